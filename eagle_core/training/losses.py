"""What a head learns from a corpus: training-time test, for both families, with the arithmetic of inference.

Drafting starts at a committed pair s, whose feature is the target's, and goes on with pairs s+1, s+2, … whose
features are the head's own outputs. Training walks every such chain of a text at once. Row s of step k is the pair
s+k of the chain that started at s:

    token x_{s+k+1}    feature: target's at s (k = 0), else feedback of row s at step k−1    rotary position s+k
    predicts x_{s+k+2}; it should predict it as the target did, from its state after token x_{s+k+1}

    step 0   attends to step-0 rows 0 … s                         the committed pairs
    step k   attends to step-0 rows 0 … s and to row s of steps 1 … k      its own chain, nothing of other chains

which is exactly what `HeadCache` holds when inference has committed s+1 pairs and drafted k more. `TrainingTimeTest`
is that context; the head is the same `EagleHead`. The test of this module is that law: logits of step k equal those
drafted one pair after another.

    EAGLE-3     Σ_k decay^k · CE(target's distribution over the draft vocabulary, head's)
    EAGLE-1/2   Σ_k decay^k · (SmoothL1(feedback, target's next feature) + token_weight · CE through the frozen LM head)

Source: EAGLE §4.2 (loss, noise), EAGLE-3 §3.2 (training-time test).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle_core.errors import TrainingError
from eagle_core.heads import POST_NORM, EagleHead

__all__ = ["Batch", "LogitLaw", "Objective", "TrainingTimeTest", "ahead", "chain_steps"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some conversations of a corpus, packed into rows: B rows of T tokens, several conversations in a row.

    tokens [B, T] int64; segment [B, T] int64: which conversation a token belongs to, −1 for padding;
    position [B, T] int64: the token's index in its conversation; answer [B, T] bool: written as an answer;
    features [B, T, F]: the states the head reads; final [B, T, Ht]: the state after the target's final norm;
    name: where it came from, for messages.
    """

    tokens: Tensor
    segment: Tensor
    position: Tensor
    answer: Tensor
    features: Tensor
    final: Tensor
    name: str = ""

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
        move = lambda x: x.to(device, non_blocking=True)  # noqa: E731
        return Batch(
            move(self.tokens), move(self.segment), move(self.position), move(self.answer),
            move(self.features).to(dtype), move(self.final).to(dtype), self.name,
        )  # fmt: skip


def ahead(x: Tensor, by: int, fill: float = 0) -> Tensor:
    """x [B, T, …] looked at `by` tokens later: out[:, s] = x[:, s + by]; `fill` where that is past the end."""
    out = torch.full_like(x, fill)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out


