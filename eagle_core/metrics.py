"""The numbers people quote about speculative decoding, each defined once, computed from events alone.

`METRICS` is the one table: the page's panels and tooltips, the command line's tables and the README's glossary
all read their labels, units, definitions and values here. Whatever stands there can be recomputed from an
exported trace, without torch and without the model:

    run = Run.collect(load_trace(open("answer.jsonl")))
    METRICS["tau"].of(run)            → 3.2
    METRICS["tau"].show(3.2)          → "3.20 tokens/forward"

A worked example, two steps of a drafter that drafts chains of four:

    step 0   drafted a b c d   the target draws a b c x   → accepted a b c, bonus x   4 tokens
    step 1   drafted e f g h   the target draws e y       → accepted e,     bonus y   2 tokens

    τ = (4 + 2) / 2 = 3        the bonus is in, the token the prefill drew is not
    reached depth 1 2 3 4      = 1, ½, ½, 0       of all steps          (unconditional)
                               = 1, ½, 1, 0       of the steps that reached the depth before (conditional)
    drafted 8, accepted 4      f, g, h count as rejected even where the target would have drawn them there

Undefined values are None, never 0 and never NaN; every share lies in 0..1. Pool the answers of several prompts
with `Run.pool` before asking for a number: long answers then weigh more than short ones, as everywhere in the
literature (EAGLE §4 averages over all drafting-verification cycles).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from eagle_core.errors import TraceError
from eagle_core.events import Event, Finish, Node, Start, Step

__all__ = [
    "BINS",
    "METRICS",
    "SHORTEST",
    "Bin",
    "Depth",
    "Length",
    "Metric",
    "Run",
    "accepted_length",
    "calibration_gap",
    "glossary",
    "measure",
    "table",
]

SHORTEST = 1e-6
"""Milliseconds below which nothing was measured: no clock counts less than a nanosecond, and no rate is made of it."""

BINS = 10
"""Equal bins of a calibration table: [0, 0.1), [0.1, 0.2) … [0.9, 1]."""


class Depth(NamedTuple):
    """Acceptance at one depth. `reached` of `steps` steps accepted a node at this depth; `unconditional` is that
    share, `conditional` the share of the steps that had reached the depth before (None where none had)."""

    depth: int
    reached: int
    steps: int
    unconditional: float
    conditional: float | None


class Length(NamedTuple):
    """How many steps accepted exactly `accepted` drafted tokens."""

    accepted: int
    steps: int


class Bin(NamedTuple):
    """One bin of a calibration table: `nodes` drafted nodes scored in [low, high), on average `score`; `accepted` is
    the share of them that the target accepted. A calibrated drafter has `accepted` ≈ `score`."""

    low: float
    high: float
    nodes: int
    score: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Run:
    """What was collected of an answer, or of many pooled ones: enough for every metric."""

    starts: tuple[Start, ...] = ()
    steps: tuple[Step, ...] = ()
    finishes: tuple[Finish, ...] = ()

    @classmethod
    def collect(cls, events: Iterable[Event]) -> Run:
        """The run of one stream of events, whether it reached its finish or not."""
        starts, steps, finishes = [], [], []
        for event in events:
            if isinstance(event, Start):
                starts.append(event)
            elif isinstance(event, Step):
                steps.append(event)
            elif isinstance(event, Finish):
                finishes.append(event)
            else:
                raise TraceError(f"expected Start, Step or Finish, found {type(event).__name__}")
        return cls(tuple(starts), tuple(steps), tuple(finishes))

    @classmethod
    def pool(cls, runs: Iterable[Run]) -> Run:
        """One run that holds the steps of all of them."""
        runs = list(runs)
        return cls(
            tuple(s for run in runs for s in run.starts),
            tuple(s for run in runs for s in run.steps),
            tuple(f for run in runs for f in run.finishes),
        )

    @property
    def ids(self) -> list[int]:
        """Ids of the answer. Of a pooled run only their number means anything."""
        return [i for start in self.starts for i in start.emitted] + [i for step in self.steps for i in step.emitted]

    @property
    def text(self) -> str:
        """Text of the answer."""
        return "".join(
            [*(s.text for s in self.starts), *(s.text for s in self.steps), *(f.text for f in self.finishes)]
        )


Value: TypeAlias = float | int | tuple[Any, ...] | None
Unit = Literal["tokens/forward", "tokens", "steps", "share", "tokens/s", "ms", "forwards", "table"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one table of numbers (unit "table": a tuple of `Depth`, `Length` or `Bin` rows)."""

    name: str
    label: str
    unit: Unit
    definition: str
    of: Callable[[Run], Value]

    def show(self, value: Value) -> str:
        """The value as people read it, with its unit; "–" where it is undefined."""
        if value is None:
            return "–"
        if isinstance(value, tuple):
            return f"{len(value)} rows"
        if self.unit == "share":
            return f"{100 * value:.1f} %"
        if self.unit in ("tokens", "steps"):
            return f"{value:,}"
        return f"{value:.2f} {self.unit}" if self.unit != "tokens/s" else f"{value:.1f} {self.unit}"


