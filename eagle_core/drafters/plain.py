"""Methods without a network: plain decoding, and prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eagle_core.budget import best_size
from eagle_core.drafters.base import Drafter, Feedback, TreeSettings
from eagle_core.tree import DraftTree, path_tree, root_tree
from eagle_core.verify import Sampling

__all__ = ["PromptLookup", "Vanilla", "find_continuation"]


class Vanilla(Drafter):
    """Drafts nothing: the tree is its root, the target's draw is the only token of a step."""

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        return root_tree(feedback.root)


def find_continuation(ids: Sequence[int], longest: int, count: int) -> tuple[int, int]:
    """Where the last tokens occurred before: the longest n-gram, at its most recent place.

        ids = [5, 8, 9, 2, 7, 8, 9]   the 2-gram (8, 9) occurred at 1; what followed there starts at 3 → (3, 2)

    Args:
        ids: the text.
        longest: tokens of the n-gram to try first; shorter ones follow down to 1.
        count: tokens wanted; a place with fewer followers is still taken.

    Returns:
        index of the first follower, and n; n is 0 where nothing recurs.
    """
    size = len(ids)
    for n in range(min(longest, size - 1), 0, -1):
        tail = tuple(ids[size - n :])
        for start in range(size - n - 1, -1, -1):
            if ids[start + n - 1] == tail[-1] and tuple(ids[start : start + n]) == tail:
                return start + n, n
    return size, 0


class PromptLookup(Drafter):
    """Drafts what followed the most recent occurrence of the last tokens: free, and good at repetition.

    A lookup has no probabilities of its own. The confidence shown is the measured share of looked-up tokens accepted
    so far in this answer after an n-gram of that length, by Laplace's rule (accepted + 1) / (offered + 2).

    Source: prompt lookup decoding (Saxena 2023).
    """

    longest = 3

    def reset(self, capacity: int, settings: TreeSettings, sampling: Sampling) -> None:
        self._counts = {n: [1, 2] for n in range(1, self.longest + 1)}
        self._last: tuple[int, int] = (0, 0)  # n of the last lookup, tokens it drafted

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        self._learn(len(feedback.tokens) - 1)
        ids = feedback.ids
        room = min(settings.depth, settings.limit - 1)
        start, n = find_continuation(ids, self.longest, room)
        drafted = list(ids[start : start + room])
        accepted, offered = self._counts.get(n, (0, 1))
        if settings.auto is not None:
            values = [(accepted / offered) ** i for i in range(1, len(drafted) + 1)]
            drafted = drafted[: best_size(values, settings.auto, 0.0)[0] - 1]
        self._last = (n, len(drafted))
        if not drafted:
            return root_tree(feedback.root)
        device = feedback.root.device
        tokens = torch.tensor(drafted).to(device, non_blocking=True)
        confidence = torch.full((len(drafted) + 1,), accepted / offered, device=device)
        confidence[:1] = 1
        return path_tree(torch.cat((feedback.root, tokens)), confidence)

    def _learn(self, accepted: int) -> None:
        """`accepted` of the last drafts were: that many hits, and one miss if the next one failed."""
        n, drafted = self._last
        if drafted:
            self._counts[n][0] += accepted
            self._counts[n][1] += min(accepted + 1, drafted)

    def describe(self) -> dict[str, Any]:
        return {"name": f"n-grams of up to {self.longest} tokens"}
