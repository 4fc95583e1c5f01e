"""What the page says of a run: exact on hand-made steps, and true for every shape and every hostile text."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import app
from eagle_core.compare import Scored, Verdict
from eagle_core.errors import InvalidRequest
from eagle_core.events import FATES, SOURCES, Candidate, Choice, Finish, Node, Start, Step, dump, load, load_trace
from eagle_core.metrics import METRICS, Run
from tests import synthetic
from viz import playground
from viz.charts import figures, sweep
from viz.export import numbers_csv, parts, replay, trace
from viz.graph import branching, graph, graphml
from viz.lesson import PAGES, page
from viz.stage import OVERLAP, Teller, message, pieces
from viz.verdict import beside, pays
from viz.why import REASONS, reasons, summary, why
from viz.words import WORDS, about, number, say, visible

HOSTILE = [
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "${1+1}", "{{value}}", "`", "\\",
    "\u2028", "\u2029",     "\u202e", "\u200f", "\x00", "\x1b[31m", "\n", " ", "", "&lt;", "]]>", "'\"", "😀", "\ufffd",
    "中文", "العربية", "x" * 300, "$\\frac{1}{2}$", "**bold**", "-->",
]  # fmt: skip


def step() -> Step:
    """the ─┬─ cat ─┬─ sat      The target draws cat after the, ran after cat, and x everywhere else.
    │       └─ ran
    └─ dog ─── ate"""

    def node(i, text, parent, depth, c, v, q, fate, draw, p=1.0):  # type: ignore[no-untyped-def]
        return Node(i, 10 + i, text, parent, depth, c, v, q, fate, draw[0], draw[1], p, depth < 2)

    x = (99, " x")
    return Step(
        index=6, position=41,
        nodes=[
            node(0, " the", -1, 0, 1.0, 1.0, 1.0, "root", (11, " cat"), 0.83),
            node(1, " cat", 0, 1, 0.7, 0.7, 0.83, "accepted", (14, " ran")),
            node(2, " dog", 0, 1, 0.2, 0.2, 0.1, "not the draw", x),
            node(3, " sat", 1, 2, 0.5, 0.35, 0.0, "not the draw", x),
            node(4, " ran", 1, 2, 0.4, 0.28, 1.0, "accepted", x, 0.6),
            node(5, " ate", 2, 2, 0.9, 0.18, 0.0, "parent rejected", x),
        ],
        dropped=[Candidate(6, 30, " bat", 0, 1, 0.1, 0.1, True), Candidate(7, 31, " big", 0, 1, 0.05, 0.5, False)],
        accepted=[0, 1, 4], bonus=Choice(99, " x", 0.6), top=[Choice(99, " x", 0.5), Choice(1, " y", 0.2)],
        emitted=[11, 14, 99], text=" cat ran x", timing={"draft_ms": 4.0, "verify_ms": 30.0, "other_ms": 1.0},
        forwards=2, settings={"total_token": 6}, outside=[],
    )  # fmt: skip


class TestWhy:
    def test_every_fate_has_its_sentence(self) -> None:
        s = step()
        assert [REASONS[i] for i in reasons(s)] == [
            "root", "accepted", "sibling", "sibling", "accepted", "unreached", "beam", "rule",
        ]  # fmt: skip
        assert why(s, 1, "en") == "Accepted: after “·the” the target drew “·cat” (p 0.830), and this is that token."
        assert why(s, 2, "en") == (
            "Rejected: after “·the” the target drew “·cat” (p 0.830), a sibling of this node; “·dog” had p 0.100."
        )
        assert why(s, 5, "en").startswith("Never reached: its ancestor “·dog” was rejected")
        assert why(s, 6, "en") == (
            "In the beam, so the drafter expanded it; then rerank left it out: value 0.100, the lowest kept is 0.180."
        )
        assert "生长规则" in why(s, 7, "zh")

    def test_a_draw_without_a_choice_has_no_number(self) -> None:
        s = step()
        greedy = replace(s, nodes=[n._replace(draw_p=1.0) for n in s.nodes])
        assert why(greedy, 2, "en") == (
            "Rejected: after “·the” the target drew “·cat” (its likeliest token), a sibling of this node."
        )

    def test_a_draw_that_no_child_was(self) -> None:
        s = step()
        nodes = [n._replace(draw=77, draw_text=" ox") if n.id == 2 else n for n in s.nodes]
        nodes[5] = nodes[5]._replace(fate="not the draw")
        changed = replace(s, nodes=nodes)
        assert REASONS[reasons(replace(changed, outside=[2]))[5]] == "vocabulary"
        assert REASONS[reasons(changed)[5]] == "miss"
        assert "no child in the tree was" in why(changed, 5, "en")

    def test_summary(self) -> None:
        assert summary(step(), "en") == (
            "Step 7: 6 nodes, depth 1 to 2; path of 2 accepted: ·cat ·ran; then the target’s own “·x”."
        )
        root = replace(step(), nodes=step().nodes[:1], dropped=[], accepted=[0], emitted=[99])
        assert summary(root, "en") == "Step 7: no draft; the target’s own “·x”."


class TestStage:
    def test_a_step_in_columns(self) -> None:
        run = synthetic.run(1, steps=1)
        teller = Teller("r", ask="hi")
        teller.tell(run[:1])
        told = json.loads(teller.tell([replace(step(), index=0)]))["events"][-1]
        assert told["p"] == [-1, 0, 0, 1, 1, 2, 0, 0]
        assert told["x"][:3] == [" the", " cat", " dog"] and told["t"][6] == 30
        assert [FATES[f] for f in told["f"]] == [n.fate for n in step().nodes]
        assert told["a"] == [0, 1, 4] and told["bonus"][:3] == [99, " x", 0.6]
        assert told["text"] == [" cat", " ran", " x"] and told["floor"] == 0.18
        assert told["tau"] == 3 and told["tps"] == pytest.approx(3000 / 35, rel=1e-3)
        assert told["settings"] == {"total_token": 6}  # differs from the start's, so it is told

    def test_a_dropped_message_loses_nothing(self) -> None:
        run = synthetic.run(2, steps=6)
        teller, seen = Teller("r"), set()
        for i, event in enumerate(run):
            told = json.loads(teller.tell([event]))
            if i % (OVERLAP + 1) != OVERLAP - 1 or event is run[-1]:  # every third message never arrives
                seen |= {e["n"] for e in told["events"]}
        assert seen == set(range(len(run)))

    def test_running_numbers_end_at_the_metrics(self) -> None:
        run = synthetic.run(4, steps=9)
        events = json.loads(Teller("r").tell(run))["events"]
        collected = Run.collect(run)
        assert events[-2]["tau"] == pytest.approx(METRICS["tau"].of(collected), rel=1e-3)
        assert events[-2]["tps"] == pytest.approx(METRICS["tokens_per_second"].of(collected), rel=1e-3)
        assert events[-1]["numbers"]["tokens"] == METRICS["tokens"].of(collected)

    def test_text_cut_at_a_stop(self) -> None:
        run = synthetic.run(11, steps=8, cut=True)
        events = json.loads(Teller("r").tell(run))["events"]
        told = "".join(t for e in events if e["kind"] != "finish" for t in e["text"])
        assert told == Run.collect(run).text

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        total=st.integers(1, 256),
        depth=st.integers(1, 10),
        top_k=st.integers(1, 12),
        texts=st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), min_size=2, max_size=9, unique=True),
    )
    def test_any_run_is_told_whole_and_harmless(self, seed, total, depth, top_k, texts) -> None:  # type: ignore[no-untyped-def]
        run = synthetic.run(seed, steps=2, total=total, depth=depth, top_k=top_k, texts=texts)
        assert [load(dump(e)) for e in run] == run  # what the generator makes is a valid trace
        text = Teller("r", ask=texts[0], title=texts[-1]).tell(run)
        assert "<" not in text and "\u2028" not in text and "\u2029" not in text
        told = json.loads(text)
        assert told["ask"] == texts[0]
        for event, original in zip(told["events"][1:-1], run[1:-1]):
            assert len(event["f"]) == len(original.nodes)
            assert len(event["p"]) == len(event["w"]) == len(original.nodes) + len(original.dropped)
            assert sum(event["f"].count(i) for i in range(len(FATES))) == len(original.nodes)
            assert event["x"] == [r.text for r in [*original.nodes, *original.dropped]]
            assert "".join(event["text"]) == original.text
            for row in {0, len(original.nodes) - 1, len(original.nodes) // 2, len(event["p"]) - 1}:
                for language in WORDS:
                    assert REASONS[event["w"][row]] and why(original, row, language)

    def test_message_is_safe_inside_html(self) -> None:
        assert message(note={"key": "k", "text": "</script>\u2028"}, empty=None) == (
            '{"note":{"key":"k","text":"\\u003c/script>\\u2028"}}'
        )


class TestPieces:
    @pytest.mark.parametrize(
        "labels, text, expected",
        [
            ([" a", " b"], " a b", [" a", " b"]),
            ([" a", "0xF0 9F", "0x98 80", " b"], " a😀 b", [" a", "", "😀", " b"]),
            (["0xF0 9F", "0x98"], "", ["", ""]),  # nothing final yet
            (["0x80", "!"], "😀!", ["😀", "!"]),  # it began in an earlier step
            ([" Hello"], "Hello", ["Hello"]),  # a tokenizer that drops the first space
            ([" a", "<|end|>"], " a", [" a", ""]),
            ([], "", []),
        ],
    )
    def test_exact(self, labels: list[str], text: str, expected: list[str]) -> None:
        assert pieces(labels, text) == expected

    @given(st.lists(st.text(max_size=4), min_size=1, max_size=8), st.text(max_size=20))
    def test_always_the_whole_text(self, labels: list[str], text: str) -> None:
        assert "".join(pieces(labels, text)) == text
        whole = "".join(labels)
        assert "".join(pieces(labels, whole)) == whole


class TestWords:
    def test_both_languages_fill_the_same_slots(self) -> None:
        for key, english in WORDS["en"].items():
            slots = set(re.findall(r"\{(\w+)\}", english))
            assert slots == set(re.findall(r"\{(\w+)\}", WORDS["zh"][key])), key

    def test_no_claim_without_a_verdict(self) -> None:
        for language in WORDS:
            for key, text in WORDS[language].items():
                assert "lossless" not in text.lower() and "无损" not in text, key

    def test_unfilled_slot_is_an_error(self) -> None:
        with pytest.raises(KeyError):
            say("en", "why.accepted", token="a")

    @pytest.mark.parametrize(
        "x, text", [(0, "0"), (1, "1"), (0.5, "0.500"), (1e-9, "<0.001"), (0.99999, ">0.999"), (0.9994, "0.999")]
    )
    def test_number(self, x: float, text: str) -> None:
        assert number(x) == text

    @given(st.text(max_size=30))
    def test_visible_hides_nothing_and_moves_nothing(self, text: str) -> None:
        import unicodedata

        shown = visible(text)
        assert shown and not any(
            unicodedata.category(c) in ("Cc", "Zl", "Zp") or c in "\u202a\u202e\u2066" for c in shown
        )

    def test_methods_and_knobs_match_the_engine(self) -> None:
        from eagle_core import METHODS

        assert {name: method.settings for name, method in METHODS.items()} == app.USES
        for name, method in METHODS.items():
            assert WORDS["en"][f"method.{name}"] == method.label
            assert WORDS["en"][f"method.{name}.explain"] == method.explain

    def test_the_editor_draws_the_reference_tree(self) -> None:
        from eagle_core.growth import EAGLE1_TREE

        drawn = re.search(r"REFERENCE = (\[.*?\]);", (app.STAGE / "editor.js").read_text(encoding="utf-8"))
        assert drawn and [tuple(p) for p in json.loads(drawn[1])] == list(EAGLE1_TREE.paths)


class TestVerdict:
    def plain(self, ids: list[int], ms: float) -> Run:
        run = synthetic.run(1, steps=len(ids) - 1, total=1, method="vanilla")
        steps = [
            replace(s, emitted=[i], timing={"draft_ms": 0.0, "verify_ms": ms, "other_ms": 0.0})
            for s, i in zip(run[1:-1], ids[1:])
        ]
        return Run.collect([replace(run[0], emitted=ids[:1]), *steps, run[-1]])

    def test_a_worked_example(self) -> None:
        """Steps of 35 ms for 3 tokens beside plain forwards of 20 ms: break-even 1.75, and it pays 3 / 1.75."""
        start = synthetic.run(1, steps=1)[0]
        ours = Run.collect([replace(start, emitted=[1]), replace(step(), index=0)])
        told = beside(ours, self.plain([1, 11, 14, 99], 20.0), Verdict("equal"))
        assert told["verdict"] == "equal" and told["n"] == 4
        assert told["pays"] == {
            "tau": 3.0, "need": 1.75, "plain_ms": 20.0, "draft": 0.2, "verify": 1.5, "other": 0.05,
            "pays": True, "cause": None,
        }  # fmt: skip
        assert told["speedup"] == pytest.approx(60 / 35, rel=1e-3)

    @pytest.mark.parametrize("ms, cause", [(40.0, None), (10.0, "verify"), (11.0, "verify")])
    def test_why_not(self, ms: float, cause: str | None) -> None:
        start = synthetic.run(1, steps=1)[0]
        told = pays(Run.collect([start, replace(step(), index=0)]), self.plain([1, 11, 14, 99], ms))
        assert told and told["cause"] == cause and told["pays"] is (cause is None)

    def test_a_difference_names_both_tokens(self) -> None:
        start = synthetic.run(1, steps=1)[0]
        ours = Run.collect([replace(start, emitted=[1]), replace(step(), index=0)])
        best = (Scored(11, " cat", 9.5), Scored(12, " dog", 9.25))
        found = Verdict("different", 1, 0.25, 1e-3, 11, 12, best)
        told = beside(ours, self.plain([1, 12, 14, 99], 20.0), found)
        assert (told["at"], told["gap"], told["mine"], told["plain"]) == (2, "0.25", " cat", " dog")
        assert say("en", "verdict.different", **told).startswith(
            "DIFFERENT at token 2: here “ cat”, plain decoding “ dog”"
        )


class TestGraph:
    @settings(max_examples=20, deadline=None)
    @given(
        seed=st.integers(0, 999),
        total=st.integers(1, 256),
        texts=st.lists(st.sampled_from(HOSTILE) | st.text(max_size=4), min_size=2, max_size=6, unique=True),
    )
    def test_a_tree_that_others_can_read(self, seed: int, total: int, texts: list[str]) -> None:
        one = synthetic.run(seed, steps=1, total=total, texts=texts)[1]
        assert isinstance(one, Step)
        tree = graph(one)
        assert nx.is_arborescence(tree) and len(tree) == len(one.nodes) + len(one.dropped)
        back = nx.parse_graphml(graphml(one))
        assert set(back.edges) == {(str(a), str(b)) for a, b in tree.edges}
        shape = branching(one)
        assert shape["nodes"] == len(one.nodes) and shape["depth"] == max(n.depth for n in one.nodes)


class TestCharts:
    def test_every_number_comes_from_the_metrics(self) -> None:
        run, plain = (
            Run.collect(synthetic.run(3, steps=14)),
            Run.collect(synthetic.run(3, steps=9, total=1, method="vanilla")),
        )
        drawn = figures(run, plain)
        assert tuple(drawn) == app.CHARTS
        length = drawn["length"].data
        assert [a + b for a, b in zip(length[0].y, length[1].y)] == [len(s.emitted) for s in run.steps]
        assert list(drawn["acceptance"].data[0].y) == [r.unconditional for r in METRICS["acceptance"].of(run)]
        assert sum(drawn["histogram"].data[0].y) == len(run.steps)
        assert drawn["race"].data[1].y[-1] == len(plain.ids)
        assert all(f.data == g.data for f, g in zip(drawn.values(), figures(run, plain).values()))

    @pytest.mark.parametrize(
        "run", [Run(), Run.collect(synthetic.run(1, steps=1, total=1))], ids=["nothing", "vanilla"]
    )
    def test_of_almost_nothing(self, run: Run) -> None:
        assert len(figures(run, None, "zh")) == len(app.CHARTS)

    def test_a_sweep(self) -> None:
        rows = [
            {"temperature": t, "value": v, "tau": v / 2, "tokens_per_second": 10 - v} for t in (0, 1) for v in (4, 1)
        ]
        data = sweep(rows, "total_token").data
        assert [list(d.x) for d in data] == [["1", "4"]] * 4 and [d.name for d in data][:1] == ["τ · T 0"]


class TestExport:
    def test_numbers_as_a_table(self) -> None:
        run = synthetic.run(3, steps=2)
        rows = numbers_csv(run).splitlines()
        assert rows[0] == "scope,step,name,value,unit" and f"run,,tokens,{len(Run.collect(run).ids)},tokens" in rows
        assert f"step,1,emitted,{len(run[2].emitted)},tokens" in rows

    def test_a_trace_reads_back(self) -> None:
        run = synthetic.run(5, steps=3, texts=HOSTILE)
        assert list(load_trace(trace(run).split("\n"))) == run

    def test_one_file_that_asks_for_nothing(self) -> None:
        run = synthetic.run(5, steps=3, texts=HOSTILE)
        page = replay(run, ask="</script><script>alert(1)</script>", title="<b>")
        assert page.count("</script>") == 1 and "<title>&lt;b&gt;</title>" in page
        assert "default-src 'none'" in page and "src=" not in page.split("<script>")[0]
        assert replay(run, ask="a") == replay(run, ask="a")


def test_recordings_are_whole_and_small() -> None:
    shelf = playground.Shelf()
    assert len(shelf.titles) >= 8
    methods = set()
    for title, name in shelf.titles:
        recording = shelf[name]
        assert title and recording.ask and isinstance(recording.events[0], Start)
        assert recording.events[-1].kind == "finish"
        methods.add(recording.events[0].method)
        assert METRICS["tokens"].of(Run.collect(recording.events)) == recording.events[-1].tokens  # type: ignore[union-attr]
        assert WORDS["en"].get(f"recording.{name}", title) == title  # one title, in the index and in the words
        assert dict(map(reversed, shelf.called("zh")))[name]  # type: ignore[arg-type]
    assert {"eagle1", "eagle2", "eagle3", "lookup"} <= methods
    for path in playground.TRACES.glob("*.gz"):
        assert path.stat().st_size <= 300_000


def test_command_line() -> None:
    args = app.options().parse_args(
        ["--base-model-path", "T", "--ea-model-path", "D", "--total-token", "-1", "--trace", "f.jsonl"]
    )
    assert (args.target, args.drafter, args.total_token, args.trace) == ("T", "D", -1, "f.jsonl")
    assert app.options().parse_args(["--target", "T", "--port", "80", "--public"]).public
    with pytest.raises(SystemExit):
        app.main(["--trace", "/nowhere.jsonl"])


class TestLine:
    def test_first_come_first_served(self) -> None:
        line = playground.Line()
        with line.ticket() as one:
            with line.ticket() as two, line.ticket() as three:
                assert [line.ahead(t, 0) for t in (one, two, three)] == [0, 1, 2]
            with line.ticket() as four:
                assert line.ahead(four, 0) == 1  # those who left are no longer before it
        with line.ticket() as five:
            assert line.ahead(five, 0) == 0


class TestBatches:
    def test_everything_arrives_and_errors_come_through(self) -> None:
        run = synthetic.run(1, steps=5)
        assert [e for batch in playground.batches(iter(run), threading.Event()) for e in batch] == run

        def broken():  # type: ignore[no-untyped-def]
            yield run[0]
            raise InvalidRequest("no")

        told = playground.batches(broken(), threading.Event())
        assert next(told) == run[:1]
        with pytest.raises(InvalidRequest):
            next(told)

    def test_leaving_stops_the_work(self) -> None:
        cancel, run = threading.Event(), synthetic.run(1, steps=2)

        def endless():  # type: ignore[no-untyped-def]
            while not cancel.wait(0.005):
                yield run[0]

        told = playground.batches(endless(), cancel)
        next(told)
        told.close()
        assert cancel.is_set()


def test_the_page_and_its_pictures_import_no_torch() -> None:
    code = "import sys, app, viz.stage, viz.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


def test_start_is_told() -> None:
    told = json.loads(Teller("r").tell(synthetic.run(1, steps=1)[:1]))["events"][0]
    assert told["kind"] == "start" and told["method"] == "eagle3" and isinstance(synthetic.run(1)[0], Start)


class TestHostileNumbers:
    """Times and probabilities at the edges of what a trace may hold: no screen and no file says inf or NaN."""

    ODD = st.sampled_from([0.0, 5e-324, 1e-310, 1e-9, 1e-6, 0.25, 1.0, 1e15, 9e15])

    @settings(max_examples=12, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 999), total=st.integers(1, 40))
    def test_everything_stays_finite(self, data, seed, total) -> None:  # type: ignore[no-untyped-def]
        share = st.sampled_from([0.0, 5e-324, 1e-300, 0.5, 1.0])
        run = []
        for event in synthetic.run(seed, steps=3, total=total):
            if isinstance(event, Start):
                event = replace(event, prefill_ms=data.draw(self.ODD), pair={"target": ["odd"], "prompt": "odd"})
            elif isinstance(event, Step):
                nodes = [n._replace(confidence=data.draw(share), value=data.draw(share)) for n in event.nodes]
                names = data.draw(st.sampled_from([(), ("draft_ms",), ("draft_ms", "verify_ms", "other_ms", "odd_ms")]))
                event = replace(event, nodes=nodes, timing={name: data.draw(self.ODD) for name in names})
            else:
                event = replace(event, seconds=data.draw(self.ODD), timing={"x": data.draw(self.ODD)})
            run.append(event)
        assert list(load_trace(trace(run).split("\n"))) == run  # what is tried here can be uploaded
        told = Teller("r").tell(run)  # refuses what is not finite
        ours, plain = Run.collect(run), Run.collect([e for e in run if not isinstance(e, Finish)])
        verdict = beside(ours, plain, Verdict("equal"))
        for text in (
            told, message(verdict=verdict), numbers_csv(run), replay(run, verdict=verdict, plain=run), graphml(run[1]),
            json.dumps([f.to_plotly_json() for f in figures(ours, plain).values()], default=list, allow_nan=False),
        ):  # fmt: skip
            assert not re.search(r"[\s,:>\[]-?(?:nan|inf|infinity)\b", text.replace("Infinity", "").lower()[:200_000])
        for metric in METRICS.values():
            value = metric.of(ours)
            assert value is None or isinstance(value, tuple) or math.isfinite(value)

    def test_no_rate_is_made_of_no_time(self) -> None:
        run = [
            replace(e, timing={"draft_ms": 0.0, "verify_ms": 5e-324, "other_ms": 0.0}) if isinstance(e, Step) else e
            for e in synthetic.run(1, steps=2)
        ]
        events = json.loads(Teller("r").tell(run))["events"]
        assert "tps" not in events[1] or events[1]["tps"] is None
        assert METRICS["tokens_per_second"].of(Run.collect(run)) is None


class TestLesson:
    @pytest.fixture
    def shelf(self) -> playground.Shelf:
        shelf = playground.Shelf(Path("nowhere"))
        shelf.put(playground.Recording.of("one", synthetic.run(3, steps=9), "a", "One"))
        shelf.put(playground.Recording.of("two", synthetic.run(8, steps=5, sharpness=0.9), "b", "Two"))
        return shelf

    def test_every_page_stands_on_a_real_step(self, shelf: playground.Shelf) -> None:
        pages = [page(shelf, i) for i in range(len(PAGES))]
        assert [p and p["key"] for p in pages] == list(PAGES) and page(shelf, len(PAGES)) is None
        for told in pages:
            assert told
            step = next(e for e in shelf[told["run"]].events if isinstance(e, Step) and e.index == told["step"])
            assert told["row"] is None or 0 < told["row"] < len(step.nodes)
            for language in WORDS:
                text = say(language, f"lesson.{told['key']}.text", **told["slots"])
                assert len(text) < 280 and say(language, f"lesson.{told['key']}")
        accept = pages[5]
        assert accept
        most = max(len(e.accepted) for e in shelf["one"].events if isinstance(e, Step)) - 1
        assert accept["slots"]["a"] == most and accept["phase"] == "accept"

    def test_value_is_the_product_that_it_says(self, shelf: playground.Shelf) -> None:
        told = page(shelf, 1)
        assert told
        step = shelf[told["run"]].events[told["step"] + 1]
        assert isinstance(step, Step)
        node = step.nodes[told["row"]]
        assert node.depth >= 2
        assert node.value == pytest.approx(node.confidence * step.nodes[node.parent].value)

    def test_without_recordings_there_is_none(self) -> None:
        assert page(playground.Shelf(Path("nowhere")), 0) is None

    def test_on_the_shipped_recordings(self) -> None:
        shelf = playground.Shelf()
        pages = [page(shelf, i) for i in range(len(PAGES))]
        assert all(pages)
        hit, miss = pages[7], pages[8]
        assert hit and miss and hit["slots"]["a"] >= 3 and miss["slots"]["n"] > 0


class TestCaption:
    def test_says_method_settings_pair_hardware_and_verdict(self) -> None:
        start = synthetic.run(1, steps=1)[0]
        assert isinstance(start, Start)
        assert about(start, "en") == (
            "EAGLE-3  ·  total_token 24 · depth 6 · top-k 8  ·  T 0.0 · seed 1  ·  tiny  ·  cpu · float32 · test  ·  "
            "not checked against plain decoding"
        )
        equal = beside(Run.collect(synthetic.run(1, steps=1)), Run(), Verdict("equal"))
        assert about(start, "en", equal).endswith(f"equal to plain decoding, {equal['n']} of {equal['n']} tokens")
        figure = figures(Run.collect(synthetic.run(1, steps=1)), None, "en", equal)["length"]
        assert figure.layout.meta["caption"] == about(start, "en", equal)

    def test_names_only_what_the_method_uses(self) -> None:
        start = synthetic.run(1, steps=1, method="eagle1")[0]
        assert isinstance(start, Start)
        assert about(start, "en").startswith("EAGLE-1  ·  depth 6  ·  T 0.0")
        assert about(replace(start, method="vanilla"), "en").startswith("Plain decoding  ·  T 0.0")

    def test_auto_stands_last(self) -> None:
        rows = [{"temperature": 0.0, "value": v, "tau": 2.0, "tokens_per_second": 9.0} for v in (-1, 64, 4)]
        figure = sweep(rows, "total_token", "en", "about it")
        assert list(figure.data[0].x) == ["4", "64", "auto"] and figure.layout.meta["caption"] == "about it"
        assert playground._numbers("1, 4，auto -1 4", int) == [1, 4, -1]


class TestSources:
    def test_a_second_source_is_told_and_kept(self) -> None:
        one = step()
        nodes = [n._replace(source=s) for n, s in zip(one.nodes, [None, "head", "lookup", "both", "head", "lookup"])]
        marked = replace(one, index=0, nodes=nodes)
        start = synthetic.run(1, steps=1)[:1]
        told = json.loads(Teller("r").tell([*start, marked]))["events"][-1]
        assert told["s"] == [-1, 0, 1, 2, 0, 1, -1, -1]
        assert graph(marked).nodes[2]["source"] == "lookup" and "source" not in graph(marked).nodes[0]
        assert "s" not in json.loads(Teller("r").tell([*start, replace(one, index=0)]))["events"][-1]
        assert all(f"source.{name}" in WORDS["zh"] for name in SOURCES)


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours, "#rrggbb"."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_that_carry_text_can_be_read(theme: int) -> None:
    blocks = re.findall(r"\{([^}]*--st-surface[^}]*)\}", parts()[1])
    ink = dict(re.findall(r"--st-([\w-]+):\s*(#[0-9a-f]{6})", blocks[theme]))
    pairs = [(text, ground) for text in ("ink", "sub", "accent", "alert", "later") for ground in ("surface", "ground")]
    pairs += [("ink", "draft"), ("ink", "copied-tint"), ("on-accent", "accent"), ("on-bonus", "bonus")]
    weak = {(a, b): round(contrast(ink[a], ink[b]), 2) for a, b in pairs if contrast(ink[a], ink[b]) < 4.5}
    assert not weak
    assert contrast(ink["ghost"], ink["surface"]) >= 3 and contrast(ink["accent"], ink["surface"]) >= 3  # borders
