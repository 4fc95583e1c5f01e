"""How good is a drafter? Acceptance, measured by really decoding.

    python -m eagle_core evaluate --drafter D --prompts FILE.jsonl --json OUT.json --settings main,chains,ablations

Every number comes from the events of the real loop with the real drafter, pooled over the prompts (`metrics.Run.pool`),
so a long answer weighs more than a short one. The target answers each prompt once, plainly; since speculation cannot
change the text, drafts are then judged by that answer instead of by forwards over trees (`recall`), which gives the
same numbers several times sooner; `--decode` pays for the forwards. Times are not the subject here: `bench` measures
those. Settings, or groups of them:

    main        the tree of --total-token, --depth, --tree-top-k (60/8/10: official EAGLE's 60/7/10)
    trees       60/8/10, 24/6/8 and 12/5/4
    chains      chain-1 … chain-7: K drafts without branches
    ablations   by-confidence   the beam ranks by a node's own confidence, not by its path's value
                no-rerank       nodes in order of generation, not the most valuable of all candidates
                static          EAGLE-1's template with the same head
                dynamic         a grown tree of as many nodes and levels as that template

Each costs minutes, so each finished answer is kept beside the JSON (`OUT.traces/`, one compressed trace an answer,
named by everything it depends on, the head's weights included); a run that was killed, or a second one with more
settings, computes only what is missing. `load_trace` reads them, and every number can be recomputed from them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_core.bench import Prompt, fitting, read_prompts, save_figure, writable
from eagle_core.errors import InvalidRequest, TraceError
from eagle_core.events import Event, Finish, Step, dump, load_trace
from eagle_core.metrics import METRICS, Run, calibration_gap, measure, table
from eagle_core.training.store import weights

if TYPE_CHECKING:
    from eagle_core.drafters.base import Drafter, TreeSettings
    from eagle_core.heads import EagleHead
    from eagle_core.target import Target
    from eagle_core.verify import Sampling

__all__ = ["MT_BENCH", "Setting", "choose", "evaluate", "figure", "numbers"]

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""The categories of Spec-Bench that together are MT-bench."""

ENOUGH = 200
"""Nodes that a calibration bin must hold to be judged."""

DRAFTING = 1
"""Which rules of drafting a kept trace shows. Raise it with any change of what the same head drafts with the same
settings, so that traces of the old rules are not taken for the new ones'."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to draft: a tree, and whether its shape is EAGLE-1's template."""

    name: str
    tree: TreeSettings
    static: bool = False


def choose(names: Sequence[str], main: TreeSettings) -> list[Setting]:
    """The settings of these names and groups, each once, in the order given.

    Raises:
        InvalidRequest: an unknown name; lists the known ones.
    """
    from eagle_core.growth import EAGLE1_TREE

    def tree(nodes: int, depth: int, top_k: int) -> TreeSettings:
        return replace(main, total_token=nodes, depth=depth, top_k=top_k, expand_by="value", rerank=True)

    template = EAGLE1_TREE.paths
    nodes, depth = len(template) + 1, max(map(len, template))
    groups = {
        "main": [Setting("main", main)],
        "trees": [Setting(f"tree-{n}-{d}-{k}", tree(n, d, k)) for n, d, k in ((60, 8, 10), (24, 6, 8), (12, 5, 4))],
        "chains": [Setting(f"chain-{k}", tree(k + 1, k, 1)) for k in range(1, 8)],
        "ablations": [
            Setting("by-confidence", replace(main, expand_by="confidence")),
            Setting("no-rerank", replace(main, rerank=False)),
            Setting("uncoupled", replace(main, coupled=False)),
            Setting("static", replace(main, total_token=nodes, depth=depth, static_tree=template), static=True),
            Setting("dynamic", tree(nodes, depth, main.top_k)),
        ],
    }
    known = {s.name: [s] for group in groups.values() for s in group} | groups
    chosen: dict[str, Setting] = {}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"there is no setting {name!r}; choose among {', '.join(known)}")
        chosen.update((s.name, s) for s in known[name])
    return list(chosen.values())


