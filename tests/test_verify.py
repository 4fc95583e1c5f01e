"""Draw and walk, by exact enumeration: what a round emits has the target's distribution, for every rule."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_core.errors import InvalidRequest
from eagle_core.tree import path_tree
from eagle_core.verify import Noise, Sampling, draws, processed, ratio_draws, ratio_odds, walk
from tests.adversaries import tree_of
from tests.conftest import goldens, numbers

Outcomes = dict[tuple[int, ...], float]


def scenarios() -> list[dict[str, Any]]:
    return numbers(goldens() / "sampling.json")["scenarios"]


def named(rule: str) -> list[Any]:
    return [pytest.param(s, id=s["name"]) for s in scenarios() if rule in s["rules"]]


def row(table: dict[str, list[str]], prefix: tuple[int, ...]) -> list[float]:
    return [float(Fraction(x)) for x in table[",".join(map(str, prefix))]]


def emitted(tokens: list[int], choices: list[int], alive: list[bool]) -> tuple[int, ...]:
    path = [i for i, lives in enumerate(alive) if lives]
    return (*(tokens[i] for i in path[1:]), choices[path[-1]])


def by_draws(scenario: dict[str, Any]) -> Outcomes:
    """Every way the target can draw at the nodes of the tree, weighed; the walk is the engine's own."""
    tokens = [0] + [n["token"] for n in scenario["tree"]]  # the root's token never matters
    parents = [-1] + [n["parent"] + 1 for n in scenario["tree"]]
    prefixes: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        prefixes.append((*prefixes[parent], token))
    tree = tree_of(tokens, parents)
    p = [row(scenario["p"], prefix) for prefix in prefixes]
    outcomes: Outcomes = defaultdict(float)

    def explore(node: int, choices: dict[int, int], weight: float) -> None:
        """Only draws on the walk matter: decide them as the walk reaches their nodes."""
        for x, px in enumerate(p[node]):
            if not px:
                continue
            now = {**choices, node: x}
            drawn = [now.get(i, -1) for i in range(len(tokens))]
            alive = walk(tree, torch.tensor(drawn)).tolist()
            end = max(i for i, lives in enumerate(alive) if lives)
            if end in now:
                outcomes[emitted(tokens, drawn, alive)] += weight * px
            else:
                explore(end, now, weight * px)

    explore(0, {}, 1.0)
    return outcomes


def by_ratio(scenario: dict[str, Any], spoil: str = "") -> Outcomes:
    """Every chain that q can draft, every coin, every draw, weighed with the engine's own odds."""
    size, k = scenario["V"], scenario["chain_length"]
    outcomes: Outcomes = defaultdict(float)
    for chain in itertools.product(range(size), repeat=k):
        prefixes = [chain[:i] for i in range(k + 1)]
        q = torch.tensor([row(scenario["q"], prefix) for prefix in prefixes[:-1]] + [[0.0] * size], dtype=torch.float64)
        weight = 1.0
        for i, token in enumerate(chain):
            weight *= float(q[i, token])
        if not weight:
            continue
        p = torch.tensor([row(scenario["p"], prefix) for prefix in prefixes], dtype=torch.float64)
        tree = path_tree(torch.tensor((0, *chain)), torch.ones(k + 1, dtype=torch.float64), proposal=q)
        accept, rest = ratio_odds(p, tree)
        if spoil == "fresh":  # a wrong rule: after a rejection draw from p itself
            rest = p
        alive = weight
        for i in range(k + 1):
            lost = alive * (1 - float(accept[i]) if i < k else 1.0)
            for x in range(size):
                if lost and rest[i, x] > 0:
                    outcomes[(*chain[:i], x)] += lost * float(rest[i, x])
            alive -= lost
    return outcomes


def assert_equal(found: Outcomes, want: dict[str, str]) -> None:
    wanted = {tuple(map(int, k.split(","))): float(Fraction(v)) for k, v in want.items() if Fraction(v)}
    found = {k: v for k, v in found.items() if v > 1e-12}
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, abs=1e-9), key


def first_token(outcomes: Outcomes) -> dict[int, float]:
    total: dict[int, float] = defaultdict(float)
    for key, value in outcomes.items():
        total[key[0]] += value
    return total


@pytest.mark.parametrize("scenario", named("deterministic"))
def test_draw_rule_by_enumeration(scenario: dict[str, Any]) -> None:
    outcomes = by_draws(scenario)
    assert_equal(outcomes, scenario["rules"]["deterministic"]["round_outcomes"])
    for token, p in first_token(outcomes).items():
        assert p == pytest.approx(row(scenario["p"], ())[token])


@pytest.mark.parametrize("scenario", named("chain_pq"))
def test_ratio_rule_by_enumeration(scenario: dict[str, Any]) -> None:
    assert_equal(by_ratio(scenario), scenario["rules"]["chain_pq"]["round_outcomes"])


def test_a_wrong_rule_does_not_pass() -> None:
    """The negative controls: this comparison tells the right rule from plausible wrong ones."""
    scenario = next(s for s in scenarios() if s["name"] == "fixed-5")
    want = scenario["rules"]["chain_pq"]["round_outcomes"]
    with pytest.raises(AssertionError):
        assert_equal(by_ratio(scenario, spoil="fresh"), want)
    for wrong in scenario["wrong"].values():
        if "round_outcomes" in wrong:
            with pytest.raises(AssertionError):
                assert_equal(by_draws(scenario), wrong["round_outcomes"])


