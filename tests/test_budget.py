"""The size that pays: by hand-made costs, where the best size can be seen; then measured on a tiny pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_core.budget import AUTO_LIMIT, Costs, Pace, best_size, measure_costs, next_level_pays
from eagle_core.drafters import Feedback, TreeSettings
from eagle_core.drafters.lookup import PromptLookup
from eagle_core.drafters.plain import Vanilla
from eagle_core.engine import generate
from eagle_core.events import dump, load
from eagle_core.growth import grow_dynamic
from eagle_core.tree import path_tree
from eagle_core.verify import Sampling
from tests.conftest import drafter_for, greedy, tiny_target
from tests.test_growth import Oracle

FREE = Costs((1, 64), (10.0, 10.0), 0.0, 0.0)  # rows cost nothing: take all
DEAR = Costs((1, 64), (10.0, 640.0), 0.0, 0.0)  # every row costs a forward: take only near-certain ones
PROMPT = [5, 17, 42, 3, 8]


def test_interpolation() -> None:
    costs = Costs((1, 4, 8), (10.0, 16.0, 36.0), 1.0, 1.0)
    assert [costs.verify(n) for n in (1, 2, 4, 6, 8, 16)] == [10, 12, 16, 26, 36, 72]


def test_the_best_size_by_hand() -> None:
    assert best_size([0.5] * 80, FREE, 0)[0] == AUTO_LIMIT
    assert best_size([0.5] * 80, DEAR, 0)[0] == 1
    assert best_size([], FREE, 0) == (1, 0.1)
    step = Costs((1, 4, 5, 64), (10.0, 10.0, 40.0, 40.0), 0.0, 0.0)  # three drafts are free, the fourth is not
    assert best_size([0.9, 0.5, 0.4, 0.4, 0.4], step, 0)[0] == 4


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=70), st.lists(st.floats(0.1, 50), min_size=4, max_size=4), st.floats(0, 50))
def test_no_other_size_is_better(values: list[float], steps: list[float], drafted: float) -> None:
    values = sorted(values, reverse=True)
    ms = [sum(steps[: i + 1]) for i in range(4)]
    costs = Costs((1, 8, 24, 64), tuple(ms), 0.0, 0.0)
    n, rate = best_size(values, costs, drafted)
    for other in range(1, min(len(values) + 1, AUTO_LIMIT) + 1):
        assert (1 + sum(values[: other - 1])) / (drafted + costs.verify(other)) <= rate * (1 + 1e-9)
    assert 1 <= n <= min(len(values) + 1, AUTO_LIMIT)


def test_drafting_stops_where_it_cannot_pay() -> None:
    slow_drafter = Costs((1, 64), (10.0, 10.0), 1.0, 100.0)
    assert next_level_pays([0.9], [0.9], [0.9], FREE, 0)
    assert not next_level_pays([0.9], [0.9], [0.9], slow_drafter, 1.0)
    deep = grow_dynamic(Oracle(3), torch.tensor([1]), TreeSettings(-1, 6, 4, costs=FREE))
    flat = grow_dynamic(Oracle(3), torch.tensor([1]), TreeSettings(-1, 6, 4, costs=slow_drafter))
    assert deep.forwards == 6 and flat.forwards == 1 and len(flat) == 5
    small = grow_dynamic(Oracle(3), torch.tensor([1]), TreeSettings(-1, 6, 4, costs=DEAR))
    assert len(small) == 1


def test_the_choice_depends_on_the_costs_alone() -> None:
    def sizes() -> list[int]:
        target = tiny_target()
        costs = Costs((1, 8, 64), (10.0, 14.0, 60.0), 1.0, 2.0)
        events = list(
            generate(target, drafter_for("eagle3", target), PROMPT, method="eagle3",
                     settings=TreeSettings(-1, costs=costs), max_new_tokens=16)
        )  # fmt: skip
        assert [t for e in events[:-1] for t in e.emitted] == greedy(target.model, PROMPT, 16)
        assert events[0].settings["costs"]["verify_ms"] == [10.0, 14.0, 60.0]
        assert all(load(dump(event)) == event for event in events)
        return [len(e.nodes) for e in events[1:-1]]

    assert sizes() == sizes()


@pytest.mark.parametrize("method", ["chain", "chain-sampled", "lookup", "eagle3"])
def test_every_method_drafts_less_where_rows_are_dear(method: str) -> None:
    target = tiny_target()
    sizes = []
    for costs in (FREE, DEAR):
        drafter = drafter_for(method, target)
        events = list(
            generate(target, drafter, PROMPT * 3, method=method, sampling=Sampling(1.0, seed=2),
                     settings=TreeSettings(-1, costs=costs), max_new_tokens=16)
        )  # fmt: skip
        sizes.append(sum(len(e.nodes) for e in events[1:-1]) / len(events[1:-1]))
    assert sizes[0] > sizes[1]


def test_a_drafter_of_almost_no_context_can_be_measured() -> None:
    target = tiny_target()
    drafter = drafter_for("eagle3", target)
    drafter.context = 1
    assert measure_costs(target, drafter).level_ms == 0


def test_the_targets_forwards_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    first = measure_costs(target, drafter_for("vanilla", target))
    with monkeypatch.context() as patch:
        patch.setattr("eagle_core.target.Session.verify", None)
        second = measure_costs(target, drafter_for("eagle3", target), first)
    assert (second.rows, second.verify_ms) == (first.rows, first.verify_ms)
    assert second.extend_ms > first.extend_ms and second.level_ms > 0


@pytest.mark.parametrize("method", ["vanilla", "lookup", "eagle2", "eagle3", "hybrid", "chain"])
def test_measuring_leaves_the_pair_as_it_was(method: str) -> None:
    target = tiny_target()
    drafter = drafter_for(method, target)
    costs = measure_costs(target, drafter)
    assert costs.rows[0] == 1 and list(costs.verify_ms) == sorted(costs.verify_ms) and costs.verify_ms[0] > 0
    assert not target.lock.locked()
    events = list(
        generate(target, drafter, PROMPT, method=method, settings=TreeSettings(-1, costs=costs), max_new_tokens=12)
    )
    assert [t for e in events[:-1] for t in e.emitted] == greedy(target.model, PROMPT, 12)
    assert isinstance(drafter, PromptLookup | Vanilla) or costs.level_ms >= 0


def test_a_level_is_judged_by_what_levels_hand_down() -> None:
    costs = Costs((1, 64), (30.0, 90.0), 3.0, 3.0)
    assert next_level_pays([0.6, 0.2], [0.6, 0.2], [0.9, 0.05], costs, 3.0)
    assert not next_level_pays([0.6, 0.2], [0.6, 0.2], [0.1, 0.1], costs, 3.0)
    pace = Pace(costs)
    pace.level(1, [0.8, 0.1])
    pace.level(1, [0.4, 0.3])
    assert pace.hands_down(1) == pytest.approx([0.6, 0.2])
    assert pace.hands_down(3) == pytest.approx([0.6 * 0.85**2, 0.2 * 0.85**2])
    pace.level(2, [0.5, 0.0])
    assert pace.hands_down(2) == [0.5, 0.0]


def told(values: list[float], accepted: int) -> Feedback:
    """The feedback on a chain of these values, of which so many were accepted."""
    tokens = torch.arange(len(values) + 1)
    tree = path_tree(tokens, torch.tensor([1.0, *values]))
    ids = list(range(20))
    return Feedback(ids, tokens[: accepted + 1], torch.zeros(accepted + 1, 0), tokens[:1], tree)


def test_values_are_corrected_by_what_became_of_them() -> None:
    pace = Pace(FREE)
    assert pace.scale(1) == 1
    for _ in range(200):
        pace.learn(told([0.5], 0))
    assert 0.5 <= pace.scale(1) < 0.6 and pace.scale(2) == 1
    for _ in range(2000):
        pace.learn(told([0.5], 1))
    assert pace.scale(1) == 1.5


def test_a_drafter_that_does_not_pay_rests_and_is_tried_again() -> None:
    def asked(value: float, steps: int = 300) -> int:
        pace, times = Pace(Costs((1, 64), (30.0, 90.0), 10.0, 10.0)), 0
        for _ in range(steps):
            if pace.asks():
                times += 1
                pace.saw([value], 10.0)
        return times

    assert asked(0.9) == 300 and 10 <= asked(0.01) < 40


def test_beside_a_sure_lookup_a_dear_drafter_is_not_asked() -> None:
    pace = Pace(Costs((1, 64), (30.0, 90.0), 3.0, 3.0))
    for _ in range(20):
        assert pace.asks()
        pace.saw([0.5, 0.2], 3.0)
    assert not pace.asks([0.97**i for i in range(1, 17)])
    assert pace.asks([0.5, 0.3, 0.2])


@pytest.mark.parametrize("method", ["eagle2", "eagle3", "hybrid"])
def test_a_rested_head_catches_up(method: str) -> None:
    """After a rest the head reads what it missed at once; its drafts are those of one that never rested."""
    target = tiny_target()
    seen: list[dict[int, list[int]]] = []
    for patient in (True, False):
        drafter = drafter_for(method, target)
        trees: dict[int, list[int]] = {}
        seen.append(trees)
        plain = drafter.propose

        def propose(
            feedback: Feedback, budget: TreeSettings, plain=plain, drafter=drafter, patient=patient, trees=trees
        ):  # type: ignore[no-untyped-def]
            drafter._pace.asks = lambda free=(): feedback.position % 5 == 0 or not patient
            tree = plain(feedback, budget)
            trees[feedback.position] = tree.tokens.tolist() if tree.forwards else []
            return tree

        drafter.propose = propose
        events = list(
            generate(target, drafter, PROMPT, method=method, max_new_tokens=60,
                     settings=TreeSettings(-1, 3, 4, costs=Costs((1, 64), (10.0, 15.0), 0.1, 0.1)))
        )  # fmt: skip
        assert [t for e in events[:-1] for t in e.emitted] == greedy(target.model, PROMPT, 60)
    common = [p for p in seen[0] if seen[0][p] and p in seen[1]]
    assert len(common) > 3 and [p for p in seen[0] if not seen[0][p]]
    assert all(seen[0][p][:5] == seen[1][p][:5] for p in common)


@pytest.mark.parametrize("method", ["chain", "chain-sampled", "eagle2", "eagle3", "hybrid"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resting_changes_no_text(method: str, temperature: float) -> None:
    target = tiny_target()
    sampling = Sampling(temperature, seed=3)
    hopeless = TreeSettings(-1, 3, 4, costs=Costs((1, 64), (10.0, 640.0), 50.0, 50.0))

    def answer(name: str, budget: TreeSettings) -> tuple[list[int], list[int]]:
        events = list(
            generate(target, drafter_for(name, target), PROMPT, method=name, sampling=sampling, settings=budget,
                     max_new_tokens=60)
        )  # fmt: skip
        return [t for e in events[:-1] for t in e.emitted], [e.forwards for e in events[1:-1]]

    ids, forwards = answer(method, hopeless)
    assert forwards.count(0) > len(forwards) / 2 and any(forwards)
    if method != "chain-sampled" or not temperature:
        assert ids == answer("vanilla", TreeSettings())[0]