def accepted_length(step: Step) -> int:
    """Drafted tokens of this step that were accepted and emitted: the path without its root, cut at a stop."""
    return min(len(step.accepted) - 1, len(step.emitted))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _emitted(run: Run) -> int:
    return sum(len(s.emitted) for s in run.steps)


def _of_trees(function: Callable[[Run], Value]) -> Callable[[Run], Value]:
    """A number read from the trees: undefined for a run that was made without recording them (`record=False`)."""

    def of(run: Run) -> Value:
        return function(run) if all(s.nodes for s in run.steps) else None

    return of


def _drafted(run: Run) -> int:
    return sum(len(s.nodes) - 1 for s in run.steps)


def _accepted(run: Run) -> int:
    return sum(accepted_length(s) for s in run.steps)


def _milliseconds(run: Run, kind: str | None = None) -> float:
    return sum(ms for s in run.steps for name, ms in s.timing.items() if kind in (None, name))


def _time_share(run: Run, *kinds: str) -> float | None:
    part = _share(sum(_milliseconds(run, kind) for kind in kinds), _milliseconds(run))
    return None if part is None else min(part, 1.0)  # the sums round differently


def _overhead(run: Run) -> float | None:
    forwards = _time_share(run, "draft_ms", "verify_ms")
    return None if forwards is None else 1.0 - forwards


def _tokens_per_second(run: Run) -> float | None:
    ms = _milliseconds(run)
    return _share(_emitted(run), ms / 1000) if ms > SHORTEST else None


def _acceptance(run: Run) -> tuple[Depth, ...]:
    deepest = max((node.depth for s in run.steps for node in s.nodes), default=0)
    reached = [len(run.steps)] + [sum(accepted_length(s) >= d for s in run.steps) for d in range(1, deepest + 1)]
    return tuple(
        Depth(d, reached[d], reached[0], reached[d] / reached[0], _share(reached[d], reached[d - 1]))
        for d in range(1, deepest + 1)
    )


def _lengths(run: Run) -> tuple[Length, ...]:
    counts = Counter(accepted_length(s) for s in run.steps)
    return tuple(Length(n, counts[n]) for n in range(max(counts, default=-1) + 1))


def _outside(run: Run) -> float | None:
    drawn_at = [(node in s.outside) for s in run.steps for node in s.accepted[: len(s.emitted)]]
    return _share(sum(drawn_at), len(drawn_at)) if _drafted(run) else None


def _bins(scored: Iterable[tuple[float, bool]]) -> tuple[Bin, ...]:
    count, total, hits = [0] * BINS, [0.0] * BINS, [0] * BINS
    for score, hit in scored:
        b = min(max(int(score * BINS), 0), BINS - 1)
        count[b] += 1
        total[b] += score
        hits[b] += hit
    return tuple(
        Bin(b / BINS, (b + 1) / BINS, count[b], total[b] / count[b], hits[b] / count[b])
        for b in range(BINS)
        if count[b]
    )


def _judged(run: Run) -> Iterator[tuple[Node, bool, bool]]:
    """Every drafted node on which a verdict fell, whether its parent was accepted, and whether it was itself. What
    hangs below a stop was neither accepted nor rejected, whichever node the target would have chosen there."""
    for step in run.steps:
        accepted = set(step.accepted)
        unjudged = set(step.accepted[len(step.emitted) :])  # the node that was emitted last, if a stop cut its draw
        for node in step.nodes[1:]:
            if node.parent in unjudged:
                unjudged.add(node.id)
            else:
                yield node, node.parent in accepted, node.id in accepted


def _confidence_bins(run: Run) -> tuple[Bin, ...]:
    return _bins((node.confidence, accepted) for node, parent_accepted, accepted in _judged(run) if parent_accepted)


def _value_bins(run: Run) -> tuple[Bin, ...]:
    return _bins((node.value, accepted) for node, _, accepted in _judged(run))


