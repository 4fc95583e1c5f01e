"""What the page says of a run: exact on hand-made steps, and true for every shape and every hostile text."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_core.events import FATES, Candidate, Choice, Node, Start, Step, dump, load
from eagle_core.metrics import METRICS, Run
from tests import synthetic
from viz.export import replay
from viz.stage import OVERLAP, Teller, message, pieces
from viz.why import REASONS, reasons, summary, why
from viz.words import WORDS, number, say, visible

HOSTILE = [
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "${1+1}", "{{value}}", "`", "\\", "\u2028", "\u2029",
    "\u202e", "\u200f", "\x00", "\x1b[31m", "\n", " ", "", "&lt;", "]]>", "'\"", "😀", "\ud83d".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
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
            "In the beam, so the drafter expanded it; then rerank left it out: value 0.100, the lowest kept value is 0.180."
        )
        assert "生长规则" in why(s, 7, "zh")

    def test_a_draw_that_no_child_was(self) -> None:
        s = step()
        nodes = [n._replace(draw=77, draw_text=" ox") if n.id == 2 else n for n in s.nodes]
        nodes[5] = nodes[5]._replace(fate="not the draw")
        changed = replace(s, nodes=nodes)
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

    @settings(max_examples=40, deadline=None)
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
        import re

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
        import app
        from eagle_core import METHODS

        assert {name: method.settings for name, method in METHODS.items()} == app.USES
        for name, method in METHODS.items():
            assert WORDS["en"][f"method.{name}"] == method.label
            assert WORDS["en"][f"method.{name}.explain"] == method.explain


class TestExport:
    def test_one_file_that_asks_for_nothing(self) -> None:
        run = synthetic.run(5, steps=3, texts=HOSTILE)
        page = replay(run, ask="</script><script>alert(1)</script>", title="<b>")
        assert page.count("</script>") == 1 and "<title>&lt;b&gt;</title>" in page
        assert "default-src 'none'" in page and "src=" not in page.split("<script>")[0]
        assert replay(run, ask="a") == replay(run, ask="a")


def test_the_page_and_its_pictures_import_no_torch() -> None:
    code = "import sys, app, viz.stage, viz.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


def test_start_is_told() -> None:
    told = json.loads(Teller("r").tell(synthetic.run(1, steps=1)[:1]))["events"][0]
    assert told["kind"] == "start" and told["method"] == "eagle3" and isinstance(synthetic.run(1)[0], Start)
