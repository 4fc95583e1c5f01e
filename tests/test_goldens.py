"""Rounds of the reference implementation, node for node: trees, masks, positions, scores, accepted paths, bonuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_core.checkpoints import load_head
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.engine import generate
from eagle_core.target import Target
from tests.conftest import goldens, numbers


def cases() -> list[Path]:
    return sorted(p.parent for p in goldens().glob("eagle*/rounds.json*"))


def first_difference(case: Path, spoil: Callable[[Any], None] | None = None) -> str | None:
    """Run every generation of a case and tell the first thing that is not as recorded."""
    from transformers import AutoModelForCausalLM

    golden = numbers(case / "rounds.json")
    model = AutoModelForCausalLM.from_pretrained(case / "target", dtype=torch.float32, attn_implementation="sdpa")
    target = Target(model, name=case.name)
    head = load_head(case / "head", target)
    if spoil is not None:
        spoil(head)
    method = golden["method"]
    drafter = METHODS[method].make(head, target)
    for number, run in enumerate(golden["runs"]):
        eos = run["eos_token_id"]
        target.eos_ids = frozenset() if eos is None else frozenset({eos})
        budget = TreeSettings(run["total_token"], run["depth"] + 1, run["top_k"])  # their depth counts from level 2
        enough = len(run["output_ids"]) - len(run["prompt_ids"]) + run["depth"] + 3
        events = list(
            generate(target, drafter, run["prompt_ids"], method=method, settings=budget, max_new_tokens=enough)
        )
        ids = [t for e in events[:-1] for t in e.emitted]
        wanted = run.get("output_ids_cut_after_eos") or run["output_ids"]
        if ids[: len(wanted) - len(run["prompt_ids"])] != wanted[len(run["prompt_ids"]) :]:
            return f"run {number}: the text"
        if events[0].first.token != run["first_root"]:
            return f"run {number}: the first token"
        steps = events[1:-1]
        ended_early = events[-1].reason == "eos"  # the reference drafts once more after an end drawn as the bonus
        if len(steps) < len(run["rounds"]) - ended_early:
            return f"run {number}: {len(steps)} rounds instead of {len(run['rounds'])}"
        for step, want in zip(steps, run["rounds"]):
            if difference := _compare(step, want, last=ended_early and step is steps[-1]):
                return f"run {number}, round {step.index}: {difference}"
    return None


def _compare(step: Any, want: dict[str, Any], last: bool) -> str | None:
    nodes = step.nodes
    ancestors: list[set[int]] = []
    for node in nodes:
        ancestors.append({node.id} | (ancestors[node.parent] if node.parent >= 0 else set()))
    found = {
        "committed": step.position,
        "root": nodes[0].token,
        "tokens": [n.token for n in nodes],
        "parents": [n.parent for n in nodes],
        "depths": [n.depth for n in nodes],
        "positions": [step.position + n.depth for n in nodes],
        "bonus": step.bonus.token,
    }
    if not last:  # behind an end-of-text the reference goes on and we do not
        found |= {"accepted_nodes": step.accepted, "accept_length": len(step.accepted) - 1}
    for name, value in found.items():
        if value != want[name]:
            return f"{name} {value} instead of {want[name]}"
    if "mask_rows" in want:
        rows = [int(row, 16) for row in want["mask_rows"]]
        if rows != [sum(1 << j for j in seen) for seen in ancestors]:
            return "the mask"
    for node, score in zip(nodes[1:], want["scores"][1:], strict=True):
        if abs(math.log(node.value) - score) > 5e-5:
            return f"score {math.log(node.value)} of node {node.id} instead of {score}"
    return None


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_round_equals_the_reference(case: Path) -> None:
    assert first_difference(case) is None


@pytest.mark.parametrize("name,spoil", [
    ("one layer too deep", lambda h: _recapture(h, 1)),
    ("one layer too shallow", lambda h: _recapture(h, -1)),
    ("draft ids taken for target ids", lambda h: h.draft_to_target.copy_(torch.arange(len(h.draft_to_target)))),
    ("rotary base", lambda h: h.rotary.inv_freq.mul_(0.5)),
])  # fmt: skip
def test_each_planted_fault_shows(name: str, spoil: Callable[[Any], None]) -> None:
    case = next(c for c in cases() if c.name == "eagle3-vd")
    assert first_difference(case, spoil) is not None


def _recapture(head: Any, shift: int) -> None:
    from dataclasses import replace

    head.config = replace(head.config, capture=tuple(j + shift for j in head.config.capture))
