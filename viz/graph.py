"""Trees as networkx graphs, for people who want to go on with them elsewhere.

    graph(step)             → DiGraph: an edge from every parent to its child, all facts of a node as attributes
    graphml(step)           → the same as GraphML text
    branching(step)         → {"nodes": 24, "leaves": 11, "width": 8, "depth": 6, …}

The candidates that rerank left out are nodes as well, with `kept` false, so the growth can be studied.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

import networkx as nx

from eagle_core.events import Node, Step

__all__ = ["branching", "graph", "graphml"]

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def graph(step: Step, dropped: bool = True) -> nx.DiGraph:
    """The tree of a step, root 0; without the candidates that were left out if not `dropped`."""
    tree = nx.DiGraph(step=step.index, position=step.position)
    rows: list[Any] = [*step.nodes, *(step.dropped if dropped else ())]
    accepted = set(step.accepted)
    for row in rows:
        kept = isinstance(row, Node)
        facts = {
            "token": row.token,
            "label": row.text,
            "depth": row.depth,
            "confidence": row.confidence,
            "value": row.value,
            "expanded": row.expanded,
            "kept": kept,
            **({"source": row.source} if row.source else {}),
            "accepted": row.id in accepted and kept,
        }
        if kept:
            facts |= {
                "fate": row.fate,
                "target_p": row.target_p,
                "draw": row.draw,
                "draw_label": row.draw_text,
                "draw_p": row.draw_p,
            }
        tree.add_node(row.id, **facts)
    tree.add_edges_from((row.parent, row.id, {"confidence": row.confidence}) for row in rows if row.parent >= 0)
    return tree


def graphml(step: Step) -> str:
    """GraphML, UTF-8. Characters that XML cannot hold become U+FFFD."""
    tree = graph(step)
    for facts in tree.nodes.values():
        for key in ("label", "draw_label"):
            if key in facts:
                facts[key] = _NOT_XML.sub("\ufffd", facts[key])
    out = BytesIO()
    nx.write_graphml_xml(tree, out)
    return out.getvalue().decode("utf-8")


def branching(step: Step) -> dict[str, int]:
    """The shape of the verified tree in numbers."""
    tree = graph(step, dropped=False)
    levels = list(nx.bfs_layers(tree, 0))
    return {
        "nodes": len(tree),
        "leaves": sum(degree == 0 for _, degree in tree.out_degree()),
        "width": max(map(len, levels)),
        "depth": len(levels) - 1,
        "most_children": max((degree for _, degree in tree.out_degree()), default=0),
    }
