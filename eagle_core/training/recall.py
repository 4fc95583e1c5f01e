"""A target that remembers its answer, so that drafters can be measured without paying for verification.

Speculation never changes the text: whatever is drafted, the target goes on as it would have anyway. So once an
answer is known, a draft is accepted exactly if it says what the answer says next, and no tree has to be read to
find that out. What a drafter is fed (features of the accepted tokens) comes from one forward over the whole text.

    text      [ prompt … │ a b c d e … ]          the answer, by plain decoding
    features  one row a token                      by one causal forward over the text
    verify    a node whose path is the text so far draws the next token of the text; any other is dead

`Recalled` stands in for a `Target` in `engine.generate`: the loop, the drafters and the events are the real ones, only
the forwards over trees are looked up. Drafts agree with those of real decoding up to rounding (features of one long
forward against many short ones); times mean nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_core.target import Session, Target
from eagle_core.tree import DraftTree
from eagle_core.verify import Noise, Sampling, processed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Recalled", "write_answers"]

_CERTAIN = 1e4  # a logit that leaves the others no chance at any temperature
_BATCH_TOKENS = 8192  # padded tokens of one batch of answers: bounds the cache


class Recalled(Target):
    """The target, in front of a text it knows.

    Args:
        target: the real one; its lock is taken for the forward that reads the text.
        text: prompt and answer.
        capture: hidden states the drafter wants.
    """

    def __init__(self, target: Target, text: Sequence[int], capture: Sequence[int]) -> None:
        self.__dict__.update(target.__dict__)  # everything but the cache and the lock is the target's own
        self.lock = threading.Lock()
        self.text = torch.tensor(text, device=target.device)
        self.features = torch.empty(len(text), 0, device=target.device)
        if not capture:  # a drafter that reads no features needs no forward at all
            return
        with target.lock, torch.inference_mode():
            session = target.session(len(text), capture)
            try:
                _, self.features = session.prefill(self.text)
            finally:
                target.release(session)

    def session(self, capacity: int, capture: Sequence[int] = ()) -> _Recollection:
        return _Recollection(self)

    def release(self, session: Session) -> None:
        """Nothing was lent."""


class _Recollection(Session):
    """How far an answer has got; `length` tokens are committed."""

    def __init__(self, target: Recalled) -> None:
        self.recalled = target
        self.length = 0

    def prefill(self, tokens: Tensor, cancelled: Any = None) -> tuple[Tensor, Tensor]:
        assert torch.equal(tokens, self.recalled.text[: len(tokens)]), "this target recalls another prompt"
        self.length = len(tokens)
        at = torch.tensor([self.length - 1], device=tokens.device)
        return self._certain(at, at >= 0), self.recalled.features[: self.length]

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        text = self.recalled.text
        at = self.length + tree.depth
        here = text[at.clamp_max(len(text) - 1)]
        right = (here == tree.tokens) & (at < len(text))
        alive = (right[None, :] | ~tree.ancestors).all(1)
        return self._certain(at, alive), self.recalled.features[at.clamp_max(len(text) - 1)]

    def commit(self, path: Tensor, count: int, straight: bool) -> None:
        self.length += count

    def _certain(self, at: Tensor, alive: Tensor) -> Tensor:
        """[N, V] logits: where alive, the token after position `at` is certain."""
        text = self.recalled.text
        following = text[(at + 1).clamp_max(len(text) - 1)]
        logits = torch.zeros(len(at), self.recalled.vocab_size, device=text.device)
        return logits.scatter_(1, following[:, None], alive[:, None].float() * _CERTAIN)


def write_answers(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling
) -> Iterator[tuple[int, list[int]]]:
    """The target's own answers, by transformers' `generate`, in batches of similar length, the longest prompts first.
    Above temperature 0 they are drawn with the noise that `engine.generate` draws with, so they are its answers too.

    A batch adds up in another order than a single row, so where two tokens are closer than rounding an answer may take
    the other one; it is the target's answer all the same.

    Yields:
        index of a prompt and its answer, as batches finish.
    """
    from eagle_core.bench import by_transformers

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    while order:
        batch = [order.pop()]  # the longest decides the padding
        width = len(prompts[batch[0]]) + max_new_tokens
        while order and (len(batch) + 1) * width <= _BATCH_TOKENS and len(batch) < 32:
            batch.append(order.pop())
        asked = [prompts[i] for i in batch]
        extra: dict[str, Any] = {}
        if not sampling.greedy:
            extra["logits_processor"] = [_draw([width - max_new_tokens - len(ids) for ids in asked], sampling)]
        yield from zip(batch, by_transformers(target, asked, max_new_tokens, Sampling(), **extra), strict=True)


def _draw(padding: Sequence[int], sampling: Sampling) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor of logits whose argmax is the engine's draw. `padding`: of each row, on the left."""

    def process(ids: Tensor, logits: Tensor) -> Tensor:
        probs = processed(logits, sampling)
        noise = Noise(sampling.seed, logits.device)
        rows = [noise.exponential(ids.shape[1] - n, logits.shape[-1]) for n in padding]
        return probs / torch.stack(rows)

    return process
