"""A step touches the host once: no hidden syncs on the way from one draft to the next.

On any machine: no operator of a step reads a value back (`item`, `nonzero`, boolean indexing), except inside the one
packed copy. On a CUDA device the same steps run under PyTorch's own sync detector, set to raise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_core import engine
from eagle_core.check import no_syncs, reads
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.engine import generate
from eagle_core.target import Target
from eagle_core.verify import Sampling
from tests.conftest import drafter_for, tiny_model, tiny_target
from tests.test_compare import command, save_tiny

PROMPT = [5, 17, 42, 3, 8, 17, 42]
# A CPU may look at values where an accelerator must not; these settings take no such short cut.
SAMPLINGS = [Sampling(), Sampling(1.0, top_k=9, min_p=0.05, seed=1)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_no_operator_of_a_step_reads_a_value_back(method: str, sampling: Sampling) -> None:
    target = tiny_target()
    events = generate(
        target, drafter_for(method, target), PROMPT, method=method, sampling=sampling, settings=TreeSettings(16, 4, 4)
    )
    next(events)  # the prefill may wait
    with reads() as counts:
        for _ in range(20):
            next(events)
    assert not counts


def test_the_counter_sees_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.walk
    monkeypatch.setattr(engine, "walk", lambda tree, choices: plain(tree, choices) & bool(choices[0] >= 0))
    target = tiny_target()
    events = generate(target, drafter_for("eagle3", target), PROMPT, method="eagle3")
    next(events)
    with reads() as counts:
        next(events)
    assert counts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["vanilla", "lookup", "eagle1", "eagle2", "eagle3", "hybrid"])
def test_twenty_steps_without_a_sync_on_cuda(
    method: str, sampling: Sampling
) -> None:  # pragma: no cover - runs where a GPU is
    import copy

    model = copy.deepcopy(tiny_model("llama")).cuda()
    target = Target(model, name="tiny")
    drafter = drafter_for(method, tiny_target())
    if hasattr(drafter, "head"):
        head = copy.deepcopy(drafter.head).cuda()
        head.borrow(target.embedding, target.lm_head)
        drafter = METHODS[method].make(head, target)
    events = generate(target, drafter, PROMPT, method=method, sampling=sampling, settings=TreeSettings(16, 4, 4))
    next(events)
    next(events)  # the first step allocates
    with no_syncs():
        for _ in range(20):
            next(events)


def test_the_device_check_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    target, head = save_tiny(tmp_path)
    _, found = command(capsys, "check", "--target", target, "--drafter", head, "--max-new-tokens", "12")
    assert found["ok"] and found["wrong"] == [] and found["prompts"] == 3 and found["peak_memory_mb"] > 0
    assert set(found["methods"]) == {"hf", "vanilla", "lookup", "eagle3", "hybrid"}
    for name, m in found["methods"].items():
        assert m["verdicts"] == {"equal": 3 if name == "hf" else 6} and m["failed"] == {}
        assert m["tokens_per_second"]["n"] == m["ratio_to_hf"]["n"] == 3
        assert name == "hf" or (m["syncs"] == [] and m["tau"] >= 1)


@pytest.mark.parametrize("fault", ["a wait", "another text", "a crash"])
def test_the_device_check_notices(fault: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.walk

    def wrong(tree: Any, choices: torch.Tensor) -> torch.Tensor:
        if fault == "a crash" and len(tree) > 1:
            raise RuntimeError("a fault planted by the test")
        alive = plain(tree, choices)
        if fault == "a wait":
            assert bool(choices[0] >= 0)
        elif len(tree) > 2:
            alive[1] = True
        return alive

    monkeypatch.setattr(engine, "walk", wrong)
    target, head = save_tiny(tmp_path)
    _, found = command(capsys, "check", "--target", target, "--drafter", head, "--max-new-tokens", "12")
    assert not found["ok"] and "eagle3" in found["wrong"]
    assert ("vanilla" in found["wrong"]) is (fault == "a wait")
    assert fault != "a crash" or "planted" in str(found["methods"]["eagle3"]["failed"])
