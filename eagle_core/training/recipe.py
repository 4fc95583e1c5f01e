"""The whole way to a pair of heads, as one command: corpus → EAGLE-3 → EAGLE-2 → evaluation.

    python -m eagle_core.training.recipe --out DIR [--target T] [--prompts FILE] [--minutes 14]

Every stage is a command that can be run by itself and is printed before it runs; each continues what an interrupted
one left, so the same line again picks up where it stopped. The minutes are shared out as 30 % corpus, 40 % EAGLE-3,
20 % EAGLE-2, the rest for starting up and measuring. The defaults (minutes, tokens, batch) are meant for one
data-centre GPU; on a CPU give it hours and `--batch-tokens 700`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "stages"]


def stages(args: argparse.Namespace) -> list[list[str]]:
    """The command lines, in order."""
    out: Path = args.out
    target = ["--target", args.target] if args.target else []
    device = ["--device", args.device]
    corpus = str(out / "corpus")
    seed = ["--seed", str(args.seed)]
    minutes = ["--minutes", f"{0.3 * args.minutes:g}"]
    lines = [["corpus", *target, *device, "--out", corpus, "--tokens", str(args.tokens), *minutes, *seed]]
    for method, share in (("eagle3", 0.4), ("eagle2", 0.2)):
        run = out / f"{method}-run"
        places = ["--corpus", corpus, "--out", str(run), "--export", str(out / method)]
        size = ["--hours", f"{share * args.minutes / 60:.4g}", "--batch-tokens", str(args.batch_tokens)]
        resume = ["--resume"] if (run / "checkpoint.pt").exists() else []
        lines.append(["train", method, *target, *device, *places, *size, *seed, *resume, *args.train])
    if args.prompts:
        for method in ("eagle3", "eagle2"):
            lines.append(
                ["evaluate", *target, *device, "--drafter", str(out / method), "--prompts", str(args.prompts),
                 "--json", str(out / f"{method}.json"), *(["--limit", str(args.limit)] if args.limit else [])]
            )  # fmt: skip
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run every stage. Returns the first exit code that is not 0."""
    from eagle_core.__main__ import main as command

    parser = argparse.ArgumentParser(
        prog="python -m eagle_core.training.recipe", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--target", help="a hub id or a folder (default: the default target)")
    parser.add_argument(
        "--prompts", type=Path, help="Spec-Bench lines to evaluate on; without them nothing is evaluated"
    )
    parser.add_argument("--minutes", type=float, default=14.0, help="for everything (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=2_000_000, help="of the corpus, if its time allows (default: %(default)s)"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of a training step (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=0, help="prompts to evaluate, 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("train", nargs="*", help="further options of `train`, after --")
    args = parser.parse_args(argv)
    for line in stages(args):
        print("python -m eagle_core " + shlex.join(line), file=sys.stderr, flush=True)
        code = command(line)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
