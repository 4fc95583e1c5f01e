"""The CPU path computes what plain transformers computes, and is left away where it does not."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from eagle_core import cpu
from eagle_core.cpu import GROUPED, FastPath, choose_threads
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.drafters.plain import Vanilla
from eagle_core.engine import generate
from eagle_core.heads import POST_NORM
from eagle_core.target import Target
from eagle_core.tree import DraftTree, ancestor_mask
from eagle_core.verify import Sampling
from tests.adversaries import Adversary
from tests.conftest import FAMILIES, VOCAB, drafter_for, greedy, tiny_model

PROMPT = [5, 17, 42, 3, 8, 8, 21, 60, 1, 17, 42]

packs = pytest.mark.skipif(
    not hasattr(torch.ops.mkl, "_mkl_linear"), reason="this PyTorch comes without MKL: nothing can be packed"
)


@pytest.fixture
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers are packed as well, whatever a trial of them says."""
    monkeypatch.setattr(cpu, "_trial", lambda groups, packs: {"plain": 2.0, "packed": 1.0})


def new_target(family: str = "llama") -> Target:
    target = Target(deepcopy(tiny_model(family)), name=f"fast-{family}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_trial", lambda groups, packs: {"plain": 2.0, "packed": 1.0})
        target.quicken(threads=torch.get_num_threads())
    return target


fast_target = cache(new_target)


def ids_of(target: Target, drafter: Any, method: str, **how: Any) -> list[int]:
    events = generate(target, drafter, PROMPT, method=method, max_new_tokens=20, **how)
    return [token for event in events if event.kind != "finish" for token in event.emitted]


@packs
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same(family: str) -> None:
    target = fast_target(family)
    assert target.fast is not None
    report = target.fast.report
    assert report["packed"] > 0 or family == "gpt2"  # whose layers are no linear ones
    want = greedy(tiny_model(family), PROMPT, 20)
    for seed in range(3):
        drafter = Adversary(seed, VOCAB, PROMPT + want if seed % 2 else None, capture=(1, POST_NORM, 4, 2))
        assert ids_of(target, drafter, "vanilla", settings=TreeSettings((9, 33, 64)[seed], 6)) == want
    with target.plain():
        assert target.attention == ("eager" if family == "gpt_oss" else "sdpa")
        assert not any("forward" in vars(module) for module in target.model.modules())
        assert greedy(target.model, PROMPT, 20) == want
    assert target.attention == ("eager" if family == "gpt_oss" else GROUPED)
    target.self_check()


@packs
@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_the_same(method: str) -> None:
    target = fast_target()
    drafter = drafter_for(method, target)
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        if METHODS[method].name == "chain-sampled" and not sampling.greedy:
            continue  # keeps the distribution, not the draws
        plain = ids_of(Target(tiny_model("llama")), Vanilla(), "vanilla", sampling=sampling)
        assert ids_of(target, drafter, method, sampling=sampling) == plain


@packs
def test_logits_and_states_differ_by_rounding() -> None:
    target = fast_target("qwen2")  # with biases
    parents = torch.tensor([-1, 0, 0, 1, 2, 2])
    one = torch.ones(6)
    tree = DraftTree(torch.arange(6), parents, ancestor_mask(parents, 2), one, one, 2)

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        session = target.session(64, (1, 3, POST_NORM))
        session.prefill(torch.tensor(PROMPT))
        return session.verify(tree)

    fast = read()
    with target.plain():
        plain = read()
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class _Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 16, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias)
        self.other = nn.Linear(16, 5)


@packs
@pytest.mark.parametrize("bias", [False, True])
def test_layers_packed_together_stay_three_layers(bias: bool, packing_pays: None) -> None:
    block = _Block(bias)
    plain = deepcopy(block)
    assert FastPath(block).report["packed"] == 4
    x, y = torch.randn(1, 7, 24), torch.randn(1, 2, 24)
    with torch.inference_mode():
        for names, inputs in (("qkv", (x, x, x)), ("vkq", (x, x, x)), ("qkv", (x, y, x)), ("kkv", (y, x, y))):
            for name, given in zip(names, inputs, strict=True):
                found = getattr(block, f"{name}_proj")(given)
                torch.testing.assert_close(found, getattr(plain, f"{name}_proj")(given), rtol=1e-5, atol=1e-5)
                assert found.view(1, given.shape[1], -1, 8).shape[2] == found.shape[-1] // 8


