"""Measuring a drafter: which settings, what is pooled, what is kept for a second run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from eagle_core.__main__ import main
from eagle_core.bench import Prompt, save_figure
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.engine import generate
from eagle_core.errors import InvalidRequest, TraceError
from eagle_core.events import Event, Finish
from eagle_core.metrics import METRICS, Run
from eagle_core.training.card import _evaluation
from eagle_core.training.evaluate import Setting, choose, evaluate, figure, fingerprint, keep, kept, numbers, tables
from eagle_core.training.recall import Recalled, write_answers
from eagle_core.verify import Sampling
from tests.conftest import eagle_head, greedy, tiny_target
from tests.test_compare import command, save_tiny
from tests.test_metrics import chain, run

MAIN = TreeSettings(total_token=9, depth=3, top_k=3)
PROMPTS = [
    (Prompt(1, "writing", ("a",)), [3, 14, 15, 9]),
    (Prompt(2, "qa", ("b",)), [2, 7, 1, 8]),
    (Prompt(3, "qa", ("c",)), [1, 6, 1, 8, 0, 3]),
]


class Answers:
    """Decodes with random heads, and counts how often it was asked; `recall` looks verdicts up."""

    def __init__(self, family: str = "eagle1", *, recall: bool = False, sampling: Sampling | None = None) -> None:
        self.target, self.sampling, self.recall = tiny_target(), sampling or Sampling(), recall
        self.grown = "eagle3" if family == "eagle3" else "eagle2"
        head = eagle_head(family, draft_vocab=37 if family == "eagle3" else 61)
        self.drafters = {s: METHODS[m].make(head, self.target) for s, m in ((False, self.grown), (True, "eagle1"))}
        self.asked = 0

    def __call__(self, setting: Setting, prompt: Prompt, ids: list[int]) -> Iterator[Event]:
        self.asked += 1
        method = "eagle1" if setting.static else self.grown
        drafter, by = self.drafters[setting.static], self.target
        request = {"sampling": self.sampling, "max_new_tokens": 24}
        if self.recall:
            plain = METHODS["vanilla"].make(None, self.target)
            answer = Run.collect(generate(self.target, plain, ids, method="vanilla", **request)).ids
            by = Recalled(self.target, ids + answer, drafter.capture)
        return generate(by, drafter, ids, method=method, settings=setting.tree, **request)


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


def test_the_card_tells_what_was_measured():
    runs = {1: run(chain(1, 1, 1), chain(0, 0, 0, index=1)), 2: run(chain(1, 0, 0, outside=[1]))}
    found = numbers(runs, {1: "writing", 2: "qa"})
    report = found | {
        "sampling": {"temperature": 0.0}, "prompts_file": "p.jsonl", "max_new_tokens": 8, "dtype": "float32",
        "settings": {"main": found},
    }  # fmt: skip
    text = "\n".join(_evaluation(report))
    assert "| main | 2.333 |" in text and "| qa | 1 | 2.000 |" in text and "lacks 14.3%" in text
    assert "at most" not in text  # no bin is full enough to be judged
    report["calibration"] = {"confidence_gap": 0.0412}
    assert "at most 0.041 apart" in "\n".join(_evaluation(report))


def test_answers_of_one_token_have_no_steps_and_harm_nothing():
    found = numbers({1: run()}, {1: "qa"})
    assert found["tau"] is None and found["tau_interval"] is None and found["acceptance"]["unconditional"] == []


# ----------------------------------------------------------------------------------------------- evaluate


def test_every_setting_decodes_once_and_is_kept(tmp_path):
    answers = Answers()
    settings = choose(["main", "chain-2", "ablations"], MAIN)
    found = evaluate(answers, settings, PROMPTS, tmp_path, {"head": "x"})
    assert answers.asked == len(settings) * len(PROMPTS)
    assert found["main"]["tau"] >= 1 and len(found["chain-2"]["acceptance"]["unconditional"]) == 2
    assert found["chain-2"]["tau"] <= 3
    assert evaluate(answers, settings, PROMPTS, tmp_path, {"head": "x"}) == found
    assert answers.asked == len(settings) * len(PROMPTS)
    evaluate(answers, settings[:1], PROMPTS, tmp_path, {"head": "y"})
    assert answers.asked == (len(settings) + 1) * len(PROMPTS)  # another head, other answers


def test_kept_traces_recompute_the_numbers(tmp_path):
    found = evaluate(Answers(), choose(["main"], MAIN), PROMPTS, tmp_path, {})
    runs = [kept(path) for path in tmp_path.iterdir()]
    assert METRICS["tau"].of(Run.pool(runs)) == found["main"]["tau"]


def test_an_answer_that_was_cut_short_is_not_kept(tmp_path):
    finish = Finish(reason="cancelled", text="", steps=0, tokens=0, drafted=0, accepted=0, seconds=0.0)

    def broken() -> Iterator[Event]:
        yield run(chain(1)).starts[0]
        raise RuntimeError("power cut")

    for events, error in (
        (iter([finish]), TraceError),
        (iter(run(chain(1)).steps), TraceError),
        (broken(), RuntimeError),
    ):
        with pytest.raises(error):
            keep(tmp_path / "a.jsonl.gz", events)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- recall


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("eagle1", Sampling()),
        ("eagle3", Sampling()),
        ("eagle1", Sampling(0.9, seed=3)),
        ("eagle3", Sampling(1.5, top_k=9, top_p=0.9, seed=1)),
    ],
)
def test_looking_the_answer_up_gives_the_numbers_of_decoding(tmp_path, family, sampling):
    settings = choose(["main", "static"], TreeSettings(total_token=40, depth=2, top_k=12))
    decoded = evaluate(Answers(family, sampling=sampling), settings, PROMPTS, tmp_path / "a", {})
    looked_up = evaluate(Answers(family, sampling=sampling, recall=True), settings, PROMPTS, tmp_path / "b", {})
    assert decoded["main"]["accepted"] > 5, "heads that guess nothing prove nothing"
    for name in decoded:
        for key in ("tau", "acceptance", "drafted", "lengths", "outside_draft_vocab", "by_category"):
            assert looked_up[name][key] == decoded[name][key], (name, key)
        assert looked_up[name]["calibration"] == approximately(decoded[name]["calibration"])


def approximately(value: Any) -> Any:
    """Scores come from features that were rounded differently."""
    if isinstance(value, dict):
        return {key: approximately(v) for key, v in value.items()}
    if isinstance(value, list):
        return [approximately(v) for v in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def test_the_recalled_text_is_what_is_emitted():
    target = tiny_target()
    prompt, answer = PROMPTS[0][1], greedy(target.model, PROMPTS[0][1], 10)
    drafter = METHODS["lookup"].make(None, target)
    by = Recalled(target, prompt + answer, drafter.capture)
    found = Run.collect(generate(by, drafter, prompt, method="lookup", max_new_tokens=10))
    assert found.ids == answer
    with pytest.raises(AssertionError, match="another prompt"):
        list(generate(by, drafter, [5, 5], method="lookup", max_new_tokens=10))


def test_answers_in_a_batch_are_those_of_one_by_one():
    target = tiny_target()
    prompts = [ids for _, ids in PROMPTS]
    found = dict(write_answers(target, prompts, 9, Sampling()))
    assert found == {i: greedy(target.model, p, 9) for i, p in enumerate(prompts)}
    end = greedy(target.model, prompts[1], 4)[3]
    target.eos_ids = frozenset([end])
    short = dict(write_answers(target, prompts, 9, Sampling()))
    assert short[1] == greedy(target.model, prompts[1], 4)[: short[1].index(end) + 1]


@pytest.mark.parametrize("sampling", [Sampling(0.9, seed=3), Sampling(1.5, top_k=9, top_p=0.9, seed=1)])
def test_sampled_answers_are_drawn_with_the_engines_noise(sampling):
    target = tiny_target()
    plain = METHODS["vanilla"].make(None, target)
    prompts = [ids for _, ids in PROMPTS]
    want = {
        i: Run.collect(generate(target, plain, ids, method="vanilla", sampling=sampling, max_new_tokens=12)).ids
        for i, ids in enumerate(prompts)
    }
    assert dict(write_answers(target, prompts, 12, sampling)) == want


def test_another_training_has_another_fingerprint():
    assert fingerprint(eagle_head("eagle1")) == fingerprint(eagle_head("eagle1"))
    assert fingerprint(eagle_head("eagle1")) != fingerprint(eagle_head("eagle1", seed=1))


def test_tables_and_figure(tmp_path):
    found = evaluate(Answers(), choose(["main", "chain-2"], MAIN), PROMPTS, tmp_path / "traces", {})
    request = {"target": "tiny", "drafter": "random", "sampling": {"temperature": 0.0}}
    result = {**found["main"], **request, "settings": found}
    text = tables(result)
    for part in ("chain-2", "conditional", "MT-bench", "Calibration", "writing"):
        assert part in text
    save_figure(figure(result), tmp_path / "head.html")
    assert "chain-2" in (tmp_path / "head.html").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- command line


def test_evaluate_on_the_command_line(tmp_path, capsys):
    target, head = save_tiny(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"question_id": i, "category": c, "turns": [f"w{i}"]} for i, c in ((3, "qa"), (4, "writing"), (5, "qa"))]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out = tmp_path / "out.json"
    request = ["--target", target, "--prompts", str(prompts), "--json", str(out), "--max-new-tokens", "16"]
    text, found = command(capsys, "evaluate", "--drafter", head, *request, "--settings", "chain-2,main")
    assert {"tau", "acceptance", "outside_draft_vocab", "calibration", "by_category"} <= set(found)
    assert {"unconditional", "conditional"} <= set(found["acceptance"])
    assert list(found["settings"]) == ["chain-2", "main"] and found["settings"]["main"]["tree"]["total_token"] == 60
    assert found == json.loads(out.read_text(encoding="utf-8"))
    assert len(list((tmp_path / "out.traces").glob("*.jsonl.gz"))) == 6
    assert "chain-2" in text
    _, decoded = command(capsys, "evaluate", "--drafter", head, *request, "--settings", "main", "--decode")
    assert decoded["tau"] == found["settings"]["main"]["tau"]
    _, lookup = command(capsys, "evaluate", "--drafter", "lookup", *request)
    assert lookup["outside_draft_vocab"] in (None, 0) and lookup["tau"] >= 1


def test_evaluate_wants_a_drafter(tmp_path, capsys):
    assert main(["evaluate", "--prompts", "x", "--json", str(tmp_path / "o.json")]) == 2
    assert "which drafter" in capsys.readouterr().err
