"""Is the text the same, and how much sooner was it there? Vanilla and a method on the very same ids.

Speculation must not change a single token. `verdict` compares two answers and names the first difference;
a difference is not yet a fault, though: a forward over a tree and a forward over one row add up in different
orders, and where the target's two best tokens are closer than that rounding, either may win. So the target
reads the prompt and the common part of the answers once more, and the gap of its two best decides:

    ids equal                                    → equal
    both drawn tokens are the target's two best
    there, and closer than rounding              → tie          (both answers are right)
    anything else                                → different    (a bug: report it with the trace)

Sampling draws with noise keyed by seed and position, so the same ids are expected at any temperature, and the gap
is that of the noisy scores. Only drafts verified by the ratio rule keep nothing but the distribution; then ids say
nothing, and the verdict is None with that reason.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from eagle_core.errors import InvalidRequest
from eagle_core.events import Event
from eagle_core.metrics import METRICS, Run, table

if TYPE_CHECKING:
    from eagle_core.drafters.base import TreeSettings
    from eagle_core.pairs import Pair
    from eagle_core.target import Target
    from eagle_core.verify import Sampling

__all__ = [
    "TOLERANCE",
    "Answer",
    "Comparison",
    "Scored",
    "Verdict",
    "best_two",
    "compare",
    "first_difference",
    "judge",
    "timed",
    "verdict",
]

TOLERANCE = {"float64": 1e-9, "float32": 5e-4, "float16": 0.15, "bfloat16": 1.0}
"""Logits closer than this are a tie. What rounding does was measured on the default target, a tree of 16 nodes against
the same paths row by row: a logit (magnitude 17 to 33) moves by up to 4e-5 in float32 and up to 0.375, three units in
the last place, in bfloat16. Both tokens move, and larger models add up more: hence ten times that, and three times."""


class Scored(NamedTuple):
    """A token the target scored: its logit, or at a temperature its noisy score in units of logits."""

    token: int
    text: str
    logit: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What two answers have to do with each other.

    Attributes:
        verdict: None where ids cannot tell (the ratio rule).
        position: index in the answer of the first difference.
        gap: distance of the target's two best there; None if equal or unknown.
        ours, theirs: the tokens at the position (None where that answer had ended).
        best: the target's two best there, teacher-forced.
        why: one sentence for people.
    """

    verdict: Literal["equal", "tie", "different"] | None
    position: int | None = None
    gap: float | None = None
    tolerance: float | None = None
    ours: int | None = None
    theirs: int | None = None
    best: tuple[Scored, ...] = ()
    why: str = ""


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first difference, the shorter length where one answer begins the other, None if equal."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def verdict(
    ours: Sequence[int], theirs: Sequence[int], best: Sequence[Scored] = (), tolerance: float = TOLERANCE["float32"]
) -> Verdict:
    """Compare two answers to the same prompt.

    Args:
        ours, theirs: the answers' ids; `theirs` is vanilla's.
        best: the target's two best tokens at the first difference, best first (`best_two`). Without them a
            difference cannot be excused as a tie.
        tolerance: see `TOLERANCE`.
    """
    position = first_difference(ours, theirs)
    if position is None:
        return Verdict("equal", why=f"All {len(ours)} ids are equal.")
    a = ours[position] if position < len(ours) else None
    b = theirs[position] if position < len(theirs) else None
    gap = best[0].logit - best[1].logit if len(best) > 1 else None
    tie = gap is not None and gap < tolerance and {a, b} == {s.token for s in best[:2]}
    if tie:
        why = f"At position {position} the target's two best are {gap:.2g} apart, below {tolerance:g}: both are right."
    elif a is None or b is None:
        why = f"One answer ends at position {position}, the other goes on."
    elif gap is None:
        why = f"The answers part at position {position}."
    else:
        why = f"The answers part at position {position}, where the target's two best are {gap:.3g} apart: not rounding."
    return Verdict("tie" if tie else "different", position, gap, tolerance, a, b, tuple(best[:2]), why)


def best_two(
    target: Target, prompt_ids: Sequence[int], ids: Sequence[int], sampling: Sampling | None = None
) -> tuple[Scored, ...]:
    """The target's two best next tokens after prompt and `ids`, by one plain causal forward.

    At a temperature: by the noisy scores from which the token at that position is drawn, scaled back to logits, so
    that rounding weighs the same; fewer than two where top-k, top-p or min-p leave a single token.
    """
    import torch

    from eagle_core.verify import Noise, processed

    text = [*prompt_ids, *ids]
    with target.lock, torch.inference_mode():
        session = target.session(len(text))
        try:
            logits, _ = session.prefill(torch.tensor(text, device=target.device))
        finally:
            target.release(session)
        scores = logits[-1]
        if sampling is not None and not sampling.greedy:
            noise = Noise(sampling.seed, target.device).exponential(len(text), scores.shape[-1])
            scores = (processed(logits, sampling)[-1].log() - noise.log()) * sampling.temperature
        top = scores.topk(2)
    pairs = [(i, s) for i, s in zip(top.indices.tolist(), top.values.tolist(), strict=True) if s > float("-inf")]
    return tuple(Scored(i, target.tokenizer.decode([i]) if target.tokenizer else str(i), s) for i, s in pairs)


