"""From ids to text that is right at every step, for every tokenizer.

A token is not a piece of text: an emoji may take three, SentencePiece puts a space in front of a word only when
something precedes it, and a stop string may end inside a token. So the stream always decodes *all* ids of the
answer and hands out what became final: no half characters, and nothing that may still turn into a stop string.

    ids        [ 38, 7012, 233 ]            text so far "Hi " + two of an emoji's four bytes
    handed out "Hi "                        the rest comes when its last byte does, or with `finish`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["Labels", "TextStream", "decode"]

_BROKEN = "\ufffd"  # what decoders put for bytes that are no character (yet)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an answer: special tokens left out, spaces as they are. "" without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """Turns an answer's ids into text, piece by piece; the pieces and `finish` join to the decoded whole.

    Args:
        tokenizer: the target's, or None (all text is then empty).
        stop: strings that end the answer; what precedes the earliest one is the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._ids: list[int] = []
        self._given = ""
        self._whole = ""
        self.stopped: str | None = None  # the stop string that was found

    def add(self, token: int) -> bool:
        """Take one more id. True when a stop string is now complete."""
        self._ids.append(token)
        if self._stop:
            self._whole = decode(self._tokenizer, self._ids)
            found = [(self._whole.find(s), s) for s in self._stop if s in self._whole]
            if found:
                at, self.stopped = min(found, key=lambda pair: (pair[0], -len(pair[1])))
                self._whole = self._whole[:at]
        return self.stopped is not None

    def take(self) -> str:
        """The text that became final since the last call."""
        if self.stopped is not None:
            return self._hand_out(self._whole)
        self._whole = decode(self._tokenizer, self._settled())
        return self._hand_out(self._final(self._whole))

    def finish(self) -> str:
        """What was held back: an unfinished character, or the beginning of a stop string that never came."""
        if self.stopped is None:
            self._whole = decode(self._tokenizer, self._ids)
        piece = self._whole[len(self._given) :]
        self._given = self._whole
        return piece

    def _settled(self) -> list[int]:
        """The ids without a run of byte tokens at the end: SentencePiece decodes such a run as a whole, so one more
        bad byte turns all of its characters into broken ones."""
        tokenizer, ids = self._tokenizer, self._ids
        end = first_byte = len(ids)
        while tokenizer is not None and end:  # special tokens are no text, so a run goes on across them
            end -= 1
            if _is_byte(tokenizer.convert_ids_to_tokens(ids[end])):
                first_byte = end
            elif ids[end] not in _special(tokenizer):
                break
        return ids[:first_byte]

    def _final(self, text: str) -> str:
        """Without what may still change: broken bytes at the end, the beginning of a stop string."""
        text = text.rstrip(_BROKEN) if text.endswith(_BROKEN) else text
        held = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:n]):
                    held = n
                    break
        return text[: len(text) - held]

    def _hand_out(self, text: str) -> str:
        """The part of `text` not yet given. A decoder that rewrites earlier text (rare) waits until it settles."""
        if not text.startswith(self._given):
            return ""
        piece, self._given = text[len(self._given) :], text
        return piece


def _is_byte(piece: str | None) -> bool:
    return piece is not None and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


class Labels:
    """The label of a single token on a screen: its text with its spaces, special tokens by name, parts of a
    character as bytes (`<0xF0><0x9F>`), and `#id` without a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None

    def __getitem__(self, token: int) -> str:
        label = self._known.get(token)
        if label is None:
            label = self._known[token] = self._make(token)
        return label

    def _make(self, token: int) -> str:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"#{token}"
        piece = tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a padding row of the embedding that no token has
            return f"<#{token}>"
        if token in _special(tokenizer):
            return str(piece)
        # Decoded behind another token, so that a decoder which strips the first space keeps this one.
        if self._anchor is None:
            self._anchor = _anchor(tokenizer)
        anchor, alone = self._anchor
        both = tokenizer.decode([anchor, token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = both[len(alone) :] if both.startswith(alone) else both
        if _BROKEN in text and _BROKEN not in piece:
            return _as_bytes(piece)
        return text or str(piece)


def _special(tokenizer: Any) -> frozenset[int]:
    return frozenset(getattr(tokenizer, "all_special_ids", ()))


def _anchor(tokenizer: Any) -> tuple[int, str]:
    """A token with plain text of its own, and that text."""
    ids = tokenizer.encode("a", add_special_tokens=False) or [0]
    return ids[-1], tokenizer.decode([ids[-1]], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@cache
def _byte_of() -> dict[str, int]:
    """The printable character that byte-level BPE (GPT-2) shows for every byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def _as_bytes(piece: str) -> str:
    """A byte-level piece as hexadecimal bytes; pieces such as `<0xF0>` are that already."""
    table = _byte_of()
    if all(c in table for c in piece) and not piece.startswith("<0x"):
        return "".join(f"<0x{table[c]:02X}>" for c in piece)
    return piece
