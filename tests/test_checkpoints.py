"""Checkpoints: every public dialect gives the expected numbers; every damage is refused in words, and leaves no trace.

The reference numbers of `tests/goldens` were computed independently of this project. A larger set is used where the
variable EAGLE_GOLDENS names one, or where it lies in ../shared/goldens.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle_core import checkpoints, formats, sources
from eagle_core.checkpoints import estimate_memory, inspect, load_head, save_head, self_test
from eagle_core.errors import CheckpointError, EagleError, InvalidRequest, ModelNotFound, PairMismatch
from eagle_core.heads import POST_NORM, EagleHead, HeadCache, HeadConfig
from eagle_core.target import Target

HERE = Path(__file__).parent / "goldens"


def _sets() -> list[Path]:
    larger = Path(os.environ.get("EAGLE_GOLDENS", Path(__file__).parents[2] / "shared" / "goldens"))
    return [HERE] + ([larger] if (larger / "checkpoints").is_dir() else [])


def _folders(kind: str) -> list[Any]:
    found: dict[str, Path] = {}
    for root in _sets():
        for folder in sorted((root / kind).iterdir()):
            if (folder / "expected.json").exists():
                found.setdefault(folder.name, folder)
    return [pytest.param(folder, id=name) for name, folder in found.items()]


def _expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


@pytest.fixture(scope="module")
def targets() -> Callable[[Path], Target]:
    made: dict[Path, Target] = {}

    def get(root: Path) -> Target:
        if root not in made:
            model = AutoModelForCausalLM.from_pretrained(
                root / "checkpoints" / "_target", dtype=torch.float32, attn_implementation="sdpa"
            )
            made[root] = Target(model, name="golden")
        return made[root]

    return get


@pytest.fixture
def target(targets: Callable[[Path], Target]) -> Target:
    return targets(HERE)


def _print(target: Target) -> str:
    """A fingerprint of everything a failed load could have touched."""
    digest = hashlib.sha256()
    for name, tensor in target.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    digest.update(repr(sorted(vars(target))).encode())
    digest.update(repr([(name, len(module._forward_hooks)) for name, module in target.model.named_modules()]).encode())
    return digest.hexdigest()


def _two_steps(head: EagleHead, ids: torch.Tensor, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs for all pairs of `ids`, then for one drafted pair: logits, feedback, token, logits2, feedback2."""
    pairs = len(ids) - 1
    cache = HeadCache(head.config, pairs + 1, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        feedback, read = head(ids[None, 1:], head.fuse(states[None]), torch.arange(pairs)[None], cache)
        logits = head.logits(read)[0]
        token = logits[-1].argmax()
        if head.draft_to_target is not None:
            token = head.draft_to_target[token]
        cache.start = pairs
        feedback2, read2 = head(token.view(1, 1), feedback[:, -1:], torch.tensor([[pairs]]), cache)
        logits2 = head.logits(read2)[0]
    return {
        "logits": logits,
        "feedback": feedback[0],
        "token": token,
        "logits2": logits2,
        "feedback2": feedback2[0],
    }


def _assert_close(actual: torch.Tensor, expected: Any, tolerance: float) -> None:
    expected = torch.tensor(expected).view_as(actual)
    assert ((actual - expected).abs() <= tolerance * (1 + expected.abs())).all(), (actual - expected).abs().max()


# The reference set ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", _folders("checkpoints"))
def test_published_dialects_give_the_reference_numbers(folder: Path, targets: Callable[[Path], Target]) -> None:
    expected, target = _expected(folder), targets(folder.parents[1])
    if expected["method"] not in ("eagle1", "eagle3"):
        with pytest.raises(CheckpointError, match="(?i)" + expected["method"].replace("peagle", "P-EAGLE")) as refusal:
            load_head(folder, target)
        assert "EAGLE-1/2/3" in str(refusal.value)
        return
    head = load_head(folder, target)
    inputs = load_file(folder / "inputs.safetensors")
    ids, tolerance, outputs = inputs["ids"], expected["tolerance"], expected["outputs"]
    assert head.config.family == expected["method"]
    assert head.config.num_layers == expected["layers"]
    assert list(head.config.capture) == (expected["capture_boundaries"] or [POST_NORM])
    assert head.config.draft_vocab_size == expected["draft_vocab_size"]
    assert head.config.rope["rope_theta"] == expected["rope_theta"]
    assert head.facts["layers_assumed"] == (expected["layer_id_convention"] == "default")
    if (table := expected.get("draft_to_target")) is not None and table != list(range(expected["vocab_size"])):
        assert head.draft_to_target is not None and head.draft_to_target.tolist() == table
    else:
        assert head.draft_to_target is None
    for name, value in expected["flags"].items():
        assert getattr(head.config, name) == value, name
    session = target.session(len(ids), head.config.capture)
    _, states = target.forward(session.cache, ids, torch.arange(len(ids)), None, head.config.capture, 0)
    states = states[:-1]
    given = inputs["aux"] if "aux" in inputs else inputs["hidden"]
    assert torch.allclose(states, given, atol=1e-5)
    out = _two_steps(head, ids, given)
    _assert_close(out["logits"], outputs["logits"], tolerance)
    _assert_close(out["feedback"], outputs["feedback"], tolerance)
    assert int(out["token"]) == outputs["step2"]["token"]
    _assert_close(out["logits2"], outputs["step2"]["logits"], tolerance)
    _assert_close(out["feedback2"], outputs["step2"]["feedback"], tolerance)


def test_a_rotary_base_can_be_overridden(target: Target) -> None:
    folder = HERE / "checkpoints" / "angelslim-eagle3-early-stop-rows"
    inputs, expected = load_file(folder / "inputs.safetensors"), _expected(folder)
    head = load_head(folder, target, rope_theta=10000.0)
    out = _two_steps(head, inputs["ids"], inputs["aux"])
    _assert_close(out["logits"], expected["outputs"]["logits_if_rope_theta_10000"], expected["tolerance"])
    assert any("AngelSlim trains with 10000" in text for text in load_head(folder, target).facts["warnings"])


@pytest.mark.parametrize("folder", _folders("bad"))
def test_bad_checkpoints_are_refused_in_words(folder: Path, targets: Callable[[Path], Target]) -> None:
    expected, target = _expected(folder), targets(folder.parents[1])
    before = _print(target)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(EagleError) as refusal:
        warnings.simplefilter("always")
        load_head(folder, target)
    text = str(refusal.value).replace(folder.name, "").lower()  # the folder's own name must not do the naming
    for words in expected["must_mention"]:
        assert any(word.lower() in text for word in words), f"{text!r} mentions none of {words}"
    assert not [w for w in caught if "goldens" in str(w.message)]
    assert _print(target) == before


# One head, many dialects ------------------------------------------------------------------------------------------


class Folder:
    """A checkpoint to be bent: configuration, tensors, and where they are written."""

    def __init__(self, origin: Path, home: Path) -> None:
        self.path = home / "head"
        self.config = json.loads((origin / "config.json").read_text())
        self.tensors: dict[str, Any] = {}
        for file in sorted(origin.glob("model*.safetensors")):
            self.tensors |= load_file(file)

    def write(self, form: str = "safetensors") -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        (self.path / "config.json").write_text(json.dumps(self.config))
        if form == "safetensors":
            save_file({k: v.clone().contiguous() for k, v in self.tensors.items()}, self.path / "model.safetensors")
        else:
            torch.save(self.tensors, self.path / "pytorch_model.bin")
        return self.path

    def rename(self, change: Callable[[str], str]) -> Folder:
        self.tensors = {change(name): tensor for name, tensor in self.tensors.items()}
        return self


@pytest.fixture
def eagle3(tmp_path: Path) -> Folder:
    return Folder(HERE / "checkpoints" / "eagle3-sharded", tmp_path)


@pytest.fixture
def eagle1(tmp_path: Path) -> Folder:
    return Folder(HERE / "checkpoints" / "safeailab-eagle1-fcbias", tmp_path)


@pytest.fixture
def four_aux(tmp_path: Path) -> Folder:
    return Folder(HERE / "checkpoints" / "eagle31-four-aux", tmp_path)


def _reference(name: str, target: Target) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    folder = HERE / "checkpoints" / name
    inputs = load_file(folder / "inputs.safetensors")
    states = inputs["aux"] if "aux" in inputs else inputs["hidden"]
    return _two_steps(load_head(folder, target), inputs["ids"], states), inputs["ids"], states


def _same(folder: Path, target: Target, name: str, **overrides: Any) -> bool:
    want, ids, states = _reference(name, target)
    got = _two_steps(load_head(folder, target, **overrides), ids, states)
    return all(torch.allclose(got[key].float(), want[key].float(), atol=1e-5) for key in want)


def _vllm(folder: Folder) -> None:
    folder.config = {"model_type": "eagle", "architectures": ["Eagle3LlamaForCausalLM"], "model": folder.config}


def _absolute(folder: Folder) -> None:
    folder.tensors["d2t"] = folder.tensors["d2t"] + torch.arange(48)


DIALECTS: dict[str, Callable[[Folder], Any]] = {
    "as-it-is": lambda f: None,
    "layers.0": lambda f: f.rename(lambda n: n.replace("midlayer.", "layers.0.")),
    "model-prefix": lambda f: f.rename(lambda n: n if n in ("d2t", "t2d") else "model." + n),
    "draft_id_to_target_id": lambda f: f.rename(lambda n: {"d2t": "draft_id_to_target_id"}.get(n, n)),
    "absolute": _absolute,
    "absolute-without-t2d": lambda f: (_absolute(f), f.tensors.pop("t2d")),
    "no-t2d": lambda f: f.tensors.pop("t2d"),
    "int32-map": lambda f: f.tensors.update(d2t=f.tensors["d2t"].to(torch.int32)),
    "no-draft_vocab_size": lambda f: f.config.pop("draft_vocab_size"),
    "base-architecture": lambda f: f.config.update(architectures=["LlamaForCausalLM"]),
    "forty-layers-claimed": lambda f: f.config.update(num_hidden_layers=40),
    "vllm-wrapped": _vllm,
    "modern-rope": lambda f: f.config.update(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "mrope": lambda f: f.config.update(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
    "default-ids-as-outputs": lambda f: f.config.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),
    "default-ids-as-boundaries": lambda f: f.config.update(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}
    ),
    "default-ids-unsorted": lambda f: f.config.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [4, 1, 6]}),
    "extra-tensor": lambda f: f.tensors.update({"rotary_emb.inv_freq": torch.ones(4)}),
}


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_head_in_another_dialect_is_the_same(dialect: str, form: str, eagle3: Folder, target: Target) -> None:
    DIALECTS[dialect](eagle3)
    assert _same(eagle3.write(form), target, "eagle3-sharded")