# ------------------------------------------------------------------------------------------------ numbers


def numbers(runs: Mapping[Any, Run], category: Mapping[Any, str]) -> dict[str, Any]:
    """Everything that is reported about one setting.

    Args:
        runs: prompt id → its answer.
        category: prompt id → its category.
    """
    by_category: dict[str, list[Any]] = {}
    for i in runs:
        by_category.setdefault(category[i], []).append(i)
    whole = _pooled([runs[i] for i in runs])
    mt_bench = [runs[i] for i in runs if category[i] in MT_BENCH]
    return {
        **whole,
        "tau_interval": _interval([runs[i] for i in runs]),
        "by_category": {name: _pooled([runs[i] for i in ids], short=True) for name, ids in by_category.items()},
        "mt_bench": _pooled(mt_bench, short=True) if mt_bench else None,
    }


def _pooled(runs: Sequence[Run], short: bool = False) -> dict[str, Any]:
    run = Run.pool(runs)
    depths = METRICS["acceptance"].of(run)
    assert isinstance(depths, tuple)
    found = {
        "tau": METRICS["tau"].of(run),
        "acceptance": {
            "unconditional": [d.unconditional for d in depths],
            "conditional": [d.conditional for d in depths],
            "reached": [d.reached for d in depths],
        },
        "prompts": len(runs),
        **measure(run, "steps", "tokens", "drafted", "accepted", "outside_draft_vocab"),
    }
    if short:
        return found
    calibration: dict[str, Any] = {}
    for name in ("confidence", "value"):
        bins = METRICS[f"{name}_calibration"].of(run)
        assert isinstance(bins, tuple)
        calibration |= {name: [b._asdict() for b in bins], f"{name}_gap": calibration_gap(bins, ENOUGH)}
    return {
        **found,
        **measure(run, "lengths", "draft_forwards"),
        "calibration": calibration,
    }


def _interval(runs: Sequence[Run], draws: int = 1000) -> list[float] | None:
    """95 % of τ over resampled prompts (bootstrap, seeded): how far another choice of prompts may lie."""
    counted = [(sum(len(s.emitted) for s in run.steps), len(run.steps)) for run in runs if run.steps]
    if len(counted) < 2:
        return None
    chance = random.Random(0)
    taus = []
    for _ in range(draws):
        tokens, steps = zip(*chance.choices(counted, k=len(counted)), strict=True)
        taus.append(sum(tokens) / sum(steps))
    taus.sort()
    return [taus[int(draws * 0.025)], taus[int(draws * 0.975) - 1]]


# ------------------------------------------------------------------------------------------------- answers


def keep(path: Path, events: Iterable[Event]) -> None:
    """Write a finished answer's trace. What expansion and rerank left out is not kept: no number needs it."""
    collected = [replace(e, dropped=[]) if isinstance(e, Step) else e for e in events]
    if not collected or not isinstance(collected[-1], Finish) or collected[-1].reason == "cancelled":
        raise TraceError("the answer was cancelled before its end; nothing was kept of it")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")  # a kill must not leave half a trace under a name that counts
    with gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=3) as out:
        out.writelines(dump(e) + "\n" for e in collected)
    unfinished.replace(path)


