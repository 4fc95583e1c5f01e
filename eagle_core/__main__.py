"""The command line: `python -m eagle_core COMMAND …`.

Each command is a module with `configure(parser)` and `run(args) -> dict | None`. Text streams to stdout as it is
made, tables for people follow, and the last line of stdout is the returned object as JSON. Progress goes to stderr.
Exit code 0, or 2 with one sentence on bad input. Nothing is imported before its command is chosen.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from importlib import import_module

from eagle_core.errors import EagleError

COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("eagle_core.commands", "answer a prompt with any method, optionally writing a trace"),
    "compare": ("eagle_core.compare", "plain decoding and a method on the same ids: verdict and first difference"),
    "bench": ("eagle_core.bench", "measure methods against transformers' generate, paired in one run"),
    "check": ("eagle_core.check", "on this device: lossless, no hidden waits, speed against generate; one JSON line"),
    "inspect": ("eagle_core.checkpoints", "what a drafter checkpoint holds and how it will be read"),
    "corpus": ("eagle_core.training.corpus", "let a target write the text its drafters are trained on"),
    "train": ("eagle_core.training.trainer", "train an EAGLE head for a target"),
    "evaluate": ("eagle_core.training.evaluate", "acceptance and calibration of a drafter, by depth and category"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m eagle_core", description="Lossless EAGLE decoding, told as events."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, line) in COMMANDS.items():
        # Only the chosen command's module is imported, so that --help stays free of torch.
        command = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if name in argv[:1]:
            import_module(module).configure(command)
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a letter shows "?" and the answer goes on
    try:
        result = import_module(COMMANDS[args.command][0]).run(args)
        if result is not None:
            print(json.dumps(result, allow_nan=False))  # in ASCII, so that it is whole in every encoding
        sys.stdout.flush()
    except EagleError as e:
        print(f"{args.command}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
