"""Measuring a drafter: which settings, what is pooled, what is kept for a second run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from eagle_core.bench import Prompt, save_figure
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.engine import generate
from eagle_core.errors import InvalidRequest, TraceError
from eagle_core.events import Event, Finish, load_trace
from eagle_core.metrics import METRICS, Run
from eagle_core.training.evaluate import Setting, choose, evaluate, figure, fingerprint, kept, numbers, tables
from tests.conftest import eagle_head, tiny_target
from tests.test_metrics import chain, run

MAIN = TreeSettings(total_token=9, depth=3, top_k=3)
PROMPTS = [
    (Prompt(1, "writing", ("a",)), [3, 14, 15, 9]),
    (Prompt(2, "qa", ("b",)), [2, 7, 1, 8]),
    (Prompt(3, "qa", ("c",)), [1, 6, 1, 8, 0, 3]),
]


class Answers:
    """Decodes with random heads, and counts how often it was asked."""

    def __init__(self) -> None:
        self.target = tiny_target()
        head = eagle_head("eagle1")
        self.drafters = {
            static: METHODS[m].make(head, self.target) for static, m in ((False, "eagle2"), (True, "eagle1"))
        }
        self.asked = 0

    def __call__(self, setting: Setting, ids: list[int]) -> Iterator[Event]:
        self.asked += 1
        method = "eagle1" if setting.static else "eagle2"
        return generate(
            self.target, self.drafters[setting.static], ids, method=method, settings=setting.tree, max_new_tokens=16
        )


# ----------------------------------------------------------------------------------------------- settings


def test_groups_and_names_choose_settings():
    assert [s.name for s in choose(["main"], MAIN)] == ["main"]
    assert choose(["main"], MAIN)[0].tree == MAIN
    trees = [(s.tree.total_token, s.tree.depth, s.tree.top_k) for s in choose(["trees"], MAIN)]
    assert trees == [(60, 8, 10), (24, 6, 8), (12, 5, 4)]
    chains = [(s.tree.total_token, s.tree.depth, s.tree.top_k) for s in choose(["chains"], MAIN)]
    assert chains == [(k + 1, k, 1) for k in range(1, 8)]
    assert [s.name for s in choose(["chain-5", "main", "chain-5"], MAIN)] == ["chain-5", "main"]
    with pytest.raises(InvalidRequest, match="no setting 'chain-9'"):
        choose(["chain-9"], MAIN)


def test_ablations_change_one_thing_and_the_dynamic_tree_has_the_templates_size():
    found = {s.name: s for s in choose(["ablations"], MAIN)}
    assert found["by-confidence"].tree == replace(MAIN, expand_by="confidence")
    assert found["no-rerank"].tree == replace(MAIN, rerank=False)
    assert found["static"].static and not found["dynamic"].static
    assert len(found["static"].tree.static_tree) + 1 == found["dynamic"].tree.total_token == 26
    assert found["dynamic"].tree.depth == max(map(len, found["static"].tree.static_tree)) == 5


# ------------------------------------------------------------------------------------------------ numbers


def test_numbers_are_pooled_over_steps_and_by_category():
    runs = {1: run(chain(1, 1, 1), chain(0, 0, 0, index=1)), 2: run(chain(1, 0, 0, outside=[1]))}
    found = numbers(runs, {1: "writing", 2: "qa"})
    assert found["tau"] == (4 + 1 + 2) / 3
    assert found["acceptance"]["unconditional"] == [2 / 3, 1 / 3, 1 / 3]
    assert found["acceptance"]["conditional"] == [2 / 3, 1 / 2, 1.0]
    assert found["by_category"]["writing"]["tau"] == 2.5 and found["by_category"]["qa"]["tau"] == 2
    assert found["mt_bench"]["tau"] == 2.5 and found["mt_bench"]["prompts"] == 1
    assert found["outside_draft_vocab"] == 1 / 7
    assert found["calibration"]["confidence"] and found["calibration"]["confidence_gap"] is None  # too few nodes
    low, high = found["tau_interval"]
    assert 2 <= low <= found["tau"] <= high <= 2.5
    json.dumps(found, allow_nan=False)


def test_answers_of_one_token_have_no_steps_and_harm_nothing():
    found = numbers({1: run()}, {1: "qa"})
    assert found["tau"] is None and found["tau_interval"] is None and found["acceptance"]["unconditional"] == []


# ----------------------------------------------------------------------------------------------- evaluate


def test_every_setting_really_decodes_and_only_once(tmp_path):
    answers = Answers()
    settings = choose(["main", "chain-2", "ablations"], MAIN)
    found = {s.name: n for s, n in evaluate(answers, settings, PROMPTS, tmp_path, {"head": "x"})}
    assert answers.asked == len(settings) * len(PROMPTS)
    assert found["main"]["tau"] >= 1 and len(found["chain-2"]["acceptance"]["unconditional"]) == 2
    assert found["chain-2"]["tau"] <= 3
    assert found["static"]["drafted"] == 25 * found["static"]["steps"] - sum_of_missing(tmp_path, found)
    again = {s.name: n for s, n in evaluate(answers, settings, PROMPTS, tmp_path, {"head": "x"})}
    assert answers.asked == len(settings) * len(PROMPTS) and again == found
    list(evaluate(answers, settings[:1], PROMPTS, tmp_path, {"head": "y"}))
    assert answers.asked == (len(settings) + 1) * len(PROMPTS)  # another head, other answers


def sum_of_missing(tmp_path, found) -> int:
    """Nodes that static trees lack because the text was about to end."""
    missing = 0
    for path in tmp_path.iterdir():
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            collected = Run.collect(load_trace(lines))
        if collected.starts[0].method == "eagle1":
            missing += sum(26 - len(s.nodes) for s in collected.steps)
    return missing


def test_a_kept_trace_recomputes_the_numbers(tmp_path):
    (pair,) = evaluate(Answers(), choose(["main"], MAIN), PROMPTS, tmp_path, {})
    runs = []
    for path in tmp_path.iterdir():
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            runs.append(Run.collect(load_trace(lines)))
    assert METRICS["tau"].of(Run.pool(runs)) == pair[1]["tau"]


def test_an_answer_that_was_cut_short_is_not_kept(tmp_path):
    finish = Finish(reason="cancelled", text="", steps=0, tokens=0, drafted=0, accepted=0, seconds=0.0)
    with pytest.raises(TraceError, match="cancelled"):
        kept(tmp_path / "a.jsonl.gz", lambda: iter([finish]))
    with pytest.raises(RuntimeError):
        kept(tmp_path / "b.jsonl.gz", lambda: iter([].__iter__()) if broken() else iter([]))
    assert list(tmp_path.iterdir()) == []


def broken() -> bool:
    raise RuntimeError


def test_another_training_has_another_fingerprint():
    assert fingerprint(eagle_head("eagle1")) == fingerprint(eagle_head("eagle1"))
    assert fingerprint(eagle_head("eagle1")) != fingerprint(eagle_head("eagle1", seed=1))


def test_tables_and_figure(tmp_path):
    settings = choose(["main", "chain-2"], MAIN)
    found = {s.name: n for s, n in evaluate(Answers(), settings, PROMPTS, tmp_path / "traces", {})}
    request = {"target": "tiny", "drafter": "random", "sampling": {"temperature": 0.0}}
    result = {**found["main"], **request, "settings": found}
    text = tables(result)
    for part in ("chain-2", "conditional", "MT-bench", "Calibration", "writing"):
        assert part in text
    save_figure(figure(result), tmp_path / "head.html")
    assert "chain-2" in (tmp_path / "head.html").read_text(encoding="utf-8")
