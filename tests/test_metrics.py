"""Every number by hand on small runs, then its bounds and identities on random ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_core.errors import TraceError
from eagle_core.events import Choice, Finish, Node, Start, Step, dump, load_trace
from eagle_core.metrics import METRICS, Bin, Depth, Length, Run, accepted_length, calibration_gap, glossary, measure

# ---------------------------------------------------------------------------------------------- runs by hand


def start(**changes) -> Start:
    plain = {
        "method": "eagle3",
        "pair": {},
        "sampling": {},
        "settings": {},
        "max_new_tokens": 99,
        "stop": [],
        "prompt_ids": [1, 2],
        "prompt_text": "ab",
        "first": Choice(3, "c", 1.0),
        "emitted": [3],
        "text": "c",
        "prefill_ms": 5.0,
        "device": "cpu",
        "dtype": "float32",
        "attention": "sdpa",
        "threads": 1,
        "versions": {},
        "machine": "m",
    }
    return Start(**{**plain, **changes})


def step(
    parents=(-1,),
    verdicts=(),
    *,
    index=0,
    cut=None,
    confidence=None,
    timing=None,
    outside=(),
    forwards=1,
) -> Step:
    """A step whose nodes 1… have these parents. `verdicts[i - 1]` says whether the target's draw at node i's parent
    equals node i; the walk follows. `cut`: how many ids a stop lets out."""
    n = len(parents)
    depth, value, fates = [0], [1.0], ["root"]
    confidence = [1.0, *(confidence or [0.5] * (n - 1))]
    for i in range(1, n):
        parent = parents[i]
        depth.append(depth[parent] + 1)
        value.append(value[parent] * confidence[i])
        alive = fates[parent] in ("root", "accepted")
        fates.append("parent rejected" if not alive else "accepted" if verdicts[i - 1] else "not the draw")
    path = [i for i, fate in enumerate(fates) if fate in ("root", "accepted")]
    emitted = [100 + i for i in path[1:]] + [7]
    if cut is not None:
        emitted = emitted[:cut]
        for i in path[1 + cut :]:
            fates[i] = "past the stop"
        path = path[: 1 + cut]
    return Step(
        index=index,
        position=10,
        nodes=[
            Node(i, 100 + i, "t", parents[i], depth[i], confidence[i], value[i], 1.0, fates[i], 7, "x", 1.0, True)
            for i in range(n)
        ],
        dropped=[],
        accepted=path,
        bonus=Choice(7, "x", 1.0),
        top=[],
        outside=list(outside),
        emitted=emitted,
        text="t" * len(emitted),
        timing=timing or {"draft_ms": 2.0, "verify_ms": 6.0, "other_ms": 2.0},
        forwards=forwards,
        settings={},
    )


def chain(*verdicts, **changes) -> Step:
    return step((-1, *range(len(verdicts))), verdicts, **changes)


def run(*steps) -> Run:
    return Run.collect([start(), *steps])


def value(name: str, of: Run):
    return METRICS[name].of(of)


def test_three_accepted_and_the_bonus_give_tau_4():
    assert value("tau", run(chain(1, 1, 1, 0))) == 4


def test_the_token_of_the_prefill_is_not_counted_in_tau_but_in_tokens():
    one = run(chain(1, 1, 1, 0))
    assert (value("tau", one), value("tokens", one)) == (4, 5)


def test_tau_is_the_mean_over_all_steps_not_the_last_one():
    assert value("tau", run(chain(0, 0, 0, 0), chain(1, 1, 1, 1, index=1))) == 3  # one and five


def test_vanilla_has_tau_1_and_no_acceptance():
    vanilla = run(step(), step(index=1))
    assert value("tau", vanilla) == 1
    assert value("acceptance", vanilla) == ()
    assert value("acceptance_rate", vanilla) is None
    assert value("outside_draft_vocab", vanilla) is None
    assert value("lengths", vanilla) == (Length(0, 2),)


def test_a_match_behind_a_rejected_token_does_not_count():
    broken = run(chain(1, 0, 1, 0))
    assert (value("accepted", broken), value("drafted", broken), value("tau", broken)) == (1, 4, 2)
    assert value("acceptance_rate", broken) == 0.25


def test_a_last_step_cut_at_the_stop_counts_what_it_emitted():
    cut = run(chain(1, 1, 1, 1), chain(1, 1, 1, 1, index=1, cut=2))
    assert value("tau", cut) == (5 + 2) / 2
    assert value("accepted", cut) == 4 + 2
    assert [d.reached for d in value("acceptance", cut)] == [2, 2, 1, 1]


def test_a_stop_at_the_bonus_keeps_every_accepted_node():
    assert accepted_length(chain(1, 1, cut=3)) == accepted_length(chain(1, 1, cut=2)) == 2


def test_acceptance_by_depth_of_all_steps_and_of_those_that_got_there():
    hand = run(chain(1, 1, 1, 0), chain(1, 0, 0, 0, index=1))  # the example of the module's docstring
    assert value("acceptance", hand) == (
        Depth(1, 2, 2, 1.0, 1.0),
        Depth(2, 1, 2, 0.5, 0.5),
        Depth(3, 1, 2, 0.5, 1.0),
        Depth(4, 0, 2, 0.0, 0.0),
    )
    assert value("tau", hand) == 3


def test_the_depth_behind_one_that_nobody_reached_is_undefined_given_the_one_before():
    assert value("acceptance", run(chain(0, 0)))[1] == Depth(2, 0, 1, 0.0, None)


def test_lengths_name_also_the_lengths_that_never_occurred():
    assert value("lengths", run(chain(1, 1), chain(0, 0, index=1))) == (Length(0, 1), Length(1, 0), Length(2, 1))


def test_confidence_is_judged_only_below_accepted_parents():
    #  root ─┬─ 1 (.95, accepted) ─── 3 (.85, not the draw)
    #        └─ 2 (.15, not the draw) ─── 4 (.85, parent rejected: says nothing about its confidence)
    tree = run(step((-1, 0, 0, 1, 2), (1, 0, 0, 1), confidence=[0.95, 0.15, 0.85, 0.85]))
    assert value("confidence_calibration", tree) == (
        Bin(0.1, 0.2, 1, 0.15, 0.0),
        Bin(0.8, 0.9, 1, 0.85, 0.0),
        Bin(0.9, 1.0, 1, 0.95, 1.0),
    )


def test_value_is_judged_on_every_node():
    tree = run(step((-1, 0, 0, 1, 2), (1, 0, 0, 1), confidence=[0.95, 0.15, 0.5, 0.5]))
    bins = value("value_calibration", tree)
    assert [(b.low, b.nodes, b.accepted) for b in bins] == [(0.0, 1, 0.0), (0.1, 1, 0.0), (0.4, 1, 0.0), (0.9, 1, 1.0)]


def test_a_confidence_of_one_falls_into_the_last_bin_and_nodes_past_the_stop_into_none():
    assert value("confidence_calibration", run(chain(1, 1, 1, confidence=[1.0, 1.0, 1.0], cut=1))) == (
        Bin(0.9, 1.0, 1, 1.0, 1.0),
    )


def test_below_a_stop_nothing_is_judged_neither_the_draw_nor_its_siblings():
    #  root ─── 1 (accepted, the stop) ─┬─ 2 (the draw)
    #                                   └─ 3 (not the draw; counted without 2 it would bias the bins) ─── 4
    tree = run(step((-1, 0, 1, 1, 3), (1, 1, 0, 0), confidence=[0.95, 0.75, 0.25, 0.25], cut=1))
    assert [b.nodes for b in value("confidence_calibration", tree)] == [1]
    assert [b.nodes for b in value("value_calibration", tree)] == [1]


def test_the_gap_of_calibration_reads_only_bins_with_enough_nodes():
    bins = [Bin(0.0, 0.1, 3, 0.05, 0.9), Bin(0.5, 0.6, 300, 0.55, 0.5)]
    assert calibration_gap(bins) == pytest.approx(0.85)
    assert calibration_gap(bins, at_least=200) == pytest.approx(0.05)
    assert calibration_gap([]) is None


def test_draws_outside_the_draft_vocabulary_are_a_share_of_the_draws():
    mixed = run(chain(1, 1, 0, outside=[2, 3]), chain(0, index=1))  # node 3 is not on the path
    assert value("outside_draft_vocab", mixed) == 1 / 4
    cut = run(chain(1, 1, 0, outside=[2], cut=2))  # the draw at node 2 came after the stop
    assert value("outside_draft_vocab", cut) == 0


def test_a_run_made_without_recording_trees_has_no_numbers_of_trees():
    bare = replace(chain(1, 1), nodes=[], accepted=[0])
    found = measure(run(bare))
    assert found["tau"] == 3 and found["step_ms"] == 10
    assert {name for name, v in found.items() if v is None} == {
        "drafted",
        "accepted",
        "acceptance_rate",
        "acceptance",
        "lengths",
        "outside_draft_vocab",
        "confidence_calibration",
        "value_calibration",
    }


def test_times_are_shares_of_the_steps_and_whatever_is_no_forward_is_overhead():
    timed = run(chain(1, 0, timing={"draft_ms": 3.0, "verify_ms": 5.0, "commit_ms": 1.0, "other_ms": 1.0}))
    assert value("draft_share", timed) == 0.3
    assert value("verify_share", timed) == 0.5
    assert value("overhead", timed) == pytest.approx(0.2)
    assert value("step_ms", timed) == 10
    assert value("tokens_per_second", timed) == pytest.approx(200)


def test_a_run_without_steps_has_no_number_at_all_rather_than_a_wrong_one():
    empty = measure(Run.collect([start()]))
    assert {name for name, v in empty.items() if v} == {"tokens"}
    assert empty["tau"] is None and empty["tokens_per_second"] is None


def test_pooled_runs_weigh_steps_alike():
    long, short = run(chain(1), chain(1, index=1), chain(1, index=2)), run(chain(0))
    assert value("tau", Run.pool([long, short])) == 7 / 4


def test_what_is_no_event_is_refused():
    with pytest.raises(TraceError, match="found str"):
        Run.collect(["step"])


# ------------------------------------------------------------------------------------------------- any run


@st.composite
def steps(draw, index=0):
    n = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))]
    lucky = {p: draw(st.sampled_from([i for i in range(n) if parents[i] == p])) for p in set(parents[1:])}
    verdicts = [lucky[parents[i]] == i and draw(st.booleans()) for i in range(1, n)]
    ms = st.floats(0, 1e4, allow_subnormal=False)
    made = step(
        parents,
        verdicts,
        index=index,
        cut=draw(st.none() | st.integers(1, n)),
        confidence=draw(st.lists(st.floats(0, 1), min_size=n - 1, max_size=n - 1)),
        timing={"draft_ms": draw(ms), "verify_ms": draw(ms), "other_ms": draw(ms)},
        forwards=draw(st.integers(0, 9)),
    )
    return made


@st.composite
def runs(draw):
    return run(*(draw(steps(index=i)) for i in range(draw(st.integers(0, 6)))))


def shares(of: Run):
    for metric in METRICS.values():
        found = metric.of(of)
        if metric.unit == "share":
            yield metric.name, found
        elif metric.unit == "table":
            for row in found:
                for name in ("unconditional", "conditional", "score", "accepted"):
                    if hasattr(row, name) and not isinstance(row, Length):
                        yield f"{metric.name}.{name}", getattr(row, name)


@given(runs())
def test_every_share_lies_in_0_to_1(any_run):
    for name, share in shares(any_run):
        assert share is None or 0 <= share <= 1, name


@given(runs())
def test_identities_between_the_numbers(any_run):
    depths, lengths = value("acceptance", any_run), value("lengths", any_run)
    unconditional = [d.unconditional for d in depths]
    assert unconditional == sorted(unconditional, reverse=True)
    assert sum(n.accepted * n.steps for n in lengths) == value("accepted", any_run) <= value("drafted", any_run)
    assert sum(n.steps for n in lengths) == value("steps", any_run)
    if any_run.steps:
        # a step cut at a stop has no bonus, so τ = 1 + Σ acceptance holds with the bonuses that were emitted
        bonuses = sum(len(s.emitted) > accepted_length(s) for s in any_run.steps)
        assert value("tau", any_run) == pytest.approx(sum(unconditional) + bonuses / len(any_run.steps))
        assert value("tau", any_run) >= 1
    judged = sum(b.nodes for b in value("confidence_calibration", any_run))
    assert judged <= sum(b.nodes for b in value("value_calibration", any_run)) <= value("drafted", any_run)


@given(runs())
def test_a_trace_recomputes_every_number(any_run):
    finish = Finish(reason="length", text="", steps=0, tokens=0, drafted=0, accepted=0, seconds=1.0)
    lines = [dump(event) for event in (*any_run.starts, *any_run.steps, finish)]
    again = Run.collect(load_trace(lines))
    assert measure(again) == measure(any_run)
    assert (again.ids, again.text) == (any_run.ids, any_run.text)


# ----------------------------------------------------------------------------------------------- the table


def test_every_metric_says_what_it_is():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.label and metric.definition.endswith(".") and len(metric.definition) > 40, name
    assert "bonus" in METRICS["tau"].definition and "prefill" in METRICS["tau"].definition
    assert all(m.definition in glossary() and f"`{m.name}`" in glossary() for m in METRICS.values())


def test_values_are_shown_with_their_units():
    assert METRICS["tau"].show(3.2) == "3.20 tokens/forward"
    assert METRICS["overhead"].show(0.0825) == "8.2 %"
    assert METRICS["tokens"].show(1280) == "1,280"
    assert METRICS["tokens_per_second"].show(48.26) == "48.3 tokens/s"
    assert METRICS["tau"].show(None) == "–"
    assert METRICS["lengths"].show((Length(0, 1),)) == "1 rows"


def test_metrics_need_no_torch():
    code = "import sys, eagle_core.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
