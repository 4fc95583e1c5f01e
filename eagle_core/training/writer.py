"""Continuous batching: one target writing many conversations side by side (`corpus` says what for).

    writer = Writer(target, seed=0, capture=(2, 15, 27, POST_NORM))
    for number, conversations in writer.block(range(48)): …

Every slot stands in the same place of its own conversation: it has exactly one token that the target has not read.
A step reads these in one forward and decides, slot by slot, what follows: a token of the template that is owed
(`forced`), a token drawn for the role whose turn it is, or the next turn, the next conversation. Given text that is
long is read by a forward of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from eagle_core.errors import TrainingError
from eagle_core.heads import POST_NORM
from eagle_core.training.kinds import KINDS, Kind
from eagle_core.training.store import Conversation, Prompt

__all__ = ["STATE_LIMIT", "Template", "Writer"]

_LIKELIEST = 256  # answers and user turns are drawn from so many ids
_TEMPERATURES = ((0.0, 0.4), (0.7, 0.25), (1.0, 0.35))  # of answers, with their shares
_USER_TOP_P = 0.95
_ROOM = 16  # tokens kept free for an answer, and the least that is worth a further user turn
_LONG = 24  # forced ids that are worth a forward of their own
STATE_LIMIT = float(np.finfo(np.float16).max)


# --------------------------------------------------------------------------------------------------- template


@dataclass(frozen=True, slots=True)
class Template:
    """The ids that a chat template puts around what people and the model say.

    before_user    everything up to the first user turn's text
    to_answer      from a user turn's end to the answer's first token
    to_user        from an answer's end to the next user turn's text
    ends           ids that end a turn
    behind         the text that a first and that a later user turn stands behind, and how many ids of it are not to be
                   said again. Given words are tokenised together with it, since many tokenizers join the space before
                   a word to the word: "[INST] " and "Why" are other ids than "[INST] Why".
    """

    before_user: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    ends: frozenset[int]
    behind: tuple[tuple[str, int], tuple[str, int]]

    @classmethod
    def of(cls, target: Any) -> Template:
        """Read the pieces off the tokenizer's template by rendering marked messages.

        Raises:
            TrainingError: no tokenizer, no chat template, or one that cannot hold two turns, or not in pieces.
        """
        tokenizer = target.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise TrainingError(
                f"The tokenizer of {target.name} has no chat template, so there are no user turns to write; "
                "a corpus needs a chat model (or a tokenizer with `chat_template` set)."
            )
        one, two, three = "Wordone", "Wordtwo", "Wordthree"
        turns = [
            {"role": "user", "content": one},
            {"role": "assistant", "content": two},
            {"role": "user", "content": three},
        ]
        try:
            asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            before, _ = asked.split(one)
            said, _ = whole.split(two)
            again, _ = whole.split(three)
        except Exception as error:  # templates are programs of other people: anything may be raised
            raise TrainingError(
                f"The chat template of {target.name} cannot hold user, assistant, user: {error}"
            ) from error
        ids = lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
        question, answer, second = ids(before + one), ids(said + two), ids(again + three)
        if ids(asked)[: len(question)] != question or second[: len(answer)] != answer:
            raise TrainingError(
                f"The tokenizer of {target.name} joins the end of a turn to what its chat template puts behind it, so"
                " turns cannot be written one after the other; a corpus needs a template that ends them with a token of"
                " their own."
            )
        before_user, to_user = _shared(ids(before), question), _shared(ids(again), second)[len(answer) :]
        to_answer = ids(asked)[len(question) :]
        special = set(tokenizer.all_special_ids)
        closing = {piece[0] for piece in (to_answer, to_user) if piece and piece[0] in special}
        ends = frozenset(target.eos_ids | closing)
        if not ends:
            raise TrainingError(
                f"Nothing ends a turn in the chat template of {target.name}: no special token and no EOS id."
            )
        return cls(before_user, to_answer, to_user, ends, ((before, 0), (again, len(answer))))


def _shared(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The ids that both begin with."""
    return tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# ------------------------------------------------------------------------------------------------------ cache


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values of all slots, [slots, kv_heads, capacity, head_dim]."""

    is_sliding = False

    def __init__(self, owner: _SlotCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self._owner.slots, key_states.shape[1], self._owner.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        owner = self._owner
        rows, columns = owner.rows[:, None], owner.columns  # [R, 1], [R, T]
        self.keys[rows, :, columns] = key_states.transpose(1, 2)
        self.values[rows, :, columns] = value_states.transpose(1, 2)
        if owner.everyone:
            return self.keys[:, :, : owner.end], self.values[:, :, : owner.end]
        return self.keys[owner.rows, :, : owner.end], self.values[owner.rows, :, : owner.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.end, 0

    def get_seq_length(self) -> int:
        return self._owner.end

    def get_max_length(self) -> int:
        return self._owner.capacity


class _SlotCache(Cache):
    """Keys and values of slots that stand at different lengths. `place` says which rows the next forward writes."""

    def __init__(self, num_layers: int, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.end = 0
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])

    def place(self, rows: Tensor, columns: Tensor, end: int) -> None:
        """rows: [R] slots; columns: [R, T] where their T new tokens go; end: columns that attention looks at."""
        assert end <= self.capacity, f"slot cache of {self.capacity} columns asked to hold {end}"
        self.rows, self.columns, self.end = rows, columns, end
        self.everyone = len(rows) == self.slots  # rows are ascending, so then they are all of them in order


# ------------------------------------------------------------------------------------------------- what to say


@dataclass(slots=True)
class _Turn:
    """A user turn to come: `opening` is given, `free` more tokens are the model's; then an answer of ≤ `answer`."""

    opening: str
    free: int
    answer: int