def kept(path: Path) -> Run:
    """The run of a kept trace."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return Run.collect(load_trace(lines))


def evaluate(
    answer: Callable[[Setting, Prompt, list[int]], Iterator[Event]],
    settings: Sequence[Setting],
    prompts: Sequence[tuple[Prompt, list[int]]],
    traces: Path,
    identity: Mapping[str, Any],
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """The numbers of each setting.

    Args:
        answer: decodes one prompt with one setting; called for all settings of a prompt before the next prompt.
        prompts: with their ids, chat template applied.
        traces: folder of finished answers.
        identity: what an answer depends on beside the setting and the prompt's ids (JSON-able).
        progress: called with what was done, once for each answer.
    """
    paths: dict[str, dict[int | str, Path]] = {setting.name: {} for setting in settings}
    for prompt, ids in prompts:
        for setting in settings:
            depends = json.dumps([identity, asdict(setting.tree), setting.static, ids], sort_keys=True)
            key = hashlib.sha256(depends.encode()).hexdigest()[:16]
            path = paths[setting.name][prompt.id] = traces / f"{prompt.id}-{key}.jsonl.gz"
            if not path.exists():
                keep(path, answer(setting, prompt, ids))
            progress(f"{setting.name} {prompt.category} {prompt.id}")
    category = {prompt.id: prompt.category for prompt, _ in prompts}
    return {
        setting.name: {
            "tree": asdict(setting.tree),
            "static": setting.static,
            **numbers({i: kept(path) for i, path in paths[setting.name].items()}, category),
        }
        for setting in settings
    }


def fingerprint(head: EagleHead) -> str:
    """A digest of a head's weights and configuration: another training, another fingerprint."""
    import torch

    digest = hashlib.sha256(repr(head.config).encode())
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------- tables and figures


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def tables(result: Mapping[str, Any]) -> str:
    """The result as people read it."""
    parts = []
    depths = range(max((len(r["acceptance"]["unconditional"]) for r in result["settings"].values()), default=0))
    header = ["setting", "τ", "95 % of τ", "steps", *(f"d{d + 1}" for d in depths)]
    for kind in ("unconditional", "conditional"):
        rows = []
        for name, r in result["settings"].items():
            interval = r["tau_interval"]
            by_depth = [_percent(share) for share in r["acceptance"][kind]]
            rows.append(
                [
                    name,
                    "–" if r["tau"] is None else f"{r['tau']:.3f}",
                    "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}",
                    str(r["steps"]),
                    *by_depth,
                    *[""] * (len(depths) - len(by_depth)),
                ]
            )
        parts.append(f"Acceptance by depth, {kind}, % of steps\n" + table(header, rows))
    rows = [
        [name, str(r["prompts"]), "–" if r["tau"] is None else f"{r['tau']:.3f}", _percent(r["outside_draft_vocab"])]
        for name, r in [("all", result), *result["by_category"].items(), *_named(result)]
    ]
    first = next(iter(result["settings"]))
    parts.append(f"By category, setting {first}\n" + table(["category", "prompts", "τ", "outside draft vocab %"], rows))
    rows = []
    for kind in ("confidence", "value"):
        for b in result["calibration"][kind]:
            bounds = f"{b['low']:.1f}–{b['high']:.1f}"
            rows.append([f"{kind} {bounds}", str(b["nodes"]), f"{b['score']:.3f}", f"{b['accepted']:.3f}"])
    parts.append("Calibration\n" + table(["bin", "nodes", "drafter says", "accepted"], rows))
    return "\n\n".join(parts)