@packs
def test_gradients_flow_as_through_plain_layers(packing_pays: None) -> None:
    block = _Block(True)
    FastPath(block)
    x = torch.randn(1, 3, 24, requires_grad=True)
    (block.other(block.q_proj(x)).sum() + block.k_proj(x).sum()).backward()
    assert x.grad is not None and float(x.grad.abs().sum()) > 0
    assert block.q_proj.weight.grad is not None


@packs
def test_what_does_not_agree_is_left_away(packing_pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    product = cpu._Pack.product
    monkeypatch.setattr(cpu._Pack, "product", lambda self, x: product(self, x) * 1.001)
    block = _Block(False)
    assert FastPath(block).report["packed"] == 0
    assert not any("forward" in vars(module) for module in block.modules())


def test_a_norm_of_another_formula_is_left_alone() -> None:
    class OnePlusRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(12)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    assert FastPath(nn.Sequential(OnePlusRMSNorm())).report["norms"] == 0
    model = deepcopy(tiny_model("llama"))
    assert FastPath(model).report["norms"] == 9  # two of each layer, and the last


def test_without_memory_for_two_forms_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_AVPHYS_PAGES": 1, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(cpu.os, "sysconf", sizes.__getitem__)
    assert FastPath(_Block(False)).report == {"linear": "plain", "packed": 0, "norms": 0}


@packs
def test_a_trial_that_packing_loses_keeps_the_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_trial", lambda groups, packs: {"plain": 1.0, "packed": 1.0})
    assert FastPath(_Block(False)).report["packed"] == 0


def test_threads_follow_the_measurement_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        clock = [0.0]
        monkeypatch.setattr(cpu.time, "perf_counter", lambda: clock[0])
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

        def forward(cost: dict[int, float]) -> None:
            clock[0] += cost[torch.get_num_threads()]

        assert choose_threads(lambda: forward({4: 2.0, 2: 1.0})) == torch.get_num_threads() == 2
        torch.set_num_threads(4)
        assert choose_threads(lambda: forward({4: 1.0, 2: 1.0})) == torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert choose_threads(lambda: pytest.fail("nothing is measured where the user has chosen")) == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "mixtral"])
def test_a_recorded_forward_holds_for_every_length(family: str) -> None:
    target = fast_target(family)
    assert target.fast is not None and target.fast.replay is not None and target.fast.report["recorded"]
    capture = (0, 1, 3, POST_NORM)
    for length, capacity in ((1, 20), (30, 300), (70, 80)):
        prompt = torch.arange(length) % VOCAB
        for nodes in (1, 2, 7):
            parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3][:nodes])
            one = torch.ones(nodes)
            tree = DraftTree(torch.arange(nodes) * 5, parents, ancestor_mask(parents, 3), one, one, 3)
            found = []
            for recorded in (True, False):
                replay, target.fast.replay = target.fast.replay, target.fast.replay if recorded else None
                session = target.session(capacity, capture)
                session.prefill(prompt)
                found.append((*session.verify(tree), *session.cache.rows(length + nodes)))  # type: ignore[misc]
                session.commit(torch.arange(nodes), 1, straight=True)
                found[-1] += session.verify(tree)  # type: ignore[operator]
                target.fast.replay = replay
            for a, b in zip(*found, strict=True):
                live = a.shape[2] if a.dim() == 4 else None
                a, b = (a, b) if live is None else (a[:, :, : length + nodes], b[:, :, : length + nodes])
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_model_that_cannot_be_recorded_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = cpu._Forward.run
    calls = iter(range(100))

    def unlike(self: Any, *given: torch.Tensor) -> list[torch.Tensor]:
        logits, *states = forward(self, *given)
        return [logits + next(calls), *states]  # differs from call to call, as something data-dependent would

    monkeypatch.setattr(cpu._Forward, "run", unlike)
    target = new_target()
    assert target.fast is not None and target.fast.replay is None and not target.fast.report["recorded"]
    monkeypatch.setattr(cpu._Forward, "run", lambda self, *given: [][1])
    assert new_target().fast.replay is None  # type: ignore[union-attr]
    assert ids_of(target, Vanilla(), "vanilla") == greedy(tiny_model("llama"), PROMPT, 20)


def test_mixed_layer_kinds_are_not_recorded() -> None:
    target = fast_target("gemma3_text")  # two masks
    assert target.fast is not None and target.fast.replay is None
