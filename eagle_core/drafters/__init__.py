"""The methods: one class a file-family, one row a method. Every list of methods anywhere reads this table.

A new method is one class that implements `Drafter` and one row here. Medusa would be a `Drafter` that captures
`POST_NORM`, runs its heads once and returns a template tree; DFlash and P-EAGLE capture boundaries, run one
parallel forward and return a path; Lookahead reads `Feedback.choices` and returns its window and its guesses as
one tree, whose mask is the ancestor mask. None of them changes the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from eagle_core.drafters.base import MAX_NODES, Drafter, Feedback, TreeSettings

__all__ = ["MAX_NODES", "METHODS", "Drafter", "Feedback", "Method", "TreeSettings"]

Part = Literal["nothing", "eagle1 head", "eagle3 head", "draft model"]


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table.

    Attributes:
        name: stable identifier, as the command line takes it.
        label: what people read.
        explain: one sentence.
        needs: the trained part it drafts with.
        instead: what serves as well where a pair lacks that part.
        settings: the fields of `TreeSettings` it reads; others are disabled on the page.
        make: drafter from that part (an `EagleHead`, a draft `Target`, or None) and the target.
    """

    name: str
    label: str
    explain: str
    needs: Part
    settings: tuple[str, ...]
    make: Callable[[Any, Any], Drafter]
    instead: tuple[Part, ...] = ()


def _vanilla(part: Any, target: Any) -> Drafter:
    from eagle_core.drafters.plain import Vanilla

    return Vanilla()


def _lookup(part: Any, target: Any) -> Drafter:
    from eagle_core.drafters.lookup import PromptLookup

    return PromptLookup()


def _chain(sampled: bool) -> Callable[[Any, Any], Drafter]:
    def make(draft: Any, target: Any) -> Drafter:
        from eagle_core.drafters.chain import Chain

        return Chain(draft, target.vocab_size, sampled=sampled)

    return make


def _eagle(static: bool) -> Callable[[Any, Any], Drafter]:
    def make(head: Any, target: Any) -> Drafter:
        from eagle_core.drafters.eagle import Eagle

        return Eagle(head, static=static)

    return make


def _hybrid(head: Any, target: Any) -> Drafter:
    from eagle_core.drafters.hybrid import Hybrid

    return Hybrid(head)


_CHAIN = ("total_token", "depth")
_TREE = ("total_token", "depth", "top_k", "expand_by", "rerank", "coupled")

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            "vanilla",
            "Plain decoding",
            "One token for each forward of the target: the baseline.",
            "nothing",
            (),
            _vanilla,
        ),
        Method(
            "lookup",
            "Prompt lookup",
            "Drafts the continuation of the last place where the most recent tokens occurred before.",
            "nothing",
            _CHAIN,
            _lookup,
        ),
        Method(
            "chain",
            "Draft model",
            "A smaller language model drafts its likeliest tokens, one after another.",
            "draft model",
            (*_CHAIN, "coupled"),
            _chain(sampled=False),
        ),
        Method(
            "chain-sampled",
            "Draft model, sampled",
            "A smaller language model samples its drafts; each is accepted with probability min(1, p/q).",
            "draft model",
            _CHAIN,
            _chain(sampled=True),
        ),
        Method(
            "eagle1",
            "EAGLE-1",
            "A one-layer head continues the target's features and fills a tree of fixed shape.",
            "eagle1 head",
            ("depth", "static_tree", "coupled"),
            _eagle(static=True),
        ),
        Method(
            "eagle2",
            "EAGLE-2",
            "The EAGLE-1 head grows its tree where it is confident, then keeps the most valuable nodes.",
            "eagle1 head",
            _TREE,
            _eagle(static=False),
        ),
        Method(
            "eagle3",
            "EAGLE-3",
            "A head trained on its own drafts reads low, middle and high features of the target and grows the tree.",
            "eagle3 head",
            _TREE,
            _eagle(static=False),
        ),
        Method(
            "hybrid",
            "EAGLE + lookup",
            "An EAGLE head's tree with a looked-up passage grafted on: one budget, one rerank for both.",
            "eagle3 head",
            _TREE,
            _hybrid,
            instead=("eagle1 head",),
        ),
    )
}
