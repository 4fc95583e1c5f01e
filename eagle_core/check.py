"""Does it hold on this device? One command for a machine that is to be trusted, one JSON line as its answer.

    python -m eagle_core check [--target T] [--drafter D] [--device cuda] [--max-new-tokens 48]

For every method that the pair can run, over a few prompts:

    lossless   greedy and sampled ids equal plain decoding's, or part from it at a tie (`compare.judge`); greedy ones
               of plain decoding against transformers' own `generate` as well
    syncs      steps of a fixed tree in which the host waited for the device outside the one packed copy: on CUDA under
               PyTorch's own detector, elsewhere by counting operators that read a value back
    speed      whole answers against `generate`, paired and interleaved (`bench`)

and the peak of memory. `ok` is true where nothing differs and nothing waits; `wrong` names the methods where it does.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_core.bench import Prompt, bench, chat_ids, contestant, machine, quartiles, read_prompts
from eagle_core.compare import Verdict, judge
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.errors import InvalidRequest
from eagle_core.metrics import METRICS, Run

if TYPE_CHECKING:
    from eagle_core.pairs import Pair
    from eagle_core.target import Target
    from eagle_core.verify import Sampling

__all__ = ["check", "hidden_syncs", "no_syncs", "reads"]

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that counts the words of a text.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
)
"""Easy, code, repetition: enough to accept, to reject and to look up."""

FIXED = TreeSettings(16, 4, 4)  # −1 may look at values on a CPU, where that costs nothing
STEPS = 12  # watched for syncs

_READS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.is_nonzero.default",
    "aten.masked_select.default",
}


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Counts, by name, the operators run inside whose result the host must wait for."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func) in _READS:
                counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield counts


@contextmanager
def no_syncs() -> Iterator[None]:
    """On CUDA: any wait for the device raises, but for the copy that the engine declares as its own."""
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def hidden_syncs(pair: Pair, method: str, ids: list[int], sampling: Sampling) -> list[str]:
    """What made the host wait in a few steps of an answer; empty where nothing did."""
    events = pair.generate(ids, method=method, sampling=sampling, settings=FIXED, max_new_tokens=STEPS * 20)
    list(islice(events, 2))  # the prefill may wait, the first step allocates
    try:
        if pair.target.device.type == "cuda":
            with no_syncs():
                list(islice(events, STEPS))
            return []
        with reads() as counts:
            list(islice(events, STEPS))
        return sorted(counts)
    except RuntimeError as error:  # the detector's own
        return [str(error).splitlines()[0]]
    finally:
        events.close()  # type: ignore[attr-defined]


def check(pair: Pair, prompts: list[tuple[Prompt, list[int]]], max_new_tokens: int) -> dict[str, Any]:
    """Everything the module promises, as JSON holds it.

    Args:
        prompts: with their ids.
        max_new_tokens: of each answer.
    """
    import torch

    from eagle_core.verify import Sampling

    target = pair.target
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    how = Sampling(), Sampling(1.0, top_k=50, top_p=0.95, seed=1)
    verdicts: dict[str, Counter[str]] = {name: Counter() for name in pair.methods}
    taus: dict[str, list[float]] = {name: [] for name in pair.methods}
    failed: dict[str, dict[str, str]] = {name: {} for name in pair.methods}
    for (prompt, ids), sampling in product(prompts, how):
        plain = _answer(pair, "vanilla", ids, sampling, max_new_tokens)
        for name in pair.methods:
            try:
                run = _answer(pair, name, ids, sampling, max_new_tokens)
            except Exception as error:  # whatever it is, it is this method's result and must not stop the others
                failed[name][str(prompt.id)] = f"{type(error).__name__}: {error}"
            else:
                tau = METRICS["tau"].of(run)
                if isinstance(tau, float):
                    taus[name].append(tau)
                if sampling.greedy or pair.drafter(name).rule == "draw":
                    verdicts[name][_said(judge(target, ids, run.ids, plain.ids, sampling))] += 1
    names = ["vanilla", "hf", *(name for name in pair.methods if name != "vanilla")]
    everyone = [contestant(pair, name, Sampling(), TreeSettings()) for name in names]
    records = bench(everyone, prompts, target, Sampling(), max_new_tokens)
    verdicts["hf"] = Counter(_said(verdict) for verdict in records["hf"].verdicts.values())
    speeds = {n: {i: a.tokens_per_second for i, a in record.answers.items()} for n, record in records.items()}
    methods: dict[str, Any] = {}
    for name in names:
        methods[name] = {
            "verdicts": dict(verdicts[name]),
            "tau": sum(taus[name]) / len(taus[name]) if taus.get(name) else None,
            "tokens_per_second": quartiles(speeds[name].values()),
            "ratio_to_hf": quartiles(v / speeds["hf"][i] for i, v in speeds[name].items() if i in speeds["hf"]),
            "failed": {str(i): why for i, why in records[name].failed.items()} | failed.get(name, {}),
        }
        if name != "hf" and not methods[name]["failed"]:
            waits = {wait for s in how for wait in hidden_syncs(pair, name, prompts[0][1], s)}
            methods[name]["syncs"] = sorted(waits)
    wrong = [n for n, m in methods.items() if m["verdicts"].get("different") or m["failed"] or m.get("syncs")]
    return {
        "ok": not wrong,
        "wrong": wrong,
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "machine": machine(target),
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "peak_memory_mb": _peak(target),
        "methods": methods,
    }


def _answer(pair: Pair, method: str, ids: list[int], sampling: Sampling, max_new_tokens: int) -> Run:
    return Run.collect(pair.generate(ids, method=method, sampling=sampling, max_new_tokens=max_new_tokens))


def _said(verdict: Verdict) -> str:
    return str(verdict.verdict)


def _peak(target: Target) -> float:
    """The most memory used so far, in MB: of the device on CUDA, else of the process."""
    if target.device.type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated(target.device) / 1e6)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most / 1e6 if sys.platform == "darwin" else most / 1e3)


def _prompts(target: Target, file: Path | None) -> list[tuple[Prompt, list[int]]]:
    """Those of a file, or a few questions, or for a target that cannot be asked in words, ids that recur."""
    if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
        if file is not None:
            raise InvalidRequest(f"{target.name} has no chat template, so it cannot be asked the questions of a file")
        return [
            (Prompt(n, "ids", ("",)), [(7 * i * i + 3 * (i % n) + 1) % target.vocab_size for i in range(24)])
            for n in (3, 5, 7)
        ]
    asked = [Prompt(i, "check", (q,)) for i, q in enumerate(QUESTIONS)] if file is None else read_prompts(file, 8)
    return [(prompt, chat_ids(target, prompt.turns[0])) for prompt in asked]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `check`."""
    from eagle_core import commands

    parser.add_argument("--prompts", type=Path, help="Spec-Bench lines, at most 8 are taken (default: three questions)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="(default: %(default)s)")
    commands.add_pair(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load, check, tell."""
    from eagle_core.commands import pair_of

    pair = pair_of(args)
    for why in pair.failures:
        print(why, file=sys.stderr)
    unknown = [name for name in METHODS if name not in pair.methods]
    if unknown:
        print(f"not checked, for lack of a drafter: {', '.join(unknown)}", file=sys.stderr)
    return check(pair, _prompts(pair.target, args.prompts), args.max_new_tokens)
