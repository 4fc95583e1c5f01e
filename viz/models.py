"""The pair behind the page: brought in once, in the background, with its progress told; and the one door to its engine.

    models = Models(None, None)
    for what, done in models.coming():      "load.download", 0.37 … until it is there
        …
    models.answer(prompt, cancel, method="eagle3", …)      → the engine's events
    models.check(prompt_ids, ids, cancel, …)               → plain decoding's events, then the verdict

Where a Hugging Face Space lends GPUs (`spaces.GPU`, handed in as `gpu`), an answer is made in a process of its own
that holds one: what goes there and comes back is pickled, so errors travel as values, and closing the iterator is
what stops the work there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar

from eagle_core.errors import EagleError
from eagle_core.events import Event, Finish
from eagle_core.metrics import Run, measure
from viz.words import say

if TYPE_CHECKING:
    from eagle_core import Pair
    from eagle_core.compare import Verdict

__all__ = ["LEASE", "Load", "Models", "lease"]

LEASE = (10, 60)
"""Seconds of a lent GPU that an answer asks for at least and at most; an anonymous visitor has two minutes a day."""


def lease(prompt: Any, request: dict[str, Any]) -> int:
    """Seconds of a lent GPU for one answer: room for its tokens at a slow pace, as short as can be."""
    return min(LEASE[1], LEASE[0] + request["max_new_tokens"] // 8)


class Load:
    """A pair on its way, on a thread of its own. `what` names the stage in `viz.words`, `done` is the share of all."""

    STAGES: ClassVar = {"download": (0.3, 0.6), "unpack": (0.6, 0.62), "convert": (0.62, 0.8)}
    """Stages that the core tells a share of, by how their names begin; each stretches over a part of the whole."""

    def __init__(self, target: str | None, drafter: str | None) -> None:
        self.what, self.done = "load.engine", 0.0
        self.pair: Pair | None = None
        self.error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._work, args=(target, drafter), daemon=True, name="load").start()

    def _work(self, target: str | None, drafter: str | None) -> None:
        try:
            import torch  # noqa: F401  (most of what starting takes)

            self._reach("load.engine", 0.2)
            from eagle_core import load_pair

            self._reach("load.target", 0.3)
            pair = load_pair(target, drafter, progress=self._report)
            self._reach("load.drafters", 0.92)
            pair.failures  # noqa: B018  (reads the announced heads, so that the first answer need not)
            self.pair = pair
        except BaseException as e:  # handed to whoever waits, whole
            self.error = e
        finally:
            self._over.set()

    def _reach(self, what: str, done: float) -> None:
        self.what, self.done = what, max(done, self.done)

    def _report(self, label: str, share: float) -> None:
        stage = next((name for name in self.STAGES if label.startswith(name)), None)
        if stage is None:
            return
        low, high = self.STAGES[stage]
        self._reach(f"load.{stage}", low + (high - low) * share)
        if stage == "convert" and share >= 1:
            self._reach("load.target", high)

    def told(self, every: float = 0.25) -> Iterator[tuple[str, float]]:
        """Stage and share, again and again until it is over; raises what went wrong."""
        pause = 0.0  # the first word at once, the others at their pace
        while not self._over.wait(pause):
            yield self.what, self.done
            pause = every
        if self.error is not None:
            raise self.error


class Models:
    """The pair, brought in when it is first wanted.

    Args:
        target: a preset, hub id or folder; None for the default.
        drafter: a hub id or folder; None for the preset's own.
        gpu: the decorator of a place that lends GPUs; None where the models run in this process.
    """

    def __init__(self, target: str | None, drafter: str | None, gpu: Callable[..., Any] | None = None) -> None:
        self._names = target, drafter
        self._pair: Pair | None = None
        self._load: Load | None = None
        self._lock = threading.Lock()
        self._lent = gpu is not None
        if gpu is not None:
            self._answer_there = gpu(duration=lease)(self._answer_there)  # type: ignore[method-assign]
            self._check_there = gpu(duration=lease)(self._check_there)  # type: ignore[method-assign]

    @property
    def loaded(self) -> bool:
        return self._pair is not None

    def warm(self) -> None:
        """Begin to bring the pair in, if nobody has yet."""
        with self._lock:
            if self._pair is None and self._load is None:
                self._load = Load(*self._names)

    def coming(self) -> Iterator[tuple[str, float]]:
        """How far the pair is, until it is there; nothing where it is there already.

        Raises:
            EagleError: it cannot be had; the next one who wants it tries again.
        """
        self.warm()
        load = self._load
        if load is None:
            return
        try:
            yield from load.told()
        except BaseException:
            with self._lock:
                if load.error is not None and self._load is load:
                    self._load = None
            raise
        with self._lock:
            if self._load is load:
                self._pair, self._load = load.pair, None

    def pair(self) -> Pair:
        """The pair, waited for."""
        for _ in self.coming():
            pass
        assert self._pair is not None
        return self._pair

    def replace(self, target: str | None, drafter: str | None) -> Iterator[tuple[str, float]]:
        """Take another pair into use, telling how far it is; what was there stays if it cannot be had."""
        from eagle_core.pairs import spare_the_collector

        load = Load(target, drafter)
        yield from load.told()
        with self._lock:
            self._pair, self._load = load.pair, None
        del load
        spare_the_collector()

    def look(self, target: str, drafter: str, language: str) -> Iterator[str]:
        """What a pair is and needs, read from its files without loading weights into memory; lines of text."""
        import torch
        from transformers import AutoModelForCausalLM

        from eagle_core.checkpoints import inspect
        from eagle_core.pairs import target_config

        config = target_config(target or None)
        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        size = sum(p.numel() for p in model.parameters())
        dtype = config.dtype if torch.cuda.is_available() and config.dtype else torch.float32
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        yield say(
            language, "models.memory", name=target or config.name_or_path, parameters=round(size / 1e6),
            weights=round(size * dtype.itemsize / 1e6), dtype=str(dtype).removeprefix("torch."),
            kv=round(2 * text.num_hidden_layers * heads * width * dtype.itemsize / 1e3, 1),
            context=text.max_position_embeddings,
        )  # fmt: skip
        if drafter:
            facts = inspect(drafter, config)
            yield from (f"{key}: {value}" for key, value in facts.items() if value not in (None, [], {}))

    # The door to the engine. `request` holds what `Pair.generate` takes besides the prompt and `cancel`.

    def answer(self, prompt: Any, cancel: threading.Event, **request: Any) -> Iterator[Event]:
        """The events of one answer. Raises `EagleError` at once, or in its course."""
        if self._lent:
            return _stoppable(self._answer_there(prompt, request), cancel)
        return self.pair().generate(prompt, cancel=cancel, **request)

    def check(
        self, prompt_ids: list[int], ids: list[int], cancel: threading.Event, **request: Any
    ) -> Iterator[Event | Verdict]:
        """Plain decoding of the same prompt, and at the end what it says of `ids`, unless that was cancelled."""
        if self._lent:
            return _stoppable(self._check_there(prompt_ids, request | {"ids": ids}), cancel)
        return _checked(self.pair(), prompt_ids, ids, request | {"cancel": cancel})

    def _answer_there(self, prompt: Any, request: dict[str, Any]) -> Iterator[Event | EagleError]:
        try:
            yield from self.pair().generate(prompt, **request)
        except EagleError as e:  # an exception would lose its sentence on the way
            yield e

    def _check_there(self, prompt_ids: list[int], request: dict[str, Any]) -> Iterator[Event | Verdict | EagleError]:
        request = dict(request)
        try:
            yield from _checked(self.pair(), prompt_ids, request.pop("ids"), request)
        except EagleError as e:
            yield e


def _checked(pair: Pair, prompt_ids: list[int], ids: list[int], request: dict[str, Any]) -> Iterator[Event | Verdict]:
    from eagle_core.compare import Verdict, judge

    plain = []
    method, sampling = request["method"], request["sampling"]
    for event in pair.generate(prompt_ids, **request | {"method": "vanilla"}):
        plain.append(event)
        yield event
    if request.get("cancel") and request["cancel"].is_set():
        return
    if pair.drafter(method).rule == "ratio" and not sampling.greedy:
        yield Verdict(None)  # ids cannot tell
    else:
        yield judge(pair.target, prompt_ids, ids, Run.collect(plain).ids, sampling)


def _stoppable(items: Iterator[Any], cancel: threading.Event) -> Iterator[Any]:
    """What comes from a lent GPU. Stopped by leaving it: what it told so far then ends with a `Finish` of its own."""
    told: list[Event] = []
    with closing(items):  # type: ignore[type-var]
        try:
            for item in items:
                if isinstance(item, EagleError):
                    raise item
                yield item
                if isinstance(item, Event):
                    told.append(item)
                if cancel.is_set() and not isinstance(item, Finish):
                    break
            else:
                return
        except EagleError:
            raise
        except Exception as e:  # whatever the lender raises: no quota left, no GPU free, its process ended
            raise EagleError(f"the Space could not lend its GPU: {e}") from e
    run = Run.collect(told)
    numbers: dict[str, Any] = measure(run, "steps", "tokens", "drafted", "accepted")
    seconds = sum(ms for step in run.steps for ms in step.timing.values()) / 1000
    counts: dict[str, Any] = {name: value or 0 for name, value in numbers.items()}
    yield Finish(reason="cancelled", text="", seconds=seconds, **counts)
