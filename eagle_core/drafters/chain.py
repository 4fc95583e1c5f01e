"""Classic speculative decoding: a smaller language model of the same vocabulary drafts a chain.

The likeliest drafts (`chain`) are verified by the draw rule like everything else. Sampled drafts (`chain-sampled`)
carry the distribution they were sampled from and are verified with min(1, p/q).

Source: Leviathan et al. 2023; Chen et al. 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from eagle_core.budget import Costs, Pace, next_level_pays
from eagle_core.drafters.base import Drafter, Feedback, TreeSettings
from eagle_core.target import Session, Target
from eagle_core.tree import DraftTree, path_tree, root_tree
from eagle_core.verify import Noise, Sampling, coupled, processed

__all__ = ["Chain"]


class Chain(Drafter):
    """Drafts with `draft`, a language model whose ids mean the target's tokens.

    Args:
        draft: the draft model; it keeps a cache of its own.
        vocab_size: width of the target's logits; padding rows that only one of the two has are never drafted.
        sampled: sample the drafts from the processed draft distribution instead of taking the likeliest.
    """

    def __init__(self, draft: Target, vocab_size: int, *, sampled: bool) -> None:
        self.draft = draft
        self.rule = "ratio" if sampled else "draw"
        self.context = draft.context
        self._vocab = vocab_size
        self._rows = draft.embedding.shape[0]  # a padding row that only the target has is read as the last of these
        self._sampled = sampled
        self._session: Session | None = None

    def reset(self, capacity: int, settings: TreeSettings, sampling: Sampling, noise: Noise) -> None:
        if self._session is not None:
            self.draft.release(self._session)
        self._session = self.draft.session(capacity + settings.depth)
        self._sampling = sampling
        self._noise = noise
        decides = settings.auto is not None and self.draft.device.type == "cpu"
        self._pace = Pace(settings.auto) if decides and settings.auto is not None else None
        self._drafted = 0  # drafts of the last chain
        self._read = 0  # tokens of text the draft model had read when it drafted them

    @property
    def _keeps_proposal(self) -> bool:
        return self._sampled and not self._sampling.greedy

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        session = self._session
        assert session is not None, "reset comes before propose"
        pace = self._pace
        if pace is not None:
            pace.learn(feedback)
            if not pace.asks():
                return root_tree(feedback.root)
        # All drafts but the last were fed while drafting; those that were accepted need no second reading.
        accepted = len(feedback.tokens) - 1
        session.cache.length = self._read + min(accepted, max(self._drafted - 1, 0)) if self._read else 0
        unread = torch.tensor(feedback.ids[session.cache.length :]).clamp_max(self._rows - 1)
        room = min(settings.depth, settings.limit - 1)
        logits, _ = session.prefill(unread.to(self.draft.device, non_blocking=True))
        tokens, confidence, proposal = [feedback.root], [logits.new_ones(1)], []
        worth: list[float] = []  # values of the drafts so far, read back only where −1 decides by them
        for d in range(room):
            if d:
                # Decided before the next draft is drawn: dropping one that was seen would bias the ratio rule.
                if settings.auto is not None and not _pays(worth, settings.auto):
                    break
                logits, _ = session.prefill(tokens[-1])
            logits = logits[:, : self._vocab].nan_to_num(0.0, 0.0, -1e30)  # an overflow may only cost speed
            at = feedback.position + 1 + d
            if self._keeps_proposal:
                q = processed(logits, self._sampling)
                token = (q / self._noise.exponential(at, q.shape[-1], stream=1).to(q.device)).argmax(-1)
            else:
                if settings.coupled:
                    logits = coupled(logits, at, self._sampling, self._noise, self._vocab)
                q, token = logits.softmax(-1), logits.argmax(-1)
            tokens.append(token)
            confidence.append(q.gather(1, token[:, None])[:, 0])
            proposal.append(F.pad(q, (0, self._vocab - q.shape[-1])))
            if settings.auto is not None:
                worth.append((worth[-1] if worth else 1.0) * confidence[-1].item())
        if pace is not None:
            values = [value * pace.scale(d) for d, value in enumerate(worth, 1)]
            pace.saw(values, pace.costs.drafting(max(len(proposal), 1)))
        self._read, self._drafted = len(feedback.ids), len(proposal)
        chain = torch.cat(tokens), torch.cat(confidence), max(len(proposal), 1)
        if not self._keeps_proposal or not proposal:
            return path_tree(*chain)
        return path_tree(*chain, torch.cat((*proposal, torch.zeros_like(proposal[0]))))

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.draft.name,
            "context": self.draft.context,
            "dtype": str(self.draft.dtype).removeprefix("torch."),
        }


def _pays(worth: list[float], costs: Costs) -> bool:
    """Whether one more draft is expected to, if it is as likely as the last one was."""
    share = worth[-1] / (worth[-2] if len(worth) > 1 else 1.0) if worth[-1] else 0.0
    return next_level_pays(worth, worth[-1:], [share], costs, costs.extend_ms + (len(worth) - 1) * costs.level_ms)
