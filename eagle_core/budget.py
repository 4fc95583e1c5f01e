"""`total_token = -1`: how large a tree pays on this machine, and whether drafting pays at all.

The drafter's values are probabilities that a node is accepted, so a tree is expected to emit one token (the bonus)
plus the sum of its nodes' values. What that costs is measured once for a pair: a target forward over N rows, a
drafter's extend, a drafted level. Each step then takes the N that gives the most tokens for its time, and drafting
stops at the level that can no longer pay:

    nodes by value   .62  .41  .30  .11  .05 …          expected tokens   1  1.62  2.03  2.33  2.44 …
    forward over N   38   48   55   58   70  ms         per second        →  keep the N where the ratio peaks

What an answer teaches is remembered (`Pace`): how values of each depth turn out, and what drafting has brought. Where
it did not pay for a while the drafter rests and the answer goes on plainly, with a trial now and then.

Given the measured costs, which are part of the trace, all of it is a function of the answer so far.
Source: the reference implementation times five tree sizes at load and keeps one; here every step chooses.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_core.drafters import Drafter, Feedback
    from eagle_core.target import Target

__all__ = ["AUTO_LIMIT", "Costs", "Pace", "best_size", "measure_costs", "next_level_pays"]

AUTO_LIMIT = 64
"""The largest tree that −1 considers."""

_ROWS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 64)
_CONTEXT = 192  # committed tokens while measuring
_ROUNDS = 3  # the least of so many counts: whatever else a machine does only adds
_PAIRS = 2  # newly committed pairs of a measured extend: about what a step accepts

_PRIOR = 32.0  # tokens of each depth that the drafter's own word is worth beside what happened
_FADES = 0.85  # what a level not seen yet hands down, beside the level above it
_SCALE = (0.5, 1.5)  # no correction goes further
_MEMORY = 0.95  # weight of what drafting brought, one drafted step later
_WARM = 8  # drafted steps before it is judged
_LOSS = 0.96  # of the speed without it: what drafting may cost, as estimates are noisy and things change
_SURE = 0.9  # first value of a lookup beside which a drafter has little to add
_PATIENCE = (3, 48)  # steps of rest before a trial: at first, and where trials keep failing


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured milliseconds of one pair on one machine.

    Attributes:
        rows: sizes of a target forward, ascending, the first is 1.
        verify_ms: what each took, never decreasing.
        extend_ms: drafting one level: the drafter's forward over newly committed pairs, and choosing; 0 for a method
            without a network.
        level_ms: one level more.
    """

    rows: tuple[int, ...]
    verify_ms: tuple[float, ...]
    extend_ms: float
    level_ms: float

    def drafting(self, depth: int) -> float:
        """Milliseconds of drafting `depth` ≥ 1 levels."""
        return self.extend_ms + (depth - 1) * self.level_ms

    def verify(self, n: int) -> float:
        """Milliseconds of a forward over `n` rows, by linear interpolation."""
        i = bisect_left(self.rows, n)
        if i == len(self.rows):
            return self.verify_ms[-1] * n / self.rows[-1]
        if self.rows[i] == n:
            return self.verify_ms[i]
        (a, b), (x, y) = self.rows[i - 1 : i + 1], self.verify_ms[i - 1 : i + 1]
        return x + (y - x) * (n - a) / (b - a)


def best_size(values: Sequence[float], costs: Costs, drafted_ms: float) -> tuple[int, float]:
    """How many nodes to verify.

    Args:
        values: of the drafted nodes, best first.
        costs: measured.
        drafted_ms: what drafting them took.

    Returns:
        nodes, root included (1 to len(values) + 1), and the expected tokens per millisecond; the smaller tree on a tie.
    """
    verify_ms = _verify_ms(costs)
    best, rate, expected = 1, 1.0 / (drafted_ms + verify_ms[1]), 1.0
    for n, value in enumerate(values[: AUTO_LIMIT - 1], 2):
        expected += value
        if (tokens_per_ms := expected / (drafted_ms + verify_ms[n])) > rate:
            best, rate = n, tokens_per_ms
    return best, rate