def test_old_and_second_layer_names(four_aux: Folder, target: Target) -> None:
    """SGLang's hidden_norm of later layers is their input_layernorm, also when both are there."""
    tensors = four_aux.tensors
    for name in list(tensors):
        if name.startswith("layers.0.") and "hidden_norm" not in name and "input_layernorm" not in name:
            tensor = tensors[name]
            tensors[name.replace("layers.0.", "layers.1.")] = (
                tensor[:, :32] if "q_proj" in name or "k_proj" in name or "v_proj" in name else tensor
            )
    tensors["layers.1.input_layernorm.weight"] = torch.linspace(0.5, 1.5, 32)
    ids = torch.tensor([5, 17, 3, 60])
    states = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    want = _two_steps(load_head(four_aux.write(), target), ids, states)
    tensors["layers.1.hidden_norm.weight"] = torch.ones(32)
    both = load_head(four_aux.write(), target)
    assert torch.equal(_two_steps(both, ids, states)["logits"], want["logits"])
    assert any("layers.1.hidden_norm.weight" in text for text in both.facts["warnings"])
    tensors["layers.1.hidden_norm.weight"] = tensors.pop("layers.1.input_layernorm.weight")
    only = load_head(four_aux.write(), target)
    assert only.config.num_layers == 2
    assert torch.equal(_two_steps(only, ids, states)["logits"], want["logits"])


