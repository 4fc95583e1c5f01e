"""A corpus on disk: conversations of one target, readable without loading them.

    corpus.json       what it is: target, captured boundaries, counts of what is complete, the writer's settings
    tokens.u32        token ids of all conversations, one after another, chat template included
    answer.u8         1 where the token is part of an answer, its end token included
    lengths.i32       tokens of each conversation
    temperature.f32   at which the answers of each conversation were drawn
    features.f16      [tokens, boundaries · Ht] captured states, for the first `featured` conversations

Files only grow, and `corpus.json` is replaced in one move after they have: what it counts is complete, and what a
killed writer left behind it is cut off at the next append. So anybody may read while somebody writes; that only one
process writes at a time is seen to by a lock (`Corpus.writing`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from eagle_core.errors import TrainingError

__all__ = ["Conversation", "Corpus", "Prompt", "disk_errors", "identity", "replace_file", "weights"]

_FORMAT = 1
_KINDS = {"tokens": ("u32", np.uint32), "answer": ("u8", np.uint8), "features": ("f16", np.float16),
          "lengths": ("i32", np.int32), "temperature": ("f32", np.float32)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user turn: its text, and how many more tokens the target may add to it."""

    text: str
    free: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """tokens [n] int, answer [n] bool, temperature of the answers, features [n, boundaries · Ht] or None."""

    tokens: np.ndarray
    answer: np.ndarray
    temperature: float
    features: np.ndarray | None = None


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a write that the disk refused into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrainingError(
                f"The disk of {path} is full. Nothing that was complete is lost; free some space and continue."
            ) from error
        raise TrainingError(f"{path} cannot be written: {error.strerror}.") from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file in one move: a reader, or a kill, sees the old one or the new one."""
    half = path.with_name(path.name + ".part")
    with disk_errors(path):
        try:
            half.write_bytes(content)
            os.replace(half, path)
        finally:
            half.unlink(missing_ok=True)


def weights(target: Any) -> str:
    """A digest of a target's weights: another training of the same model, another digest; "" if they are not in memory.

    A sample of each tensor is read, in bfloat16, so that the same checkpoint loaded in float32 has the same digest.
    """
    import torch

    digest = hashlib.sha256()
    for tensor in target.model.parameters():
        if tensor.is_meta:
            return ""
        sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 1024)].to(torch.bfloat16)
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(sample.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def identity(target: Any) -> dict[str, Any]:
    """What must agree for a text to be this target's own: its sizes, its weights and, where it has one, its tokenizer.
    In float16 weights are rounded in another way, so there they tell nothing and are left out."""
    import torch

    tokenizer = target.tokenizer
    digest = ""
    if tokenizer is not None:
        words = json.dumps(sorted(tokenizer.get_vocab().items())) + str(tokenizer.chat_template)
        digest = hashlib.sha256(words.encode()).hexdigest()
    told = "" if target.dtype == torch.float16 else weights(target)
    return {
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "tokenizer": digest,
        **({"weights": told} if told else {}),
    }


class Corpus:
    """The conversations under `folder`. Open with `Corpus.open`, make with `Corpus.create`."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self._lock = FileLock(folder / ".lock", timeout=0)

    @classmethod
    def exists(cls, folder: Path | str) -> bool:
        return (Path(folder) / "corpus.json").exists()

    @classmethod
    def create(cls, folder: Path | str, target: Any, capture: Sequence[int], **writer: Any) -> Corpus:
        """An empty corpus of this target. `capture`: boundaries of its feature file, in order."""
        folder = Path(folder)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        corpus = cls(folder, {
            "format": _FORMAT, "name": target.name, "target": identity(target), "capture": list(capture),
            "conversations": 0, "tokens": 0, "featured": 0, "featured_tokens": 0, "writer": writer,
        })  # fmt: skip
        with corpus.writing():
            if cls.exists(folder):
                raise TrainingError(f"{folder} already holds a corpus; continue it, or name another folder.")
            corpus._commit()
        return corpus

    @classmethod
    def open(cls, folder: Path | str, target: Any = None) -> Corpus:
        """Open a corpus.

        Raises:
            TrainingError: no corpus there, one of a newer format, or the corpus of another target.
        """
        folder = Path(folder)
        path = folder / "corpus.json"
        if not path.exists():
            raise TrainingError(
                f"{folder} holds no corpus (no corpus.json). Write one with `python -m eagle_core corpus`."
            )
        try:
            about = json.loads(path.read_text())
        except ValueError as error:
            raise TrainingError(f"{path} is damaged: {error}") from error
        if about.get("format") != _FORMAT:
            raise TrainingError(f"{folder} is a corpus of format {about.get('format')}; this version reads {_FORMAT}.")
        corpus = cls(folder, about)
        if target is not None:
            mine, theirs = identity(target), about["target"]
            differing = [f"{key} {theirs[key]!r} there, {mine[key]!r} here" for key in mine
                         if theirs.get(key, mine[key]) != mine[key]]  # fmt: skip
            if differing:
                raise TrainingError(
                    f"{folder} was written by another target, {about['name']!r}: {'; '.join(differing)}. "
                    "A head learns only from text of its own target."
                )
        return corpus

    def refresh(self) -> None:
        """See what a writer has added meanwhile."""
        self.about = json.loads((self.folder / "corpus.json").read_text())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep every other process from writing here, and begin from what is on disk. May be nested.

        Raises:
            TrainingError: another process is writing.
        """
        with disk_errors(self.folder):
            try:
                self._lock.acquire()
            except Timeout:
                raise TrainingError(
                    f"Another process is writing to the corpus in {self.folder}; wait until it is done, or name"
                    " another folder. Training may read it meanwhile, unless it is written without states."
                ) from None
        try:
            if self._lock.lock_counter == 1 and self.exists(self.folder):
                self.refresh()
            yield
        finally:
            self._lock.release()

    def __len__(self) -> int:
        return int(self.about["conversations"])

    @property
    def tokens(self) -> int:
        return int(self.about["tokens"])

    @property
    def featured(self) -> int:
        """Conversations, from the first, whose states are on disk."""
        return int(self.about["featured"])

    @property
    def capture(self) -> tuple[int, ...]:
        return tuple(self.about["capture"])

    @property
    def width(self) -> int:
        return len(self.capture) * int(self.about["target"]["hidden_size"])

    def array(self, kind: str) -> np.ndarray:
        """The complete part of one file, memory-mapped; features are [tokens, width]."""
        suffix, dtype = _KINDS[kind]
        count = {"lengths": len(self), "temperature": len(self), "features": int(self.about["featured_tokens"])}.get(
            kind, self.tokens
        )
        shape: tuple[int, ...] = (count, self.width) if kind == "features" else (count,)
        if count == 0:
            return np.empty(shape, dtype)
        try:
            return np.memmap(self.folder / f"{kind}.{suffix}", dtype=dtype, mode="r", shape=shape)
        except (OSError, ValueError) as error:
            raise TrainingError(f"{self.folder}/{kind}.{suffix} is shorter than corpus.json says: {error}") from error

    def offsets(self) -> np.ndarray:
        """[conversations + 1] int64: where each conversation begins."""
        return np.concatenate([[0], np.cumsum(self.array("lengths"), dtype=np.int64)])

    def append(self, conversations: Iterable[Conversation]) -> None:
        """Add whole conversations; states are kept while every conversation so far had them."""
        new = list(conversations)
        if not new:
            return
        with self.writing():
            featured = self.featured == len(self) and all(c.features is not None for c in new)
            self._write("tokens", self.tokens, np.concatenate([c.tokens for c in new]))
            self._write("answer", self.tokens, np.concatenate([c.answer for c in new]))
            self._write("lengths", len(self), np.array([len(c.tokens) for c in new]))
            self._write("temperature", len(self), np.array([c.temperature for c in new]))
            added = sum(len(c.tokens) for c in new)
            if featured:
                self.append_features([c.features for c in new if c.features is not None], commit=False)
            self.about["conversations"] += len(new)
            self.about["tokens"] += added
            self._commit()

    def append_features(self, features: Sequence[np.ndarray], *, commit: bool = True) -> None:
        """Add the states of the next conversations that lack them, one array [n, width] each."""
        with self.writing():
            done = int(self.about["featured_tokens"])
            self._write("features", done * self.width, np.concatenate(features).ravel())
            self.about["featured"] += len(features)
            self.about["featured_tokens"] += sum(len(f) for f in features)
            if commit:
                self._commit()

    def remember(self, **state: Any) -> None:
        """While `writing`, keep facts of the writer in corpus.json with the next append."""
        assert self._lock.is_locked, "what is remembered before `writing` is lost when it begins"
        self.about["writer"].update(state)

    def _write(self, kind: str, complete: int, values: np.ndarray) -> None:
        suffix, dtype = _KINDS[kind]
        path, end = self.folder / f"{kind}.{suffix}", complete * np.dtype(dtype).itemsize
        with disk_errors(path), open(path, "ab") as file:
            if (found := file.seek(0, os.SEEK_END)) < end:
                raise TrainingError(
                    f"{path} is shorter than corpus.json says ({found:,} bytes, not {end:,}), so the corpus is damaged;"
                    " bring back a copy of its folder, or write to another one."
                )
            file.truncate(end)
            file.seek(0, os.SEEK_END)
            file.write(np.ascontiguousarray(values, dtype).tobytes())

    def _commit(self) -> None:
        replace_file(self.folder / "corpus.json", json.dumps(self.about, indent=1).encode())
