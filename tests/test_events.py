"""Traces: the round trip, and what a broken or hostile file gets."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_core.errors import TraceError
from eagle_core.events import SCHEMA, Finish, Start, Step, dump, load, load_trace
from tests import synthetic


def test_round_trip_of_any_run() -> None:
    for seed in range(5):
        events = synthetic.run(seed)
        assert list(load_trace([dump(e) for e in events])) == events
        assert list(load_trace([dump(e) + "\n" for e in events] + ["\n"])) == events


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_any_text_survives(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    step = next(e for e in synthetic.run(1, texts=[text or "x", "y"]) if isinstance(e, Step))
    assert load(dump(step)) == step


def test_events_are_frozen_and_hold_no_nan() -> None:
    start, step, finish = (next(e for e in synthetic.run(0) if isinstance(e, kind)) for kind in (Start, Step, Finish))
    for event in (start, step, finish):
        with pytest.raises(AttributeError):
            event.text = "other"  # type: ignore[misc]
    step.timing["draft_ms"] = float("nan")
    with pytest.raises(ValueError):
        dump(step)


def test_older_traces_load_as_they_are() -> None:
    """Schema 1 knew no sources, and no time of a commit."""
    start, step, *_ = synthetic.run(0)
    first = json.loads(dump(start)) | {"schema": 1}
    old = load(json.dumps(first))
    assert isinstance(old, Start) and old.schema == 1 and json.loads(dump(old)) == first
    assert isinstance(step, Step) and "source" not in dump(step)
    assert all(row.source is None for row in (*step.nodes, *step.dropped))
    both = load(dump(replace(step, nodes=[step.nodes[0], *(n._replace(source="both") for n in step.nodes[1:])])))
    assert isinstance(both, Step) and {n.source for n in both.nodes} == {None, "both"}
    assert load(dump(both)) == both


def spoiled(change: Any, kind: str = "step") -> str:
    event = next(e for e in synthetic.run(0) if e.kind == kind)
    plain = json.loads(dump(event))
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize("line,names", [
    ("", "JSON"), ("{", "JSON"), ("[]", "object"), ("null", "object"), ('{"kind":"stop"}', "stop"),
    ("[" * 100_000, "JSON"),
    (spoiled(lambda p: p.pop("nodes")), "nodes"),
    (spoiled(lambda p: p.update(extra=1)), "extra"),
    (spoiled(lambda p: p.update(nodes=[])), "root"),
    (spoiled(lambda p: p.update(index="0")), "index"),
    (spoiled(lambda p: p.update(index=True)), "index"),
    (spoiled(lambda p: p["nodes"][1].update(parent=5)), "tree"),
    (spoiled(lambda p: p["nodes"][1].update(parent=-1)), "tree"),
    (spoiled(lambda p: p["nodes"][1].update(parent=-7)), "parent"),
    (spoiled(lambda p: p["nodes"][1].update(id=9)), "tree"),
    (spoiled(lambda p: p["nodes"][1].update(depth=3)), "depth"),
    (spoiled(lambda p: p["nodes"][1].update(fate="<b>")), "fate"),
    (spoiled(lambda p: p["nodes"][0].update(fate="parent rejected")), "fate"),
    (spoiled(lambda p: p["nodes"][1].update(fate="root")), "fate"),
    (spoiled(lambda p: p["nodes"][p["accepted"][-1]].update(fate="not the draw")), "rejected|fate"),
    (spoiled(lambda p: p["nodes"][1].update(confidence=2)), "probability"),
    (spoiled(lambda p: p["nodes"][1].update(value=-0.5)), "value"),
    (spoiled(lambda p: p["bonus"].update(p=1.5)), "probability"),
    (spoiled(lambda p: p["nodes"][1].update(draw_p=10**400)), "draw_p"),
    (spoiled(lambda p: p.update(position=10**400)), "position"),
    (spoiled(lambda p: p.update(forwards=-2)), "forwards"),
    (spoiled(lambda p: p["timing"].update(draft_ms=-1.0)), "draft_ms"),
    (spoiled(lambda p: p.update(outside=[99])), "outside"),
    (spoiled(lambda p: p.update(emitted=[])), "emitted"),
    (spoiled(lambda p: p.update(emitted=[1] * 9)), "emitted"),
    (spoiled(lambda p: p.update(text="\ud800")), "surrogate"),
    (spoiled(lambda p: p["settings"].update({"\ud800": 1})), "surrogate"),
    (spoiled(lambda p: p["settings"].update(a=["\udfff"])), "surrogate"),
    (spoiled(lambda p: p["settings"].update(a=77)).replace('"a": 77', '"a": 1e999'), "settings"),
    (spoiled(lambda p: p["settings"].update(a=77)).replace('"a": 77', '"a": ' + "[" * 50 + "]" * 50), "deeply"),
    (spoiled(lambda p: p.update(versions={"torch": 2}), "start"), "versions"),
    (spoiled(lambda p: p.update(dropped=[], outside=[], accepted=[0], nodes=[p["nodes"][0]] + [
        {**p["nodes"][1], "id": i, "parent": 0, "depth": 1} for i in range(1, 400)])), "more than 256"),
    (spoiled(lambda p: p["nodes"][1].pop("text")), "exactly"),
    (spoiled(lambda p: p["nodes"][1].update(text=None)), "text"),
    (spoiled(lambda p: p.update(accepted=[0, 0])), "accepted"),
    (spoiled(lambda p: p.update(accepted=[])), "accepted"),
    (spoiled(lambda p: p.update(timing=[])), "timing"),
    (spoiled(lambda p: p["timing"].update(draft_ms="1")), "timing"),
    (spoiled(lambda p: p.update(schema=SCHEMA + 1), "start"), "schema"),
    (spoiled(lambda p: p.update(schema=0), "start"), "schema"),
    (spoiled(lambda p: p.update(schema="1"), "start"), "schema"),
    (spoiled(lambda p: p.update(schema=True), "start"), "schema"),
    (spoiled(lambda p: p["nodes"][1].update(source="<b>")), "source"),
    (spoiled(lambda p: p["nodes"][1].update(source=1)), "source"),
    (spoiled(lambda p: p["nodes"][1].update(origin="head")), "exactly"),
    (spoiled(lambda p: p.update(value=1)).replace('"value": 1}', '"value": NaN}'), "NaN"),
])  # fmt: skip
def test_a_broken_line_is_refused_by_name(line: str, names: str) -> None:
    with pytest.raises(TraceError, match=names):
        load(line)


def test_a_trace_in_disorder_is_refused_with_its_line() -> None:
    lines = [dump(e) for e in synthetic.run(0)]
    for broken, number in (
        (lines[1:], 1),
        ([*lines, lines[1]], len(lines) + 1),
        ([*lines, lines[-1]], len(lines) + 1),
        (lines[:2] + lines[3:], 3),
        ([lines[0]] * 2, 2),
    ):
        with pytest.raises(TraceError, match=f"line {number}"):
            list(load_trace(broken))


def test_an_answer_cancelled_before_its_prompt_was_read_is_a_trace() -> None:
    finish = Finish(reason="cancelled", text="", steps=0, tokens=0, drafted=0, accepted=0, seconds=0.0)
    assert list(load_trace([dump(finish)])) == [finish]
    with pytest.raises(TraceError, match="line 2"):
        list(load_trace([dump(finish)] * 2))


def test_a_trace_cut_off_still_gives_what_was_written() -> None:
    lines = [dump(e) for e in synthetic.run(0)]
    assert len(list(load_trace(lines[:3]))) == 3


_RUN = [dump(e) for e in synthetic.run(2, steps=2, total=5, depth=2, top_k=2)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_but_a_trace_error_comes_out(data: Any) -> None:
    """Any value in any place of a real event: it loads, or a TraceError says why not."""
    plain = json.loads(data.draw(st.sampled_from(_RUN)))
    junk = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(10**400),
        st.floats(),
        st.text(max_size=5),
        st.just("\ud800"),
        st.just([[float("inf")]]),
        st.just([]),
        st.just({}),
        st.just([{}]),
    )
    spot: Any = plain
    while True:
        key = data.draw(st.sampled_from(sorted(spot)) if isinstance(spot, dict) else st.integers(0, len(spot) - 1))
        if isinstance(spot[key], dict | list) and spot[key] and data.draw(st.booleans()):
            spot = spot[key]
        else:
            spot[key] = data.draw(junk)
            break
    with suppress(TraceError):
        event = load(json.dumps(plain).replace("Infinity", "1e999"))
        assert load(dump(event).encode().decode()) == event  # what was read can be written


def test_replaying_a_trace_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from eagle_core import load_trace, METHODS, TreeSettings;"
        "import eagle_core.metrics, eagle_core.__main__;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
