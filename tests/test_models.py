"""Bringing the pair in, and its engine where it runs: here, or in a process that a Space lends a GPU to."""

from __future__ import annotations

import gzip
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import app
import eagle_core
from eagle_core import Sampling, TreeSettings
from eagle_core.compare import Verdict
from eagle_core.errors import EagleError, InvalidRequest, ModelNotFound
from eagle_core.events import Finish, Start, Step
from eagle_core.metrics import Run
from eagle_core.pairs import Pair
from eagle_core.target import Target
from tests.conftest import eagle_head, tiny_model
from viz import models as module
from viz.models import Load, Models, lease
from viz.playground import TRACES, Playground, Shelf
from viz.words import WORDS

IDS = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def pair() -> Pair:
    pair = Pair(Target(tiny_model("llama"), None, "tiny"))
    pair._parts["eagle3 head"] = eagle_head("eagle3")
    return pair


def request(**more: Any) -> dict[str, Any]:
    return {"method": "eagle3", "sampling": Sampling(), "settings": TreeSettings(8), "max_new_tokens": 12} | more


class Elsewhere:
    """A stand-in for the `spaces` package: what is decorated runs as if in another process, so everything that goes
    in and out is pickled, and leaving the generator is all that stops it."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.closed = 0
        self.broken: Exception | None = None

    def GPU(self, duration: Callable[..., int]) -> Callable[..., Any]:
        def decorate(task: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
            def away(*args: Any) -> Iterator[Any]:
                if self.broken:
                    raise self.broken
                self.asked.append(duration(*args))
                items = task(*pickle.loads(pickle.dumps(args)))
                while True:
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    except Exception as e:  # the package hands on the kind of an error, not its sentence
                        raise RuntimeError(type(e).__name__) from None
                    try:
                        yield pickle.loads(pickle.dumps(item))
                    except GeneratorExit:
                        self.closed += 1
                        items.close()
                        raise

            return away

        return decorate


class TestComing:
    def test_tells_its_stages_and_is_there(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        go = threading.Event()

        def load_pair(target: str | None, drafter: str | None, progress: Callable[[str, float], None]) -> Pair:
            assert (target, drafter) == ("T", "D")
            for label, share in (("downloading x", 0.5), ("unpacking", 1.0), ("converting to y", 0.5)):
                progress(label, share)
            go.wait(10)
            progress("converting to y", 1.0)
            return pair

        monkeypatch.setattr(eagle_core, "load_pair", load_pair)
        models = Models("T", "D")
        told = []
        for what, done in models.coming():
            told.append((what, done))
            if what == "load.convert":
                go.set()
        assert models.loaded and models.pair() is pair and list(models.coming()) == []
        assert [done for _, done in told] == sorted(done for _, done in told) and told[-1][1] <= 1
        assert ("load.convert", pytest.approx(0.71)) in told
        assert all(what in WORDS["en"] and what in WORDS["zh"] for what, _ in told)

    def test_many_wait_for_one(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        loads = []
        monkeypatch.setattr(eagle_core, "load_pair", lambda *a, **k: loads.append(a) or pair)
        models = Models(None, None)
        waiting = [threading.Thread(target=models.pair) for _ in range(5)]
        for one in waiting:
            one.start()
        for one in waiting:
            one.join(10)
        assert len(loads) == 1 and models.pair() is pair

    def test_a_failure_is_told_and_tried_again(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        def fails(*args: Any, **kw: Any) -> Pair:
            raise ModelNotFound("no way to the hub")

        monkeypatch.setattr(eagle_core, "load_pair", fails)
        models = Models(None, None)
        with pytest.raises(ModelNotFound, match="no way to the hub"):
            list(models.coming())
        monkeypatch.setattr(eagle_core, "load_pair", lambda *a, **k: pair)
        assert models.pair() is pair

    def test_another_pair_or_none(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        models = Models(None, None)
        models._pair = pair

        def fails(*args: Any, **kw: Any) -> Pair:
            raise ModelNotFound("not there")

        monkeypatch.setattr(eagle_core, "load_pair", fails)
        with pytest.raises(ModelNotFound):
            list(models.replace("other", None))
        assert models.pair() is pair

    def test_begins_when_somebody_came_and_not_before(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        began = threading.Event()
        monkeypatch.setattr(eagle_core, "load_pair", lambda *a, **k: began.set() or pair)
        monkeypatch.setattr("viz.playground.WARM", 0.01)
        for eager in (False, True):
            models = Models(None, None)
            ground = Playground(models, Shelf(), None, eager=eager)
            assert not began.wait(0.1)
            ground.welcome()
            assert began.wait(5 if eager else 0.1) is eager

    def test_the_first_word_comes_at_once(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        go = threading.Event()
        monkeypatch.setattr(eagle_core, "load_pair", lambda *a, **k: go.wait(10) and pair)
        told = Load(None, None).told(every=60)
        assert next(told)[0].startswith("load.")
        go.set()


class TestLentGpu:
    @pytest.fixture
    def space(self) -> Elsewhere:
        return Elsewhere()

    @pytest.fixture
    def models(self, space: Elsewhere, pair: Pair) -> Models:
        models = Models(None, None, space.GPU)
        models._pair = pair
        return models

    def test_the_same_answer_as_here(self, models: Models, space: Elsewhere, pair: Pair) -> None:
        here = Run.collect(pair.generate(IDS, **request()))
        there = Run.collect(models.answer(IDS, threading.Event(), **request()))
        assert there.ids == here.ids and len(there.finishes) == 1
        assert space.asked == [lease(IDS, request())] and space.closed == 0

    def test_the_check_and_its_verdict(self, models: Models, pair: Pair) -> None:
        ids = Run.collect(pair.generate(IDS, **request())).ids
        *events, found = models.check(IDS, ids, threading.Event(), **request())
        assert isinstance(found, Verdict) and found.verdict == "equal"
        assert isinstance(events[0], Start) and events[0].method == "vanilla"
        *_, found = models.check(IDS, [*ids[:-1], ids[-1] + 1], threading.Event(), **request())
        assert isinstance(found, Verdict) and found.verdict == "different"

    def test_stop_leaves_the_gpu_and_ends_the_answer(self, models: Models, space: Elsewhere) -> None:
        cancel, told = threading.Event(), []
        for event in models.answer(IDS, cancel, **request(max_new_tokens=60)):
            told.append(event)
            if sum(isinstance(e, Step) for e in told) == 3:
                cancel.set()
        last, run = told[-1], Run.collect(told)
        assert isinstance(last, Finish) and last.reason == "cancelled" and space.closed == 1
        assert (last.steps, last.tokens) == (3, len(run.ids))

    def test_errors_keep_their_sentence(self, models: Models, space: Elsewhere) -> None:
        with pytest.raises(InvalidRequest, match="eagle9"):
            list(models.answer(IDS, threading.Event(), **request(method="eagle9")))
        space.broken = RuntimeError("no quota left")
        with pytest.raises(EagleError, match="no quota left"):
            list(models.answer(IDS, threading.Event(), **request()))

    def test_leases_are_short_and_fit_the_answer(self) -> None:
        assert lease("", {"max_new_tokens": 1}) == 10
        assert lease("", {"max_new_tokens": 256}) == 42
        assert lease("", {"max_new_tokens": 1024}) == module.LEASE[1] <= 60

    def test_the_page_takes_the_decorator_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "spaces", None)  # not importable
        assert app.lent() is None
        space = types.ModuleType("spaces")
        space.GPU = Elsewhere().GPU  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "spaces", space)
        assert app.lent() is space.GPU


def test_a_trace_is_opened_packed_as_recordings_are_and_plain(tmp_path: Path) -> None:
    packed = next(TRACES.glob("*.jsonl.gz"))
    plain = tmp_path / packed.stem
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    for path in (packed, plain):
        found = app.opening(str(path), Shelf())
        assert found is not None and found.name == plain.stem and len(found.events) > 2