class TrainingTimeTest:
    """The attention context of all chains of a batch (module docstring). Call the head once a step, in order.

    Args:
        segment: [B, T] int64; rows see only their own segment.
    """

    def __init__(self, segment: Tensor) -> None:
        t = segment.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=segment.device).tril()
        self.mask = (causal & (segment[:, :, None] == segment[:, None, :]))[:, None]  # [B, 1, T, T]
        self.entries: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        entries = self.entries.setdefault(layer, [])
        entries.append((k, v))
        if len(entries) == 1:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1])
        b, heads, t, d = q.shape
        q = q.view(b, k.shape[1], heads // k.shape[1], t, d) * d**-0.5  # a group of queries for each kv head
        (k0, v0), later = entries[0], entries[1:]
        committed = (q @ k0[:, :, None].mT).masked_fill(~self.mask[:, :, None], float("-inf"))
        drafted = [(q * key[:, :, None]).sum(-1, keepdim=True) for key, _ in later]
        weights = torch.cat([committed, *drafted], -1).softmax(-1, dtype=torch.float32).to(v.dtype)
        out = weights[..., :t] @ v0[:, :, None]
        for i, (_, value) in enumerate(later):
            out = out + weights[..., t + i : t + i + 1] * value[:, :, None]
        return out.view(b, heads, t, d)


def chain_steps(
    head: EagleHead, batch: Batch, steps: int, features: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Every chain of the batch, `steps` pairs long. Returns (feedback, read), each [B, T, H], for each step."""
    attend = TrainingTimeTest(batch.segment)
    g = head.fuse(batch.features if features is None else features)
    out = []
    for k in range(steps):
        g, read = head(ahead(batch.tokens, k + 1), g, batch.position + k, attend)
        out.append((g, read))
    return out


@dataclass(frozen=True, slots=True)
class LogitLaw:
    """How a target's logits follow from what its LM head says: cap · tanh(scale · x / cap), without a cap if it is 0.

    Granite and Cohere scale, Gemma-2 caps, most do neither.
    """

    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        return self.cap * torch.tanh(x / self.cap) if self.cap else x

    @classmethod
    @torch.no_grad()
    def of(cls, target: Any) -> LogitLaw:
        """Found by one forward over eight tokens.

        Raises:
            TrainingError: the logits follow another law, so soft targets cannot be had from states alone.
        """
        ids = torch.arange(8, device=target.device) * 7919 % target.vocab_size
        session = target.session(len(ids))
        at = torch.arange(len(ids), device=target.device)
        logits, state = target.forward(session.cache, ids, at, None, (POST_NORM,), 0)
        target.release(session)
        said = target.lm_head(state).float().to(logits)
        cap = float(getattr(target.config, "final_logit_softcapping", None) or 0.0)
        straight = logits.abs() < 0.9 * cap if cap else torch.ones_like(logits, dtype=torch.bool)
        x, y = said[straight], logits[straight]
        y = cap * torch.atanh(y / cap) if cap else y
        law = cls(float(f"{float((x * y).sum() / (x * x).sum()):.4g}"), cap)
        error, size = float((law(said) - logits).abs().max()), float(logits.abs().max())
        if not (law.scale > 0 and error <= (1e-3 if target.dtype == torch.float32 else 5e-2) * (1 + size)):
            raise TrainingError(
                f"The logits of {target.name} are no multiple of what its LM head says (off by {error:.3g}, the largest"
                f" is {size:.3g}), so kept states do not tell its distributions; no head can be trained for it here."
            )
        return law


@dataclass(slots=True)
class Tally:
    """Sums over the predictions of one training step, on the device. `agree / count` is its accuracy."""

    loss: Tensor
    agree: list[Tensor] = field(default_factory=list)
    count: list[Tensor] = field(default_factory=list)
    parts: dict[str, Tensor] = field(default_factory=dict)


class Objective(nn.Module):
    """A head with its loss, so that one module is what gets distributed over devices.

    Args:
        head: the head in training.
        lm_rows: [R, Ht] frozen rows of the target's LM head: the head's draft vocabulary, or for a head that reads
            the target's LM head the rows the token loss looks at.
        row_of: [V] int64, the row of a target id, −1 for ids without one.
        lm_bias: [R] the same rows of the LM head's bias, where it has one.
        law: from what the LM head says to the target's logits.
        decay: weight of step k is decay^k.
        token_weight: of the cross-entropy against the feature loss (EAGLE-1/2).
        noise: half the width of the uniform noise on features (EAGLE-1/2).
    """

    def __init__(
        self,
        head: EagleHead,
        lm_rows: Tensor,
        row_of: Tensor,
        *,
        lm_bias: Tensor | None = None,
        law: LogitLaw = LogitLaw(),
        decay: float = 0.8,
        token_weight: float = 0.1,
        noise: float = 0.1,
        everywhere: bool = False,
    ) -> None:
        super().__init__()
        self.head, self.law = head, law
        self.decay, self.token_weight, self.noise, self.everywhere = decay, token_weight, noise, everywhere
        self.register_buffer("lm_rows", lm_rows, persistent=False)
        self.register_buffer("row_of", row_of, persistent=False)
        self.register_buffer("lm_bias", lm_bias, persistent=False)
        self.lm_rows: Tensor
        self.row_of: Tensor
        self.lm_bias: Tensor | None

    def forward(self, batch: Batch, steps: int, generator: torch.Generator | None = None) -> Tally:
        """One pass over a batch. `generator` draws the noise; without it there is none."""
        features = batch.features
        regression = self.head.config.family == "eagle1"
        if regression and generator is not None and self.noise > 0:
            noise = torch.rand(features.shape, generator=generator).to(features)
            features = features + (noise * 2 - 1) * self.noise
        chains = chain_steps(self.head, batch, steps, features)

        # The target's word on x_{s+1}, for every s whose next token counts; computed once, read by every step.
        counts = ahead(batch.segment, 1, fill=-2) == batch.segment
        counts &= ahead(self.row_of[batch.tokens], 1, fill=-1) >= 0
        if not self.everywhere:
            counts &= ahead(batch.answer, 1)
        with torch.no_grad():
            wanted = self.law(F.linear(batch.final[counts], self.lm_rows, self.lm_bias).float()).softmax(-1)
            best = wanted.argmax(-1)
        index = torch.full(counts.shape, -1, device=counts.device)
        index[counts] = torch.arange(len(wanted), device=counts.device)

        tally = Tally(loss=batch.final.new_zeros((), dtype=torch.float32))
        for k, (feedback, read) in enumerate(chains):
            at = torch.where(ahead(batch.segment, k + 1, fill=-2) == batch.segment, ahead(index, k + 1, fill=-1), -1)
            rows = at >= 0
            picked = at[rows]
            logits = self._logits(read[rows])
            n = max(1, len(picked))
            log_q = logits.float().log_softmax(-1)
            token_loss = -(wanted[picked] * log_q).sum() / n
            loss = token_loss
            if regression:
                goal = ahead(batch.final, k + 1)[rows]
                feature_loss = F.smooth_l1_loss(feedback[rows].float(), goal.float(), reduction="sum") / (
                    n * goal.shape[-1]
                )
                loss = feature_loss + self.token_weight * token_loss
                tally.parts[f"feature_loss_{k + 1}"] = feature_loss.detach()
            tally.parts[f"token_loss_{k + 1}"] = token_loss.detach()
            tally.loss = tally.loss + self.decay**k * loss
            tally.agree.append((log_q.argmax(-1) == best[picked]).sum().detach())
            tally.count.append(rows.sum())
        return tally

    def _logits(self, read: Tensor) -> Tensor:
        if self.head.lm_head is not None:
            return self.head.logits(read)
        return F.linear(read, self.lm_rows, self.lm_bias) * self.head.config.logit_scale

    def settings(self) -> dict[str, Any]:
        return {
            "decay": self.decay,
            "token_weight": self.token_weight,
            "noise": self.noise,
            "everywhere": self.everywhere,
        }
