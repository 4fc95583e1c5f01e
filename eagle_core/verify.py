"""The one verb: draw and walk.

The target draws one token at every node of the tree, from that node's own *processed* distribution; then we
walk from the root to the child that equals the draw, as long as there is one. Where the walk ends, the draw
itself is the *bonus* token. Every emitted token is therefore a draw of the target given the text before it:
the output is the target's by construction, whatever was drafted, greedy and sampled alike.

    node   draw        child equal to the draw?
    root   " cat"      yes: walk on
    " cat" " sat"      yes: walk on
    " sat" " down"     no                      → emit " cat", " sat" and the bonus " down"

The noise of a draw is keyed by *(seed, absolute position)*, not by node or by step, so plain decoding with the
same seed draws the same tokens: every method prints the same text as vanilla at any temperature. In
distribution this is the q = 1 rule (accept a candidate with probability p, else strike it out and renormalise).

As the noise is known before the draw, a drafter may use it too (`coupled`): it then guesses the draw itself instead of
a likely token, and temperature costs it little. What is drafted changes, what is printed cannot.

Drafts that were *sampled* from a known q may be verified by the ratio rule instead: accept with
min(1, p/q), else draw from the normalised positive part of p − q. It is expressed as draws too
(`ratio_draws`), so the walk is the same; it keeps the target's distribution, not vanilla's very tokens.

Sources: Leviathan et al. 2023 (Algorithm 1), EAGLE §4.3; Daliri et al. 2024, "Coupling without communication and
drafter-invariant speculative decoding" (shared noise); the order of processors is transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle_core.errors import InvalidRequest
from eagle_core.tree import DraftTree

__all__ = ["Noise", "Sampling", "coupled", "draws", "processed", "ratio_draws", "ratio_odds", "walk"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's distribution is processed before a draw, in transformers' order: temperature, top-k,
    top-p, min-p. Temperature 0 is greedy and ignores the rest. `top_k` 0 and `top_p` 1 and `min_p` 0 are off.

    Raises `InvalidRequest` for values outside their range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 100:  # logits over less may overflow
            raise InvalidRequest(f"temperature is {self.temperature}; choose 0 (greedy), or 1e-6 to 100")
        if self.top_k < 0:
            raise InvalidRequest(f"top-k sampling is {self.top_k}; choose 0 (off) or a number of tokens to keep")
        if not 0 <= self.top_p <= 1:
            raise InvalidRequest(f"top-p is {self.top_p}; choose 0 to 1, 1 is off")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequest(f"min-p is {self.min_p}; choose 0 to 1, 0 is off")
        if not 0 <= self.seed < 1 << 63:
            raise InvalidRequest(f"seed is {self.seed}; choose a number from 0 to 2**63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be struck out before the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is drawn from: the one definition for drafting, verification and display.

    Args:
        logits: [N, V].
        sampling: at temperature 0 the result is one-hot at the (lowest-numbered) argmax.

    Returns:
        [N, V] float32, rows sum to 1.
    """
    logits = logits.float()
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if sampling.top_p < 1:
        logits = logits.masked_fill(logits < _nucleus_floor(logits, sampling.top_p), -torch.inf)
    probs = logits.softmax(-1)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """The lowest logit of the nucleus: a token stays while the likelier ones together hold less than `top_p`.

    A full sort of N × V costs more than a target forward on a CPU and the nucleus is almost always small, so there
    the likeliest 1024 are tried first. An accelerator sorts at once: looking at the result would stall it.

    Returns: [N, 1].
    """
    total = logits.logsumexp(-1, keepdim=True)
    vocab = logits.shape[-1]
    sizes = (1024, vocab) if logits.device.type == "cpu" and vocab > 1024 else (vocab,)
    for size in sizes:
        top = logits.topk(size, -1).values if size < vocab else logits.sort(-1, descending=True).values
        probs = (top - total).exp()
        before = probs.cumsum(-1) - probs
        keep = before < top_p
        keep[:, 0] = True
        if size == vocab or bool((~keep[:, -1]).all()):
            break
    return top.gather(-1, keep.sum(-1, keepdim=True) - 1)


