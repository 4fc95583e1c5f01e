"""An EAGLE head and prompt lookup, in one tree.

The head guesses by meaning, a lookup by repetition; what a lookup found is grafted onto the head's tree
(`growth.Graft`), where both sources share one budget and one rerank. A copied passage runs on for many tokens at no
cost, so the chain may reach deeper than the head drafts.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from eagle_core.drafters.base import Feedback, TreeSettings
from eagle_core.drafters.eagle import Eagle
from eagle_core.drafters.lookup import TextIndex
from eagle_core.growth import Graft
from eagle_core.heads import EagleHead
from eagle_core.verify import Noise, Sampling

__all__ = ["Hybrid"]

_REACH = 32
"""Deepest level of a looked-up chain; how many of its tokens are verified is for the budget and their values to say."""

_POOLING = ((2.26, 0.58), (1.0, 0.3))
"""Agreement and trust of `growth.Graft` after a match of one token, and after a longer one.

Logistic regressions on the 5,024 lookups that the default pair's EAGLE-3 head was asked about while drafting some 100
answers of its corpus. Log-loss of a looked-up token: 0.431 pooled like this; 0.439 as 1 − (1 − c)(1 − r), 0.457 as
max(c, r), 0.492 by the lookup's rate r alone, 1.656 by the head's probability c alone."""


class Hybrid(Eagle):
    """Drafts with an EAGLE head, and with what followed the last tokens where they occurred before.

    Args:
        head: as `Eagle`.
    """

    def __init__(self, head: EagleHead) -> None:
        super().__init__(head)
        self.draftable = None  # a lookup may say any token
        table = head.draft_to_target
        self._draft_id = None if table is None else {token: i for i, token in enumerate(table.tolist())}
        self._text = TextIndex()

    def reset(self, capacity: int, settings: TreeSettings, sampling: Sampling, noise: Noise) -> None:
        super().reset(capacity, settings, sampling, noise)
        self._text = TextIndex()

    def reach(self, settings: TreeSettings) -> int:
        return max(settings.depth, _REACH)

    def _graft(self, feedback: Feedback, settings: TreeSettings) -> Graft:
        text = self._text
        text.read(feedback.ids)
        tokens, matches = text.continuation(min(self.reach(settings), feedback.room, settings.limit - 1))
        rates = [text.rate(match) for match in matches]
        pooling = [_POOLING[min(match, len(_POOLING)) - 1] for match in matches]
        numbers = [[math.log(r), math.log(r) - math.log1p(-r) + a, t] for r, (a, t) in zip(rates, pooling, strict=True)]
        device = feedback.root.device
        alone, odds, trust = torch.tensor(numbers).view(-1, 3).to(device, non_blocking=True).unbind(1)
        draft = [t if self._draft_id is None else self._draft_id.get(t) for t in tokens]
        said = torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True)
        return Graft(said, draft, alone, odds, trust)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "lookup": TextIndex.describe()}
