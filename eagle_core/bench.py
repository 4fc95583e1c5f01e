"""How fast is it really? Methods against transformers' own `generate`, on the same prompts, in one run.

    python -m eagle_core bench --prompts FILE.jsonl --methods hf,eagle3,eagle3@60/8/10 --limit 20 --json OUT.json

Speed on a shared machine drifts, so nothing is compared across runs: every method answers every prompt, one right
after the other, in an order that rotates from prompt to prompt, and ratios are taken prompt by prompt before
their median. Every time is wall time of the whole answer, prefill included, because that is what `generate` can
be asked for. Every method's ids are checked against vanilla's (`compare.verdict`), so that no speed is reported for
a different text without saying so.

A contestant is a method of `METHODS`, optionally with its own tree (`eagle3@60/8/10` is total_token 60, depth 8,
top-k 10; `eagle3@-1` lets measured costs choose; `eagle3@12+24+60/4+8` is a sweep, every combination a contestant of
its own), or one of transformers' own:

    hf           model.generate(do_sample=False)
    hf-lookup    the same with prompt_lookup_num_tokens=10 (assisted generation without a second model)

`--sweep` writes out a grid of trees for every method that reads one, and with it total_token -1, at each of
`--temperatures`: rows for the page's lab, and how close -1 comes to the best tree of the grid in each category.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_core.compare import Answer, Verdict, judge, timed
from eagle_core.errors import InvalidRequest
from eagle_core.metrics import METRICS, Run, measure, table

if TYPE_CHECKING:
    from eagle_core.drafters.base import TreeSettings
    from eagle_core.pairs import Pair
    from eagle_core.target import Target
    from eagle_core.verify import Sampling

__all__ = [
    "GRID",
    "HF",
    "Contestant",
    "Prompt",
    "Record",
    "auto_vs_best",
    "bench",
    "by_transformers",
    "contestant",
    "expand",
    "figure",
    "fitting",
    "lab_rows",
    "machine",
    "quartiles",
    "read_prompts",
    "report",
    "save_figure",
    "spread",
    "sweep",
    "tables",
    "writable",
]


# ------------------------------------------------------------------------------------------------ prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of a Spec-Bench file; `turns` are the user's messages in order."""

    id: int | str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file of Spec-Bench lines, `{"question_id", "category", "turns"}`, at most `limit`, spread
    over the categories.

    Raises:
        InvalidRequest: the file is missing or empty, or a line is no such object or has the id of an earlier one; names
            the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"{path} cannot be read as prompts ({e}); give a text file of JSON lines") from None
    prompts: list[Prompt] = []
    at: dict[int | str, int] = {}  # line of each id
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = row["turns"]
            if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns)):
                raise ValueError("turns should be a list of texts")
            prompts.append(Prompt(row["question_id"], str(row["category"]), tuple(turns)))
            first = at.setdefault(prompts[-1].id, number)
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidRequest(
                f"{path}, line {number} is no prompt ({e}); expected an object with question_id, category and turns"
            ) from None
        if first != number:
            raise InvalidRequest(
                f"{path}, line {number} has the question_id {prompts[-1].id!r} of line {first}; answers are told apart"
                " by it, so give every question its own"
            )
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt; expected JSON lines with question_id, category and turns")
    return prompts if limit is None else spread(prompts, limit)


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """`limit` prompts in file order, taken from the categories in turn: one of each, then a second of each …"""
    if limit < 1:
        raise InvalidRequest(f"limit is {limit}; take at least one prompt")
    seen: Counter[str] = Counter()
    ranked = []
    for i, prompt in enumerate(prompts):
        ranked.append((seen[prompt.category], i))
        seen[prompt.category] += 1
    chosen = sorted(i for _, i in sorted(ranked)[:limit])
    return [prompts[i] for i in chosen]


# -------------------------------------------------------------------------------------------- contestants


@dataclass(frozen=True, slots=True)
class Contestant:
    """Someone who answers prompts. `checked`: its ids must be vanilla's; `settings`: its tree (None: transformers)."""

    name: str
    answer: Callable[[list[int], int], Answer]
    checked: bool = True
    settings: TreeSettings | None = None


HF = {"hf": {}, "hf-lookup": {"prompt_lookup_num_tokens": 10}}
"""Name → what transformers' `generate` is given beyond the common request."""


