"""Where a head begins: with what can be known before any training.

What a head has to say next is, to a good part, a linear function of what it reads; so its first weights are the
least-squares solution over some of the corpus (`regress`), from which training goes on:

EAGLE-1/2   fc([embedding ; feature]) is the best linear guess of the next feature; the layer begins silent
EAGLE-3     g + attention is that guess of the target's next last state. fc carries the features' part. The
            embedding's part goes through the values of one query head of each group, which begin by looking at their
            own row (queries and keys are the same random projection of the embedding); the other heads and the MLP
            begin silent. The LM head is the target's rows of the draft vocabulary, under the target's final norm.

On the default target this alone agrees with the target as often as a head begun from noise after 90,000 tokens.
Parts that are not silent begin as the target's last layer where that has the same shapes, else as small noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagle_core.heads import POST_NORM, EagleHead, HeadConfig, default_capture
from eagle_core.training.losses import Batch

__all__ = ["draft_vocabulary", "initial_head", "regress"]


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
    scale: float = 1.0,
) -> tuple[EagleHead, list[str]]:
    """A head to train, attached to its target.

    Args:
        family: "eagle1" (for EAGLE-1 and EAGLE-2) or "eagle3".
        capture: boundaries an EAGLE-3 head reads; default that of every implementation.
        draft_ids: [Vd] ascending target ids an EAGLE-3 head can draft.
        seed: of the noise.
        noise: standard deviation of parts that begin as noise.
        scale: the factor between what the target's LM head says and its logits.

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
        logit_scale=1.0 if fused else scale,
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
        mine: Any = head.layers[0]
        h = target.hidden_size
        head.fc.weight[:, -h:] += torch.eye(h)
        mine.self_attn.o_proj.weight.zero_()
        mine.mlp.down_proj.weight.zero_()
        for name in ("gate_proj", "up_proj"):
            start(f"mlp.{name}", _find(mine, f"mlp.{name}.weight"), _find(last, f"mlp.{name}"))
        if fused:
            assert draft_ids is not None and head.lm_head is not None
            rows = target.lm_head.weight.detach()  # may be on another device than the embedding
            head.lm_head.weight.copy_(rows[draft_ids.to(rows.device)].float() * scale)
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


@torch.no_grad()
def regress(head: EagleHead, batches: Iterable[Batch]) -> None:
    """Set a fresh head's weights to the least-squares guess described above.

    batches: one conversation in a row; their first pair is left out, because many targets mark the first token with
    a state of another size.
    """
    layer: Any = head.layers[0]
    fused = head.config.family == "eagle3"
    samples = [
        (head.embed(tokens[2:]).float(), features[1:-1], final[2:])
        for batch in batches
        for tokens, features, final in zip(batch.tokens, batch.features, batch.final, strict=True)
    ]
    embedding, features, goal = (torch.cat(parts) for parts in zip(*samples, strict=True))
    if fused:
        embedding = layer.input_layernorm(embedding)
        weight = head.norm.weight
        size = (goal / weight).pow(2).mean(-1).sqrt()
        if not 0.95 < float(size.median()) < 1.05:  # not an RMS norm with these weights: keep its overall size
            weight.fill_(float(goal.pow(2).mean().sqrt()))
        # Any multiple will do under a norm; the size of the last feature keeps fc near the size of the identity.
        goal = goal / weight * features[:, -head.config.target_hidden_size :].pow(2).mean().sqrt()
    order = (features, embedding) if fused else (embedding, features)
    x = torch.cat(order, -1)
    home = torch.device("cpu") if x.device.type == "mps" else x.device  # MPS has no float64
    squares, products = ((x.T @ y).to(home).double() for y in (x, goal))
    ridge = torch.diag(1e-3 * squares.diagonal())
    solution = torch.linalg.solve(squares + ridge, products).T.float()
    if not fused:
        head.fc.weight.copy_(solution)
        return
    width = features.shape[1]
    head.fc.weight.copy_(solution[:, :width])
    _speak_the_embedding(head, solution[:, width:], squares[width:, width:].float())


def _speak_the_embedding(head: EagleHead, matrix: Tensor, squares: Tensor) -> None:
    """Make layer 0's attention add matrix @ normed embedding [H, H], as nearly as its values' rank allows, weighing
    directions by how much embeddings use them (`squares` [H, H])."""
    layer: Any = head.layers[0]
    attention, config = layer.self_attn, head.config
    h, d, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    rank = min(groups * d, h)
    size = squares.diagonal().mean()
    root = torch.linalg.cholesky(squares + 1e-4 * size * torch.eye(h, device=squares.device))
    left, singular, right = torch.linalg.svd(matrix @ root)
    half = singular[:rank].sqrt()
    write = left[:, :rank] * half
    read = torch.linalg.solve_triangular(root.T, right[:rank].T, upper=True).T * half[:, None]
    random = torch.randn(h, rank, generator=torch.Generator().manual_seed(0))
    look = torch.linalg.qr(random)[0].T.to(matrix.device) * 2  # as sharp as makes own rows stand out
    attention.k_proj.weight[:, h:], attention.v_proj.weight[:, h:] = 0, 0
    attention.k_proj.weight[:rank, :h], attention.v_proj.weight[:rank, :h] = look, read
    for group in range(groups):
        here = slice(group * d, min((group + 1) * d, rank))
        first = group * (config.num_attention_heads // groups) * d
        rows = slice(first, first + here.stop - here.start)
        attention.q_proj.weight[rows, :h], attention.q_proj.weight[rows, h:] = look[here], 0
        attention.o_proj.weight[:, rows] = write[:, here]