class Noise:
    """Random rows keyed by (seed, position, stream), the same on every call: no state but a small memory.

    torch's global generator is never touched. Streams keep the target's draws apart from the drafter's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._generator = torch.Generator(device)
        self._rows: dict[tuple[int, int, int], Tensor] = {}

    def _key(self, position: int, stream: int) -> torch.Generator:
        x = (self._seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + stream * 0x8CB92BA72F3D8DD7) % (1 << 64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finaliser of splitmix64
            x = (x ^ (x >> shift)) * factor % (1 << 64)
        return self._generator.manual_seed((x ^ (x >> 31)) >> 1)

    def exponential(self, position: int, vocab: int, stream: Literal[0, 1] = 0) -> Tensor:
        """[V] float32 exponential variates: `argmax(p / e)` draws from p. Stream 0: target, 1: drafter."""
        row = self._rows.get((position, vocab, stream))
        if row is None:
            row = torch.empty(vocab, device=self._device)
            row.exponential_(generator=self._key(position, stream)).clamp_min_(1e-30)
            self._rows[position, vocab, stream] = row
            for old in [k for k in self._rows if k[0] < position - 64]:
                del self._rows[old]
        return row

    def uniform(self, position: int) -> Tensor:
        """[1] float32 in [0, 1): the coin that accepts or rejects a draft of the token at `position`."""
        return torch.rand(1, device=self._device, generator=self._key(position, 2))


def draws(
    logits: Tensor, tree: DraftTree, position: int, sampling: Sampling, noise: Noise, max_depth: int
) -> tuple[Tensor, Tensor | None]:
    """What the target draws at every node.

    Args:
        logits: [N, V], the target's, one row a node.
        tree: the verified tree.
        position: absolute position of the root.
        sampling: how to process the logits.
        noise: the keyed noise of this answer.
        max_depth: an upper bound of the tree's depth, known on the host.

    Returns:
        choices [N] int64, and the processed distributions [N, V], or None when greedy (they are one-hot).
    """
    if sampling.greedy:
        return logits.argmax(-1), None
    probs = processed(logits, sampling)
    vocab = logits.shape[-1]
    rows = torch.stack([noise.exponential(position + 1 + d, vocab) for d in range(max_depth + 1)])
    return (probs / rows[tree.depth]).argmax(-1), probs


def coupled(
    logits: Tensor, position: int, sampling: Sampling, noise: Noise, vocab: int, ids: Tensor | None = None
) -> Tensor:
    """What a drafter believes the target will *draw* as the token at `position`, told the noise of that draw.

    The target draws argmax(p^(1/T) / e) = argmax(log p + T·g) with g = −log e. A drafter knows g and thinks that log p
    is `logits`, but for errors; if those are Gumbel's, softmax(logits + T·g) is the chance of each token to be drawn.
    At temperature 0 that is the drafter's own distribution, which is how confidence is read there: one rule for every
    temperature.

    Where top-k, top-p or min-p strike tokens out, those below the drafter's own floor t are drawn only if it is wrong
    by t − logit, which has a chance of about exp(logit − t); they then compete as tokens at the floor, but stay below
    its first guess.

    Args:
        logits: [B, Vd], the drafter's.
        position: absolute position of the drafted token.
        vocab: V, the width of the target's logits, by which its noise is drawn.
        ids: [Vd] target ids of the drafter's; None where they are the same (or the first of them).

    Returns:
        [B, Vd] logits of the draw.
    """
    if sampling.greedy:
        return logits
    row = noise.exponential(position, vocab).to(logits.device)
    row = row[: logits.shape[-1]] if ids is None else row[ids]
    luck = -sampling.temperature * row.log()
    said = logits + luck
    if not sampling.filtered:
        return said
    kept = processed(logits, sampling) > 0
    floor = logits.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    first = said.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
    return torch.where(kept, said, logits - floor + torch.minimum(floor + luck, first))


def ratio_odds(probs: Tensor, tree: DraftTree) -> tuple[Tensor, Tensor]:
    """The ratio rule's numbers for a sampled chain.

    Args:
        probs: [N, V], the target's processed distribution at every node.
        tree: a path of N nodes with `proposal`.

    Returns:
        accept [N − 1]: min(1, p/q) of each draft, and rest [N, V]: what is drawn from at a node where its draft is
        rejected, the normalised (p − q)+, and p itself at the last node. Where p − q has no positive part rejection
        cannot happen, and the row is p.
    """
    drafted = tree.tokens[1:, None]
    assert tree.proposal is not None
    q = tree.proposal[:-1]
    accept = (probs[:-1].gather(1, drafted) / q.gather(1, drafted).clamp_min(1e-38))[:, 0].clamp_max(1)
    rest = (probs[:-1] - q).clamp_min(0)
    mass = rest.sum(1, keepdim=True)
    rest = torch.where(mass > 0, rest / mass.clamp_min(1e-38), probs[:-1])
    return accept, torch.cat((rest, probs[-1:]))


def ratio_draws(
    logits: Tensor, tree: DraftTree, position: int, sampling: Sampling, noise: Noise, max_depth: int
) -> tuple[Tensor, Tensor | None]:
    """The ratio rule for a sampled chain, told as draws: an accepted draft's parent "draws" the draft itself.

    `tree` is a path with `proposal` [N, V], row i the distribution that the draft after node i was sampled from. The
    residual (p − q)+ is zero at a rejected token, so a rejected draft is never drawn again and the walk stops.
    Arguments and results as in `draws`, and without a proposal (temperature 0, no drafts) it is `draws`.

    Source: Leviathan et al. 2023, Algorithm 1 and Appendix A.1.
    """
    if sampling.greedy or tree.proposal is None:
        return draws(logits, tree, position, sampling, noise, max_depth)
    probs = processed(logits, sampling)
    n, vocab = probs.shape
    accept, rest = ratio_odds(probs, tree)
    rows = torch.stack([noise.exponential(position + 1 + d, vocab) for d in range(n)])
    coins = torch.cat([noise.uniform(position + 1 + d) for d in range(n - 1)])
    choices = (rest / rows).argmax(-1)
    choices[:-1] = torch.where(coins < accept, tree.tokens[1:], choices[:-1])
    return choices, probs


def walk(tree: DraftTree, choices: Tensor) -> Tensor:
    """Where the draws lead: [N] bool, true on the path from the root, without a loop or a host sync.

    A node lives if it equals its parent's draw and so do all its ancestors. Siblings with equal tokens (an adversary's
    tree) would both live; the first does.
    """
    parents = tree.parents.clamp_min(0)
    match = choices[parents] == tree.tokens
    twin = (tree.parents[:, None] == tree.parents[None, :]) & (tree.tokens[:, None] == tree.tokens[None, :])
    match &= ~twin.tril(-1).any(1)
    match[0] = True
    return (match[None, :] | ~tree.ancestors).all(1)
