"""What visitors can do to one another and to themselves while an answer is under way, without a browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import app
from eagle_core.errors import InvalidRequest
from eagle_core.events import Step
from tests import synthetic
from tests.test_page import PAUSE, TinyPair
from viz import playground
from viz.models import Models
from viz.playground import Playground, Recording, Shelf, Visit
from viz.words import WORDS

WISH: dict[str, Any] = {
    "method": "eagle3", "total_token": 12, "depth": 3, "top_k": 4, "temperature": 0.0, "top_p": 1.0,
    "sampling_top_k": 0, "min_p": 0.0, "seed": 0, "max_new_tokens": 40, "expand_by": "value", "rerank": True,
    "coupled": True, "static_tree": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return TinyPair()


@pytest.fixture
def ground(pair: TinyPair) -> Iterator[Playground]:
    shelf = Shelf(playground.Path("nowhere"))
    shelf.put(Recording.of("first", synthetic.run(3, steps=4), "Why?", "A first one"))
    models = Models(None, None)
    models._pair = pair
    pair.slow.pause = PAUSE
    yield Playground(models, shelf, shelf["first"])
    pair.slow.pause = 0


def ask(ground: Playground, visit: Visit, text: str = "hello", race: bool = False, **wish: Any) -> Iterator[Any]:
    return map(json.loads, ground.answer(visit, text, race=race, system=None, **WISH | wish))


def begun(told: Iterator[dict[str, Any]]) -> None:
    """Reads messages until a step of the answer has come."""
    for message in told:
        if any(event["kind"] == "step" for event in message.get("events", ())):
            return
    raise AssertionError("no step came")


@pytest.mark.parametrize("how", ["new", "recording", "lesson", "trace"])
def test_what_was_begun_anew_hears_nothing_of_the_answer_before(ground: Playground, how: str) -> None:
    visit = ground.visit("a")
    told = ask(ground, visit, "old question")
    begun(told)
    if how == "new":
        ground.fresh("a")
    elif how == "recording":
        ground.play(visit, ground.shelf["first"])
    elif how == "lesson":
        assert "message" in ground.lesson([visit.key, 0, None])
    else:
        text = "".join(playground.dump(event) + "\n" for event in synthetic.run(5, steps=3))
        assert "message" in ground.open_trace([visit.key, "mine.jsonl", text])
    assert [message for message in told if message.get("events")] == []
    assert visit.talk == [] and visit.idle
    begun(ask(ground, visit, "next question", max_new_tokens=4))
    shown = list(visit.shown.values())[-1]
    assert "old" not in str(shown.run.starts[0].prompt_text)


def test_a_check_that_was_left_says_nothing_on_the_new_stage(ground: Playground, pair: TinyPair) -> None:
    visit = ground.visit("a")
    told = ask(ground, visit, race=True)
    for message in told:
        if message.get("role") == "plain":
            break
    ground.fresh("a")
    assert [message for message in told if message.get("run")] == []


def test_a_sweep_and_an_answer_do_not_end_each_other(ground: Playground, pair: TinyPair) -> None:
    visit = ground.visit("a")
    told = ask(ground, visit)
    begun(told)
    swept = ground.sweep(visit, "hello", "total_token", "4", "0", 8, "eagle3", "en")
    thread = threading.Thread(target=lambda: [None for _ in swept])  # it waits in line, until it is stopped
    next(swept)
    thread.start()
    ground.stop("a")
    assert [event["reason"] for message in told for event in message.get("events", ()) if "reason" in event] == [
        "cancelled"
    ]
    assert visit.idle and not visit.lab.is_set()
    begun(ask(ground, visit, "again", max_new_tokens=4))
    ground.stop_lab("a")
    thread.join(20)
    assert not thread.is_alive()


def test_whoever_leaves_takes_their_sweep_along(ground: Playground) -> None:
    visit = ground.visit("a")
    ground.leave("a")
    assert visit.cancel.is_set() and visit.lab.is_set()


def test_a_refusal_is_a_sentence_and_gives_the_text_back(ground: Playground) -> None:
    visit = ground.visit("a")
    *_, last = ask(ground, visit, method="eagle1", static_tree="[[0],[1,0]]")
    assert visit.refused and last["note"]["key"] == "status.error" and "has no parent" in last["note"]["text"]
    begun(ask(ground, visit, max_new_tokens=4))
    assert not visit.refused


def test_an_unforeseen_error_is_a_sentence_too(
    ground: Playground, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    visit = ground.visit("a")
    monkeypatch.setattr(ground.models, "answer", lambda *args, **request: 1 / 0)
    *_, last = ask(ground, visit)
    assert last["note"]["key"] == "status.broken" and visit.refused and visit.idle
    assert "ZeroDivisionError" in caplog.text


def test_an_emptied_seed_is_zero(ground: Playground) -> None:
    visit = ground.visit("a")
    list(ask(ground, visit, seed=None, max_new_tokens=4))
    assert not visit.refused and list(visit.shown.values())[-1].run.starts[0].sampling["seed"] == 0


def test_old_runs_make_room(ground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    visit = ground.visit("a")
    ground.shelf.put(Recording.of("second", synthetic.run(8, steps=4), "And?", "A second one"))
    for name in ("first", "second"):
        visit.shown[name] = ground.shelf[name].shown()
    rows = [
        sum(len(e.nodes) + len(e.dropped) for e in ground.shelf[n].events if isinstance(e, Step)) for n in visit.shown
    ]
    monkeypatch.setattr(playground, "MAX_ROWS", sum(rows))
    visit.make_room()
    assert list(visit.shown) == ["first", "second"]
    monkeypatch.setattr(playground, "MAX_ROWS", sum(rows) - 1)
    visit.make_room()
    assert list(visit.shown) == ["second"]
    monkeypatch.setattr(playground, "MAX_ROWS", 0)
    visit.make_room()
    assert list(visit.shown) == ["second"]  # what is on the page stays, whatever it has


def test_a_page_that_lost_its_connection_is_known_again(ground: Playground) -> None:
    """Its session was forgotten; the next answer is a new visit's, and the stage learns by which key to ask."""
    ground.visit("a")
    ground.leave("a")
    visit = ground.visit("a")
    told = list(ask(ground, visit, max_new_tokens=4))
    assert {message["visit"] for message in told if "visit" in message} == {visit.key}
    name = next(iter(visit.shown))
    assert "text" in ground.keep([visit.key, "trace", name, 0, "en"])


@pytest.mark.parametrize("language", [*WORDS, "xx", None, 3])
def test_a_replay_speaks_the_language_of_the_page(ground: Playground, language: Any) -> None:
    visit = ground.visit("a")
    kept = ground.keep([visit.key, "replay", "first", 0, language])
    assert ('lang="zh-CN"' in kept["text"]) == (language == "zh")


def test_a_public_page_refuses_larger_trees_by_name() -> None:
    app.refuse_above(depth=(10, 10), top_k=(16, 16))
    with pytest.raises(InvalidRequest, match="depth is 11; this public page takes 10"):
        app.refuse_above(depth=(11, 10), top_k=(16, 16))


def test_a_static_tree_that_is_no_list_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no JSON list"):
        playground._paths("[[0],")