def judge(
    target: Target,
    prompt_ids: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    sampling: Sampling | None = None,
) -> Verdict:
    """`verdict`, with the target asked for its two best where the answers part."""
    position = first_difference(ours, theirs)
    inside = position is not None and position < min(len(ours), len(theirs))
    best = best_two(target, prompt_ids, ours[:position], sampling) if inside else ()
    return verdict(ours, theirs, best, TOLERANCE[str(target.dtype).removeprefix("torch.")])


@dataclass(frozen=True, slots=True)
class Answer:
    """One timed answer. `seconds` is wall time from the request to its last event, prefill included."""

    ids: list[int]
    text: str
    seconds: float
    run: Run = field(repr=False, default_factory=Run)

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds


def timed(events: Iterator[Event]) -> Answer:
    """Exhaust a stream of events against the clock."""
    began = time.perf_counter()
    collected = list(events)
    seconds = time.perf_counter() - began
    run = Run.collect(collected)
    return Answer(run.ids, run.text, seconds, run)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method's answer beside vanilla's. `speedup`: tokens per second of ours over vanilla's, measured, never
    estimated; one pair of runs on a shared machine is an anecdote, `bench` gives medians."""

    ours: Answer
    vanilla: Answer
    verdict: Verdict

    @property
    def speedup(self) -> float:
        return self.ours.tokens_per_second / self.vanilla.tokens_per_second


def compare(
    pair: Pair,
    prompt: str | list[dict[str, str]] | list[int],
    *,
    method: str,
    sampling: Sampling,
    settings: TreeSettings,
    max_new_tokens: int = 128,
    **request: Any,
) -> Comparison:
    """Answer one prompt plainly and with a method, on the same ids, after a short warm-up of both.

    Args:
        prompt, request: as for `Pair.generate`.
    """
    common = {"sampling": sampling, "settings": settings, **request}
    warm = {**common, "max_new_tokens": min(max_new_tokens, 8)}
    ids = timed(pair.generate(prompt, method="vanilla", **warm)).run.starts[0].prompt_ids
    common.pop("system", None)  # it is in the ids
    warm.pop("system", None)
    timed(pair.generate(ids, method=method, **warm))
    vanilla = timed(pair.generate(ids, method="vanilla", max_new_tokens=max_new_tokens, **common))
    ours = timed(pair.generate(ids, method=method, max_new_tokens=max_new_tokens, **common))
    if pair.drafter(method).rule == "ratio" and not sampling.greedy:
        why = "Drafts verified by the ratio rule keep the target's distribution, not vanilla's draws; ids cannot tell."
        return Comparison(ours, vanilla, Verdict(None, why=why))
    return Comparison(ours, vanilla, judge(pair.target, ids, ours.ids, vanilla.ids, sampling))


# -------------------------------------------------------------------------------------------- command line


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `compare`."""
    from eagle_core import commands

    commands.add_prompt(parser)
    parser.add_argument("--method", default="eagle3", help="what to compare with vanilla (default: %(default)s)")
    commands.add_pair(parser)
    commands.add_sampling(parser)
    commands.add_tree(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; repeatable"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both answers, the verdict, the times."""
    from eagle_core.commands import pair_of, prompt_of, sampling_of, tree_of

    sampling, settings, prompt = sampling_of(args), tree_of(args), prompt_of(args)
    pair = pair_of(args)
    if why := pair.why_not(args.method):
        raise InvalidRequest(f"{args.method} cannot run with this pair: {why}")
    found = compare(
        pair,
        prompt,
        method=args.method,
        sampling=sampling,
        settings=settings,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        system=args.system,
    )
    print(found.ours.text)
    print()
    rows = []
    for name, answer in (("vanilla", found.vanilla), (args.method, found.ours)):
        tau, split = METRICS["tau"], [METRICS[key] for key in ("draft_share", "verify_share", "overhead")]
        rows.append(
            [
                name,
                str(len(answer.ids)),
                str(len(answer.run.steps)),
                tau.show(tau.of(answer.run)).removesuffix(f" {tau.unit}"),
                f"{answer.seconds:.2f}",
                f"{answer.tokens_per_second:.1f}",
                *(m.show(m.of(answer.run)) for m in split),
            ]
        )
    print(table(["method", "tokens", "steps", "τ", "seconds", "tokens/s", "draft", "verify", "outside"], rows))
    v = found.verdict
    print(f"\n{v.verdict or 'no verdict by ids'}: {v.why}")
    print(f"{found.speedup:.2f} × vanilla's tokens per second, measured on one pair of answers; bench gives medians.")
    return {
        **asdict(v),
        "best": [s._asdict() for s in v.best],
        "ids": found.ours.ids,
        "vanilla_ids": found.vanilla.ids,
        "method": args.method,
        "tau": METRICS["tau"].of(found.ours.run),
        "speedup": found.speedup,
        "seconds": found.ours.seconds,
        "vanilla_seconds": found.vanilla.seconds,
        "tokens_per_second": found.ours.tokens_per_second,
        "vanilla_tokens_per_second": found.vanilla.tokens_per_second,
    }
