"""Measuring: which prompts, who competes, what is reported. Times themselves are not tested."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from eagle_core.__main__ import main
from eagle_core.bench import (
    Contestant,
    Prompt,
    Record,
    auto_vs_best,
    bench,
    contestant,
    expand,
    figure,
    fitting,
    lab_rows,
    machine,
    quartiles,
    read_prompts,
    report,
    save_figure,
    spread,
    sweep,
    tables,
)
from eagle_core.compare import Answer
from eagle_core.drafters import TreeSettings
from eagle_core.errors import InvalidRequest
from eagle_core.verify import Sampling
from tests.conftest import greedy, tiny_target
from tests.test_compare import TinyPair, command, save_tiny

TREE = TreeSettings(total_token=9, depth=3, top_k=3)
PROMPTS = [
    (Prompt(1, "writing", ("a",)), [3, 14, 15, 9]),
    (Prompt(2, "writing", ("b",)), [2, 7, 1, 8]),
    (Prompt(3, "math", ("c",)), [1, 6, 1, 8, 0, 3]),
]
FACTS = {
    "cpu": "a CPU",
    "cores": 2,
    "threads": 1,
    "load_average": [0.5, 0.4, 0.3],
    "device": "cpu",
    "versions": {"torch": "2", "transformers": "5"},
    "weights_read_ms": 1.0,
}
REQUEST = {"target": "tiny", "dtype": "float32", "prompts": 3, "max_new_tokens": 12, "sampling": {"temperature": 0.0}}


def lines(tmp_path, *rows) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return str(path)


# ------------------------------------------------------------------------------------------------ prompts


def test_a_prompt_file_is_read_line_by_line(tmp_path):
    path = lines(tmp_path, {"question_id": 7, "category": "qa", "turns": ["Who?", "Why?"], "reference": ["x"]}, "")
    assert read_prompts(path) == [Prompt(7, "qa", ("Who?", "Why?"))]


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("{", "line 2"),
        ({"question_id": 1, "category": "qa"}, "turns"),
        ({"question_id": 1, "category": "qa", "turns": "Who?"}, "list of texts"),
        ({"question_id": 1, "category": "qa", "turns": []}, "list of texts"),
        ([], "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, names):
    path = lines(tmp_path, {"question_id": 1, "category": "qa", "turns": ["ok"]}, row)
    with pytest.raises(InvalidRequest, match=names):
        read_prompts(path)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequest, match="holds no prompt"):
        read_prompts(lines(tmp_path, ""))


def test_a_limit_spreads_over_the_categories():
    prompts = [Prompt(i, category, ("t",)) for i, category in enumerate("aaaabbbbc")]
    assert [p.id for p in spread(prompts, 3)] == [0, 4, 8]
    assert Counter(p.category for p in spread(prompts, 5)) == {"a": 2, "b": 2, "c": 1}
    assert spread(prompts, 99) == prompts
    with pytest.raises(InvalidRequest, match="at least one"):
        spread(prompts, 0)


def test_prompts_of_a_file_need_a_chat_template():
    with pytest.raises(InvalidRequest, match="no chat template"):
        fitting(tiny_target(), [PROMPTS[0][0]], 8)


# -------------------------------------------------------------------------------------------- contestants


def test_a_contestant_may_bring_its_own_tree():
    pair = TinyPair()
    for name, tree in (
        ("eagle3", (9, 3, 3)),
        ("eagle3@5", (5, 3, 3)),
        ("eagle3@5/2", (5, 2, 3)),
        ("eagle3@7/4/2", (7, 4, 2)),
    ):
        settings = contestant(pair, name, Sampling(), TREE).settings
        assert (settings.total_token, settings.depth, settings.top_k) == tree
    for bad in ("eagle3@", "eagle3@x", "eagle3@1/2/3/4", "medusa", "hf@5"):
        with pytest.raises(InvalidRequest, match="is no"):
            contestant(pair, bad, Sampling(), TREE)


def test_a_sweep_is_written_out():
    assert expand("hf,eagle3@12+24/4+6,hf") == [
        "vanilla", "hf", "eagle3@12/4", "eagle3@12/6", "eagle3@24/4", "eagle3@24/6",
    ]  # fmt: skip
    assert expand("") == ["vanilla"] and expand("eagle3@-1") == ["vanilla", "eagle3@-1"]


def test_the_grid_of_a_sweep_is_written_out_with_what_it_is_held_against():
    assert sweep(["vanilla", "hf", "eagle3", "eagle2@9"], "8+16/4+6") == [
        "vanilla", "hf", "eagle3@8/4", "eagle3@8/6", "eagle3@16/4", "eagle3@16/6", "eagle3@-1/6", "eagle2@9",
    ]  # fmt: skip
    assert sweep(["lookup"], "8") == ["lookup@8", "lookup@-1"]


def test_transformers_own_generate_is_asked_for_the_same():
    pair = TinyPair()
    wanted = greedy(pair.target.model, PROMPTS[0][1], 10)
    for name in ("hf", "hf-lookup", "vanilla", "eagle2@7/2/3"):
        answer = contestant(pair, name, Sampling(), TREE).answer(PROMPTS[0][1], 10)
        assert answer.ids == wanted, name
        assert answer.seconds > 0


def test_transformers_stops_where_ours_stops():
    pair = TinyPair()
    end = greedy(pair.target.model, PROMPTS[0][1], 6)[5]
    pair.target.eos_ids = frozenset([end])
    ours = contestant(pair, "eagle3", Sampling(), TREE).answer(PROMPTS[0][1], 30).ids
    theirs = contestant(pair, "hf", Sampling(), TREE).answer(PROMPTS[0][1], 30).ids
    assert ours == theirs and ours[-1] == end and len(ours) <= 6


def test_sampling_by_transformers_leaves_the_global_dice_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    hf = contestant(TinyPair(), "hf", Sampling(1.0, seed=4), TREE)
    hf.answer(PROMPTS[0][1], 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert not hf.checked  # its draws are its own


def test_only_the_ratio_rule_is_not_held_to_vanillas_ids():
    pair = TinyPair()
    assert contestant(pair, "eagle3", Sampling(1.0), TREE).checked
    assert not contestant(pair, "chain-sampled", Sampling(1.0), TREE).checked
    assert contestant(pair, "chain-sampled", Sampling(), TREE).checked


# -------------------------------------------------------------------------------------------------- bench


@pytest.fixture(scope="module")
def measured():
    pair = TinyPair()
    names = ["vanilla", "hf", "hf-lookup", "lookup", "eagle2", "eagle3", "eagle3@5/2/2"]
    everyone = [contestant(pair, name, Sampling(), TREE) for name in names]
    records = bench(everyone, PROMPTS, pair.target, Sampling(), 12)
    return report(records, [p for p, _ in PROMPTS], FACTS, REQUEST)


def test_the_keys_that_others_read(measured):
    assert {"machine", "settings", "methods", "by_category"} == set(measured)
    for name, m in measured["methods"].items():
        assert m["tokens_per_second"]["median"] > 0
        assert m["tokens_per_second"]["q1"] <= m["tokens_per_second"]["median"] <= m["tokens_per_second"]["q3"]
        assert m["ratio_to_hf"]["n"] == m["ratio_to_vanilla"]["n"] == 3
        assert m["failed"] == {} and m["tokens"] == 36
        if not name.startswith("hf"):
            assert m["tau"] >= 1 and 0 <= m["overhead"] <= 1
    assert measured["methods"]["hf"]["ratio_to_hf"]["median"] == 1
    assert measured["methods"]["vanilla"]["tau"] == 1
    assert measured["methods"]["hf"]["tau"] is None and measured["methods"]["hf"]["overhead"] is None
    assert list(measured["by_category"]) == ["writing", "math"]
    assert measured["by_category"]["math"]["eagle3"]["ratio_to_hf"]["n"] == 1
    json.dumps(measured, allow_nan=False)


def test_every_methods_ids_are_vanillas(measured):
    assert all(m["ids"] == {"equal": 3} for m in measured["methods"].values())


def test_the_table_and_the_figure_name_everyone(measured, tmp_path):
    text = tables(measured)
    for name in measured["methods"]:
        assert name in text
    assert "3/0/0" in text and "a CPU, 2 cores, 1 threads, load 0.5 before" in text and "prefill included" in text
    save_figure(figure(measured), tmp_path / "bench.html")
    page = (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert "eagle3@5" in page and "a CPU" in page


def test_what_a_step_takes_is_split(measured):
    for name, m in measured["methods"].items():
        if name.startswith("hf"):
            assert m["split"] is None and m["step_ms"] is None
        else:
            assert list(m["split"]) == ["draft", "verify", "commit", "rest"]
            assert sum(m["split"].values()) == pytest.approx(1) and min(m["split"].values()) >= 0
            assert m["split"]["verify"] > 0 and m["split"]["commit"] > 0 and m["step_ms"] > 0


def test_auto_is_held_against_the_best_of_each_category():
    speed = {
        "eagle3@8/4": {1: 10.0, 2: 10.0, 3: 40.0},
        "eagle3@16/4": {1: 20.0, 2: 30.0, 3: 20.0},
        "eagle3@-1/4": {1: 22.0, 2: 27.0, 3: 36.0},
        "lookup": {1: 99.0, 2: 99.0, 3: 99.0},
    }
    records = {n: Record({i: Answer([1], "", 1 / v) for i, v in by.items()}) for n, by in speed.items()}
    trees = {
        "eagle3@8/4": TreeSettings(8, 4),
        "eagle3@16/4": TreeSettings(16, 4),
        "eagle3@-1/4": TreeSettings(-1, 4),
        "lookup": TreeSettings(),
    }
    found = auto_vs_best(records, trees, [p for p, _ in PROMPTS])
    assert list(found) == ["eagle3"] and list(found["eagle3"]) == ["writing", "math", "all"]
    writing, math = found["eagle3"]["writing"], found["eagle3"]["math"]
    assert writing["best"] == "eagle3@16/4" and writing["ratio"]["median"] == pytest.approx((1.1 + 0.9) / 2)
    assert math["best"] == "eagle3@8/4" and math["ratio"]["median"] == pytest.approx(0.9)
    assert found["eagle3"]["all"]["best"] == "eagle3@16/4"


def always(ids, log, name):
    def answer(prompt, count):
        log.append(name)
        return Answer(list(ids), "", 0.5)

    return answer


def test_the_order_rotates_from_prompt_to_prompt():
    log: list[str] = []
    everyone = [Contestant(name, always([1, 2], log, name)) for name in ("vanilla", "b", "c")]
    bench(everyone, PROMPTS, tiny_target(), Sampling(), 2)
    assert log[:3] == ["vanilla", "b", "c"]  # the warm-up
    assert log[3:] == ["vanilla", "b", "c", "b", "c", "vanilla", "c", "vanilla", "b"]


def test_a_crash_is_reported_and_stops_nobody_else(capsys):
    log: list[str] = []

    def crash(prompt, count):
        if prompt == PROMPTS[1][1]:
            raise RuntimeError("out of patience")
        return Answer([1, 2], "", 0.25)

    everyone = [Contestant("vanilla", always([1, 2], log, "vanilla")), Contestant("fragile", crash)]
    found = report(bench(everyone, PROMPTS, tiny_target(), Sampling(), 2), [p for p, _ in PROMPTS], FACTS, REQUEST)
    fragile = found["methods"]["fragile"]
    assert fragile["failed"] == {"2": "RuntimeError: out of patience"}
    assert fragile["ratio_to_vanilla"] == {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 2}
    assert fragile["ratio_to_hf"] is None
    assert found["methods"]["vanilla"]["tokens_per_second"]["n"] == 3
    assert "fragile failed: RuntimeError: out of patience" in capsys.readouterr().err
    assert tables(found).splitlines()[3].endswith("1")


def test_other_ids_than_vanillas_are_counted():
    everyone = [Contestant("vanilla", always([1, 2], [], "")), Contestant("lossy", always([1, 3], [], ""))]
    found = report(bench(everyone, PROMPTS, tiny_target(), Sampling(), 2), [p for p, _ in PROMPTS], FACTS, REQUEST)
    assert found["methods"]["lossy"]["ids"] == {"different": 3}


def test_quartiles():
    assert quartiles([4, 1, 3, 2]) == {"median": 2.5, "q1": 1.75, "q3": 3.25, "n": 4}
    assert quartiles([2.0]) == {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 1}
    assert quartiles([]) is None


def test_the_machine_is_named():
    facts = machine(tiny_target())
    assert facts["cpu"] and facts["cores"] >= 1 and facts["device"] == "cpu" and facts["weights_read_ms"] > 0
    assert {"python", "torch", "transformers"} == set(facts["versions"])


# ------------------------------------------------------------------------------------------- command line


def test_bench_on_the_command_line(tmp_path, capsys):
    target, head = save_tiny(tmp_path)
    path = lines(
        tmp_path,
        {"question_id": 1, "category": "qa", "turns": ["w3 w4"]},
        {"question_id": 2, "category": "qa", "turns": ["w5"]},
        {"question_id": 3, "category": "rag", "turns": ["w6 w7 w8"]},
        {"question_id": 4, "category": "rag", "turns": ["w9 " * 250]},
    )
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    request = ["--target", target, "--drafter", head, "--prompts", path, "--max-new-tokens", "10"]
    text, found = command(
        capsys, "bench", *request, "--methods", "hf,eagle3", "--limit", "4", "--json", str(out), "--figure", str(page)
    )
    assert list(found["methods"]) == ["vanilla", "hf", "eagle3"]
    assert found == json.loads(out.read_text(encoding="utf-8")) and page.stat().st_size > 10_000
    assert found["settings"]["prompts"] == 3  # the fourth does not fit
    assert found["methods"]["eagle3"]["ids"] == {"equal": 3}
    assert found["methods"]["eagle3"]["ratio_to_hf"]["median"] > 0
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert "eagle3" in text and "3/0/0" in text


def test_a_sweep_on_the_command_line_is_what_the_lab_draws(tmp_path, capsys):
    target, head = save_tiny(tmp_path)
    path = lines(tmp_path, *({"question_id": i, "category": "qa", "turns": [f"w{i} w4"]} for i in (3, 5)))
    request = ["--target", target, "--drafter", head, "--prompts", path, "--max-new-tokens", "6"]
    text, found = command(
        capsys, "bench", *request, "--methods", "eagle3,hybrid", "--sweep", "4+8/2", "--temperatures", "0,1"
    )
    rows = found["sweep"]["rows"]
    assert len(rows) == 2 * (1 + 2 * 3)
    assert {(r["method"], r["total_token"], r["depth"], r["temperature"]) for r in rows} == {
        *((m, n, 2, t) for m in ("eagle3", "hybrid") for n in (4, 8, -1) for t in (0.0, 1.0)),
        *(("vanilla", 24, 6, t) for t in (0.0, 1.0)),
    }
    lab = lab_rows(found, "hybrid", "total_token", depth=2)
    assert [row["value"] for row in lab] == [4, 8, -1] * 2
    assert all(row["tau"] >= 1 and row["tokens_per_second"] > 0 and row["step_ms"] > 0 for row in lab)
    from viz.charts import sweep as draw

    assert len(draw(lab, "total_token").data) == 4
    assert set(found["sweep"]["auto_vs_best"]) == {"0", "1"}
    assert found["sweep"]["auto_vs_best"]["0"]["hybrid"]["all"]["ratio"]["n"] == 2
    costs = found["methods"]["hybrid@-1/2"]["costs"]
    assert costs["rows"][0] == 1 and costs["level_ms"] >= 0 and found["methods"]["hybrid@8/2"]["costs"] is None
    assert "-1 / best" in text and found["methods"]["eagle3@-1/2"]["ids"] == {"equal": 2}


def test_a_mistaken_bench_is_one_sentence(tmp_path, capsys):
    target, _ = save_tiny(tmp_path)
    path = lines(tmp_path, {"question_id": 1, "category": "qa", "turns": ["w3"]})
    for argv, says in (
        (["--prompts", str(tmp_path / "none")], "cannot be read"),
        (["--prompts", path, "--target", target, "--methods", "medusa"], "is no method"),
        (["--prompts", path, "--target", target, "--methods", "eagle3"], "cannot run with this pair"),
        (["--prompts", path, "--temperature", "-1"], "temperature"),
        (["--prompts", path, "--temperatures", "0,1"], "goes with --sweep"),
        (["--prompts", path, "--sweep", "--temperatures", "0,warm"], "numbers such as"),
    ):
        assert main(["bench", *argv]) == 2
        assert says in capsys.readouterr().err
