"""One interface for every method: what a target forward taught goes in, a tree comes out.

    Feedback ──► Drafter.propose(feedback, settings) ──► DraftTree

The engine calls `reset` once for each answer and `propose` once for each step, and never needs to know which
method it runs. A method that learns from rejected nodes (Lookahead, token recycling) reads the last tree and
the target's choice at every node of it; one that drafts in parallel (Medusa, DFlash, P-EAGLE) reads the same
features and returns a template or a path. Each is one class here and one row of `METHODS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from eagle_core.budget import AUTO_LIMIT, Costs
from eagle_core.errors import InvalidRequest

if TYPE_CHECKING:  # the table of methods is read by pages and command lines that never load torch
    from torch import Tensor

    from eagle_core.tree import DraftTree
    from eagle_core.verify import Noise, Sampling

__all__ = ["MAX_NODES", "Drafter", "Feedback", "TreeSettings"]

MAX_NODES = 256
"""The largest tree: what a page can show, and far past where verification pays."""


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """The budget of one tree.

    Attributes:
        total_token: nodes, root included; −1 lets the measured `costs` decide at each step (`budget`).
        depth: deepest level a drafted node can have (`hybrid`: that its head drafts); a chain of K drafts has depth K
            and `total_token` K + 1.
            Official EAGLE's `depth` D and SGLang's `num_steps` D + 1 are D + 1 here.
        top_k: children drafted for each node, and nodes expanded on each level.
        expand_by: what the beam ranks by: the path's value (EAGLE-2) or the node's own confidence (its ablation).
        rerank: choose the nodes among all candidates by value (EAGLE-2), or keep them in order of generation.
        costs: what −1 decides by.
        static_tree: EAGLE-1's template as rank paths, e.g. ((0,), (1,), (0, 0)); None is the reference's 25 nodes.
        coupled: above temperature 0, draft with the noise that the target will draw with (`verify.coupled`); False
            drafts likely tokens at any temperature, as the reference does. The text is the same.
    """

    total_token: int = 24
    depth: int = 6
    top_k: int = 8
    expand_by: Literal["value", "confidence"] = "value"
    rerank: bool = True
    static_tree: tuple[tuple[int, ...], ...] | None = None
    costs: Costs | None = None
    coupled: bool = True

    def __post_init__(self) -> None:
        if self.total_token != -1 and not 1 <= self.total_token <= MAX_NODES:
            raise InvalidRequest(
                f"total_token is {self.total_token}; a tree has 1 to {MAX_NODES} nodes, root included,"
                " or -1 to choose by measuring"
            )
        if not 1 <= self.depth <= 32:
            raise InvalidRequest(f"depth is {self.depth}; drafted nodes reach levels 1 to 32")
        if not 1 <= self.top_k <= 32:
            raise InvalidRequest(f"top_k of the tree is {self.top_k}; choose 1 to 32 children for each node")
        if self.expand_by not in ("value", "confidence"):
            raise InvalidRequest(f"expand_by is {self.expand_by!r}; the beam ranks by 'value' or by 'confidence'")

    @property
    def limit(self) -> int:
        """The most nodes a tree may have, root included."""
        return AUTO_LIMIT if self.total_token == -1 else self.total_token

    @property
    def auto(self) -> Costs | None:
        """The costs to decide by, where the size is not fixed."""
        return self.costs if self.total_token == -1 else None

    def capped(self, depth: int) -> TreeSettings:
        """The same budget, no deeper than `depth` (≥ 1)."""
        return self if self.depth <= depth else replace(self, depth=depth)


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """What is known after a target forward and its commit.

    Attributes:
        ids: every token of prompt and answer so far on the host, the root last.
        tokens: [n] int64, the tokens whose keys and values the target just took in: the prompt at first, later the
            last root and the accepted nodes.
        features: [n, F], what `Drafter.capture` asked for, at exactly those tokens.
        root: [1] int64, the last emitted token, on the device; its absolute position is `len(ids) - 1`.
        tree: the tree just verified; None after the prefill.
        choices: [N] int64, the target's choice at every node of it, also at rejected ones.
        room: levels a tree may have before the target's or the drafter's positions end.
    """

    ids: Sequence[int]
    tokens: Tensor
    features: Tensor
    root: Tensor
    tree: DraftTree | None = None
    choices: Tensor | None = None
    room: int = 1 << 30

    @property
    def position(self) -> int:
        """Absolute position of the root: the number of tokens the target's cache holds."""
        return len(self.ids) - 1


class Drafter:
    """Base of all methods.

    Attributes:
        capture: hidden states the target must hand over (`heads.POST_NORM` and boundaries), concatenated in order.
        context: tokens the drafter can follow; where they end, speculation ends and the answer goes on.
        draftable: [V] bool, the tokens it can draft; None if all.
        rule: how its trees are verified: "draw" (walk where the target's own draws lead) or "ratio" (min(1, p/q)).
    """

    capture: tuple[int, ...] = ()
    context: int = 1 << 30
    draftable: Tensor | None = None
    rule: Literal["draw", "ratio"] = "draw"

    def reset(self, capacity: int, settings: TreeSettings, sampling: Sampling, noise: Noise) -> None:
        """Forget the last answer. `capacity`: tokens the next one may hold; `settings`: its largest budget; `noise`:
        what the target will draw with."""

    def nodes(self, settings: TreeSettings) -> int:
        """The most nodes a tree of this drafter can have under `settings`."""
        return settings.limit

    def reach(self, settings: TreeSettings) -> int:
        """The deepest level a tree of this drafter can have under `settings`."""
        return settings.depth

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        """Guess how the text goes on. The tree has `settings.limit` nodes at most and is no deeper than
        `reach(settings)` and `feedback.room`; it may be smaller. Runs under `torch.inference_mode`."""
        raise NotImplementedError  # pragma: no cover

    def describe(self) -> dict[str, Any]:
        """What an event should say of this drafter: name, layers read, draft vocabulary, limits."""
        return {}