def test_a_worked_example() -> None:
    """Four tokens, p = (.5, .3, .2, 0), two candidates 1 and 3: 1 lives with .3, 3 never, else 0 or 2 is the bonus."""
    scenario = {"p": {"": ["1/2", "3/10", "1/5", "0"], "1": ["1", "0", "0", "0"], "3": ["1", "0", "0", "0"]},
                "tree": [{"token": 1, "parent": -1}, {"token": 3, "parent": -1}]}  # fmt: skip
    outcomes = by_draws(scenario)
    assert outcomes == pytest.approx({(0,): 0.5, (1, 0): 0.3, (2,): 0.2})


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p * counts.sum()
    live = expected > 0
    assert counts[~live].sum() == 0
    return float(((counts[live] - expected[live]) ** 2 / expected[live]).sum())


@pytest.mark.parametrize("sampling", [
    Sampling(0.5), Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.3, top_p=0.7), Sampling(1.0, min_p=0.2),
])  # fmt: skip
def test_draws_follow_the_processed_distribution(sampling: Sampling) -> None:
    """6,000 seeds. A right sampler fails with probability 1e-5, and the seeds are fixed."""
    logits = torch.tensor([[1.2, 0.3, -0.5, 2.0, 0.0, -1.0]])
    p = processed(logits, sampling)[0]
    counts = torch.zeros(6)
    tree = tree_of([0], [-1])
    for seed in range(6000):
        choice, _ = draws(logits, tree, 7, sampling, Noise(seed, torch.device("cpu")), 0)
        counts[choice] += 1
    assert chi_square(counts, p) < 30.9  # 5 degrees of freedom


def test_sampled_chain_end_to_end_keeps_the_distribution() -> None:
    """The glue around `ratio_odds`: coins and draws of `ratio_draws` itself, over 6,000 seeds."""
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5], [0.0, 0.7, 0.0, -2.0]])
    sampling = Sampling(1.0)
    p = processed(logits, sampling)
    q = torch.tensor([0.1, 0.6, 0.2, 0.1])
    counts = torch.zeros(4)
    for seed in range(6000):
        noise = Noise(seed, torch.device("cpu"))
        draft = (q / noise.exponential(5, 4, stream=1)).argmax()[None]
        tree = path_tree(
            torch.cat((torch.zeros(1, dtype=torch.int64), draft)), torch.ones(2), proposal=torch.stack((q, q * 0))
        )
        choices, _ = ratio_draws(logits, tree, 4, sampling, noise, 1)
        counts[choices[0]] += 1
    assert chi_square(counts, p[0]) < 27.9  # 3 degrees of freedom, 4e-6


def test_noise_is_a_function_of_seed_position_and_stream() -> None:
    a, b = Noise(3, torch.device("cpu")), Noise(3, torch.device("cpu"))
    b.exponential(9, 50)  # another order of asking
    assert torch.equal(a.exponential(4, 50), b.exponential(4, 50))
    rows = [
        a.exponential(4, 50),
        a.exponential(5, 50),
        a.exponential(4, 50, stream=1),
        Noise(4, torch.device("cpu")).exponential(4, 50),
    ]
    for x, y in itertools.combinations(rows, 2):
        assert not torch.equal(x, y)
    assert all((r > 0).all() and r.isfinite().all() for r in rows)


def test_the_global_random_state_is_never_touched() -> None:
    state = torch.random.get_rng_state()
    noise = Noise(1, torch.device("cpu"))
    noise.exponential(0, 10), noise.uniform(0)
    assert torch.equal(state, torch.random.get_rng_state())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 40),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    vocab=st.sampled_from([5, 37, 2500]),
)
def test_processed_is_transformers_pipeline(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, vocab: int
) -> None:
    """The same kept set and the same probabilities as transformers' own warpers, in its order."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(seed)
    logits = torch.randn(3, vocab) * 3
    ours = processed(logits, Sampling(temperature, top_k, top_p, min_p))
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if 0 < top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    if min_p:
        theirs = MinPLogitsWarper(min_p)(None, theirs)
    theirs = theirs.softmax(-1)
    if top_p == 0:  # transformers refuses it; ours keeps the likeliest token
        assert torch.equal(ours.argmax(-1), logits.argmax(-1)) and (ours.amax(-1) == 1).all()
        return
    unclear = (theirs.sort(-1, descending=True).values.cumsum(-1) - top_p).abs().amin() < 1e-5
    if not unclear:  # a cumulative sum exactly at top_p may round either way
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert (ours.sum(-1) - 1).abs().amax() < 1e-5


def test_greedy_is_one_hot_at_the_lowest_tied_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert processed(logits, Sampling()).tolist() == [[0, 1, 0, 0]]
    wide = torch.zeros(1, 50_000)
    wide[0, [777, 31_000, 49_999]] = 2.5
    assert draws(wide, tree_of([0], [-1]), 0, Sampling(), Noise(0, torch.device("cpu")), 0)[0].item() == 777


@pytest.mark.parametrize("top_p", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1e-6, 100.0])
def test_the_extreme_temperatures_still_give_distributions(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[1e4, 1e4, -1e4, 0.0], [-3e4, -3e4, -torch.inf, -3e4]])
    probs = processed(logits, Sampling(temperature, top_p=top_p, min_p=0.1))
    torch.testing.assert_close(probs.sum(1), torch.ones(2))


@pytest.mark.parametrize("field,value", [
    ("temperature", -0.1), ("temperature", 1e-40), ("temperature", float("nan")), ("temperature", float("inf")),
    ("top_k", -1), ("top_p", 1.01),
    ("top_p", -0.1), ("top_p", float("nan")), ("min_p", 2.0), ("seed", -1), ("seed", 1 << 63),
])  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as e:
        Sampling(**{field: value})
    assert field.replace("_", "-").split("-")[0] in str(e.value)
