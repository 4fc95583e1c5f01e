"""Shared ground: tiny random models of many families, and drafters that try to break things."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may ask a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from eagle_core.target import Target

HERE = Path(__file__).parent
VOCAB = 61


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


def goldens() -> Path:
    """The whole set of reference numbers where it lies beside the project, else the part that travels with it."""
    for folder in (os.environ.get("EAGLE_GOLDENS"), HERE.parent.parent / "shared" / "goldens"):
        if folder and Path(folder, "MANIFEST.json").exists():
            return Path(folder)
    return HERE / "goldens"


def numbers(file: Path) -> Any:
    """The reference numbers of a JSON file; those that travel with the project are compressed."""
    packed = file.with_name(file.name + ".gz")
    return json.loads(gzip.decompress(packed.read_bytes()) if packed.exists() else file.read_bytes())


def _config(family: str) -> Any:
    from transformers import AutoConfig

    small = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    extra: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {},
        "qwen3": {"head_dim": 8},
        "mistral": {"sliding_window": 7},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen2_moe": {**moe, "shared_expert_intermediate_size": 24},
        "qwen3_moe": {**moe, "head_dim": 8},
        "gemma3_text": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "gpt2": {},
        "gpt_oss": {
            "head_dim": 8,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    }
    if family == "gpt2":
        small = {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 256,
            "initializer_range": 0.4,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    return AutoConfig.for_model(family, **(small | extra[family]))


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "gemma3_text", "gpt2", "gpt_oss")


@cache
def tiny_model(family: str, seed: int = 0) -> Any:
    """A random float32 causal LM with large weights, so that its argmax is far from ties."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = _config(family)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if family == "gpt_oss" else "sdpa", dtype=torch.float32
    )
    with torch.no_grad():  # some families initialise parts at zero or one; noise makes every part count
        for parameter in model.parameters():
            if parameter.std() < 0.1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def tiny_target(family: str = "llama", seed: int = 0) -> Target:
    return Target(tiny_model(family, seed), name=f"tiny-{family}")


@pytest.fixture
def target() -> Target:
    return tiny_target()


def greedy(model: Any, prompt: list[int], count: int, eos: list[int] | None = None) -> list[int]:
    """What transformers' own generate answers."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@cache
def eagle_head(family: str, target_family: str = "llama", draft_vocab: int = VOCAB, seed: int = 0) -> Any:
    """A random head for `tiny_target(target_family)`."""
    from eagle_core.heads import POST_NORM, EagleHead, HeadConfig

    target = tiny_target(target_family)
    torch.manual_seed(seed + 1)
    config = HeadConfig(
        family=family,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        capture=(POST_NORM,) if family == "eagle1" else (1, 2, 3),
        max_position_embeddings=256,
    )
    table = None if draft_vocab == VOCAB else torch.randperm(VOCAB)[:draft_vocab].sort().values
    head = EagleHead(config, own_lm_head=family == "eagle3", draft_to_target=table)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    head.borrow(target.embedding, target.lm_head)
    return head.eval()


def drafter_for(method: str, target: Target, target_family: str = "llama") -> Any:
    """A drafter of any method for a tiny target."""
    from eagle_core.drafters import METHODS

    part: Any = None
    if METHODS[method].needs == "draft model":
        part = tiny_target("qwen2", 5)
    elif METHODS[method].needs == "eagle1 head":
        part = eagle_head("eagle1", target_family)
    elif METHODS[method].needs == "eagle3 head":
        part = eagle_head("eagle3", target_family, 37)
    return METHODS[method].make(part, target)


@pytest.fixture(scope="session")
def every_method() -> Callable[[Target], dict[str, Any]]:
    from eagle_core.drafters import METHODS

    return lambda target: {name: drafter_for(name, target) for name in METHODS}
