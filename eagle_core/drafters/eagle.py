"""EAGLE-1, EAGLE-2 and EAGLE-3: one drafter; the head decides what is read, the growth decides the tree's shape.

Drafting begins with the *extend*: the pairs (feature, next token) of the tokens committed since enter the head's
cache, where earlier steps' guessed features never stay. The last pair's output drafts level 1; deeper levels run the
beam on the head's own outputs, in scratch rows behind the committed ones:

    committed pairs 0 … L−1 │ level 1: position L │ level 2: position L+1 │ …
                            └ each node sees the committed pairs, its ancestors and itself

Source: EAGLE §4, EAGLE-2 §4, EAGLE-3 §3; `topK_genrate` of the reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle_core.budget import Pace, best_size
from eagle_core.drafters.base import Drafter, Feedback, TreeSettings
from eagle_core.growth import EAGLE1_TREE, Graft, Template, grow_dynamic, grow_template
from eagle_core.heads import EagleHead, HeadCache
from eagle_core.tree import LOOKUP, DraftTree, path_tree, root_tree
from eagle_core.verify import Noise, Sampling, coupled

__all__ = ["Eagle"]

_EXTEND_CHUNK = 1024  # pairs of one extend forward; only the first extend of a long prompt is longer


class Eagle(Drafter):
    """Drafts trees with an EAGLE head.

    Args:
        head: the trained head, attached to the target (`checkpoints.load_head`).
        static: fill EAGLE-1's template instead of growing.
    """

    def __init__(self, head: EagleHead, *, static: bool = False) -> None:
        self.head = head.eval()
        self.capture = head.config.capture
        self.context = head.config.max_position_embeddings
        if head.draft_to_target is not None:
            every = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=head.draft_to_target.device)
            self.draftable = every.index_fill_(0, head.draft_to_target, True)
        self._static = static
        self._cache: HeadCache | None = None
        self._unread: list[tuple[Tensor, Tensor]] = []  # features and tokens of pairs that the head has not seen yet
        self._pace: Pace | None = None

    def _template(self, settings: TreeSettings) -> Template:
        template = EAGLE1_TREE if settings.static_tree is None else Template.parse(settings.static_tree)
        return template.cut(settings.depth, self.head.config.draft_vocab_size)

    def nodes(self, settings: TreeSettings) -> int:
        return len(self._template(settings).paths) + 1 if self._static else settings.limit

    def reset(self, capacity: int, settings: TreeSettings, sampling: Sampling, noise: Noise) -> None:
        scratch = len(self._template(settings).paths) if self._static else settings.top_k * settings.depth
        room = capacity + scratch
        weight = next(self.head.parameters())
        if self._cache is None or self._cache.capacity < room:
            self._cache = HeadCache(self.head.config, -(-room // 256) * 256, weight.device, weight.dtype)
        self._cache.length = 0
        self._unread = []
        self._sampling, self._noise = sampling, noise
        decides = settings.auto is not None and not self._static and weight.device.type == "cpu"
        self._pace = Pace(settings.auto) if decides and settings.auto is not None else None

    def propose(self, feedback: Feedback, settings: TreeSettings) -> DraftTree:
        assert self._cache is not None, "reset comes before propose"
        self._unread.append((feedback.features, torch.cat((feedback.tokens[1:], feedback.root))))
        unread = sum(len(tokens) for _, tokens in self._unread)
        assert self._cache.length + unread == feedback.position, "the head missed a step"
        pace, graft = self._pace, self._graft(feedback, settings)
        free = [] if pace is None or graft is None else graft.alone.cumsum(0).exp().tolist()
        if pace is not None:
            pace.learn(feedback)
            if not pace.asks(free):
                return _copied(feedback.root, graft, best_size(free, pace.costs, 0.0)[0])
        features, tokens = (torch.cat(parts) for parts in zip(*self._unread, strict=True))
        told = self._told(feedback.position) if settings.coupled else None
        growing = _Growing(self.head, self._cache, features, tokens, told)
        self._unread = []
        if self._static:
            return grow_template(growing, feedback.root, self._template(settings))
        tree = grow_dynamic(growing, feedback.root, settings, graft, pace)
        if pace is not None:
            nodes = zip(tree.value.tolist()[1:], tree.depth.tolist()[1:], strict=True)
            pace.saw([value * pace.scale(d) for value, d in nodes], pace.costs.drafting(tree.forwards), free)
        return tree

    def _told(self, position: int) -> Callable[[Tensor, int], Tensor]:
        """Logits of nodes at a level → logits of what the target will draw there (`verify.coupled`)."""
        config = self.head.config
        rest = self._sampling, self._noise, config.vocab_size, self.head.draft_to_target
        return lambda logits, level: coupled(logits, position + level, *rest)

    def _graft(self, feedback: Feedback, settings: TreeSettings) -> Graft | None:
        """What to graft onto this step's tree; None for a method that grafts nothing."""
        return None

    def describe(self) -> dict[str, Any]:
        config = self.head.config
        return {
            "family": config.family,
            "capture": list(config.capture),
            "draft_vocab_size": config.draft_vocab_size,
            "context": config.max_position_embeddings,
        }


def _copied(root: Tensor, graft: Graft | None, size: int) -> DraftTree:
    """A tree of `size` nodes without the head: what was looked up, or nothing."""
    if graft is None or size == 1:
        return root_tree(root)
    confidence = torch.cat((graft.alone.new_ones(1), graft.alone[: size - 1].exp()))
    tree = path_tree(torch.cat((root, graft.tokens[: size - 1])), confidence)
    return replace(tree, source=torch.full_like(tree.tokens, LOOKUP))


class _Growing:
    """One step's drafting: the extend, then a forward a level (`growth.Expand`).

    `told` turns logits of drafts at a level into logits of what will be drawn there; None leaves them.
    """

    def __init__(
        self,
        head: EagleHead,
        cache: HeadCache,
        features: Tensor,
        tokens: Tensor,
        told: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        self.told = told
        self.head, self.cache = head, cache
        self.to_target = head.draft_to_target
        g = head.fuse(features.to(cache.rows.dtype))
        for part_g, part_tokens in zip(g.split(_EXTEND_CHUNK), tokens.split(_EXTEND_CHUNK), strict=True):
            cache.start, cache.mask = cache.length, None
            positions = torch.arange(cache.length, cache.length + len(part_tokens), device=tokens.device)
            state, read = head(part_tokens[None], part_g[None], positions[None], cache)
            cache.length += len(part_tokens)
        self.state, self.read = state[0, -1:], read[0, -1:]  # of the nodes run last
        self.visible = torch.zeros(1, 0, dtype=torch.bool, device=tokens.device)  # scratch rows each of them sees

    def first(self) -> Tensor:
        return self._logp(1)

    def level(self, parents: Tensor, tokens: Tensor, depth: int) -> Tensor:
        count, committed = len(tokens), self.cache.length
        own = torch.eye(count, dtype=torch.bool, device=tokens.device)
        self.cache.start = committed + self.visible.shape[1]
        self.visible = torch.cat((self.visible[parents], own), 1)
        self.cache.mask = torch.cat((own.new_ones(count, committed), self.visible), 1)
        positions = torch.full((1, count), committed + depth - 1, device=tokens.device)
        state, read = self.head(tokens[None], self.state[parents][None], positions, self.cache)
        self.state, self.read = state[0], read[0]
        return self._logp(depth + 1)

    def _logp(self, level: int) -> Tensor:
        logits = self.head.logits(self.read).float()
        return (logits if self.told is None else self.told(logits, level)).log_softmax(-1)