@lru_cache(maxsize=64)
def _verify_ms(costs: Costs) -> list[float]:
    """`costs.verify` of 0 (never asked for) to `AUTO_LIMIT` rows: several sizes are weighed in every step."""
    return [0.0, *(costs.verify(n) for n in range(1, AUTO_LIMIT + 1))]


def next_level_pays(
    values: Sequence[float], beam: Sequence[float], hands_down: Sequence[float], costs: Costs, drafted_ms: float
) -> bool:
    """Whether one more drafter forward is expected to raise the rate.

    Args:
        values: of all nodes drafted so far, best first.
        beam: of the nodes that would be expanded.
        hands_down: the shares of its value that such a node is expected to give to its best child, its second …
        costs, drafted_ms: as in `best_size`.
    """
    grown = sorted([*values, *(v * share for v in beam for share in hands_down)], reverse=True)
    return best_size(grown, costs, drafted_ms + costs.level_ms)[1] > best_size(values, costs, drafted_ms)[1]


class Pace:
    """What one answer has taught about its drafts.

    A drafter asks `asks` before it drafts, tells `saw` what it drafted, and `learn`s at the next step what came of it.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._expected: dict[int, float] = {}  # by depth: sum of the values drafted there
        self._reached: dict[int, int] = {}  # by depth: nodes accepted there
        self._levels: dict[int, tuple[int, list[float]]] = {}  # by depth: how often seen, and the mean shares
        self._weight = self._gained = self._paid = 0.0
        self._drafted = self._rested = 0
        self._patience = _PATIENCE[0]

    def learn(self, feedback: Feedback) -> None:
        """What became of the last tree. Reads its values: for a drafter on a CPU."""
        tree = feedback.tree
        if tree is None:
            return
        for depth, value in zip(tree.depth.tolist()[1:], tree.value.tolist()[1:], strict=True):
            self._expected[depth] = self._expected.get(depth, 0.0) + value
        for depth in range(1, len(feedback.tokens)):
            self._reached[depth] = self._reached.get(depth, 0) + 1

    def scale(self, depth: int) -> float:
        """What a value of this depth has to be multiplied by, as far as this answer tells."""
        right = (_PRIOR + self._reached.get(depth, 0)) / (_PRIOR + self._expected.get(depth, 0.0))
        return min(max(right, _SCALE[0]), _SCALE[1])

    def level(self, depth: int, shares: Sequence[float]) -> None:
        """A level was drafted: the mean shares of their value that its parents gave to their best child, second …"""
        seen, mean = self._levels.get(depth, (0, list(shares)))
        self._levels[depth] = seen + 1, [m + (s - m) / (seen + 1) for m, s in zip(mean, shares, strict=True)]

    def hands_down(self, depth: int) -> list[float]:
        """The shares that nodes are expected to give to their children of this `depth`."""
        known = max(d for d in self._levels if d <= depth)
        return [share * _FADES ** (depth - known) for share in self._levels[known][1]]

    def asks(self, free: Sequence[float] = ()) -> bool:
        """Whether to run the drafter, or to do with what is known without it.

        The last drafted steps say how many tokens it adds to those known without it, and what that takes. It is asked
        if the step is expected to gain speed by that; if not, still after some steps of rest, for things change. Where
        a lookup is nearly sure, the drafter can only add what it would where that fails.

        Args:
            free: values of a looked-up chain.
        """
        size, rate = best_size(free, self.costs, 0.0)
        tokens = 1 + sum(free[: size - 1])
        ms = tokens / rate
        wrong = 1 - free[0] if free and free[0] >= _SURE else 1.0
        gained, paid = (total / max(self._weight, 1.0) for total in (self._gained, self._paid))
        warm = self._drafted < _WARM
        if warm or (tokens + wrong * gained) / (ms + paid) > _LOSS * rate or self._rested >= self._patience:
            self._rested = 0
            return True
        self._rested += 1
        return False

    def saw(self, values: Sequence[float], drafted_ms: float, free: Sequence[float] = ()) -> None:
        """What a drafted tree promises.

        Args:
            values: of its nodes, the root left out, corrected by `scale`.
            drafted_ms: what drafting it took.
            free: as in `asks`.
        """
        size, rate = best_size(free, self.costs, 0.0)
        tokens = 1 + sum(free[: size - 1])
        paid = drafted_ms + self.costs.verify(len(values) + 1) - tokens / rate
        if (1 + sum(values)) / (drafted_ms + self.costs.verify(len(values) + 1)) > rate:
            self._patience = _PATIENCE[0]
        else:
            self._patience = min(self._patience * 2, _PATIENCE[1])
        if free and free[0] >= _SURE:
            return
        self._drafted += 1
        self._weight = _MEMORY * self._weight + 1
        self._gained = _MEMORY * self._gained + 1 + sum(values) - tokens
        self._paid = _MEMORY * self._paid + paid


def measure_costs(target: Target, drafter: Drafter, known: Costs | None = None) -> Costs:
    """Time this pair: a few forwards each, a second or two on a laptop. Raises `EngineBusy` like `generate`.

    The measurement borrows the target's lock, so that nothing else runs on it meanwhile.

    Args:
        known: of the same target with another drafter; its times of the target's forwards are taken over.
    """
    import torch

    from eagle_core.drafters import Feedback, TreeSettings
    from eagle_core.errors import EngineBusy
    from eagle_core.tree import path_tree
    from eagle_core.verify import Noise, Sampling

    if not target.lock.acquire(blocking=False):
        raise EngineBusy(f"{target.name} is giving an answer; its costs can be measured after it")
    try:
        with torch.inference_mode():
            deep = 3  # levels of the deeper draft
            drafts = 2 * _ROUNDS
            context = max(min(_CONTEXT, target.context // 2, drafter.context // 2), 1)
            ids = [(37 * i + 11) % target.vocab_size for i in range(context + AUTO_LIMIT)]
            tokens = torch.tensor(ids).to(target.device)
            session = target.session(context + AUTO_LIMIT, drafter.capture)
            _, features = session.prefill(tokens[:context])
            wait = torch.cuda.synchronize if target.device.type == "cuda" else (lambda: None)

            def timed(work: Callable[[], object]) -> float:
                wait()
                began = time.perf_counter()
                work()
                wait()
                return (time.perf_counter() - began) * 1e3

            room = min(AUTO_LIMIT, target.context - context - 1)
            rows = tuple(n for n in _ROWS if n <= room)
            trees = {n: path_tree(tokens[:n], torch.ones(n, device=target.device)) for n in rows}
            least = dict.fromkeys(rows, math.inf)
            for n in [] if known else [*rows] * _ROUNDS:  # sizes in turn: a slow moment does not fall on one of them
                least[n] = min(least[n], timed(lambda n=n: session.verify(trees[n])))  # type: ignore[misc]
            verify = _rising(list(least.values()))

            drafted = {1: math.inf, deep: math.inf}
            if drafter.context > context + _PAIRS * drafts + deep:
                budgets = {depth: TreeSettings(total_token=16, depth=depth) for depth in drafted}
                drafter.reset(context + AUTO_LIMIT, budgets[deep], Sampling(), Noise(0, target.device))
                at = context
                drafter.propose(Feedback(ids[: at + 1], tokens[:at], features, tokens[at, None]), budgets[1])
                for depth in [*drafted] * _ROUNDS:
                    told = slice(at, at + _PAIRS)
                    at += _PAIRS
                    rows_told = features[-1:].expand(_PAIRS, -1)
                    feedback = Feedback(ids[: at + 1], tokens[told], rows_told, tokens[at, None])
                    ms = timed(lambda f=feedback, d=depth: drafter.propose(f, budgets[d]))  # type: ignore[misc]
                    drafted[depth] = min(drafted[depth], ms)
            else:
                drafted = dict.fromkeys(drafted, 0.0)
            target.release(session)
    finally:
        target.lock.release()
    level = max((drafted[deep] - drafted[1]) / (deep - 1), 0.0)
    measured = Costs(rows, tuple(round(ms, 3) for ms in verify), round(drafted[1], 3), round(level, 3))
    return replace(measured, rows=known.rows, verify_ms=known.verify_ms) if known else measured


def _rising(times: Sequence[float]) -> list[float]:
    """Times of growing work as they must be, never falling: the middle of the tightest bounds from either side."""
    above = list(accumulate(times, max))
    below = list(accumulate(reversed(times), min))[::-1]
    return [(a + b) / 2 for a, b in zip(above, below, strict=True)]
