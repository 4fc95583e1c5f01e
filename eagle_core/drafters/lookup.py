"""Prompt lookup: what followed the last time these tokens were read.

    … the  cat  sat on the mat . the  cat │ ?        the last two tokens occurred before, so: sat, on, the …
      └── what followed here ──┘  └ tail ┘ │

A lookup is free and knows nothing of meaning; how far it can be trusted shows in how long a stretch of text agrees
with the place it copies from. The longer the *match*, the likelier the next token is right: on the default target's
own greedy answers (corpora 1 and 3 of the heads' cards, 390 conversations) one token in five after a match of one
token, every second after two, 95 % after twelve (`PRIOR`). That is where each answer starts; what is counted in it
then moves the rates, because one text repeats itself and another does not.

Source: prompt lookup decoding (Saxena 2023); counting by match length is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from eagle_core.budget import best_size
from eagle_core.drafters.base import Drafter, Feedback, TreeSettings
from eagle_core.tree import DraftTree, path_tree, root_tree
from eagle_core.verify import Noise, Sampling

__all__ = ["LONGEST_MATCH", "PRIOR", "PromptLookup", "TextIndex"]

PRIOR = (0.19, 0.51, 0.60, 0.72, 0.77, 0.82, 0.84, 0.86, 0.86, 0.86, 0.89, 0.95)
"""Share of looked-up tokens that were the target's, after a match of 1, 2, … tokens; the last also for longer ones."""

LONGEST_MATCH = len(PRIOR)

_WEIGHT = 8
"""How many lookups the prior is worth: of 2, 4, 8, 16 and 32 the best predictor of those corpora, at temperature 0
and 1."""

_KEYS = (3, 2, 1)  # tokens of the n-grams that are looked up; a match is then followed further back


class TextIndex:
    """A text that grows, where its last tokens occurred before, and how often what followed there was right.

    Reading a token costs a few dictionary accesses, however long the text is.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}  # n-gram → index of what followed its latest occurrence
        self._right = [_WEIGHT * share for share in PRIOR]
        self._asked = [float(_WEIGHT)] * LONGEST_MATCH

    def read(self, ids: Sequence[int]) -> None:
        """Take in the tokens of `ids` that are new. All but the first call's are judged: each is compared with what a
        lookup would have said, whether or not that was drafted."""
        judged = bool(self.ids)
        for token in ids[len(self.ids) :]:
            if judged:
                at, match = self._last_place()
                if match:
                    self._asked[match - 1] += 1
                    self._right[match - 1] += self.ids[at] == token
            here = len(self.ids)
            for n in _KEYS:
                if n <= here:
                    self._follower[tuple(self.ids[here - n :])] = here
            self.ids.append(token)

    def rate(self, match: int) -> float:
        """Probability that the token after a match of `match` ≥ 1 tokens is right, as far as this answer tells."""
        row = min(match, LONGEST_MATCH) - 1
        return self._right[row] / self._asked[row]

    def continuation(self, count: int) -> tuple[list[int], list[int]]:
        """What followed the latest place where the last tokens occurred before.

            ids = [5, 8, 9, 2, 7, 8, 9]   (8, 9) occurred at 1 → tokens [2, 7, 8, …], matches [2, 3, 4, …]

        Copying goes on into what was copied, so a text that repeats itself is continued without end.

        Returns:
            up to `count` tokens, and for each the length of the match it would follow if those before it are right.
        """
        at, match = self._last_place()
        if not match:
            return [], []
        size = len(self.ids)
        tokens: list[int] = []
        for i in range(at, at + count):
            tokens.append(self.ids[i] if i < size else tokens[i - size])
        return tokens, [match + i for i in range(count)]

    @staticmethod
    def describe() -> str:
        """How places are found, for a reader of a trace."""
        return f"the latest place where the last {_KEYS[0]} tokens, or fewer, occurred before"

    def _last_place(self) -> tuple[int, int]:
        """Index of the first follower, and length of the match (at most `LONGEST_MATCH`; 0 where nothing recurs)."""
        ids, size = self.ids, len(self.ids)
        for n in _KEYS:
            if n <= size and (at := self._follower.get(tuple(ids[size - n :]))) is not None:
                match = n
                while match < LONGEST_MATCH and at > match and ids[at - match - 1] == ids[size - match - 1]:
                    match += 1
                return at, match
        return size, 0


class PromptLookup(Drafter):
    """Drafts what followed the most recent occurrence of the last tokens: free, and good at repetition."""

    def reset(self, capacity: int, settings: TreeSettings, sampling: Sampling, noise: Noise) -> None:
        self._text = TextIndex()

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        text = self._text
        text.read(feedback.ids)
        tokens, matches = text.continuation(min(settings.depth, settings.limit - 1))
        confidence = [text.rate(match) for match in matches]
        values = list(accumulate(confidence, mul))
        if settings.auto is not None:
            tokens = tokens[: best_size(values, settings.auto, 0.0)[0] - 1]
        if not tokens:
            return root_tree(feedback.root)
        device = feedback.root.device
        drafted = torch.tensor(tokens).to(device, non_blocking=True)
        known = torch.tensor([1.0, *confidence[: len(tokens)]]).to(device, non_blocking=True)
        return path_tree(torch.cat((feedback.root, drafted)), known)

    def describe(self) -> dict[str, Any]:
        return {"name": TextIndex.describe()}
