"""The trained draft networks: one class for EAGLE-1/2 and EAGLE-3 heads, used by inference and training alike.

A head reads *pairs*. Pair t joins what the target knew at token t (its feature) with the token that came
next, x_{t+1}, and predicts x_{t+2}; its rotary position is t. Where the target has not been yet, the head's own
output takes the feature's place.

    EAGLE-1/2   x = fc([emb ; g])                      g = the target's state after its final norm
                x = x + attention(x);  x = x + mlp(norm(x));   logits = target's LM head(x);   feedback = x
    EAGLE-3     g = fc([low ; mid ; high])             states between the target's layers, raw
                x = g + attention([norm(emb) ; norm(g)]);  x = x + mlp(norm(x))
                logits = LM head(norm(x)) over a draft vocabulary;   feedback = x, before the norm

The attention *context* is an argument (`attend`), not part of the head: drafting passes a cache with scratch
rows behind it (`HeadCache`), training passes the several-step attention of training-time test. Weights and
arithmetic are shared, so what is trained is what is drafted.

Source: EAGLE §4.1, EAGLE-3 §3.1; `cnets1.py` and `cnets.py` of the reference implementation; the flags of
`HeadConfig` are those that public checkpoints set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

__all__ = ["POST_NORM", "Attend", "EagleHead", "HeadCache", "HeadConfig", "default_capture"]

POST_NORM = -1
"""In a capture tuple: the state after the target's final norm, which its LM head reads. Other entries are
boundaries: j means the residual stream before layer j, and n (the number of layers) the state after the last
layer, before the final norm."""


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """The boundaries every EAGLE-3 implementation reads when a checkpoint names none: 2, n // 2, n − 3."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and flags of a head. Everything that tensors can tell was read from tensors (`checkpoints`).

    `capture` is what the target must hand over, in this order, concatenated. `draft_vocab_size` is the width of
    the head's logits. `rope` holds transformers' `rope_parameters`. The flags' meaning is that of the checkpoints:

    norm_before_residual  the residual of layer 0 is the normed feature
    norm_before_fc        one RMSNorm over the concatenated features
    fc_norm               one RMSNorm for each feature
    norm_output           the feedback is the normed output (EAGLE-3.1)
    qk_norm               RMSNorm on queries and keys (Qwen3-style heads)
    embedding_norm        EAGLE-1 with a norm on the embedding (HASS-style)
    first_norm            layer 0 norms what it reads; by default EAGLE-3 heads do and EAGLE-1 heads do not
    last_norm             what the LM head reads is normed; same defaults
    """

    family: Literal["eagle1", "eagle3"]
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    capture: tuple[int, ...]
    num_layers: int = 1
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    fc: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_norm: bool = False
    first_norm: bool | None = None
    last_norm: bool | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("first_norm", "last_norm"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.family == "eagle3")

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features the target hands over."""
        return len(self.capture) * self.target_hidden_size


class Attend(Protocol):
    """The attention context of one forward: stores this layer's new keys and values, attends, returns the mix."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [B, heads, T, D]; k, v: [B, kv_heads, T, D], all rotated. Returns [B, heads, T, D]."""


