"""Where a head begins: with what the target already knows.

    fc            near the identity on the last captured state (EAGLE-1/2: on the feature)
    attention     the target's last layer on the feature's half of its input; small noise on the embedding's half
    MLP, norms    the target's last layer's and its final norm
    LM head       the target's rows for the draft vocabulary

Parts that a target names or shapes differently begin as small noise, and `initial_head` says which. On the default
target this beginning reaches in one pass what noise reaches in three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagle_core.heads import POST_NORM, EagleHead, HeadConfig, default_capture

__all__ = ["draft_vocabulary", "initial_head"]


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` ids counted most often, ascending (ties: the smaller id, which BPE merged earlier).

    counts: [V]. Returns [size] int64.
    """
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def _find(module: Any, path: str) -> Any:
    """The part of a module at a dotted path, None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def initial_head(
    family: str,
    target: Any,
    *,
    capture: Sequence[int] | None = None,
    draft_ids: Tensor | None = None,
    seed: int = 0,
    noise: float = 0.02,
) -> tuple[EagleHead, list[str]]:
    """A head to train, attached to its target.

    Args:
        family: "eagle1" (for EAGLE-1 and EAGLE-2) or "eagle3".
        capture: boundaries an EAGLE-3 head reads; default that of every implementation.
        draft_ids: [Vd] ascending target ids an EAGLE-3 head can draft.
        seed: of the noise.
        noise: standard deviation of parts that begin as noise.

    Returns the head in float32 and the names of parts that begin as noise for want of a counterpart.
    """
    config = target.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    plain = rope.get("rope_type") == "default" and "rope_theta" in rope
    fused = family == "eagle3"
    shape = HeadConfig(
        family="eagle3" if fused else "eagle1",
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(draft_ids) if draft_ids is not None else target.vocab_size,
        capture=tuple(capture or default_capture(target.num_layers)) if fused else (POST_NORM,),
        max_position_embeddings=min(2048, target.context or 2048),
        rms_norm_eps=float(f"{getattr(config, 'rms_norm_eps', 1e-6):.6g}"),
        rope={"rope_type": "default", "rope_theta": float(rope["rope_theta"])} if plain
        else {"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    head = EagleHead(shape, own_lm_head=fused, draft_to_target=draft_ids if fused else None)
    random = torch.Generator().manual_seed(seed)
    unmatched: list[str] = []
    with torch.no_grad():
        for p in head.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=random) * noise)

        def start(name: str, parameter: Tensor, source: Any) -> None:
            weight = getattr(source, "weight", None)
            if weight is None or weight.shape != parameter.shape:
                unmatched.append(name)
            else:
                parameter.copy_(weight.detach().float())

        layers = _find(target.model, "model.layers")
        last = layers[-1] if layers is not None else nn.Module()
        mine, h = head.layers[0], target.hidden_size
        assert isinstance(mine, nn.Module)
        for name in ("gate_proj", "up_proj", "down_proj"):
            start(f"mlp.{name}", _find(mine, f"mlp.{name}.weight"), _find(last, f"mlp.{name}"))
        head.fc.weight[:, -h:] += torch.eye(h)
        if fused:
            assert draft_ids is not None and head.lm_head is not None
            head.lm_head.weight.copy_(target.lm_head.weight.detach()[draft_ids.to(target.device)].float())
            start("norm", head.norm.weight, _find(target.model, "model.norm"))
            start("hidden_norm", _find(mine, "hidden_norm.weight"), _find(last, "input_layernorm"))
            start("post_attention_layernorm", _find(mine, "post_attention_layernorm.weight"),
                  _find(last, "post_attention_layernorm"))  # fmt: skip
            for name in ("q_proj", "k_proj", "v_proj"):
                start(
                    f"self_attn.{name}",
                    _find(mine, f"self_attn.{name}.weight")[:, h:],
                    _find(last, f"self_attn.{name}"),
                )
    head.to(target.device)
    head.borrow(target.embedding, target.lm_head)
    return head, unmatched