def contestant(pair: Pair, name: str, sampling: Sampling, settings: TreeSettings) -> Contestant:
    """The contestant of that name (see the module's docstring).

    Raises:
        InvalidRequest: no such method, a malformed tree, or a method this pair cannot run, with the reason.
    """
    from eagle_core.drafters import METHODS

    if name in HF:
        return Contestant(
            name, lambda ids, n: _transformers(pair.target, ids, n, sampling, **HF[name]), checked=sampling.greedy
        )
    method, at, tree = name.partition("@")
    if method not in METHODS:
        raise InvalidRequest(f"{method!r} is no method; choose among {', '.join([*HF, *METHODS])}")
    if why := pair.why_not(method):
        raise InvalidRequest(f"{method} cannot run with this pair: {why}")
    if at:
        settings = _tree(tree, settings)
    checked = sampling.greedy or pair.drafter(method).rule == "draw"

    def answer(ids: list[int], n: int) -> Answer:
        return timed(pair.generate(ids, method=method, sampling=sampling, settings=settings, max_new_tokens=n))

    return Contestant(name, answer, checked, settings)


def _tree(text: str, settings: TreeSettings) -> TreeSettings:
    """`60/8/10`, `60/8` or `60` as settings."""
    try:
        numbers = [int(part) for part in text.split("/")]
        total_token, depth, top_k = [*numbers, *(settings.depth, settings.top_k)[len(numbers) - 1 :]]
    except ValueError:
        raise InvalidRequest(f"{text!r} is no tree; write total_token/depth/top-k, such as 60/8/10") from None
    return replace(settings, total_token=total_token, depth=depth, top_k=top_k)


def expand(names: str) -> list[str]:
    """The contestants of a comma-separated list, sweeps written out, vanilla first, each once.

    "hf,eagle3@12+24/4+6" → vanilla, hf, eagle3@12/4, eagle3@12/6, eagle3@24/4, eagle3@24/6
    """
    found = ["vanilla"]
    for name in filter(None, names.split(",")):
        method, at, tree = name.partition("@")
        grid = product(*(part.split("+") for part in tree.split("/")))
        found += [f"{method}@{'/'.join(point)}" for point in grid] if at else [method]
    return list(dict.fromkeys(found))


GRID = "4+8+12+16+24+48/2+4+6"
"""The trees of a sweep: total_token / depth."""


def sweep(names: Iterable[str], grid: str = GRID) -> list[str]:
    """The same contestants, each method that reads a tree and brings none with every tree of the grid, and with -1.

    ["vanilla", "eagle3"], "8+16/4" → vanilla, eagle3@8/4, eagle3@16/4, eagle3@-1/4
    """
    from eagle_core.drafters import METHODS

    depths = grid.partition("/")[2]
    deepest = f"/{max(map(int, depths.split('+')))}" if depths.replace("+", "").isdigit() else ""
    found = []
    for name in names:
        if name in METHODS and "total_token" in METHODS[name].settings:
            found += [*expand(f"{name}@{grid}")[1:], f"{name}@-1{deepest}"]
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def _transformers(target: Target, ids: list[int], max_new_tokens: int, sampling: Sampling, **extra: Any) -> Answer:
    """transformers' `generate` against the clock."""
    began = time.perf_counter()
    (new,) = by_transformers(target, [ids], max_new_tokens, sampling, **extra)
    return Answer(new, "", time.perf_counter() - began)


