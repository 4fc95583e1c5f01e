"""Which models can be targets, what they hand over, and what is refused before any forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_core.errors import UnsupportedTarget
from eagle_core.heads import POST_NORM
from eagle_core.target import Session, Target
from tests.adversaries import tree_of
from tests.conftest import FAMILIES, VOCAB, tiny_model, tiny_target

PARENTS = [-1, 0, 0, 1, 1, 2, 4, 6]
TOKENS = [9, 3, 14, 7, 20, 33, 2, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_reads_as_its_paths_before_and_after_a_commit(family: str) -> None:
    target = tiny_target(family)
    target.self_check()
    text = [int(x) for x in torch.arange(11) * 5 % VOCAB]
    session = target.session(64)
    tree = tree_of(TOKENS, PARENTS)
    with torch.inference_mode():
        session.prefill(torch.tensor(text))
        logits, _ = session.verify(tree)

    def path(i: int) -> list[int]:
        return [*path(PARENTS[i]), TOKENS[i]] if i >= 0 else []

    with torch.inference_mode():
        for i in range(len(TOKENS)):
            want = target.model(input_ids=torch.tensor([text + path(i)])).logits[0, -1].float()
            torch.testing.assert_close(logits[i], want, atol=2e-4, rtol=1e-4)
        kept = [0, 1, 4, 6]
        session.commit(torch.tensor(kept), len(kept), straight=False)
        again, _ = session.verify(tree_of([5, 6], [-1, 0]))
        want = target.model(input_ids=torch.tensor([text + path(6) + [5, 6]])).logits[0, -2:].float()
    torch.testing.assert_close(again, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_states_are_the_ones_named(family: str) -> None:
    """Boundary j is the input of layer j, n the state behind the last layer before the norm, POST_NORM behind it."""
    target = tiny_target(family)
    n = target.num_layers
    ids = torch.arange(9) * 4 % VOCAB
    layers = next(m for m in target.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n)
    inputs: dict[int, torch.Tensor] = {}
    last: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda m, a, k, j=j: inputs.__setitem__(j, (a[0] if a else k["hidden_states"])[0]), with_kwargs=True
        )
        for j, layer in enumerate(layers)
    ]
    hooks.append(
        layers[-1].register_forward_hook(lambda m, a, out: last.append((out[0] if isinstance(out, tuple) else out)[0]))
    )
    capture = (2, 0, n, POST_NORM, n - 1)
    with torch.inference_mode():
        _, features = target.session(32, capture).prefill(ids)
        parts = features.split(target.hidden_size, -1)
        head = target.model.get_output_embeddings()
        full = target.model(input_ids=ids[None]).logits[0]
        read = head(parts[3])
    for hook in hooks:
        hook.remove()
    for part, want in zip(parts, (inputs[2], inputs[0], last[0], None, inputs[n - 1])):
        if want is not None:
            torch.testing.assert_close(part, want.reshape(part.shape), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(read, full, atol=1e-3, rtol=1e-3)


def refused(model: Any) -> str:
    model.forward = None  # whatever is refused is refused before any forward
    with pytest.raises(UnsupportedTarget) as e:
        Target(model, name="it")
    return str(e.value)


def test_models_that_cannot_work_are_refused_with_the_reason() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    def causal(kind: str, **config: Any) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))

    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    assert "linear_attention" in refused(causal("mamba", **small, state_size=4))
    assert "recurrent state" in refused(causal("rwkv", **small, attention_hidden_size=32, context_length=64))
    hybrid = causal("qwen3_next", **small, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
                    num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                    layer_types=["linear_attention", "full_attention"])  # fmt: skip
    assert "linear_attention" in refused(hybrid)
    t5 = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    assert "encoder-decoder" in refused(t5)
    import copy

    strange = copy.deepcopy(tiny_model("llama"))
    strange.config._attn_implementation = "flex_attention"
    assert "flex_attention" in refused(strange)


def test_a_model_that_ignores_the_tree_mask_fails_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"), name="deaf")
    plain = target._mask
    monkeypatch.setattr(
        target,
        "_mask",
        lambda visible, *rest: plain(torch.ones_like(visible).tril(visible.shape[1] - len(visible)), *rest),
    )
    with pytest.raises(UnsupportedTarget, match="does not read a draft tree"):
        target.self_check()


def test_eos_ids_come_from_the_generation_config() -> None:
    import copy

    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.eos_token_id = [7, 9]
    assert Target(model).eos_ids == {7, 9}
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 3
    assert Target(model).eos_ids == {3}


def test_what_the_generation_config_asks_for_beyond_us_is_told() -> None:
    import copy

    model = copy.deepcopy(tiny_model("llama"))
    assert Target(model).not_applied == {}
    model.generation_config.repetition_penalty = 1.05
    model.generation_config.no_repeat_ngram_size = 0
    assert Target(model).not_applied == {"repetition_penalty": 1.05}


def test_buffers_are_reused_and_grow_when_needed() -> None:
    target = Target(tiny_model("llama"))
    first = target.session(100)
    target.release(first)
    second = target.session(200)
    assert second.cache is first.cache and isinstance(second, Session)
    target.release(second)
    assert target.session(300).cache is not first.cache