@dataclass(slots=True)
class _Slot:
    """One conversation being written."""

    number: int
    random: np.random.Generator
    temperature: float
    limit: int
    turns: deque[_Turn]
    follow: Kind | None = None  # a second conversation that quotes this one's answer
    tokens: list[int] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)
    states: list[np.ndarray] = field(default_factory=list)
    read: int = 0  # tokens that the target has read
    role: str = "user"
    left: int = 0  # tokens the role may still write
    written: int = 0  # tokens the role has written
    done: list[Conversation] = field(default_factory=list)


def _temperature(random: np.random.Generator) -> float:
    draw = random.random()
    for value, share in _TEMPERATURES:
        if draw < share:
            return value
        draw -= share
    return _TEMPERATURES[-1][0]


class Writer:
    """Writes conversations `first, first + 1, …` of a seed with one target.

    Args:
        target: a `Target` with a chat template.
        seed: with a conversation's number it decides all its draws.
        capture: boundaries whose states are kept, or empty for none.
        prompts: user turns of conversations; without them the target writes these as well.
        slots: conversations written side by side.
        limit: most tokens of one conversation.
    """

    def __init__(
        self,
        target: Any,
        *,
        seed: int = 0,
        capture: Sequence[int] = (),
        prompts: Sequence[Sequence[Prompt]] | None = None,
        kinds: Sequence[Kind] = KINDS,
        slots: int = 16,
        limit: int = 1024,
        answer_tokens: int = 300,
    ) -> None:
        self.target, self.seed, self.capture, self.prompts = target, seed, tuple(capture), prompts
        self.kinds, self.slots, self.answer_tokens = tuple(kinds), slots, answer_tokens
        self.template = Template.of(target)
        self.limit = min(limit, target.context or limit)
        least = len(self.template.before_user) + len(self.template.to_answer) + 2 * _ROOM
        if self.limit < least:
            raise TrainingError(
                f"A conversation of {self.limit} tokens holds no answer with this template; allow at least {least}."
            )
        unsupported = [j for j in self.capture if j != POST_NORM and not 0 <= j < target.num_layers]
        if unsupported:
            raise TrainingError(
                f"States at boundaries {unsupported} cannot be kept; give 0 … {target.num_layers - 1}, or -1."
            )

    def _begin(self, number: int) -> _Slot:
        random = np.random.default_rng([self.seed, number])
        temperature = _temperature(random)
        turns: deque[_Turn] = deque()
        follow = None
        if self.prompts is not None:
            for text in self.prompts[number]:
                turns.append(_Turn(text.text, text.free, self.answer_tokens))
        else:
            weights = np.array([kind.weight for kind in self.kinds])
            kind = self.kinds[int(random.choice(len(self.kinds), p=weights / weights.sum()))]
            follow = kind if kind.quoting else None
            for turn in range(1 + int(random.random() < kind.more_turns)):
                openings = kind.openings if turn == 0 else kind.later or kind.openings
                opening = openings[int(random.integers(len(openings)))]
                turns.append(_Turn(opening, kind.free, min(kind.answer, self.answer_tokens)))
        slot = _Slot(number, random, temperature, self.limit, turns, follow)
        self._open(slot)
        return slot

    def _open(self, slot: _Slot) -> None:
        """Start the slot's (next) conversation at its first user turn."""
        slot.tokens, slot.answer, slot.states, slot.read = [], [], [], 0
        slot.forced = deque()
        self._user(slot)

    def _room(self, slot: _Slot) -> int:
        """Tokens that the next user turn may have so that an answer still fits."""
        return slot.limit - len(slot.tokens) - len(slot.forced) - len(self.template.to_answer) - _ROOM

    def _user(self, slot: _Slot) -> None:
        turn, room, later = slot.turns[0], self._room(slot), bool(slot.tokens)
        given = list(self.template.to_user if later else self.template.before_user)
        if turn.opening:
            text, said = self.template.behind[later]
            given = self.target.tokenizer.encode(text + turn.opening, add_special_tokens=False)[said:]
        if later and given[:1] == slot.tokens[-1:]:  # the answer brought its end token
            given = given[1:]
        given = given[:room]
        slot.forced.extend(given)
        slot.role, slot.left, slot.written = "user", min(turn.free, room - len(given)), 0
        if slot.left == 0:
            self._to_answer(slot)

    def _to_answer(self, slot: _Slot) -> None:
        slot.forced.extend(self.template.to_answer)
        slot.role, slot.left, slot.written = "answer", slot.turns[0].answer, 0

    def _end_of_turn(self, slot: _Slot) -> bool:
        """The role has said its last word. Returns True when the conversation is over."""
        if slot.role == "user":
            self._to_answer(slot)
            return False
        slot.turns.popleft()
        if not slot.turns or self._room(slot) < len(self.template.to_user) + _ROOM:
            return True
        self._user(slot)
        return False

    def _close(self, slot: _Slot) -> bool:
        """Put the finished conversation aside. Returns True when the slot is free, False when it goes on quoting it."""
        states = np.concatenate(slot.states)[: len(slot.tokens)] if self.capture else None
        tokens, answer = np.array(slot.tokens), np.array(slot.answer)
        slot.done.append(Conversation(tokens, answer, slot.temperature, states))
        if slot.follow is None:
            return True
        kind, slot.follow = slot.follow, None
        said = [t for t, mine in zip(slot.tokens, slot.answer, strict=True) if mine and t not in self.template.ends]
        quoted = self.target.tokenizer.decode(said).strip()
        before, after = kind.quoting[int(slot.random.integers(len(kind.quoting)))]
        slot.turns = deque([_Turn(before + quoted + after, kind.quoting_free, self.answer_tokens)])
        slot.temperature = _temperature(slot.random)
        self._open(slot)
        return False

    def _next_token(self, slot: _Slot, ids: np.ndarray, logits: np.ndarray) -> int:
        """Draw from the likeliest ids (descending). User turns: temperature 1, top-p.
        The first words of a turn never end it."""
        user = slot.role == "user"
        temperature = 1.0 if user else slot.temperature
        if slot.written < (3 if user else 1):
            keep = np.array([t not in self.template.ends for t in ids])
            if keep.any():
                ids, logits = ids[keep], logits[keep]
        if temperature == 0:
            return int(ids[0])
        p = np.exp((logits - logits[0]).astype(np.float64) / temperature)
        p /= p.sum()
        if user:
            p = p[: int(np.searchsorted(np.cumsum(p), _USER_TOP_P)) + 1]
        total = np.cumsum(p)
        at = int(np.searchsorted(total, slot.random.random() * total[-1], side="right"))
        return int(ids[min(at, len(p) - 1)])

    # ----------------------------------------------------------------------------------------------- forwards

    @torch.inference_mode()
    def _forward(
        self, cache: _SlotCache, rows: list[int], tokens: Tensor, starts: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """T new tokens for each of R rows. tokens: [R, T]. Returns likeliest ids and their logits [R, ≤ 256] after the
        last token, and keeps states in `self._states` [R, T, F] float16."""
        device = self.target.device
        t = tokens.shape[1]
        first = torch.tensor(starts)
        positions = (first[:, None] + torch.arange(t)).to(device)
        end = max(starts) + t
        cache.place(torch.tensor(rows, device=device), positions, end)
        visible = torch.arange(end, device=device) <= positions[:, :, None]
        n = self.target.num_layers
        wanted = sorted({n if j == POST_NORM else j for j in self.capture})
        out = self.target.model(
            input_ids=tokens.to(device),
            position_ids=positions,
            attention_mask=self._mask(visible, positions, end),
            cache=cache,
            use_cache=True,
            output_hidden_states=wanted or None,
            logits_to_keep=1,
        )
        if wanted:
            parts = [out.hidden_states[n if j == POST_NORM else j] for j in self.capture]
            states = torch.cat([p.to(device) for p in parts], -1).float().clamp(-STATE_LIMIT, STATE_LIMIT)
            self._states = states.half().cpu().numpy()
        best = out.logits[:, -1].float().topk(min(_LIKELIEST, out.logits.shape[-1]))
        return best.indices.cpu().numpy(), best.values.cpu().numpy()

    def _mask(self, visible: Tensor, positions: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """visible: [R, T, end] bool; in the model's own form, as `Target` does for one row."""
        config = self.target.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        masks = {}
        for kind in kinds:
            mask = visible
            if kind == "sliding_attention":
                seen_at = torch.arange(end, device=visible.device)
                mask = visible & (positions[:, :, None] - seen_at < config.sliding_window)
            if self.target.attention == "eager":
                floor = torch.finfo(self.target.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.target.dtype, device=mask.device).masked_fill_(~mask, floor)
            masks[kind] = mask[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _read(self, slot: _Slot, row: int) -> None:
        if self.capture:
            slot.states.append(self._states[row])

    def block(self, numbers: Sequence[int]) -> Iterator[tuple[int, list[Conversation]]]:
        """Write conversations by number from empty slots; yields each (number, conversations) when it is finished."""
        cache = _SlotCache(self.target.num_layers, self.slots, self.limit + 1)
        waiting = deque(numbers)
        slots: dict[int, _Slot] = {}
        while waiting or slots:
            for row in range(self.slots):
                if row not in slots and waiting:
                    slots[row] = self._begin(waiting.popleft())
            for row, slot in list(slots.items()):  # long given text is read in one forward
                if len(slot.forced) > _LONG:
                    given = [slot.forced.popleft() for _ in range(len(slot.forced) - 1)]
                    self._forward(cache, [row], torch.tensor([given]), [slot.read])
                    self._read(slot, 0)
                    slot.tokens += given
                    slot.answer += [False] * len(given)
                    slot.read = len(slot.tokens)
            rows = sorted(slots)
            for row in rows:  # every slot now has exactly one token that the target has not read
                slot = slots[row]
                if slot.read == len(slot.tokens):
                    slot.tokens.append(slot.forced.popleft())
                    slot.answer.append(False)
            column = torch.tensor([[slots[row].tokens[-1]] for row in rows])
            ids, logits = self._forward(cache, rows, column, [slots[row].read for row in rows])
            for at, row in enumerate(rows):
                slot = slots[row]
                self._read(slot, at)
                slot.read += 1
                over = self._advance(slot, ids[at], logits[at])
                if over and self._close(slot):
                    yield slot.number, slot.done
                    del slots[row]

    def _advance(self, slot: _Slot, ids: np.ndarray, logits: np.ndarray) -> bool:
        """Decide the token after the one just read. Returns True when the conversation is over."""
        if slot.forced:
            return False
        full = len(slot.tokens) >= slot.limit
        ended = slot.tokens[-1] in self.template.ends and slot.written > 0
        if ended or full or slot.left == 0:
            return full or self._end_of_turn(slot)
        token = self._next_token(slot, ids, logits)
        if slot.role == "user" and token in self.template.ends:
            self._end_of_turn(slot)  # `to_answer` brings the end token with it
            return False
        slot.tokens.append(token)
        slot.answer.append(slot.role == "answer")
        slot.left -= 1
        slot.written += 1
        return False