def by_transformers(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, **extra: Any
) -> list[list[int]]:
    """What transformers' own `generate` answers, with nothing of ours in the way. Ends where ours ends: after the
    first of the target's end tokens, or at `max_new_tokens`. Sampled draws are its own, not ours for that seed.

    Args:
        prompts: ids; several are one batch, padded on the left.
        extra: further arguments of `generate`.
    """
    import torch

    request: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": not sampling.greedy,
        "num_beams": 1,
        "repetition_penalty": 1.0,  # some checkpoints ship one; a penalty would change the text
        "eos_token_id": sorted(target.eos_ids) or None,
        "pad_token_id": min(target.eos_ids, default=0),
        **extra,
    }
    if sampling.greedy:  # the values transformers takes for unset, whatever the checkpoint ships
        request |= {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    else:
        request |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        request |= {"min_p": sampling.min_p or None}
    width = max(map(len, prompts))
    padding = [width - len(ids) for ids in prompts]
    with target.lock, torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        rows = [[request["pad_token_id"]] * n + list(ids) for n, ids in zip(padding, prompts, strict=True)]
        seen = [[0] * n + [1] * len(ids) for n, ids in zip(padding, prompts, strict=True)]
        with target.plain():
            out = target.model.generate(
                input_ids=torch.tensor(rows, device=target.device),
                attention_mask=torch.tensor(seen, device=target.device),
                **request,
            )
        answers = out[:, width:].tolist()
    return [_until(answer, target.eos_ids) for answer in answers]


def _until(ids: list[int], ends: frozenset[int]) -> list[int]:
    """Up to and with the first end token: what follows is padding."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


# --------------------------------------------------------------------------------------------------- bench


_PARTS = ("draft", "verify", "commit", "other")  # of a step's time


@dataclass(slots=True)
class Record:
    """What one contestant did over the prompts, answer by answer."""

    answers: dict[int | str, Answer] = field(default_factory=dict)
    verdicts: dict[int | str, Verdict] = field(default_factory=dict)
    failed: dict[int | str, str] = field(default_factory=dict)


def bench(
    contestants: Sequence[Contestant],
    prompts: Sequence[tuple[Prompt, list[int]]],
    target: Target,
    sampling: Sampling,
    max_new_tokens: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Record]:
    """Let every contestant answer every prompt, prompt by prompt, the order rotating.

    A contestant that raises is recorded as failed on that prompt, and the others go on.

    Args:
        contestants: must contain "vanilla", the reference of ids.
        prompts: with their ids, chat template applied.
        progress: called with what was run.
    """
    records = {c.name: Record() for c in contestants}
    warm_up = min(prompts, key=lambda p: len(p[1]))[1]
    for c in contestants:  # first runs allocate caches, load heads, and choose kernels
        _attempt(c, warm_up, min(max_new_tokens, 8))
        progress(f"warm-up {c.name}")
    for i, (prompt, ids) in enumerate(prompts):
        turn = i % len(contestants)
        for c in [*contestants[turn:], *contestants[:turn]]:
            answer = _attempt(c, ids, max_new_tokens)
            if isinstance(answer, Answer):
                records[c.name].answers[prompt.id] = answer
            else:
                records[c.name].failed[prompt.id] = answer
            progress(f"{prompt.category} {prompt.id} {c.name}")
        reference = records["vanilla"].answers.get(prompt.id)
        for c in contestants:
            ours = records[c.name].answers.get(prompt.id)
            if reference is not None and ours is not None and c.checked:
                records[c.name].verdicts[prompt.id] = judge(target, ids, ours.ids, reference.ids, sampling)
    return records


def _attempt(c: Contestant, ids: list[int], max_new_tokens: int) -> Answer | str:
    """The answer, or what went wrong: whatever a contestant raises is its result and must not stop the others."""
    try:
        answer = c.answer(ids, max_new_tokens)
    except Exception as e:
        print(f"{c.name} failed: {type(e).__name__}: {e}", file=sys.stderr)
        return f"{type(e).__name__}: {e}"
    # Candidates are most of an event; kept for every answer, they would slow down what is measured after them.
    steps = tuple(replace(step, dropped=[]) for step in answer.run.steps)
    return replace(answer, run=replace(answer.run, steps=steps))


def quartiles(values: Iterable[float]) -> dict[str, float | int] | None:
    """Median, quartiles and number of the values; None of none."""
    values = sorted(values)
    if not values:
        return None
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "q1": q1, "q3": q3, "n": len(values)}


def summary(
    records: Mapping[str, Record], name: str, only: Iterable[int | str], floor_ms: float | None
) -> dict[str, Any]:
    """The numbers of one contestant over some of the prompts."""
    record = records[name]
    answers = {i: record.answers[i] for i in only if i in record.answers}
    speeds = {i: a.tokens_per_second for i, a in answers.items()}
    runs = [a.run for a in answers.values() if a.run.steps]
    pooled = Run.pool(runs)
    verify_ms = [s.timing["verify_ms"] for s in pooled.steps]

    def ratio_to(other: str) -> dict[str, float | int] | None:
        if other not in records:
            return None
        theirs = records[other].answers
        return quartiles(v / theirs[i].tokens_per_second for i, v in speeds.items() if i in theirs)

    return {
        **measure(pooled, "tau", "steps", "drafted", "accepted", "draft_share", "verify_share", "draft_forwards"),
        "tokens": sum(len(a.ids) for a in answers.values()),
        "seconds": sum(a.seconds for a in answers.values()),
        "tokens_per_second": quartiles(speeds.values()),
        "ratio_to_hf": ratio_to("hf"),
        "ratio_to_vanilla": ratio_to("vanilla"),
        "overhead": _overhead(answers.values()),
        "split": _split(pooled),
        "costs": pooled.starts[0].settings.get("costs") if pooled.starts else None,  # what -1 decided by
        "step_ms": METRICS["step_ms"].of(pooled),
        "verify_ms": quartiles(verify_ms),
        "floor_share": floor_ms / statistics.median(verify_ms) if floor_ms and verify_ms else None,
        "ids": dict(Counter(str(record.verdicts[i].verdict) for i in answers if i in record.verdicts)),
        "failed": {str(i): why for i, why in record.failed.items() if i in set(only)},
    }


def report(
    records: Mapping[str, Record], prompts: Sequence[Prompt], facts: Mapping[str, Any], request: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result, JSON-able: `{machine, settings, methods, by_category}`.

    Args:
        facts: of the machine (`machine`).
        request: what was asked: target, dtype, sampling, trees …
    """
    floor = facts["weights_read_ms"]
    categories: dict[str, list[int | str]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt.id)
    short = ("tau", "tokens_per_second", "ratio_to_hf", "ratio_to_vanilla", "overhead")
    by_category = {}
    for category, ids in categories.items():
        whole = {name: summary(records, name, ids, floor) for name in records}
        by_category[category] = {name: {key: m[key] for key in short} for name, m in whole.items()}
    return {
        "machine": dict(facts),
        "settings": {**request, "times": "wall clock of the whole answer, prefill included, for every method alike"},
        "methods": {name: summary(records, name, [p.id for p in prompts], floor) for name in records},
        "by_category": by_category,
    }


def _split(run: Run) -> dict[str, float] | None:
    """Shares of the steps' time: drafting, verifying, committing, and the rest."""
    ms = {part: sum(s.timing.get(f"{part}_ms", 0.0) for s in run.steps) for part in _PARTS}
    whole = sum(ms.values())
    return {part.replace("other", "rest"): took / whole for part, took in ms.items()} if whole else None


def auto_vs_best(
    records: Mapping[str, Record], trees: Mapping[str, TreeSettings], prompts: Sequence[Prompt]
) -> dict[str, dict[str, Any]]:
    """How total_token -1 does against the fixed tree that did best, in each category and over all.

    The best one is chosen after the fact, by its median speed in that category, so chance helps it: a ratio of 1 means
    that -1 needed no such hindsight.

    Returns:
        method → category ("all": every prompt) → `{best, ratio}`, the ratio's quartiles taken prompt by prompt.
    """
    found: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[int | str]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt.id)
    groups["all"] = [prompt.id for prompt in prompts]
    for auto in (name for name, tree in trees.items() if "@" in name and tree.total_token == -1):
        method = auto.partition("@")[0]
        fixed = [n for n, t in trees.items() if n.partition("@")[0] == method and t.total_token != -1]
        for category, ids in groups.items():
            speeds = {
                name: {i: records[name].answers[i].tokens_per_second for i in ids if i in records[name].answers}
                for name in (auto, *fixed)
            }
            tried = {name: statistics.median(speeds[name].values()) for name in fixed if speeds[name]}
            if tried:
                best = max(tried, key=lambda name: tried[name])
                ratios = [speeds[auto][i] / v for i, v in speeds[best].items() if i in speeds[auto]]
                found.setdefault(method, {})[category] = {"best": best, "ratio": quartiles(ratios)}
    return found


