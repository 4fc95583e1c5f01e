"""Train a head on a corpus that its target wrote.

    python -m eagle_core train eagle3 --target T --corpus DIR --out DIR --hours 2
    python -m eagle_core train eagle3 --target T --corpus DIR --out DIR --hours 2 --resume      after a kill
    torchrun --nproc_per_node 4 -m eagle_core train eagle3 …                                    on several GPUs

Training does not run the target: its states are on disk (and computed once, here, where the corpus lacks them). What a
step does is decided by the seed, the counters and how far the run has got. So with --steps, over corpora that nobody
adds to, a resumed run continues the curve of an unbroken one exactly; with --hours the rates and the length of chains
follow the clock, and a corpus that has grown, or one added at the end of the list, is seen from the next pass on. All
that a checkpoint holds is weights, optimizer state, counters, and the settings that these mean something with.

    out/checkpoint.pt   the newest state, replaced in one move at least every minute
    out/log.jsonl       {"step", "tokens", "seconds", "loss", "accuracy": [step 1, …]} and {"held_out": …} lines
    out/curve.png       the same as a picture

A run is one sweep of the learning rate: a short rise, level, and a fall to zero over the last `cooldown` of it.
The chains of training-time test grow along the way, from `first_chain` to `chain`, because one step costs half of
two and the first step has to be learnt first.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_core.errors import InvalidRequest
from eagle_core.training.store import Corpus, replace_file

if TYPE_CHECKING:
    from eagle_core.training.runs import Run

__all__ = ["METHODS", "Recipe", "configure", "draw_curve", "run", "train"]

METHODS = {"eagle1": "eagle1", "eagle2": "eagle1", "eagle3": "eagle3"}
"""What can be trained, and the family of head it is (EAGLE-2 is a way to draft with an EAGLE-1 head)."""


_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch_tokens", "row_tokens", "draft_vocab", "chain", "first_chain"), (1, math.inf)),
    **dict.fromkeys(("muon_iterations", "evaluate_every", "log_every"), (1, math.inf)),
    **dict.fromkeys(("updates", "hours", "decay", "token_weight", "feature_noise"), (0, math.inf)),
    **dict.fromkeys(("matrix_rate", "rate", "head_rate", "muon_block", "clip", "held_out"), (0, math.inf)),
    **dict.fromkeys(("growth", "cooldown"), (0, 1)),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every setting of a run.

    method            eagle1 | eagle2 | eagle3
    updates, hours    how long: a number of optimizer updates, or a time; one of the two
    batch_tokens      tokens of an update, over all devices
    row_tokens        length of a packed row; conversations longer than that get a row of their own
    draft_vocab       ids an EAGLE-3 head can draft; for EAGLE-1/2, rows of the LM head that the token loss looks at
    capture           boundaries an EAGLE-3 head reads; empty for the default triple
    chain, first_chain, growth    length of training chains: from `first_chain` to `chain` over the first `growth`
                      of the run
    decay             weight of chain step k is decay^k
    token_weight, feature_noise   of EAGLE-1/2's loss
    everywhere        learn from user turns too (the target wrote them as well), not from answers only
    matrix_rate, rate, head_rate  learning rates: Muon's for matrices, AdamW's for vectors, AdamW's for the LM head
    muon_iterations, muon_block   precision of a Muon step (see `muon`)
    cooldown          last part of the run in which the rates fall to zero
    clip              largest norm of the gradient, 0 for none
    held_out          tokens of held-out conversations that are evaluated
    evaluate_every    updates between evaluations

    Raises:
        InvalidRequest: a setting out of its range.
    """

    method: str = "eagle3"
    updates: int = 0
    hours: float = 0.0
    batch_tokens: int = 700
    row_tokens: int = 1024
    draft_vocab: int = 6144
    capture: tuple[int, ...] = ()
    chain: int = 4
    first_chain: int = 1
    growth: float = 0.6
    decay: float = 0.8
    token_weight: float = 0.1
    feature_noise: float = 0.1
    everywhere: bool = True
    matrix_rate: float = 0.004
    rate: float = 1e-3
    head_rate: float = 2e-5
    cooldown: float = 1.0
    muon_iterations: int = 5
    muon_block: int = 192
    clip: float = 0.0
    seed: int = 0
    held_out: int = 8000
    evaluate_every: int = 500
    log_every: int = 20

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                most = "" if high == math.inf else f" and at most {high}"
                raise InvalidRequest(f"{name} is {value}; it must be at least {low}{most}")
        if self.first_chain > self.chain:
            raise InvalidRequest(
                f"first_chain is {self.first_chain} and chain {self.chain}; chains grow, so it must be at most chain"
            )

    @property
    def family(self) -> str:
        return METHODS[self.method]

    def chain_length(self, progress: float) -> int:
        span = self.chain - self.first_chain + 1
        return min(self.chain, self.first_chain + int(span * progress / max(self.growth, 1e-9)))

    def rate_factor(self, progress: float, update: int) -> float:
        return min(1.0, (update + 1) / 10) * min(1.0, (1 - progress) / max(self.cooldown, 1e-9))


