"""`generate` on the command line, and the arguments that all commands running a method share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.errors import InvalidRequest
from eagle_core.events import Event, dump
from eagle_core.metrics import METRICS, Run, table

if TYPE_CHECKING:
    from eagle_core.pairs import Pair
    from eagle_core.verify import Sampling

__all__ = [
    "add_pair",
    "add_prompt",
    "add_sampling",
    "add_tree",
    "configure",
    "pair_of",
    "prompt_of",
    "run",
    "sampling_of",
    "tree_of",
]


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """--prompt, --prompt-ids, --system."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", help="the user's message; the target's own chat template is applied")
    group.add_argument(
        "--prompt-ids", metavar="5,17,42", help="the whole prompt as ids, for a target without tokenizer"
    )
    parser.add_argument("--system", help="a system message in front of the prompt")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """--target, --drafter, --dtype, --device, --plain, --threads."""
    parser.add_argument("--target", help="preset, hub id or local folder (default: smollm2-135m)")
    parser.add_argument("--drafter", help="hub id or local folder of a head or draft model (default: the preset's own)")
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16 or float16 (default: what the device does best)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or mps (default: the best there is)")
    parser.add_argument("--plain", action="store_true", help="transformers as it is, without the CPU path")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch on a CPU (default: what reads fastest)")


def pair_of(args: argparse.Namespace) -> Pair:
    """The pair that the arguments name, loaded."""
    from eagle_core.pairs import load_pair

    return load_pair(
        args.target, args.drafter, dtype=args.dtype, device=args.device, fast=not args.plain, threads=args.threads
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """--temperature, --top-p, --top-k, --min-p, --seed."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="nucleus of that mass; 1 is off (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="only the likeliest; 0 is off (default: %(default)s)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="floor relative to the likeliest (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text (default: %(default)s)")


def add_tree(parser: argparse.ArgumentParser) -> None:
    """--total-token, --depth, --tree-top-k, --expand-by, --no-rerank, --uncoupled, --static-tree."""
    usual = TreeSettings()
    parser.add_argument(
        "--total-token", type=int, default=usual.total_token,
        help="nodes of the tree, root included; -1 measures this machine and chooses (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--depth", type=int, default=usual.depth, help="deepest drafted level (default: %(default)s)")
    parser.add_argument(
        "--tree-top-k",
        type=int,
        default=usual.top_k,
        help="children of a node, and width of the beam (default: %(default)s)",
    )
    parser.add_argument(
        "--expand-by", choices=["value", "confidence"], default=usual.expand_by, help="what the beam ranks by"
    )
    parser.add_argument("--no-rerank", action="store_true", help="keep the beam itself instead of the best candidates")
    parser.add_argument(
        "--uncoupled", action="store_true", help="above temperature 0, draft without knowing the noise of the draw"
    )
    parser.add_argument("--static-tree", metavar="PATHS", help='EAGLE-1\'s template as JSON, e.g. "[[0],[1],[0,0]]"')


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling that the arguments ask for."""
    from eagle_core.verify import Sampling

    return Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)


def tree_of(args: argparse.Namespace) -> TreeSettings:
    """The tree settings that the arguments ask for."""
    import json

    paths = None
    if args.static_tree is not None:
        from eagle_core.growth import Template

        try:
            paths = Template.parse(json.loads(args.static_tree)).paths
        except (ValueError, TypeError, RecursionError) as e:
            raise InvalidRequest(f"--static-tree takes rank paths as JSON, such as [[0],[1],[0,0]]: {e}") from None
    return TreeSettings(
        args.total_token, args.depth, args.tree_top_k, args.expand_by, not args.no_rerank, paths,
        coupled=not args.uncoupled,
    )  # fmt: skip


def prompt_of(args: argparse.Namespace) -> str | list[int]:
    """The prompt that the arguments give: text, or ids."""
    if args.prompt_ids is None:
        return args.prompt
    try:
        return [int(part) for part in args.prompt_ids.split(",")]
    except ValueError:
        raise InvalidRequest(
            f"--prompt-ids takes whole numbers with commas, such as 5,17,42; found {args.prompt_ids!r}"
        ) from None


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `generate`."""
    add_prompt(parser)
    parser.add_argument("--method", choices=list(METHODS), default="eagle3", help="(default: %(default)s)")
    add_pair(parser)
    add_sampling(parser)
    add_tree(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; repeatable"
    )
    parser.add_argument("--trace", metavar="FILE.jsonl", help="write every event there, one JSON object a line")


@contextmanager
def _trace(path: str | None) -> Iterator[Any]:
    """A function that writes an event, flushed each time so that an interrupted run keeps what it told."""
    if path is None:
        yield lambda event: None
        return

    def failed(e: OSError) -> InvalidRequest:
        return InvalidRequest(f"the trace cannot be written to {path}: {e.strerror}")

    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as e:
        raise failed(e) from None

    def write(event: Event) -> None:
        try:
            file.write(dump(event) + "\n")
            file.flush()
        except OSError as e:
            raise failed(e) from None

    try:
        yield write
    finally:
        with suppress(OSError):  # what could not be written was told
            file.close()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Stream the answer, then its numbers."""
    sampling, settings, prompt = sampling_of(args), tree_of(args), prompt_of(args)
    pair = pair_of(args)
    events = pair.generate(
        prompt,
        method=args.method,
        sampling=sampling,
        settings=settings,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        system=args.system,
    )
    told: list[Event] = []
    with _trace(args.trace) as write:
        for event in events:
            write(event)
            told.append(event)
            sys.stdout.write(event.text)
            sys.stdout.flush()
    run = Run.collect(told)
    (finish,) = run.finishes
    shown = ("tau", "tokens_per_second", "overhead")
    print("\n")
    print(
        table(
            ["measure", "value"], [[METRICS[name].label, METRICS[name].show(METRICS[name].of(run))] for name in shown]
        )
    )
    print(f"\n{len(run.ids)} tokens in {len(run.steps)} steps and {finish.seconds:.2f} s, ended by {finish.reason}")
    if finish.note:
        print(finish.note)
    return {
        "method": args.method,
        "ids": run.ids,
        "text": run.text,
        "steps": len(run.steps),
        "tau": METRICS["tau"].of(run),
        "seconds": finish.seconds,
        "tokens_per_second": METRICS["tokens_per_second"].of(run),
        "finish": finish.reason,
    }