def lab_rows(result: Mapping[str, Any], method: str, knob: str, **fixed: int) -> list[dict[str, Any]]:
    """The rows of a sweep as the page's lab draws them: `{value, temperature, tau, tokens_per_second, step_ms}`.

    Args:
        result: of `bench --sweep`.
        method: whose rows.
        knob: total_token, depth or top_k: what `value` is.
        fixed: values of the other knobs.
    """
    rows = [row for row in result["sweep"]["rows"] if row["method"] == method]
    rows = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
    shown = ("temperature", "tau", "tokens_per_second", "step_ms")
    return [{"value": row[knob], **{name: row[name] for name in shown}} for row in rows]


def _overhead(answers: Iterable[Answer]) -> float | None:
    """Share of the decoding time spent outside target and drafter forwards, against the outer clock: what passes
    between two steps counts as well."""
    decoding = forwards = 0.0
    for answer in answers:
        if answer.run.steps:
            decoding += answer.seconds * 1000 - answer.run.starts[0].prefill_ms
            forwards += sum(s.timing["draft_ms"] + s.timing["verify_ms"] for s in answer.run.steps)
    return min(max(1 - forwards / decoding, 0.0), 1.0) if decoding else None


def machine(target: Target | None = None) -> dict[str, Any]:
    """What was measured on: processor, cores, threads, load, memory, versions; with a target, also its device, and how
    long a plain read of its weights takes, the floor of any forward that memory allows."""
    import torch
    import transformers

    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if target is not None:
        facts["device"] = (
            torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type
        )
        facts["weights_read_ms"] = _weights_read_ms(target)
    return facts


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _weights_read_ms(target: Target) -> float:
    """The least of five passes of a sum over every matrix of the decoder layers and the LM head."""
    import torch

    weights = [w for name, w in target.model.named_parameters() if w.dim() == 2 and "embed" not in name]
    weights.append(target.lm_head.weight)
    distinct = list({w.data_ptr(): w for w in weights}.values())
    best = float("inf")
    with torch.inference_mode():
        for _ in range(5):
            began = time.perf_counter()
            total = torch.stack([w.sum(dtype=torch.float32) for w in distinct]).sum().item()
            best = min(best, time.perf_counter() - began)
            assert total == total, "a weight is not a number"
    return best * 1000


