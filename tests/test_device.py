"""A step touches the host once: no hidden syncs on the way from one draft to the next.

On any machine: no operator of a step reads a value back (`item`, `nonzero`, boolean indexing), except inside the one
packed copy. On a CUDA device the same steps run under PyTorch's own sync detector, set to raise.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_core import engine
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.engine import generate
from eagle_core.target import Target
from eagle_core.verify import Sampling
from tests.conftest import drafter_for, tiny_model, tiny_target

PROMPT = [5, 17, 42, 3, 8, 17, 42]
READS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.is_nonzero.default",
    "aten.masked_select.default",
}
# A CPU may look at values where an accelerator must not; these settings take no such short cut.
SAMPLINGS = [Sampling(), Sampling(1.0, top_k=9, min_p=0.05, seed=1)]


class Reads(TorchDispatchMode):
    """Counts operators whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in READS:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_no_operator_of_a_step_reads_a_value_back(method: str, sampling: Sampling) -> None:
    target = tiny_target()
    events = generate(
        target, drafter_for(method, target), PROMPT, method=method, sampling=sampling, settings=TreeSettings(16, 4, 4)
    )
    next(events)  # the prefill may wait
    with Reads() as reads:
        for _ in range(20):
            next(events)
    assert not reads.counts


def test_the_counter_sees_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.walk
    monkeypatch.setattr(engine, "walk", lambda tree, choices: plain(tree, choices) & bool(choices[0] >= 0))
    target = tiny_target()
    events = generate(target, drafter_for("eagle3", target), PROMPT, method="eagle3")
    next(events)
    with Reads() as reads:
        next(events)
    assert reads.counts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["vanilla", "lookup", "eagle1", "eagle2", "eagle3"])
def test_twenty_steps_without_a_sync_on_cuda(
    method: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:  # pragma: no cover - runs where a GPU is
    import copy

    model = copy.deepcopy(tiny_model("llama")).cuda()
    target = Target(model, name="tiny")
    drafter = drafter_for(method, tiny_target())
    if hasattr(drafter, "head"):
        head = copy.deepcopy(drafter.head).cuda()
        head.borrow(target.embedding, target.lm_head)
        drafter = METHODS[method].make(head, target)
    plain = engine._Packed.__init__

    def packed(self: Any, parts: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        plain(self, parts)
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(engine._Packed, "__init__", packed)
    events = generate(target, drafter, PROMPT, method=method, sampling=sampling, settings=TreeSettings(16, 4, 4))
    next(events)
    next(events)  # the first step allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            next(events)
    finally:
        torch.cuda.set_sync_debug_mode("default")
