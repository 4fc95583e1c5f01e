"""Whatever a checkpoint folder holds, loading it gives a head or one plain sentence, never another exception."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle_core.checkpoints import OVERRIDES, inspect, load_head
from eagle_core.errors import EagleError
from eagle_core.heads import EagleHead, HeadCache
from eagle_core.target import Target

GOLDENS = Path(__file__).parent / "goldens" / "checkpoints"
ORIGINS = (
    "eagle3-sharded",
    "eagle31-four-aux",
    "speculators-eagle3-qwen3",
    "safeailab-eagle1-fcbias",
    "modelopt-eagle3",
)

VALUES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            3,
            7,
            1 << 31,
            1 << 62,
            -(1 << 40),
            0.0,
            0.5,
            -2.5,
            1e300,
            float("inf"),
            float("nan"),
        ]
    ),
    st.sampled_from(["", "4", "banana", "llama3", "yarn", "longrope", "silu", "eagle", "eagle3", "../../etc", "\n"]),
    st.lists(st.one_of(st.integers(-3, 12), st.text(max_size=3), st.none(), st.booleans()), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "short_factor", "long_factor", "beta_fast"]),
        st.one_of(
            st.sampled_from(["yarn", "linear", "dynamic", "llama3", "longrope", [1.0] * 4]), st.floats(), st.integers()
        ),
        max_size=4,
    ),
)
KEYS = [
    "architectures",
    "attention_bias",
    "bias",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "fc_norm",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layernorms",
    "logit_scale",
    "max_position_embeddings",
    "max_sequence_length",
    "mlp_bias",
    "model",
    "model_type",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "num_attention_heads",
    "num_aux_hidden_states",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "producer",
    "qkv_bias",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "speculators_config",
    "speculators_model_type",
    "target_hidden_size",
    "tie_word_embeddings",
    "transformer_layer_config",
    "use_aux_hidden_state",
    "use_aux_norm",
    "vocab_size",
    "dflash_config",
]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 8, 16, 32, 33, 48, 64, 96, 128]), max_size=3)
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(GOLDENS / "_target", dtype=torch.float32), name="golden")


def _tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return values.to(dtype)


def _use(path: Path, target: Target, overrides: dict[str, Any] | None = None) -> None:
    """Load it; a head that comes out must draft, and everything else must be an EagleError of one line."""
    for alone in (False, True):
        try:
            if alone:
                facts = inspect(path, **overrides or {})
                json.dumps(facts, allow_nan=False)
                continue
            head = load_head(path, target, **overrides or {})
        except EagleError as error:
            assert str(error).strip()
        else:
            assert isinstance(head, EagleHead)
            config = head.config
            cache = HeadCache(config, 4, torch.device("cpu"), torch.float32)
            with torch.inference_mode():
                g = head.fuse(torch.randn(1, 3, config.feature_size))
                feedback, read = head(torch.tensor([[1, 2, 3]]), g, torch.arange(3)[None], cache)
                logits = head.logits(read)
            assert feedback.shape == (1, 3, config.hidden_size) and logits.shape == (1, 3, config.draft_vocab_size)
            assert head.draft_to_target is None or len(head.draft_to_target) == config.draft_vocab_size


def _rename(names: list[str], data: st.DataObject) -> tuple[str, str]:
    old = data.draw(st.sampled_from(names))
    new = data.draw(
        st.one_of(
            st.sampled_from(names),
            st.sampled_from(
                ["model." + old, "midlayer.x", "layers.9.mlp.up_proj.weight", "0.0.linear.weight", "mask_hidden"]
            ),
            st.text(min_size=1, max_size=8),
        )
    )
    return old, new


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bent_checkpoints_give_a_head_or_a_sentence(data: st.DataObject, target: Target) -> None:
    origin = GOLDENS / data.draw(st.sampled_from(ORIGINS))
    config = json.loads((origin / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in origin.glob("model*.safetensors"):
        tensors |= load_file(file)
    for _ in range(data.draw(st.integers(0, 3))):
        place = config
        inner = [value for value in config.values() if isinstance(value, dict)]
        if inner and data.draw(st.booleans()):
            place = data.draw(st.sampled_from(inner))
        key = data.draw(st.sampled_from([*KEYS, *place]))
        if data.draw(st.integers(0, 4)) == 0:
            place.pop(key, None)
        else:
            place[key] = data.draw(VALUES)
    for _ in range(data.draw(st.integers(0, 2))):
        names = sorted(tensors)
        what = data.draw(st.sampled_from(["drop", "rename", "reshape", "dtype", "poison", "extra", "ids"]))
        name = data.draw(st.sampled_from(names))
        if what == "drop":
            del tensors[name]
        elif what == "rename":
            old, new = _rename(names, data)
            tensors[new] = tensors.pop(old)
        elif what == "reshape":
            tensors[name] = _tensor(data.draw(SHAPES), tensors[name].dtype, 0)
        elif what == "dtype":
            tensors[name] = tensors[name].float().to(data.draw(st.sampled_from(DTYPES)))
        elif what == "poison" and tensors[name].is_floating_point() and tensors[name].numel():
            poison = data.draw(st.sampled_from([float("nan"), float("inf"), 1e38]))
            tensors[name] = tensors[name].clone()
            tensors[name].view(-1)[0] = poison
        elif what == "extra":
            extra = data.draw(
                st.sampled_from(["fc.bias", "fc_norm.0.weight", "input_norm.weight", "d2t", "t2d", "norm.bias", "x"])
            )
            tensors[extra] = _tensor(data.draw(SHAPES), data.draw(st.sampled_from(DTYPES)), 1)
        elif what == "ids" and "d2t" in tensors:
            tensors["d2t"] = torch.randint(-200, 200, (data.draw(st.sampled_from([0, 1, 47, 48, 96])),))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        (path / "config.json").write_text(json.dumps(config))
        if data.draw(st.booleans()):
            save_file({k: v.clone().contiguous() for k, v in tensors.items()}, path / "model.safetensors")
        else:
            torch.save(tensors, path / "pytorch_model.bin")
        _use(path, target)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_give_a_sentence(data: st.DataObject, target: Target) -> None:
    """Any byte of any file changed, cut or replaced."""
    origin = GOLDENS / data.draw(st.sampled_from(["eagle3-sharded", "safeailab-eagle1-nobias-bin"]))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "head"
        shutil.copytree(origin, path)
        file = data.draw(
            st.sampled_from(sorted(f for f in path.iterdir() if f.name not in ("expected.json", "inputs.safetensors")))
        )
        content = bytearray(file.read_bytes())
        what = data.draw(st.sampled_from(["flip", "cut", "noise", "empty", "folder"]))
        if what == "flip":
            for _ in range(data.draw(st.integers(1, 8))):
                content[data.draw(st.integers(0, min(len(content) - 1, 3000)))] = data.draw(st.integers(0, 255))
        elif what == "cut":
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        elif what == "noise":
            content = bytearray(data.draw(st.binary(max_size=200)))
        elif what == "empty":
            content = bytearray()
        if what == "folder":
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(content)
        _use(path, target)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(overrides=st.dictionaries(st.sampled_from([*OVERRIDES, "nonsense"]), VALUES, max_size=3))
def test_any_override_gives_a_head_or_a_sentence(overrides: dict[str, Any], target: Target) -> None:
    _use(GOLDENS / "eagle3-sharded", target, overrides)