# ---------------------------------------------------------------------------------------- tables and figures


def _median(q: Mapping[str, Any] | None, digits: int = 2) -> str:
    return "–" if q is None else f"{q['median']:.{digits}f}"


def _range(q: Mapping[str, Any] | None, digits: int = 2) -> str:
    return "–" if q is None else f"{q['q1']:.{digits}f}–{q['q3']:.{digits}f}"


def tables(result: Mapping[str, Any]) -> str:
    """The result as people read it."""
    rows = []
    for name, m in result["methods"].items():
        split = [f"{100 * share:.0f}" for share in (m["split"] or {}).values()] or ["–"]
        ids = m["ids"]
        rows.append(
            [
                name,
                "–" if m["tau"] is None else f"{m['tau']:.2f}",
                _median(m["tokens_per_second"], 1),
                _range(m["tokens_per_second"], 1),
                _median(m["ratio_to_hf"]),
                _range(m["ratio_to_hf"]),
                _median(m["ratio_to_vanilla"]),
                "/".join(split),
                "–" if m["overhead"] is None else f"{100 * m['overhead']:.1f}",
                f"{ids.get('equal', 0)}/{ids.get('tie', 0)}/{ids.get('different', 0)}" if ids else "–",
                str(len(m["failed"])),
            ]
        )
    header = [
        "method",
        "τ",
        "tokens/s",
        "quartiles",
        "× hf",
        "quartiles",
        "× vanilla",
        "draft/verify/commit/rest %",
        "outside %",
        "equal/tie/different",
        "failed",
    ]
    parts = [table(header, rows)]
    names = list(result["methods"])
    base = "ratio_to_hf" if "hf" in names else "ratio_to_vanilla"
    rows = [
        [
            category,
            *(f"{_median(m[base])} (τ {m['tau']:.2f})" if m["tau"] else _median(m[base]) for m in methods.values()),
        ]
        for category, methods in result["by_category"].items()
    ]
    parts.append(f"Times {base.removeprefix('ratio_to_')}, median by category\n" + table(["category", *names], rows))
    facts, settings = result["machine"], result["settings"]
    load = f", load {facts['load_average'][0]:.1f} before" if facts["load_average"] else ""
    parts.append(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads{load}, {facts['device']},"
        f" {settings['dtype']},"
        f" torch {facts['versions']['torch']}, transformers {facts['versions']['transformers']};"
        f" {settings['prompts']} prompts,"
        f" at most {settings['max_new_tokens']} new tokens, temperature {settings['sampling']['temperature']:g}."
        " Wall time of whole answers, prefill included; ratios are taken prompt by prompt, then their median."
    )
    return "\n\n".join(parts)


