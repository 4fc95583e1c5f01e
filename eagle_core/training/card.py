"""Ship a trained head: weights in public form, and a card that says what it is and how it was made.

folder/model.safetensors, config.json    float16, SafeAILab's names
folder/README.md                         the card: numbers, corpus, command
folder/curve.png                         the run as a picture
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_core.training.store import disk_errors, replace_file

__all__ = ["command", "ship"]

_TITLES = {"eagle1": "EAGLE-1", "eagle2": "EAGLE-2", "eagle3": "EAGLE-3"}


def command(about: dict[str, Any]) -> str:
    """The command line that makes such a run, from `Run.about`: only what differs from the defaults is spelled out."""
    from dataclasses import fields

    from eagle_core.training.trainer import Recipe

    corpora = " ".join(corpus["folder"] for corpus in about["corpora"])
    words = [f"python -m eagle_core train {about['method']} --target {about['target']} --corpus {corpora} --out RUN"]
    if about["started_from"]:
        words.append(f"--start-from {about['started_from']}")
    words.append(f"--steps {about['updates']}" if about["updates"] else f"--hours {about['hours']:g}")
    for item in fields(Recipe):
        value = about[item.name]
        if item.name in ("method", "updates", "hours", "log_every") or value in (
            item.default,
            list(item.default or []) if isinstance(item.default, tuple) else None,
        ):
            continue
        option = "--answers-only" if item.name == "everywhere" else "--" + item.name.replace("_", "-")
        words.append(
            option
            if isinstance(value, bool)
            else f"{option} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        )
    return " ".join(words)


def _evaluation(report: dict[str, Any]) -> list[str]:
    """Tables from what `python -m eagle_core evaluate --json` wrote."""
    percent = lambda values: " | ".join("–" if v is None else f"{v:.1%}" for v in values)  # noqa: E731
    sampling = report["sampling"]
    lines = [
        f"{report['prompts']} prompts of `{report['prompts_file']}`, temperature {sampling['temperature']:g}, up to "
        f"{report['max_new_tokens']} new tokens, {report['dtype']}; τ counts the bonus token, not the prefill.",
        "",
        "| setting | τ |",
        "|---|---|",
        *(f"| {name} | {value['tau']:.3f} |" for name, value in report["settings"].items()),
        "",
        "| category | prompts | τ |",
        "|---|---|---|",
        *(f"| {name} | {value['prompts']} | {value['tau']:.3f} |" for name, value in report["by_category"].items()),
        "",
    ]
    depths = range(1, len(report["acceptance"]["conditional"]) + 1)
    lines += [
        "| acceptance by depth | " + " | ".join(map(str, depths)) + " |",
        "|---" * (len(depths) + 1) + "|",
        f"| of all steps | {percent(report['acceptance']['unconditional'])} |",
        f"| given that the parent was accepted | {percent(report['acceptance']['conditional'])} |",
    ]
    if report.get("outside_draft_vocab"):
        lines += ["", f"The draft vocabulary lacks {report['outside_draft_vocab']:.1%} of what the target said."]
    gap = report.get("calibration", {}).get("confidence_gap")
    if gap is not None:
        lines += [
            "",
            f"Confidence against how often nodes are accepted: at most {gap:.3f} apart in a bin of 200 or more.",
        ]
    return lines


def ship(run: Any, folder: Path, *, evaluations: dict[str, Path] | None = None) -> None:
    """Write the head of a `Run` to `folder`.

    Args:
        run: a `runs.Run` at its end.
        evaluations: heading → JSON file of `python -m eagle_core evaluate`, for the card.
    """
    import torch

    from eagle_core.checkpoints import save_head

    about = run.about()
    log = [json.loads(line) for line in (run.out / "log.jsonl").read_text().splitlines()]
    held = [line for line in log if line.get("held_out")]
    fused = run.recipe.family == "eagle3"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        notes = {key: about[key] for key in ("method", "target")}
        notes |= {"updates": run.at.update, "tokens": run.at.tokens}
        notes["corpus_tokens"] = sum(c["tokens"] for c in about["corpora"])
        save_head(run.head, folder, dtype=torch.float16, verifier=about["target"], notes=notes)
    title = _TITLES[about["method"]]
    layers = ", ".join(map(str, run.head.config.capture))
    reads = f"states before layers {layers}" if fused else "the state after the final norm"
    text = [
        f"# {title} head for {about['target']}",
        "",
        f"An {title} draft head ({about['parameters'] / 1e6:.1f} M parameters, float16, SafeAILab's key names) for "
        f"`{about['target']}`, trained by this project's own trainer on text that the target wrote itself.",
        "",
        "| | |",
        "|---|---|",
        f"| reads | {reads} |",
    ]
    if fused:
        text.append(
            f"| draft vocabulary | {run.head.config.draft_vocab_size:,} ids,"
            f" {about['coverage']:.1%} of the answers' tokens |"
        )
    conversations = sum(c["conversations"] for c in about["corpora"])
    tokens = sum(c["tokens"] for c in about["corpora"])
    text += [
        f"| corpus | {tokens:,} tokens in {conversations:,} conversations, written by the target |",
        f"| trained on | {run.at.tokens:,} tokens ({run.at.tokens / max(1, tokens):.1f} passes)"
        f" in {run.at.update:,} updates, "
        f"{run.at.seconds / 3600:.2f} h on {run.target.device.type.upper()} |",
        "",
        "```",
        command(about),
        "```",
        "",
        "## Held-out conversations",
        "",
        "How often the head's first choice is the target's, k tokens deep, its own outputs fed back along the text",
        "as it was written; and τ of a greedy chain (target tokens gained for each forward, bonus included) from every",
        "position.",
        "",
    ]
    if held:
        steps = len(held[-1]["held_out"]["agreement"])
        text += [
            "| tokens trained on | " + " | ".join(f"step {k + 1}" for k in range(steps)) + " | chain τ |",
            "|---" * (steps + 2) + "|",
        ]
        shown = held[:: max(1, len(held) // 8)]
        for line in shown if shown[-1] is held[-1] else [*shown, held[-1]]:
            numbers = " | ".join(f"{x:.3f}" for x in line["held_out"]["agreement"])
            text.append(f"| {line['tokens']:,} | {numbers} | {line['held_out'].get('tau', float('nan')):.2f} |")
        text += ["", "![training curve](curve.png)"]
    for heading, path in (evaluations or {}).items():
        text += ["", f"## {heading}", "", *_evaluation(json.loads(path.read_text()))]
    replace_file(folder / "README.md", ("\n".join(text) + "\n").encode())
    if (run.out / "curve.png").exists():
        replace_file(folder / "curve.png", (run.out / "curve.png").read_bytes())