@pytest.mark.parametrize("n", [32, 36, 61])
@pytest.mark.parametrize(
    ("ids", "boundaries"),
    [
        (lambda n: None, lambda n: [2, n // 2, n - 3]),
        (lambda n: [1, n // 2 - 1, n - 4], lambda n: [2, n // 2, n - 3]),
        (lambda n: [2, n // 2, n - 3], lambda n: [2, n // 2, n - 3]),
        (lambda n: [n - 12, n - 6, n], lambda n: [n - 12, n - 6, n]),
        (lambda n: [1, 5, n], lambda n: [1, 5, n]),
        (lambda n: [5, 10, n - 1], lambda n: [6, 11, n]),
    ],
)
def test_layer_ids_are_resolved_by_one_rule(n: int, ids: Any, boundaries: Any, eagle3: Folder) -> None:
    """Outputs where the first id is 1, boundaries where it is 2 or the last is n; otherwise outputs, and said so."""
    shape = formats.TargetShape("deep", n, 32, 96, 512)
    if (given := ids(n)) is not None:
        eagle3.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": given}
    plan = formats.read_plan(eagle3.write(), shape, {})
    assert list(plan.config.capture) == boundaries(n)
    assert plan.layers_assumed == (given is None or given[0] == 5)
    if given is not None:
        flipped = formats.read_plan(eagle3.path, shape, {"layer_ids": "boundary"})
        assert list(flipped.config.capture) == given and not flipped.layers_assumed
        eagle3.config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": eagle3.config,
            "eagle_aux_hidden_state_layer_ids": given,
        }
        assert list(formats.read_plan(eagle3.write(), shape, {}).config.capture) == given


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_flags_change_the_output_and_can_be_overridden(flag: str, eagle3: Folder, target: Target) -> None:
    assert not _same(eagle3.write(), target, "eagle3-sharded", **{flag: True})
    eagle3.config[flag] = True
    assert not _same(eagle3.write(), target, "eagle3-sharded")
    assert _same(eagle3.path, target, "eagle3-sharded", **{flag: False})


@pytest.mark.parametrize(
    "override", [{"capture": (1, 2, 3)}, {"logit_scale": 2.0}, {"rope_theta": 500.0}, {"lm_head": "target"}]
)
def test_other_overrides_reach_the_head(override: dict[str, Any], eagle3: Folder, target: Target) -> None:
    if "lm_head" in override:
        with pytest.raises(CheckpointError, match="lm_head"):  # a draft vocabulary of 48 needs an own LM head
            load_head(eagle3.write(), target, **override)
        return
    head = load_head(eagle3.write(), target, **override)
    key, value = next(iter(override.items()))
    assert (head.config.rope["rope_theta"] if key == "rope_theta" else getattr(head.config, key)) == value
    assert head.facts["layers_assumed"] == (key != "capture")


@pytest.mark.parametrize(
    "override",
    [
        {"norm_ouput": True},
        {"capture": []},
        {"capture": (1, 2)},
        {"capture": (1, 2, 11)},
        {"rope_theta": "big"},
        {"d2t": "?"},
        {"head_dim": 0},
    ],
)
def test_an_override_that_does_not_exist_or_fit_is_refused(
    override: dict[str, Any], eagle3: Folder, target: Target
) -> None:
    with pytest.raises(InvalidRequest):
        load_head(eagle3.write(), target, **override)


def test_linear_scaling_keeps_the_reference_base(eagle3: Folder, target: Target) -> None:
    eagle3.config |= {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    head = load_head(eagle3.write(), target)
    assert head.config.rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert any("rope_theta" in text for text in head.facts["warnings"])
    eagle3.config["architectures"] = ["LlamaForCausalLMEagle3"]
    assert load_head(eagle3.write(), target).config.rope["rope_theta"] == 5e5


def test_eagle1_with_extra_norms(eagle1: Folder, target: Target) -> None:
    """speculators' `layernorms`: norms on embedding, layer input and LM-head input, under their old names."""
    renamed = {
        "fc.weight": "fusion_fc.weight",
        "fc.bias": "fusion_fc.bias",
        **{name: name.replace("layers.0.", "transformer.") for name in eagle1.tensors if name.startswith("layers.0.")},
    }
    eagle1.rename(lambda name: renamed.get(name, name))
    generator = torch.Generator().manual_seed(1)
    for name in ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm"):
        eagle1.tensors[f"{name}.weight"] = 1 + torch.rand(32, generator=generator)
    eagle1.config = {
        "speculators_model_type": "eagle",
        "layernorms": True,
        "fusion_bias": True,
        "transformer_layer_config": eagle1.config,
    }
    head = load_head(eagle1.write(), target)
    assert head.config.embedding_norm and head.config.first_norm and head.config.last_norm
    ids, g = torch.tensor([1, 2, 3]), torch.randn(2, 32, generator=generator)
    norm = lambda x, w: torch.nn.functional.rms_norm(x, (32,), w, head.config.rms_norm_eps)  # noqa: E731
    t = eagle1.tensors
    seen: list[torch.Tensor] = []
    hook = head.layers[0].self_attn.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    out = _two_steps(head, ids, g)
    hook.remove()
    e = norm(t["embed_tokens.weight"][ids[1:]], t["embedding_layernorm.weight"])
    x = torch.cat((e, g), -1) @ t["fusion_fc.weight"].T + t["fusion_fc.bias"]
    assert torch.allclose(seen[0][0], norm(x, t["transformer.input_layernorm.weight"]), atol=1e-5)
    read = norm(out["feedback"], t["pre_lm_head_layernorm.weight"])
    assert torch.allclose(out["logits"], read @ target.lm_head.weight.T, atol=1e-4)
    del eagle1.tensors["pre_lm_head_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
        load_head(eagle1.write(), target)


def test_a_bias_that_is_promised_but_absent_is_zero_and_said(eagle1: Folder, target: Target) -> None:
    del eagle1.tensors["fc.bias"]
    head = load_head(eagle1.write(), target)
    assert head.fc.bias is None and any("fc.bias" in text for text in head.facts["warnings"])
    eagle1.config["bias"] = False
    assert not any("fc.bias" in text for text in load_head(eagle1.write(), target).facts["warnings"])


# Damage -----------------------------------------------------------------------------------------------------------

Bend = Callable[[Folder], Any]
W = "midlayer.self_attn.q_proj.weight"


def _drop(name: str) -> Bend:
    return lambda f: f.tensors.pop(name)


def _put(name: str, value: Any) -> Bend:
    return lambda f: f.tensors.update({name: value(f.tensors[name]) if callable(value) else value})


def _say(**values: Any) -> Bend:
    return lambda f: f.config.update(values)


DAMAGE: dict[str, tuple[Bend, tuple[str, ...]]] = {
    "fc": (_drop("fc.weight"), ("fc.weight", "missing")),
    "q_proj": (_drop(W), ("q_proj", "missing")),
    "v_proj": (_drop("midlayer.self_attn.v_proj.weight"), ("v_proj", "missing")),
    "down_proj": (_drop("midlayer.mlp.down_proj.weight"), ("down_proj", "missing")),
    "hidden_norm": (_drop("midlayer.hidden_norm.weight"), ("hidden_norm", "missing")),
    "input_layernorm": (_drop("midlayer.input_layernorm.weight"), ("input_layernorm", "missing")),
    "post_norm": (_drop("midlayer.post_attention_layernorm.weight"), ("post_attention_layernorm", "missing")),
    "lm_head": (_drop("lm_head.weight"), ("lm_head.weight", "missing")),
    "half-a-bias": (_put("midlayer.self_attn.q_proj.bias", torch.zeros(32)), ("k_proj.bias", "missing")),
    "fc_norm-promised": (_say(fc_norm=True), ("fc_norm.0.weight", "missing")),
    "layer-gap": (_put("layers.3.mlp.up_proj.weight", torch.zeros(64, 32)), ("layers.1", "missing")),
    "infinite": (_put("norm.weight", lambda t: t * torch.inf), ("norm.weight", "not finite")),
    "nan-embedding": (_put("embed_tokens.weight", lambda t: t * torch.nan), ("embed_tokens.weight", "not finite")),
    "integers": (_put("norm.weight", lambda t: t.to(torch.int64)), ("norm.weight", "int64")),
    "flat": (_put(W, lambda t: t.flatten()), ("q_proj.weight", "shape")),
    "twice": (_put("model.fc.weight", torch.zeros(32, 96)), ("fc.weight", "model.fc.weight", "ambiguous")),
    "duplicate-ids": (_put("d2t", lambda t: torch.zeros_like(t) - torch.arange(48) // 2), ("d2t",)),
    "float-map": (_put("d2t", lambda t: t.float()), ("d2t", "float32")),
    "quantised": (_put("midlayer.self_attn.q_proj.weight_scale", torch.ones(1)), ("quantised", "weight_scale")),
    "string-for-int": (_say(num_attention_heads="4"), ("num_attention_heads", "'4'")),
    "negative": (_say(num_attention_heads=-4), ("num_attention_heads", "-4")),
    "string-for-flag": (_say(norm_output="yes"), ("norm_output", "'yes'")),
    "odd-eps": (_say(rms_norm_eps=-1.0), ("rms_norm_eps", "-1")),
    "act": (_say(hidden_act="snake"), ("hidden_act", "snake")),
    "layers-as-words": (_say(eagle_config={"eagle_aux_hidden_state_layer_ids": ["low", "mid"]}), ("layer", "low")),
    "layers-twice": (_say(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 1, 4]}), ("layer", "twice")),
    "llama3-incomplete": (_say(rope_scaling={"rope_type": "llama3", "factor": 8.0}), ("rope", "low_freq_factor")),
    "rope-as-text": (_say(rope_scaling="yarn"), ("rope", "yarn")),
    "theta-as-text": (_say(rope_theta="1e6"), ("rope_theta", "1e6")),
    "partial-rope": (_say(partial_rotary_factor=0.5), ("partial_rotary_factor",)),
    "mtp-norm": (_say(eagle_config={"use_mtp_layernorm": True}), ("use_mtp_layernorm",)),
    "medusa": (lambda f: f.tensors.update({"0.0.linear.weight": torch.zeros(32, 32)}), ("Medusa",)),
    "p-eagle": (_put("mask_hidden", torch.zeros(1, 1, 96)), ("P-EAGLE",)),
    "dspark": (_put("markov_w1", torch.zeros(96, 4)), ("DSpark",)),
    "domino": (_put("prefix_gru.weight_ih_l0", torch.zeros(12, 32)), ("Domino",)),
    "mla": (_put("layers.0.self_attn.kv_a_proj_with_mqa.weight", torch.zeros(4, 64)), ("MLA",)),
    "dflash": (_say(architectures=["DFlashDraftModel"]), ("DFlash", "mask_token_id")),
    "other-speculator": (_say(speculators_model_type="mlp"), ("mlp",)),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str, eagle3: Folder, target: Target) -> None:
    bend, words = DAMAGE[case]
    bend(eagle3)
    before = _print(target)
    with pytest.raises(CheckpointError) as refusal:
        load_head(eagle3.write(), target)
    text = str(refusal.value).replace(str(eagle3.path), "")
    for word in words:
        assert word in text, text
    assert _print(target) == before


@pytest.mark.parametrize("name", sorted(Folder(HERE / "checkpoints" / "eagle3-sharded", Path()).tensors))
def test_every_tensor_is_used_or_named(name: str, eagle3: Folder, target: Target) -> None:
    """Change one tensor: the outputs move, or a warning says that it is not used. Leave it out: an error names it, or
    the target's stands in."""
    want, ids, states = _reference("eagle3-sharded", target)
    tensor = eagle3.tensors[name]
    if name not in ("d2t", "t2d"):
        noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) + 0.5
        eagle3.tensors[name] = tensor * noise
        got = _two_steps(load_head(eagle3.write(), target), ids, states)
        assert not torch.allclose(got["logits"], want["logits"], atol=1e-3)
    if name == "t2d":
        eagle3.tensors["t2d"] = ~tensor
        with pytest.raises(CheckpointError, match="t2d"):
            load_head(eagle3.write(), target)
    eagle3.tensors.pop(name)
    if name in ("embed_tokens.weight", "t2d"):
        load_head(eagle3.write(), target)
    else:
        with pytest.raises(CheckpointError) as refusal:
            load_head(eagle3.write(), target)
        assert name in str(refusal.value)


def test_an_unknown_tensor_is_named(eagle3: Folder, target: Target) -> None:
    eagle3.tensors["midlayer.self_attn.sinks"] = torch.zeros(4)
    assert any("midlayer.self_attn.sinks" in text for text in load_head(eagle3.write(), target).facts["warnings"])


class _Runs:
    """A pickle that would leave a file behind if it were ever loaded as code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_a_pickle_that_wants_code_is_refused_without_running_it(eagle3: Folder, target: Target, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    eagle3.tensors["extra"] = _Runs(str(proof))
    eagle3.write("bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load_head(eagle3.path, target)
    (eagle3.path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Runs(str(proof))}))  # not even a zip
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_head(eagle3.path, target)
    assert not proof.exists()


def test_a_head_of_another_width_belongs_to_another_target(eagle3: Folder) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=10,
        vocab_size=96,
    )
    narrow = Target(LlamaForCausalLM(config), name="narrow")
    with pytest.raises(PairMismatch, match="96 values") as refusal:
        load_head(eagle3.write(), narrow)
    assert "16" in str(refusal.value)
    config.vocab_size = 100
    with pytest.raises(PairMismatch, match="96 tokens, narrow has 100"):
        load_head(eagle3.path, Target(LlamaForCausalLM(config), name="narrow"))


def test_values_beyond_the_targets_range_are_refused(eagle3: Folder) -> None:
    half = Target(LlamaForCausalLM(LlamaConfig.from_pretrained(HERE / "checkpoints" / "_target")).half(), name="half")
    assert load_head(eagle3.write(), half).fc.weight.dtype == torch.float16
    eagle3.tensors["fc.weight"] = eagle3.tensors["fc.weight"] * 1e6
    with pytest.raises(CheckpointError, match=r"fc.weight .* beyond the range of torch.float16"):
        load_head(eagle3.write(), half)


# Inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_says_what_will_be_run(eagle3: Folder, target: Target) -> None:
    facts = inspect(eagle3.write(), target)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["method"], facts["variant"], facts["producer"]) == ("eagle3", "EAGLE-3", "SpecForge")
    assert (facts["layers"], facts["layers_assumed"]) == ([2, 5, 7], True)
    assert any("layers assumed" in text for text in facts["warnings"])
    assert (facts["draft_vocab_size"], facts["vocab_size"], facts["coverage"]) == (48, 96, 0.5)
    counted = sum(t.numel() for name, t in eagle3.tensors.items() if name not in ("d2t", "t2d"))
    assert facts["parameters"] == counted and facts["memory_bytes"] == 4 * counted
    assert (facts["context"], facts["target_context"]) == (512, 512)
    alone = inspect(eagle3.path)
    assert (alone["layers"], alone["layers_assumed"], alone["target_context"]) == (["2", "n // 2", "n - 3"], True, None)
    eagle3.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    assert inspect(eagle3.write())["layers"] == [2, 4, 7]


def test_inspect_knows_a_language_model(target: Target) -> None:
    folder = HERE / "checkpoints" / "_target"
    facts = inspect(folder, target)
    assert (facts["method"], facts["vocab_size"]) == ("chain", 96)
    assert facts["parameters"] == sum(p.numel() for p in target.model.parameters())
    with pytest.raises(CheckpointError, match="whole language model"):
        load_head(folder, target)
    other = LlamaConfig(vocab_size=50, hidden_size=32, num_attention_heads=4)
    assert re.search(r"96 tokens, .* 50", inspect(folder, other)["warnings"][0])


def test_inspect_on_the_command_line(eagle3: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    checkpoints.configure(parser)
    arguments = [str(eagle3.write()), "--target", str(HERE / "checkpoints" / "_target"), "--set", "capture=[1,2,10]"]
    facts = checkpoints.run(parser.parse_args(arguments))
    table = capsys.readouterr().out
    assert facts["layers"] == [1, 2, 10] and not facts["layers_assumed"]
    assert "1, 2, 10 (given)" in table and "48 of 96 tokens (50.0%)" in table
    with pytest.raises(InvalidRequest, match="KEY=VALUE"):
        checkpoints.run(parser.parse_args([str(eagle3.path), "--set", "capture"]))


def test_memory_is_known_before_loading(target: Target, eagle3: Folder) -> None:
    head = load_head(eagle3.write(), target)
    sizes = estimate_memory(target.model.config, head.config, tokens=100, dtype=torch.float32)
    assert sizes["target"] == 4 * sum(p.numel() for p in target.model.parameters())
    assert sizes["head"] == 4 * sum(p.numel() for name, p in head.named_parameters() if name != "embed_tokens.weight")
    assert sizes["cache"] == 4 * 100 * 2 * (10 + 1) * 2 * 8
    assert sizes["total"] == sizes["target"] + sizes["head"] + sizes["cache"]


# Self-test --------------------------------------------------------------------------------------------------------


def test_the_self_test_sees_a_wrong_layer() -> None:
    """A head that repeats the target's last state agrees with it; read some layers lower, it does not."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=4,
        vocab_size=40, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # a target that knows the next token from the present one alone, in its last layer only
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.normal_(0, 1)
    target = Target(model)
    head = EagleHead(
        HeadConfig(
            family="eagle3", hidden_size=16, target_hidden_size=16, intermediate_size=8, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, vocab_size=40, draft_vocab_size=40, capture=(4,),
            max_position_embeddings=64,
        )
    )  # fmt: skip
    head.borrow(target.embedding, target.lm_head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.weight.copy_(torch.eye(16))
        head.norm.weight.copy_(model.model.norm.weight)
    ids = torch.randint(40, (30,)).tolist()
    # The head repeats the state of token t, so it predicts the target's choice after t; shift by repeating tokens.
    ids = [token for token in ids for _ in range(2)][:40]
    right = self_test(head, target, ids)
    head.config = HeadConfig(
        **{**{f: getattr(head.config, f) for f in head.config.__dataclass_fields__}, "capture": (1,)}
    )
    wrong = self_test(head, target, ids)
    assert right >= 0.5 > wrong
    with pytest.raises(InvalidRequest, match="3 tokens"):
        self_test(head, target, [1, 2])
    with pytest.raises(InvalidRequest, match="context"):
        self_test(head, target, [1] * 65)


# Writing ----------------------------------------------------------------------------------------------------------

SAVED = [p for p in _folders("checkpoints") if _expected(p.values[0])["method"] in ("eagle1", "eagle3")]


@pytest.mark.parametrize("form", ["safeailab", "speculators"])
@pytest.mark.parametrize("folder", SAVED)
def test_a_saved_head_comes_back(folder: Path, form: Any, targets: Callable[[Path], Target], tmp_path: Path) -> None:
    target = targets(folder.parents[1])
    head = load_head(folder, target)
    if form == "speculators" and (head.config.family == "eagle1" or not head.config.fc):
        with pytest.raises(InvalidRequest, match="safeailab"):
            save_head(head, tmp_path, form)
        return
    save_head(head, tmp_path, form, verifier="golden", notes={"steps": 3})
    again = load_head(tmp_path, target)
    assert again.config == head.config
    inputs = load_file(folder / "inputs.safetensors")
    states = inputs["aux"] if "aux" in inputs else inputs["hidden"]
    want, got = (_two_steps(h, inputs["ids"], states) for h in (head, again))
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["notes"] == {"steps": 3}
    assert not again.facts["layers_assumed"] and again.facts["producer"] != "unknown"


@pytest.mark.parametrize("form", ["safeailab", "speculators"])
def test_other_tools_can_read_a_saved_head(form: Any, eagle3: Folder, target: Target, tmp_path: Path) -> None:
    """SafeAILab's names are those of the file that was loaded, value for value; speculators' name the layer apart."""
    save_head(load_head(eagle3.write(), target), tmp_path / "saved", form)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    layer = "midlayer." if form == "safeailab" else "layers.0."
    expected = {name.replace("midlayer.", layer): tensor for name, tensor in eagle3.tensors.items()}
    assert set(saved) == set(expected)
    assert all(torch.equal(saved[name], expected[name]) and saved[name].dtype == expected[name].dtype for name in saved)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    inner = config if form == "safeailab" else config["transformer_layer_config"]
    kept = ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    assert all(inner[key] == eagle3.config[key] for key in kept)
    assert config["draft_vocab_size"] == 48 and config["norm_before_residual"] is False


@pytest.mark.parametrize("capture", [(0, 1, 2), (2, 5, 7), (3, 5, 9), (3, 5, 10), (2, 2, 1), (1, 3, 10), (7, 5, 2)])
@pytest.mark.parametrize("form", ["safeailab", "speculators"])
def test_any_capture_survives_saving(
    capture: tuple[int, ...], form: Any, eagle3: Folder, target: Target, tmp_path: Path
) -> None:
    head = load_head(eagle3.write(), target, capture=capture)
    save_head(head, tmp_path / "saved", form)
    assert load_head(tmp_path / "saved", target).config.capture == capture


def test_half_precision_on_disk(eagle3: Folder, target: Target, tmp_path: Path) -> None:
    head = load_head(eagle3.write(), target)
    save_head(head, tmp_path / "saved", dtype=torch.bfloat16)
    assert inspect(tmp_path / "saved", target)["dtype"] == "bfloat16"
    assert torch.equal(load_head(tmp_path / "saved", target).fc.weight, head.fc.weight.bfloat16().float())
    with pytest.raises(InvalidRequest, match="form"):
        save_head(head, tmp_path / "saved", "gguf")  # type: ignore[arg-type]


# Sources ----------------------------------------------------------------------------------------------------------


httpx = importlib.import_module(hub_errors.HTTPError.__module__.split(".")[0])  # the one the hub's client is built on


def _answer(kind: Any, status: int) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/api/models/owner/name")
    return kind("no", response=httpx.Response(status, request=request))


REFUSALS: dict[str, tuple[Exception, str]] = {
    "401": (_answer(hub_errors.RepositoryNotFoundError, 401), "log in"),
    "403": (_answer(hub_errors.GatedRepoError, 403), "accept its terms"),
    "404": (_answer(hub_errors.RepositoryNotFoundError, 404), "check the spelling"),
    "404-revision": (_answer(hub_errors.RevisionNotFoundError, 404), "revision"),
    "500": (_answer(hub_errors.HfHubHTTPError, 500), "try again later"),
    "unreachable": (httpx.ConnectError("no route"), "cannot be reached"),
    "timeout": (httpx.ReadTimeout("slow"), "cannot be reached"),
    "offline": (hub_errors.OfflineModeIsEnabled("off"), "cannot be reached"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_refusal_of_the_hub_has_its_own_remedy(
    case: str, monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path
) -> None:
    error, remedy = REFUSALS[case]

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=remedy) as refusal:
        load_head("owner/name", target)
    assert "owner/name" in str(refusal.value)
    others = {text for key, (_, text) in REFUSALS.items() if text != remedy}
    assert not any(text in str(refusal.value) for text in others if case[:3] != "404")


@pytest.mark.parametrize(
    ("name", "words"),
    [("./no/such", "no folder"), ("a/b/c", "no folder"), ("", "no folder"), ("~/nothing here", "no folder")],
)
def test_a_path_that_is_not_there(name: str, words: str, target: Target) -> None:
    with pytest.raises(ModelNotFound, match=words):
        load_head(name, target)


def test_a_file_is_no_folder(eagle3: Folder, target: Target) -> None:
    with pytest.raises(ModelNotFound, match="is a file"):
        load_head(eagle3.write() / "model.safetensors", target)


def test_one_set_of_weights_is_fetched(monkeypatch: pytest.MonkeyPatch, eagle3: Folder, target: Target) -> None:
    """Of a repository with weights in two formats, configuration and safetensors are asked for, and no code."""
    files = [
        "config.json",
        "modeling_x.py",
        "pytorch_model.bin",
        "model.safetensors",
        "onnx/model.onnx",
        "README.md",
        "tokenizer.json",
    ]
    asked: list[Any] = []

    info = argparse.Namespace(siblings=[argparse.Namespace(rfilename=name) for name in files])

    def download(repo: str, **options: Any) -> str:
        asked.append((repo, options))
        return str(eagle3.write())

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_head("owner/name@v1", target).config.family == "eagle3"
    assert asked == [
        ("owner/name", {"revision": "v1", "allow_patterns": ["config.json", "tokenizer.json", "model.safetensors"]})
    ]
    shards = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sources._wanted([*shards, "pytorch_model.bin"]) == shards