def figure(result: Mapping[str, Any]) -> Any:
    """The result as one plotly figure: tokens per second, and the paired ratio by category."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#9AA0A6")
    methods = {name: m for name, m in result["methods"].items() if m["tokens_per_second"]}
    base = "ratio_to_hf" if "hf" in methods else "ratio_to_vanilla"
    against = "transformers' generate" if base == "ratio_to_hf" else "vanilla"
    fig = make_subplots(
        1, 2, column_widths=[0.4, 0.6], subplot_titles=("Tokens per second", f"Times {against}, by category")
    )
    for i, (name, m) in enumerate(methods.items()):
        colour = colours[i % len(colours)]
        q = m["tokens_per_second"]
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [q["q3"] - q["median"]],
            "arrayminus": [q["median"] - q["q1"]],
        }
        fig.add_trace(
            go.Bar(x=[name], y=[q["median"]], error_y=spread, marker={"color": colour}, showlegend=False), 1, 1
        )
        ratios = {c: row[name][base] for c, row in result["by_category"].items() if row[name][base]}
        if name != base.removeprefix("ratio_to_"):
            ys = [q["median"] for q in ratios.values()]
            fig.add_trace(go.Bar(x=list(ratios), y=ys, name=name, marker={"color": colour}), 1, 2)
    fig.add_hline(y=1, line={"color": "#9AA0A6", "dash": "dot"}, row=1, col=2)
    facts, settings = result["machine"], result["settings"]
    title = (
        f"{settings['target']} on {facts['cpu']}, {facts['threads']} threads, {settings['dtype']};"
        f" {settings['prompts']} prompts, temperature {settings['sampling']['temperature']:g}"
    )
    fig.update_layout(title=title, template="plotly_white", height=480, width=1300, barmode="group")
    return fig


def writable(*paths: Path | None) -> None:
    """Make sure, before anything is measured, that results can be written where they shall go; makes the folders.

    Raises:
        InvalidRequest: one cannot; says which, and why.
    """
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
        except OSError as e:
            raise InvalidRequest(f"nothing can be written to {path} ({e.strerror}); name another file") from None


def save_figure(fig: Any, path: Path) -> None:
    """Write a plotly figure as a page (.html, self-contained) or as a picture (.png, .svg, .pdf).

    Raises:
        InvalidRequest: pictures need the package kaleido and a Chromium; says so.
    """
    if path.suffix == ".html":
        fig.write_html(path, include_plotlyjs=True)
        return
    try:
        fig.write_image(path)
    except (ImportError, RuntimeError, ValueError) as e:
        raise InvalidRequest(
            f"{path} could not be drawn ({type(e).__name__}: {e}); pictures need kaleido and a Chromium,"
            " an .html file needs neither"
        ) from None


# -------------------------------------------------------------------------------------------- command line


def chat_ids(target: Target, turn: str) -> list[int]:
    """The ids of a first user turn, the chat template applied.

    Raises:
        InvalidRequest: this target has no tokenizer or its tokenizer no chat template.
    """
    if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
        raise InvalidRequest(
            f"{target.name} has no chat template; prompts of a file are chat turns, so choose a chat model"
        )
    messages = [{"role": "user", "content": turn}]
    return target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def fitting(target: Target, prompts: Iterable[Prompt], max_new_tokens: int) -> list[tuple[Prompt, list[int]]]:
    """The prompts' first turns as ids; one that leaves no room for its answer is left out and named on stderr."""
    chosen = []
    for prompt in prompts:
        ids = chat_ids(target, prompt.turns[0])
        if len(ids) + max_new_tokens > target.context:
            print(
                f"prompt {prompt.id} is left out: {len(ids)} tokens and an answer exceed {target.context}",
                file=sys.stderr,
            )
        else:
            chosen.append((prompt, ids))
    if not chosen:
        raise InvalidRequest(
            f"no prompt fits into the {target.context} tokens of {target.name} with {max_new_tokens} new ones"
        )
    return chosen


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench`."""
    from eagle_core import commands

    parser.add_argument("--prompts", required=True, type=Path, help="Spec-Bench lines: question_id, category, turns")
    parser.add_argument(
        "--methods",
        default="vanilla,hf,eagle2,eagle3",
        help="comma-separated methods; hf and hf-lookup are transformers' own, eagle3@60/8/10 brings its own tree,"
        " eagle3@12+24/4+8 is a sweep;"
        " vanilla always runs, every other's ids are checked against it (default: %(default)s)",
    )
    parser.add_argument(
        "--sweep", nargs="?", const=GRID, metavar="TREES",
        help="every method that reads a tree with each of these, total_token/depth, and with -1"
        " (default where no trees are named: %(const)s)",
    )  # fmt: skip
    parser.add_argument("--temperatures", help="with --sweep: comma-separated, in place of --temperature")
    parser.add_argument("--limit", type=int, help="prompts to take, spread over the categories (default: all)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--figure", type=Path, help="where to draw it: .html, .png or .svg")
    commands.add_pair(parser)
    commands.add_sampling(parser)
    commands.add_tree(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: %(default)s)")


def _temperatures(args: argparse.Namespace) -> list[float]:
    """Those asked for.

    Raises:
        InvalidRequest: no numbers, or several without a sweep.
    """
    if args.temperatures is None:
        return [args.temperature]
    if not args.sweep:
        raise InvalidRequest("--temperatures goes with --sweep; one temperature is --temperature")
    try:
        return [float(part) for part in args.temperatures.split(",")]
    except ValueError:
        raise InvalidRequest(f"--temperatures takes numbers such as 0,0.7,1; found {args.temperatures!r}") from None


def _rows(
    records: Mapping[str, Record], trees: Mapping[str, TreeSettings], temperature: float, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """One row for each tree of a sweep (`lab_rows`)."""
    rows = []
    for name, tree in trees.items():
        m = summary(records, name, [p.id for p in prompts], None)
        if m["tokens_per_second"] is not None:
            rows.append(
                {
                    "method": name.partition("@")[0],
                    "total_token": tree.total_token,
                    "depth": tree.depth,
                    "top_k": tree.top_k,
                    "temperature": temperature,
                    "tau": m["tau"],
                    "tokens_per_second": m["tokens_per_second"]["median"],
                    "step_ms": m["step_ms"],
                    "ratio_to_vanilla": m["ratio_to_vanilla"],
                    "split": m["split"],
                }
            )
    return rows


def _sweep_table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = [
        [f"{method}, T {t}", category, row["best"], _median(row["ratio"]), _range(row["ratio"])]
        for t, methods in found.items()
        for method, categories in methods.items()
        for category, row in categories.items()
    ]
    return "total_token -1 against the best tree of the grid\n" + table(
        ["method", "category", "best tree", "-1 / best", "quartiles"], rows
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, write, draw, tell."""
    from tqdm import tqdm

    from eagle_core.commands import pair_of, sampling_of, tree_of

    prompts = read_prompts(args.prompts, args.limit)
    sampling, settings = sampling_of(args), tree_of(args)
    names = expand(args.methods)
    if args.sweep:
        names = sweep(names, args.sweep)
    samplings = [replace(sampling, temperature=t) for t in _temperatures(args)]
    writable(args.json, args.figure)
    pair = pair_of(args)
    target = pair.target
    everyone = [[contestant(pair, name, how, settings) for name in names] for how in samplings]
    fitted = fitting(target, prompts, args.max_new_tokens)
    kept = [prompt for prompt, _ in fitted]
    facts = machine(target)
    measured: list[dict[str, Record]] = []
    with tqdm(total=(len(fitted) + 1) * sum(map(len, everyone)), unit="answer", file=sys.stderr) as bar:

        def progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        for how, contestants in zip(samplings, everyone, strict=True):
            measured.append(bench(contestants, fitted, target, how, args.max_new_tokens, progress))
    facts["load_average_after"] = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    trees = {c.name: c.settings for c in everyone[0] if c.settings is not None}
    request = {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts_file": args.prompts.name,
        "prompts": len(fitted),
        "max_new_tokens": args.max_new_tokens,
        "sampling": asdict(samplings[0]),
        "trees": {name: asdict(tree) for name, tree in trees.items()},
    }
    result = report(measured[0], kept, facts, request)
    if args.sweep:
        temperatures = [how.temperature for how in samplings]
        result["sweep"] = {
            "rows": [row for t, records in zip(temperatures, measured) for row in _rows(records, trees, t, kept)],
            "auto_vs_best": {f"{t:g}": auto_vs_best(r, trees, kept) for t, r in zip(temperatures, measured)},
        }
    print(tables(result))
    if args.sweep:
        print("\n" + _sweep_table(result["sweep"]["auto_vs_best"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if args.figure:
        save_figure(figure(result), args.figure)
    for name, m in result["methods"].items():
        if m["ids"].get("different"):
            print(f"WARNING: {name} changed the text of {m['ids']['different']} prompts", file=sys.stderr)
    return result