def _named(result: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return [("MT-bench", result["mt_bench"])] if result.get("mt_bench") else []


def figure(result: Mapping[str, Any]) -> Any:
    """The result as one plotly figure: acceptance by depth, calibration, τ by category, τ by setting."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ("Acceptance by depth", "Calibration", "τ by category", "τ by setting")
    fig = make_subplots(2, 2, subplot_titles=titles, horizontal_spacing=0.1, vertical_spacing=0.16)
    blue, orange = "#0072B2", "#E69F00"
    for kind, colour in (("unconditional", blue), ("conditional", orange)):
        shares = result["acceptance"][kind]
        depth = list(range(1, len(shares) + 1))
        fig.add_trace(go.Scatter(x=depth, y=shares, name=kind, mode="lines+markers", line={"color": colour}), 1, 1)
    fig.add_trace(
        go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "#9AA0A6", "dash": "dot"}, showlegend=False), 1, 2
    )
    for kind, colour in (("confidence", blue), ("value", orange)):
        bins = result["calibration"][kind]
        fig.add_trace(
            go.Scatter(
                x=[b["score"] for b in bins],
                y=[b["accepted"] for b in bins],
                customdata=[b["nodes"] for b in bins],
                hovertemplate="drafter %{x:.3f}, accepted %{y:.3f}, %{customdata} nodes",
                name=kind,
                mode="lines+markers",
                line={"color": colour},
                marker={"symbol": ["circle" if b["nodes"] >= ENOUGH else "circle-open" for b in bins], "size": 8},
            ),
            1,
            2,
        )
    category = result["by_category"]
    fig.add_trace(
        go.Bar(x=list(category), y=[r["tau"] for r in category.values()], marker={"color": blue}, showlegend=False),
        2,
        1,
    )
    settings = result["settings"]
    low_high = [(r["tau"], r["tau_interval"] or (r["tau"], r["tau"])) for r in settings.values()]
    errors = {
        "type": "data",
        "symmetric": False,
        "array": [interval[1] - tau for tau, interval in low_high],
        "arrayminus": [tau - interval[0] for tau, interval in low_high],
    }
    fig.add_trace(
        go.Bar(
            x=list(settings), y=[tau for tau, _ in low_high], error_y=errors, marker={"color": blue}, showlegend=False
        ),
        2,
        2,
    )
    fig.update_xaxes(title_text="depth", dtick=1, row=1, col=1)
    fig.update_xaxes(title_text=f"what the drafter says (open: fewer than {ENOUGH} nodes)", range=[0, 1], row=1, col=2)
    fig.update_yaxes(title_text="share of steps", range=[0, 1], row=1, col=1)
    fig.update_yaxes(title_text="accepted", range=[0, 1], row=1, col=2)
    fig.update_yaxes(title_text=METRICS["tau"].unit, row=2, col=1)
    title = f"{result['drafter']} on {result['target']}, temperature {result['sampling']['temperature']:g}"
    fig.update_layout(title=title, template="plotly_white", height=820, width=1200)
    return fig


# -------------------------------------------------------------------------------------------- command line


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `evaluate`."""
    from eagle_core import commands

    parser.add_argument("--prompts", required=True, type=Path, help="Spec-Bench lines: question_id, category, turns")
    parser.add_argument("--json", required=True, type=Path, help="where to write the result; traces are kept beside it")
    parser.add_argument(
        "--settings",
        default="main",
        help="main, trees, chains, ablations, or names such as chain-5, comma-separated (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, help="prompts to take, spread over the categories (default: all)")
    parser.add_argument("--figure", type=Path, help="where to draw it: .html, .png or .svg")
    parser.add_argument("--answers", type=Path, help="where the target's answers are kept (default: with the traces)")
    parser.add_argument(
        "--decode", action="store_true", help="verify every tree with the target instead of looking its answer up"
    )
    commands.add_pair(parser)
    commands.add_sampling(parser)
    commands.add_tree(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.set_defaults(total_token=60, depth=8, tree_top_k=10)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate, write, draw, tell."""
    from tqdm import tqdm

    from eagle_core.commands import sampling_of, tree_of
    from eagle_core.engine import generate
    from eagle_core.pairs import load_target
    from eagle_core.training.recall import Recalled

    if not args.drafter:
        raise InvalidRequest("say which drafter to evaluate: --drafter FOLDER of an EAGLE head, or --drafter lookup")
    prompts = read_prompts(args.prompts, args.limit)
    sampling, main = sampling_of(args), tree_of(args)
    settings = choose([name for name in args.settings.split(",") if name], main)
    writable(args.json, args.figure, args.answers)
    target = load_target(args.target, dtype=args.dtype, device=args.device, fast=not args.plain, threads=args.threads)
    drafters, which = _drafters(args.drafter, target)
    fitted = fitting(target, prompts, args.max_new_tokens)
    traces = args.json.with_suffix(".traces")
    request = {
        "target": target.name,
        "weights": weights(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "sampling": asdict(sampling),
        "max_new_tokens": args.max_new_tokens,
    }
    identity = {**request, "drafter": which, "decode": args.decode, "drafting": DRAFTING}
    texts = {} if args.decode else _answers(target, fitted, request, sampling, args.answers or traces / "answers.json")
    recalled: dict[int | str, Recalled] = {}  # of the prompt in progress

    def answer(setting: Setting, prompt: Prompt, ids: list[int]) -> Iterator[Event]:
        method, drafter = drafters[setting.static]
        by = target
        if not args.decode:
            if prompt.id not in recalled:
                recalled.clear()
                recalled[prompt.id] = Recalled(target, ids + texts[prompt.id], drafter.capture)
            by = recalled[prompt.id]
        return generate(
            by,
            drafter,
            ids,
            method=method,
            sampling=sampling,
            settings=setting.tree,
            max_new_tokens=args.max_new_tokens,
        )

    with tqdm(total=len(settings) * len(fitted), unit="answer", file=sys.stderr) as bar:

        def progress(doing: str) -> None:
            bar.set_description(doing)
            bar.update()

        found = evaluate(answer, settings, fitted, traces, identity, progress)
    result = {
        **next(iter(found.values())),
        **request,
        "drafter": args.drafter,
        "prompts_file": args.prompts.name,
        "verified": "by forwards over trees" if args.decode else "by the target's own answers, looked up",
        "settings": found,
    }
    print(tables(result))
    args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if args.figure:
        save_figure(figure(result), args.figure)
    return result


def _answers(
    target: Target,
    prompts: Sequence[tuple[Prompt, list[int]]],
    request: Mapping[str, Any],
    sampling: Sampling,
    path: Path,
) -> dict[int | str, list[int]]:
    """The target's answers by prompt id, read from `path` as far as they are there, else written now and kept. Answers
    that were kept before `request` had the target's weights in it are taken for this target's."""
    from tqdm import tqdm

    from eagle_core.training.recall import write_answers

    known: dict[str, list[int]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not sampling.greedy:
        request = {**request, "noise": "by seed and position"}
    older = {k: v for k, v in request.items() if k != "weights"}
    key = {}
    for prompt, ids in prompts:
        key[prompt.id], old = (
            hashlib.sha256(json.dumps([depends, ids], sort_keys=True).encode()).hexdigest()[:16]
            for depends in (request, older)
        )
        if old in known:
            known.setdefault(key[prompt.id], known[old])
    missing = [(key[prompt.id], ids) for prompt, ids in prompts if key[prompt.id] not in known]
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        answers = write_answers(target, [ids for _, ids in missing], request["max_new_tokens"], sampling)
        for i, answer in tqdm(answers, total=len(missing), desc="the target's answers", unit="answer", file=sys.stderr):
            known[missing[i][0]] = answer
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(json.dumps(known), encoding="utf-8")
            unfinished.replace(path)
    return {i: known[k] for i, k in key.items()}


def _drafters(name: str, target: Target) -> tuple[dict[bool, tuple[str, Drafter]], str]:
    """Static? → method and drafter, and what tells this drafter from any other."""
    from eagle_core.checkpoints import load_head
    from eagle_core.drafters import METHODS

    if name in METHODS and METHODS[name].needs == "nothing":
        plain = (name, METHODS[name].make(None, target))
        return {False: plain, True: plain}, name
    head = load_head(name, target)
    grown = "eagle3" if head.config.family == "eagle3" else "eagle2"
    drafters = {
        static: (method, METHODS[method].make(head, target)) for static, method in ((False, grown), (True, "eagle1"))
    }
    return drafters, fingerprint(head)
