"""Why is it so? The reason for every node's fate, and a step in one sentence.

The engine's events say what befell a node; here that becomes a reason out of `REASONS` and a sentence with the
node's own numbers. The stage receives the index of the reason and fills the same template.

    reasons(step)                 → [0, 1, 3, …], one per node and candidate
    why(step, 7, "en")            → 'Rejected: after “·the” the target drew “·cat” (p 0.83), a sibling of this node; …'
    summary(step, "en")           → 'Step 7: 23 nodes, depth 1 to 5; path of 3 accepted: ·the ·cat ·sat; then …'
"""

from __future__ import annotations

from eagle_core.events import Candidate, Node, Step
from viz.words import chance, number, say, visible

__all__ = ["REASONS", "reason", "reasons", "summary", "why"]

REASONS = ("root", "accepted", "sibling", "miss", "vocabulary", "unreached", "past", "beam", "outside", "rule", "bonus")
"""Each names the template `why.<reason>` of `viz.words`."""


def reason(name: str) -> int:
    """The index under which the stage knows a reason."""
    return REASONS.index(name)


def reasons(step: Step) -> list[int]:
    """The reason of every node and candidate of a step, as indices into `REASONS`."""
    children: set[tuple[int, int]] = {(node.parent, node.token) for node in step.nodes[1:]}
    floor = min((node.value for node in step.nodes[1:]), default=1.0)
    names = [_of_node(node, step, children) for node in step.nodes] + [_of_candidate(c, floor) for c in step.dropped]
    return [REASONS.index(name) for name in names]


def _of_node(node: Node, step: Step, children: set[tuple[int, int]]) -> str:
    match node.fate:
        case "root":
            return "root"
        case "accepted":
            return "accepted"
        case "not the draw":
            if (node.parent, step.nodes[node.parent].draw) in children:
                return "sibling"
            return "vocabulary" if node.parent in step.outside else "miss"
        case "parent rejected":
            return "unreached"
        case "past the stop":
            return "past"


def _of_candidate(candidate: Candidate, floor: float) -> str:
    if candidate.value > floor:
        return "rule"
    return "beam" if candidate.expanded else "outside"


def why(step: Step, row: int, language: str) -> str:
    """One plain sentence on the fate of node or candidate `row`, with its numbers."""
    rows: list[Node | Candidate] = [*step.nodes, *step.dropped]
    here = rows[row]
    slots: dict[str, object] = {
        "token": visible(here.text),
        "v": number(here.value),
        "floor": number(min((node.value for node in step.nodes[1:]), default=1.0)),
    }
    if isinstance(here, Node) and here.parent >= 0:
        parent = step.nodes[here.parent]
        ancestor = here
        while ancestor.fate == "parent rejected":
            ancestor = step.nodes[ancestor.parent]
        slots |= {
            "parent": visible(parent.text),
            "draw": visible(parent.draw_text),
            "dp": chance(language, parent.draw_p),
            "had": ""
            if parent.draw_p == 1
            else say(language, "draw.had", token=visible(here.text), p=number(here.target_p)),
            "ancestor": visible(ancestor.text),
        }
    return say(language, f"why.{REASONS[reasons(step)[row]]}", **slots)


def summary(step: Step, language: str) -> str:
    """The step in one sentence, for people who do not see the tree."""
    bonus, k = visible(step.bonus.text), step.index + 1
    if len(step.nodes) == 1:
        return say(language, "summary.root", k=k, bonus=bonus)
    taken = [visible(step.nodes[i].text) for i in step.accepted[1:]]
    path = (
        say(language, "summary.path", n=len(taken), tokens=" ".join(taken))
        if taken
        else say(language, "summary.nopath")
    )
    return say(
        language, "summary", k=k, n=len(step.nodes), d=max(node.depth for node in step.nodes), path=path, bonus=bonus
    )