def draw_curve(log: Path, png: Path) -> None:
    """The log as a picture: loss and accuracy of training, and agreement on held-out text, over tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    learn = [line for line in lines if "loss" in line]
    held = [line for line in lines if "held_out" in line]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([x["tokens"] / 1e6 for x in learn], [x["token_loss"] for x in learn], lw=0.8)
    left.set(xlabel="million tokens", ylabel="cross-entropy of step 1", title="Training")
    for k in range(max((len(x["held_out"]["agreement"]) for x in held), default=0)):
        right.plot(
            [x["tokens"] / 1e6 for x in held],
            [x["held_out"]["agreement"][k] for x in held],
            ".-",
            label=f"step {k + 1}",
        )
    right.set(xlabel="million tokens", ylabel="agreement with the target's first choice", title="Held-out text")
    if held:
        right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    replace_file(png, buffer.getvalue())


def train(
    recipe: Recipe,
    target: Any,
    corpora: Sequence[Corpus],
    out: Path,
    *,
    resume: bool = False,
    start_from: Path | str | None = None,
    export: Path | None = None,
) -> dict[str, Any] | None:
    """Run to the end, and write the head in public form to `export`, if given.

    Returns the last held-out report with the run's counts; None on any process but the first.
    """
    from tqdm import tqdm

    from eagle_core.training.runs import Run

    run = Run(recipe, target, corpora, out, resume=resume, start_from=start_from)
    bar = tqdm(total=100, unit="%", disable=not run.main, file=sys.stderr, desc=recipe.method,
               bar_format="{desc} {percentage:5.1f}% |{bar}| {elapsed}<{remaining} {postfix}")  # fmt: skip
    window: list[dict[str, Any]] = []
    saved = time.monotonic()
    while run.progress() < 1:
        window.append(run.update())
        update = run.at.update
        if update % recipe.log_every == 0:
            run.log(**_window_line(run, window))
            bar.n = 100 * run.progress()
            bar.set_postfix_str(
                f"{run.at.tokens:,} tokens, {run.at.tokens / run.at.seconds:.0f}/s, {_accuracy(window)}"
            )
            window = []
        if update % recipe.evaluate_every == 0:
            _evaluate_and_keep(run)
        if time.monotonic() - saved > 45:
            run.save()
            saved = time.monotonic()
    report = _evaluate_and_keep(run)
    bar.close()
    if not run.main:
        return None
    if export is not None:
        from eagle_core.training.card import ship

        ship(run, export)
    return {"method": recipe.method, "out": str(out), "updates": run.at.update, "tokens": run.at.tokens,
            "seconds": round(run.at.seconds, 1), "coverage": round(run.coverage, 4), **report}  # fmt: skip


def _accuracy(window: Sequence[dict[str, Any]]) -> list[float]:
    """Of each chain step, over the updates that walked it."""
    right = [sum(counts) for counts in zip_longest(*(x["agree"] for x in window), fillvalue=0)]
    of = [sum(counts) for counts in zip_longest(*(x["count"] for x in window), fillvalue=0)]
    return [round(a / max(1, n), 4) for a, n in zip(right, of, strict=True)]


def _window_line(run: Run, window: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mean = lambda key: round(sum(x["parts"].get(key, 0.0) for x in window) / len(window), 5)  # noqa: E731
    line = {
        "step": run.at.update,
        "tokens": run.at.tokens,
        "seconds": round(run.at.seconds, 2),
        "loss": round(sum(x["loss"] for x in window) / len(window), 5),
        "token_loss": mean("token_loss_1"),
        "accuracy": _accuracy(window),
        "rate_factor": round(window[-1]["rate_factor"], 4),
    }
    if run.recipe.family == "eagle1":
        line["feature_loss"] = mean("feature_loss_1")
    return line


def _evaluate_and_keep(run: Run) -> dict[str, Any]:
    report = run.evaluate() if run.main else {}
    run.log(step=run.at.update, tokens=run.at.tokens, seconds=round(run.at.seconds, 2), held_out=report)
    run.save()
    if run.main:
        draw_curve(run.out / "log.jsonl", run.out / "curve.png")
    return report


# ------------------------------------------------------------------------------------------------- command line

_OPTIONS = {
    "batch_tokens": (int, "tokens of an update, over all devices"),
    "row_tokens": (int, "tokens of a packed row"),
    "draft_vocab": (int, "ids an EAGLE-3 head can draft; for EAGLE-1/2, LM-head rows of the token loss"),
    "chain": (int, "length of training chains at the end of the run"),
    "first_chain": (int, "length of training chains at its start"),
    "growth": (float, "part of the run over which they grow"),
    "decay": (float, "weight of chain step k is DECAY^k"),
    "token_weight": (float, "cross-entropy against feature loss (EAGLE-1/2)"),
    "feature_noise": (float, "half the width of the noise on features (EAGLE-1/2)"),
    "matrix_rate": (float, "Muon's learning rate, for matrices"),
    "rate": (float, "AdamW's, for vectors"),
    "head_rate": (float, "AdamW's, for the LM head"),
    "cooldown": (float, "last part of the run, in which the rates fall to zero"),
    "muon_iterations": (int, "Newton-Schulz iterations of a Muon step"),
    "muon_block": (int, "size of the slices that Muon makes orthogonal, 0 for whole matrices"),
    "clip": (float, "largest norm of a gradient, 0 for none"),
    "seed": (int, "of everything that is drawn"),
    "held_out": (int, "tokens of held-out text to evaluate"),
    "evaluate_every": (int, "steps between evaluations"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=list(METHODS), help="what to train")
    parser.add_argument("--target", help="the target: a hub id or a folder (default: the default target)")
    parser.add_argument(
        "--corpus", nargs="+", required=True, type=Path, help="folders of corpora that the target wrote"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of the run")
    parser.add_argument("--hours", type=float, default=0.0, help="how long to train")
    parser.add_argument("--steps", type=int, default=0, help="how many optimizer steps to train, in place of --hours")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--start-from", help="begin with the weights of this head: a folder or a hub id")
    parser.add_argument(
        "--capture", type=int, nargs="+", default=[], help="boundaries an EAGLE-3 head reads (default 2, n//2, n-3)"
    )
    parser.add_argument("--answers-only", action="store_true", help="do not learn from user turns")
    parser.add_argument("--export", type=Path, help="write the trained head here in public form")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    defaults = Recipe()
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=getattr(defaults, name), help=f"{text} (%(default)s)"
        )


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    from eagle_core.pairs import load_target
    from eagle_core.training.corpus import fill_features
    from eagle_core.training.runs import check

    options = {name: getattr(args, name) for name in _OPTIONS}
    recipe = Recipe(
        method=args.method,
        updates=args.steps,
        hours=args.hours,
        capture=tuple(args.capture),
        everywhere=not args.answers_only,
        **options,
    )
    device, rank = args.device, os.environ.get("LOCAL_RANK")
    if rank is not None and device == "auto":  # one of several processes, each with its own GPU
        import torch

        device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    target = load_target(args.target, dtype=args.dtype, device=device)
    corpora = [Corpus.open(folder, target) for folder in args.corpus]
    check(recipe, target, corpora, args.out, resume=args.resume)
    for corpus in corpora:
        if rank in (None, "0"):
            fill_features(corpus, target)
        while corpus.featured < len(corpus):  # the first process is at it
            time.sleep(1)
            corpus.refresh()
    return train(recipe, target, corpora, args.out, resume=args.resume, start_from=args.start_from, export=args.export)