class HeadCache:
    """Keys and values of the committed pairs, with room for one tree's scratch rows behind them.

    Rows `[0, length)` come from true features and stay; rows written after them belong to the tree being
    drafted and are overwritten by the next extend. The caller sets `mask` before each forward.
    """

    def __init__(self, config: HeadConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, 2, 1, config.num_key_value_heads, capacity, config.head_dim)
        self.rows = torch.zeros(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.length = 0  # committed pairs
        self.start = 0  # first row that the forward in progress writes
        self.mask: Tensor | None = None  # [T, start + T] bool; None is causal

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        end = self.start + q.shape[2]
        assert end <= self.capacity, f"head cache of {self.capacity} rows asked to hold {end}"
        keys, values = self.rows[layer]
        keys[:, :, self.start : end] = k
        values[:, :, self.start : end] = v
        mask = self.mask
        if mask is None:
            mask = torch.ones(end - self.start, end, dtype=torch.bool, device=q.device).tril(self.start)
        return F.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width = config.hidden_size * (2 if config.family == "eagle3" and layer == 0 else 1)
        kv = config.num_key_value_heads * config.head_dim
        out = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(width, out, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(out, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        return self.o_proj(attend(self.layer, q, k, v).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """A pre-norm decoder layer; layer 0 takes its input as its family does (module docstring)."""

    def __init__(self, config: HeadConfig, layer: int) -> None:
        super().__init__()
        norm = lambda: LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # noqa: E731
        self.fused = config.family == "eagle3" and layer == 0
        self.norm_before_residual = config.norm_before_residual
        if layer > 0 or config.first_norm:
            self.input_layernorm = norm()
        if self.fused:
            self.hidden_norm = norm()
        self.self_attn = _Attention(config, layer)
        self.post_attention_layernorm = norm()
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor, embedding: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        if self.fused:
            normed = self.hidden_norm(x)
            if hasattr(self, "input_layernorm"):
                embedding = self.input_layernorm(embedding)
            a = torch.cat((embedding, normed), -1)
            x = normed if self.norm_before_residual else x
        else:
            a = self.input_layernorm(x) if hasattr(self, "input_layernorm") else x
        x = x + self.self_attn(a, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """A draft head. Parameter names are the public checkpoints' (`midlayer` is `layers.0`).

    The embedding and the LM head are the checkpoint's own where it brings them and the target's otherwise; the
    target's are borrowed by `borrow` and are not part of `state_dict`.

    Args:
        config: shape and flags.
        own_embedding: the head has its own token embedding, [V, H].
        own_lm_head: the head has its own LM head, [Vd, H].
        draft_to_target: [Vd] int64, target id of every draft id; None where the vocabularies are the same.

    Attributes:
        facts: what `checkpoints.inspect` says of the checkpoint it came from; empty for a head made otherwise.
    """

    draft_to_target: Tensor | None
    facts: dict[str, Any]

    def __init__(
        self,
        config: HeadConfig,
        *,
        own_embedding: bool = False,
        own_lm_head: bool = False,
        draft_to_target: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        norm = lambda width: LlamaRMSNorm(width, eps=config.rms_norm_eps)  # noqa: E731
        h, ht, n_features = config.hidden_size, config.target_hidden_size, len(config.capture)
        if config.family == "eagle1":
            self.fc = nn.Linear(h + ht, h, bias=config.fc_bias)
            if config.embedding_norm:
                self.embedding_layernorm = norm(h)
        else:
            if config.fc:
                self.fc = nn.Linear(n_features * ht, h, bias=config.fc_bias)
            if config.norm_before_fc:
                self.input_norm = norm(n_features * ht)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(norm(ht) for _ in range(n_features))
        if config.last_norm:
            self.norm = norm(h)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, h) if own_embedding else None
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False) if own_lm_head else None
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)
        rope = LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope),
        )
        with torch.device("cpu"):  # frequencies are computed, not loaded: also for a head laid out on "meta"
            self.rotary = LlamaRotaryEmbedding(rope)
        self.facts = {}
        self._borrowed: dict[str, Tensor | nn.Module] = {}

    def borrow(self, embedding: Tensor, lm_head: nn.Module) -> None:
        """Lend the target's token embedding [V, H] and LM head (a module H → V) for what the head lacks."""
        self._borrowed = {"embedding": embedding, "lm_head": lm_head}

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: [...] int64 target ids. Returns [..., H]."""
        weight = self._borrowed["embedding"] if self.embed_tokens is None else self.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return F.embedding(tokens, weight)

    def fuse(self, features: Tensor) -> Tensor:
        """What the target knew, made fit for the head. features: [..., feature_size]. Returns g: [..., H]."""
        if self.config.family == "eagle1":
            return features
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features) if self.config.fc else features

    def forward(self, tokens: Tensor, g: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One drafter forward over T pairs.

        Args:
            tokens: [B, T] int64, the pairs' tokens.
            g: [B, T, H], `fuse`d target features, or this method's own feedback for drafted pairs.
            positions: [B, T] int64, rotary positions: the index of the pair.
            attend: the attention context.

        Returns:
            feedback [B, T, H], the g of a next drafted pair, and read [B, T, H], what `logits` reads.
        """
        embedding = self.embed(tokens).to(g.dtype)
        rotary = self.rotary(g, positions)
        x = g
        if self.config.family == "eagle1":
            if self.config.embedding_norm:
                embedding = self.embedding_layernorm(embedding)
            x = self.fc(torch.cat((embedding, g), -1))
        for layer in self.layers:
            x = layer(x, embedding, rotary, attend)
        read = self.norm(x) if hasattr(self, "norm") else x
        return (read if self.config.norm_output else x), read

    def logits(self, read: Tensor) -> Tensor:
        """read: [..., H]. Returns [..., Vd] over the draft vocabulary, in the dtype of read."""
        lm_head = self._borrowed["lm_head"] if self.lm_head is None else self.lm_head
        assert isinstance(lm_head, nn.Module) and isinstance(lm_head.weight, Tensor)
        out = lm_head(read.to(lm_head.weight.dtype)).to(read)
        return out if self.config.logit_scale == 1.0 else out * self.config.logit_scale
