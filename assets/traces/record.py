"""Record the runs that the page opens on. Every one is really run, by the command that stands in index.json.

python assets/traces/record.py            all of them
python assets/traces/record.py code sky3  only these
"""

from __future__ import annotations

import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SKY = "Why is the sky blue?"
FOX = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog near the river bank."

# name, title, what is asked, options; in the order of the lesson. The page opens on the first.
RUNS: tuple[tuple[str, str, str, str], ...] = (
    ("sky3", "Why is the sky blue? · EAGLE-3", SKY, ""),
    ("copy", "Repetition · prompt lookup", FOX, "--method lookup"),
    ("repeat", "Repetition · EAGLE-3", FOX, ""),
    ("both", "Repetition · hybrid", FOX, "--method hybrid"),
    ("easy", "Easy: 10+2= · EAGLE-3", "10+2=", "--max-new-tokens 48"),
    ("hard", "Hard: 10+2 · EAGLE-3", "10+2", "--max-new-tokens 48"),
    ("code", "Code: Fibonacci · EAGLE-3", "Write a Python function that returns the n-th Fibonacci number.", ""),
    ("french", "Another language · EAGLE-3", "Raconte en deux phrases pourquoi la mer est salée.", ""),
    ("dice", "Why is the sky blue? · EAGLE-3, T = 1", SKY, "--temperature 1 --seed 7"),
    ("sky2", "Why is the sky blue? · EAGLE-2", SKY, "--method eagle2"),
    ("sky1", "Why is the sky blue? · EAGLE-1", SKY, "--method eagle1"),
)


def record(name: str, ask: str, options: str) -> str:
    """Run it; the trace lies beside this file, compressed. Returns the command."""
    told = HERE / f"{name}.jsonl"
    arguments = ["generate", "--prompt", ask, "--max-new-tokens", "40", *shlex.split(options)]
    command = [sys.executable, "-m", "eagle_core", *arguments, "--trace", str(told)]
    subprocess.run(command, cwd=HERE.parent.parent, check=True)
    with gzip.GzipFile(HERE / f"{name}.jsonl.gz", "wb", compresslevel=9, mtime=0) as packed:
        packed.write(told.read_bytes())
    told.unlink()
    return "python -m eagle_core " + shlex.join([*arguments, "--trace", f"{name}.jsonl"])


def main(wanted: list[str]) -> None:
    path = HERE / "index.json"
    known = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}
    for name, title, ask, options in RUNS:
        if not wanted or name in wanted:
            command = record(name, ask, options)
            known[name] = {"name": name, "title": title, "ask": ask, "file": f"{name}.jsonl.gz", "command": command}
    rows = [known[name] for name, *_ in RUNS if name in known]
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
