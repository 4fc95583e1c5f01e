"""Drafters that try to make the engine wrong: random trees, trees that hold the true continuation in odd places,
twins among siblings, nodes out of order of depth. Any of them may only cost speed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from eagle_core.drafters import Drafter, Feedback, TreeSettings
from eagle_core.tree import DraftTree, ancestor_mask

__all__ = ["Adversary", "tree_of"]


def tree_of(tokens: Sequence[int], parents: Sequence[int], max_depth: int | None = None) -> DraftTree:
    """A tree from lists, root first."""
    n = len(tokens)
    rows = torch.tensor(list(parents))
    p = torch.full((n,), 0.5)
    return DraftTree(torch.tensor(list(tokens)), rows, ancestor_mask(rows, max_depth or n), p, p)


class Adversary(Drafter):
    """Draws a random tree each step; with `truth` it plants true continuations among the lies.

    Args:
        seed: of its own dice.
        vocab: ids it may draft.
        truth: the whole text that plain decoding gives, prompt included, or None.
        capture: hidden states to ask for, so that capturing is exercised too.
    """

    def __init__(
        self, seed: int, vocab: int, truth: Sequence[int] | None = None, capture: tuple[int, ...] = ()
    ) -> None:
        self.dice, self.vocab, self.truth, self.capture = random.Random(seed), vocab, truth, capture
        self.widths: list[int] = []

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        assert feedback.root.tolist() == [feedback.ids[-1]]
        assert len(feedback.features) == len(feedback.tokens)
        assert feedback.features.shape[1] == 0 or bool(feedback.features.isfinite().all())
        dice, position = self.dice, feedback.position
        n = dice.randint(1, settings.total_token)
        self.widths.append(n)
        tokens, parents, depth = [feedback.ids[-1]], [-1], [0]
        true_nodes = {0: position}  # node → absolute position of a token known to be right
        for i in range(1, n):
            parent = dice.choice([j for j in range(i) if depth[j] < settings.depth])
            token = dice.randrange(self.vocab)
            if self.truth is not None and parent in true_nodes and dice.random() < 0.7:
                at = true_nodes[parent] + 1
                if at < len(self.truth):
                    token = self.truth[at]
                    true_nodes[i] = at
            elif dice.random() < 0.2 and i > 1:
                token, parent = tokens[-1], parents[-1]  # a twin of the node before
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
        return tree_of(tokens, parents, settings.depth)