def calibration_gap(bins: Iterable[Bin], at_least: int = 1) -> float | None:
    """The largest |accepted − score| of the bins with `at_least` nodes or more; None where there is none."""
    return max((abs(b.accepted - b.score) for b in bins if b.nodes >= at_least), default=None)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "tau",
            "Acceptance length τ",
            "tokens/forward",
            "Tokens emitted per forward of the target, over all steps. Includes the target's own (bonus) token of each "
            "step, excludes the token drawn by the prefill; 1 for vanilla decoding.",
            lambda run: _share(_emitted(run), len(run.steps)),
        ),
        Metric(
            "steps",
            "Steps",
            "steps",
            "Rounds of draft, verify and commit: forwards of the target after the prefill.",
            lambda run: len(run.steps),
        ),
        Metric(
            "tokens",
            "Tokens",
            "tokens",
            "Tokens of the answer, the one drawn by the prefill included: the number of emitted ids.",
            lambda run: len(run.ids),
        ),
        Metric(
            "drafted",
            "Drafted",
            "tokens",
            "Drafted tokens that the target verified: the nodes of all trees without their roots.",
            _of_trees(_drafted),
        ),
        Metric(
            "accepted",
            "Accepted",
            "tokens",
            "Drafted tokens that were accepted and emitted. A token that matches behind a rejected one does not count.",
            _of_trees(_accepted),
        ),
        Metric(
            "acceptance_rate",
            "Accepted / drafted",
            "share",
            "Accepted over drafted tokens. It falls as trees grow although each step emits more: compare acceptance "
            "lengths and times, not rates.",
            _of_trees(lambda run: _share(_accepted(run), _drafted(run))),
        ),
        Metric(
            "acceptance",
            "Acceptance by depth",
            "table",
            "Share of steps that accept a node at each depth: of all steps (unconditional), and of the steps that had "
            "accepted one at the depth before (conditional).",
            _of_trees(_acceptance),
        ),
        Metric(
            "lengths",
            "Accepted lengths",
            "table",
            "How many steps accepted exactly n drafted tokens, bonus token not counted.",
            _of_trees(_lengths),
        ),
        Metric(
            "outside_draft_vocab",
            "Outside the draft vocabulary",
            "share",
            "Share of the target's draws along the accepted paths (bonus tokens included) that the drafter cannot "
            "propose because its vocabulary does not hold them. It caps acceptance; it never changes the text.",
            _of_trees(_outside),
        ),
        Metric(
            "confidence_calibration",
            "Calibration of confidence",
            "table",
            "Among the drafted nodes whose parent was accepted, in bins of the drafter's confidence: the share that "
            "was accepted. Equal to the confidence where the drafter is calibrated.",
            _of_trees(_confidence_bins),
        ),
        Metric(
            "value_calibration",
            "Calibration of value",
            "table",
            "Among all drafted nodes, in bins of value (the product of confidences along the path): the share whose "
            "whole path was accepted.",
            _of_trees(_value_bins),
        ),
        Metric(
            "tokens_per_second",
            "Tokens per second",
            "tokens/s",
            "Tokens emitted by the steps over the wall time of the steps; prefill excluded.",
            _tokens_per_second,
        ),
        Metric(
            "step_ms",
            "Time of a step",
            "ms",
            "Mean wall time of a step: draft, verify and everything else.",
            lambda run: _share(_milliseconds(run), len(run.steps)),
        ),
        Metric(
            "draft_share",
            "Time drafting",
            "share",
            "Share of the steps' wall time spent drafting.",
            lambda run: _time_share(run, "draft_ms"),
        ),
        Metric(
            "verify_share",
            "Time verifying",
            "share",
            "Share of the steps' wall time spent in the target's forward.",
            lambda run: _time_share(run, "verify_ms"),
        ),
        Metric(
            "overhead",
            "Time outside forwards",
            "share",
            "Share of the steps' wall time spent neither drafting nor in the target's forward: walk, commit, text, "
            "events.",
            _overhead,
        ),
        Metric(
            "draft_forwards",
            "Drafter forwards",
            "forwards",
            "Mean number of drafter forwards in a step; a tree of depth D takes D of them, a parallel drafter one.",
            lambda run: _share(sum(s.forwards for s in run.steps), len(run.steps)),
        ),
    )
}
"""Name → metric, in the order in which people read them."""


def measure(run: Run, *names: str) -> dict[str, Any]:
    """The named metrics of a run (all of them by default) as plain JSON-able data; rows become objects."""
    return {
        name: [row._asdict() for row in value] if isinstance(value, tuple) else value
        for name in names or METRICS
        for value in [METRICS[name].of(run)]
    }


def glossary() -> str:
    """The definitions as a Markdown table: the README shows exactly this."""
    rows = [f"| {m.label} | `{m.name}` | {m.unit} | {m.definition} |" for m in METRICS.values()]
    return "\n".join(["| Number | Key | Unit | Definition |", "|---|---|---|---|", *rows])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns for a terminal: the first to the left, the others to the right."""
    lines = [list(header), *([*row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["─" * w for w in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
