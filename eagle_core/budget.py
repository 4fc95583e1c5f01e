"""`total_token = -1`: how large a tree pays on this machine.

The drafter's values are probabilities that a node is accepted, so a tree is expected to emit one token (the bonus)
plus the sum of its nodes' values. What that costs is measured once for a pair: a target forward over N rows, a
drafter forward. Each step then takes the N that gives the most tokens for its time, and drafting stops at the level
that can no longer pay:

    nodes by value   .62  .41  .30  .11  .05 …          expected tokens   1  1.62  2.03  2.33  2.44 …
    forward over N   38   48   55   58   70  ms         per second        →  keep the N where the ratio peaks

Given the measured costs, which are part of the trace, the choice is a function of the values alone.
Source: the reference implementation times five tree sizes at load and keeps one; here every step chooses.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_core.drafters import Drafter
    from eagle_core.target import Target

__all__ = ["AUTO_LIMIT", "Costs", "best_size", "measure_costs", "next_level_pays"]

AUTO_LIMIT = 64
"""The largest tree that −1 considers."""

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_CONTEXT = 192  # committed tokens while measuring
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured milliseconds of one pair on one machine.

    Attributes:
        rows: sizes of a target forward, ascending, the first is 1.
        verify_ms: what each took, never decreasing.
        extend_ms: the drafter's forward over newly committed pairs; 0 for a method without a network.
        level_ms: the drafter's forward over one level.
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
    best, rate, expected = 1, 1.0 / (drafted_ms + costs.verify(1)), 1.0
    for n, value in enumerate(values[: AUTO_LIMIT - 1], 2):
        expected += value
        if expected / (drafted_ms + costs.verify(n)) > rate:
            best, rate = n, expected / (drafted_ms + costs.verify(n))
    return best, rate


def next_level_pays(
    values: Sequence[float], beam: Sequence[float], share: float, costs: Costs, drafted_ms: float
) -> bool:
    """Whether one more drafter forward is expected to raise the rate.

    The next level is guessed to hand down the share of its parents' value that the last level did; each of its best
    children then competes with the nodes at hand.

    Args:
        values: of all nodes drafted so far, best first.
        beam: of the nodes that would be expanded.
        share: value of the last level's beam over value of its parents, at most 1.
        costs, drafted_ms: as in `best_size`.
    """
    grown = sorted([*values, *(v * share for v in beam)], reverse=True)
    return best_size(grown, costs, drafted_ms + costs.level_ms)[1] > best_size(values, costs, drafted_ms)[1]


def measure_costs(target: Target, drafter: Drafter) -> Costs:
    """Time this pair: medians of a few forwards each, a second or two on a laptop. Raises `EngineBusy` like `generate`.

    The measurement borrows the target's lock, so that nothing else runs on it meanwhile.
    """
    import torch

    from eagle_core.drafters import Feedback, TreeSettings
    from eagle_core.errors import EngineBusy
    from eagle_core.tree import path_tree
    from eagle_core.verify import Sampling

    if not target.lock.acquire(blocking=False):
        raise EngineBusy(f"{target.name} is giving an answer; its costs can be measured after it")
    try:
        with torch.inference_mode():
            context = max(min(_CONTEXT, target.context // 2, drafter.context // 2), 1)
            ids = [(37 * i + 11) % target.vocab_size for i in range(context + AUTO_LIMIT)]
            tokens = torch.tensor(ids).to(target.device)
            session = target.session(context + AUTO_LIMIT, drafter.capture)
            _, features = session.prefill(tokens[:context])
            wait = torch.cuda.synchronize if target.device.type == "cuda" else (lambda: None)

            def timed(work: object) -> float:
                times = []
                for _ in range(_REPEATS):
                    wait()
                    began = time.perf_counter()
                    work()  # type: ignore[operator]
                    wait()
                    times.append((time.perf_counter() - began) * 1e3)
                return sorted(times)[_REPEATS // 2]

            room = min(AUTO_LIMIT, target.context - context - 1)
            rows = tuple(n for n in _ROWS if n <= room)
            trees = {n: path_tree(tokens[:n], torch.ones(n, device=target.device)) for n in rows}
            verify = [timed(lambda n=n: session.verify(trees[n])) for n in rows]
            for i in range(1, len(verify)):
                verify[i] = max(verify[i], verify[i - 1])

            feedback = Feedback(ids[: context + 1], tokens[:context], features, tokens[context : context + 1])
            drafted = []
            for depth in (1, 3) if drafter.context > context + 3 else ():
                budget = TreeSettings(total_token=16, depth=depth)

                def draft(budget: TreeSettings = budget) -> None:
                    drafter.reset(context + AUTO_LIMIT, budget, Sampling())
                    drafter.propose(feedback, budget)

                drafted.append(timed(draft))
            target.release(session)
    finally:
        target.lock.release()
    level = max((drafted[1] - drafted[0]) / 2, 0.0) if drafted else 0.0
    return Costs(rows, tuple(round(ms, 3) for ms in verify), round(level, 3), round(level, 3))
