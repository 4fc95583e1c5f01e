"""Prompt lookup: the index against a plain search, rates against counting by hand, what a graft does to a tree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_core.drafters import Feedback, TreeSettings
from eagle_core.drafters.hybrid import Hybrid
from eagle_core.drafters.lookup import LONGEST_MATCH, PRIOR, PromptLookup, TextIndex
from eagle_core.engine import generate
from eagle_core.events import dump, load
from eagle_core.growth import Graft, grow_dynamic
from eagle_core.verify import Noise, Sampling
from tests.conftest import VOCAB, drafter_for, eagle_head, tiny_target
from tests.test_growth import Oracle, paths_of

texts = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def place(ids: list[int]) -> tuple[int, int]:
    """By plain search: the latest place of the longest n-gram of at most 3, and how far it matches."""
    for n in (3, 2, 1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[len(ids) - n :]:
                at = match = start + n
                for match in range(min(at, LONGEST_MATCH), 0, -1):
                    if ids[at - match : at] == ids[len(ids) - match :]:
                        break
                return at, match
    return len(ids), 0


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 20))
def test_the_index_finds_what_a_search_finds(ids: list[int], parts: list[int], count: int) -> None:
    index, read = TextIndex(), 0
    for part in parts * 20:  # in pieces, as an answer grows
        read = min(read + part, len(ids))
        index.read(ids[:read])
        at, match = place(ids[:read])
        tokens, matches = index.continuation(count)
        if not match:
            assert not tokens
            continue
        endless = ids[:read]
        for i in range(at, at + count):
            endless.append(endless[i])
        assert tokens == endless[read : read + count] and matches == list(range(match, match + count))


def test_rates_start_at_the_prior_and_follow_the_answer() -> None:
    index = TextIndex()
    index.read([1, 2, 3, 1, 2])  # the prompt is not judged
    assert [index.rate(m) for m in range(1, LONGEST_MATCH + 1)] == pytest.approx(PRIOR)
    assert index.rate(99) == index.rate(LONGEST_MATCH)
    index.read([1, 2, 3, 1, 2, 3])  # after (1, 2): 3, as before
    assert index.rate(2) == pytest.approx((8 * PRIOR[1] + 1) / 9)
    index.read([1, 2, 3, 1, 2, 3, 9])  # after (1, 2, 3): not 1
    assert index.rate(3) == pytest.approx((8 * PRIOR[2]) / 9) and index.rate(1) == pytest.approx(PRIOR[0])


def graft(tokens: list[int], rates: list[float], draft: list[int | None] | None = None) -> Graft:
    """A graft with agreement 1 and trust ½."""
    r = torch.tensor(rates)
    odds = r.log() - (-r).log1p() + 1
    ids = torch.tensor(tokens, dtype=torch.int64)
    return Graft(ids, list(tokens) if draft is None else draft, r.log(), odds, torch.full_like(r, 0.5))


def grafted_by_hand(
    oracle: Oracle, chain: list[int], rates: list[float], total: int, depth: int, k: int
) -> dict[tuple[int, ...], float]:
    """The grafted tree in plain Python over paths: value by path of the nodes it must hold."""
    value: dict[tuple[int, ...], float] = {(): 1.0}
    order: list[tuple[int, ...]] = []
    beam: list[tuple[int, ...]] = [()]
    for d in range(1, depth + 1):
        level = []
        for path in beam:
            p = oracle.logp(path).exp().tolist()
            children = dict(sorted(enumerate(p), key=lambda c: -c[1])[:k])
            if path == tuple(chain[: d - 1]) and d <= len(chain):
                token, r = chain[d - 1], rates[d - 1]
                c = min(max(p[token], 1e-3), 1 - 1e-3)
                odds = math.log(r / (1 - r)) + 1 + 0.5 * math.log(c / (1 - c))
                pooled = 1 / (1 + math.exp(-odds))
                children = {t: q * (1 - pooled) / (1 - c) for t, q in children.items()} | {token: pooled}
            for token, q in children.items():
                value[(*path, token)] = value[path] * min(q, 1.0)
                level.append((*path, token))
        runnable = list(level)
        lone = tuple(chain[:d])
        if d <= len(chain) and lone not in value:
            value[lone] = value[lone[:-1]] * rates[d - 1]
            level.append(lone)
        order += level
        beam = sorted(runnable, key=lambda path: -value[path])[:k]
    for d in range(depth + 1, len(chain) + 1):
        value[tuple(chain[:d])] = value[tuple(chain[: d - 1])] * rates[d - 1]
        order.append(tuple(chain[:d]))
    fewest = k + (depth - 1) * k * k + max(len(chain) - depth, 0)
    kept = sorted(order, key=lambda path: -value[path])[: min(total - 1, fewest)]
    return {path: value[path] for path in kept}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 999), st.lists(st.integers(0, 5), max_size=9), st.integers(2, 40), st.integers(1, 4),
    st.integers(1, 4), st.lists(st.floats(0.05, 0.95), min_size=9, max_size=9),
)  # fmt: skip
def test_a_grafted_tree_is_one_tree(
    seed: int, chain: list[int], total: int, depth: int, k: int, rates: list[float]
) -> None:
    rates = rates[: len(chain)]
    tree = grow_dynamic(Oracle(seed), torch.tensor([3]), TreeSettings(total, depth, k), graft(chain, rates))
    paths = paths_of(tree)[1:]
    assert len(set(paths)) == len(paths) == len(tree) - 1
    wanted = grafted_by_hand(Oracle(seed), chain, rates, total, depth, k)
    got = dict(zip(paths, tree.value.tolist()[1:]))
    assert sorted(got.values()) == pytest.approx(sorted(wanted.values()), rel=1e-3)
    for path, value in got.items():
        if path in wanted:  # equal values may be kept in another order
            assert value == pytest.approx(wanted[path], rel=1e-3)
    c = tree.candidates
    assert c is not None and c.source is not None and tree.source is not None
    told = [(a, b) for a, b, node in zip(c.parents.tolist(), c.tokens.tolist(), c.node.tolist()) if node != -2]
    assert len(set(told)) == len(told), "two candidates of one parent are the same token"
    by = dict(zip(paths, tree.source.tolist()[1:]))
    assert all((by[path] > 0) is (path == tuple(chain[: len(path)])) for path in paths)
    families: dict[tuple[int, ...], float] = {}
    for path, confidence in zip(paths, tree.confidence.tolist()[1:]):
        families[path[:-1]] = families.get(path[:-1], 0) + confidence
    assert all(total <= 1 + 2e-3 for total in families.values())


def test_a_token_that_the_drafter_lacks_is_looked_up_all_the_same() -> None:
    chain = [9, 8]  # beyond the oracle's vocabulary of 6
    tree = grow_dynamic(Oracle(1), torch.tensor([3]), TreeSettings(9, 1, 2), graft(chain, [0.9, 0.8], [None, None]))
    assert {(9,), (9, 8)} <= set(paths_of(tree))
    assert sorted(tree.value.tolist())[-3:] == pytest.approx([0.72, 0.9, 1.0])


def test_a_reliable_chain_needs_no_further_level() -> None:
    from eagle_core.budget import Costs

    costs = Costs((1, 64), (30.0, 90.0), 4.0, 4.0)
    sure = graft([1, 2, 3, 4, 5, 0, 1, 2], [0.98] * 8)
    chosen = TreeSettings(-1, 6, 4, costs=costs)
    alone = grow_dynamic(Oracle(2), torch.tensor([3]), chosen, graft([], []))
    helped = grow_dynamic(Oracle(2), torch.tensor([3]), chosen, sure)
    assert helped.forwards < alone.forwards and int(helped.depth.max()) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_events_name_the_source_of_every_node(temperature: float) -> None:
    target = tiny_target()
    prompt = [5, 17, 42, 3, 8, 8, 21, 60, 1, 17, 42] * 3
    events = list(
        generate(target, drafter_for("hybrid", target), prompt, method="hybrid", max_new_tokens=40,
                 sampling=Sampling(temperature, seed=1), settings=TreeSettings(20, 3, 3))
    )  # fmt: skip
    assert [load(dump(event)) for event in events] == events
    steps = events[1:-1]
    assert all(step.nodes[0].source is None for step in steps)
    nodes = [row for step in steps for row in (*step.nodes[1:], *step.dropped)]
    assert {row.source for row in nodes} == {"head", "lookup", "both"}
    for step in steps:
        rows = [*step.nodes, *step.dropped]
        assert len({(row.parent, row.token) for row in rows}) == len(rows)
        run = {row.parent for row in rows[1:] if row.source != "lookup"}
        assert {row.id for row in rows if row.expanded} == run
    assert max(node.depth for step in steps for node in step.nodes) > 3


@pytest.mark.parametrize("draft_vocab", [VOCAB, 37])
def test_chains_end_where_positions_end(draft_vocab: int) -> None:
    target = tiny_target()
    target.context = 60
    drafter = Hybrid(eagle_head("eagle3", "llama", draft_vocab))
    deepest: list[int] = []
    plain = drafter.propose

    def propose(feedback: Feedback, settings: TreeSettings) -> Any:
        tree = plain(feedback, settings)
        deepest.append(feedback.position + int(tree.depth.max()))
        assert int(tree.depth.max()) <= drafter.reach(settings)
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    prompt = [5, 17, 42] * 12
    events = list(generate(target, drafter, prompt, method="hybrid", max_new_tokens=99, settings=TreeSettings(64, 2)))
    assert events[-1].reason == "context" and max(deepest) <= 59


def test_a_lookup_is_no_deeper_than_asked() -> None:
    drafter = PromptLookup()
    drafter.reset(99, TreeSettings(), Sampling(), Noise(0, torch.device("cpu")))
    ids = [1, 2, 3] * 9
    feedback = Feedback(ids, torch.tensor(ids[:-1]), torch.zeros(len(ids) - 1, 0), torch.tensor(ids[-1:]))
    for total, depth, nodes in ((24, 6, 7), (4, 6, 4), (24, 30, 24)):
        assert len(drafter.propose(feedback, TreeSettings(total, depth))) == nodes
