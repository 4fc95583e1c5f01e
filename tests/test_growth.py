"""Trees that grow: against a plain recomputation in Python, with ties, with every knob; and templates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_core.drafters import TreeSettings
from eagle_core.errors import InvalidRequest
from eagle_core.growth import EAGLE1_TREE, Template, grow_dynamic, grow_template
from eagle_core.tree import ancestor_mask


class Oracle:
    """A drafter whose log-probabilities depend on the path alone, with ties and certainties when `coarse`."""

    to_target = None

    def __init__(self, seed: int, vocab: int = 6, coarse: bool = False) -> None:
        self.seed, self.vocab, self.coarse = seed, vocab, coarse
        self.paths: list[tuple[int, ...]] = [()]
        self.calls: list[int] = []

    def logp(self, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % (1 << 31))
        logits = torch.randn(self.vocab, generator=generator) * 2
        if self.coarse:  # p in {1, ~0}, or many equal ones: children tie with their parents and with each other
            logits = (logits > 1).float() * 200
        return logits.log_softmax(-1)

    def first(self) -> torch.Tensor:
        return self.logp(())[None]

    def level(self, parents: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        self.paths = [(*self.paths[p], t) for p, t in zip(parents.tolist(), tokens.tolist())]
        assert all(len(p) == depth for p in self.paths)
        self.calls.append(len(self.paths))
        return torch.stack([self.logp(p) for p in self.paths])


def by_hand(oracle: Oracle, total: int, depth: int, k: int) -> set[tuple[int, ...]]:
    """EAGLE-2 in plain Python over paths: expand the best k of each level, keep the best total − 1 of all."""
    value: dict[tuple[int, ...], float] = {(): 0.0}
    order: list[tuple[int, ...]] = []
    beam: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level = []
        for path in beam:
            logp, ids = oracle.logp(path).topk(k)
            for lp, token in zip(logp.tolist(), ids.tolist()):
                child = (*path, token)
                value[child] = value[path] + lp
                level.append(child)
        order += level
        beam = sorted(level, key=lambda p: -value[p])[:k]
    return set(sorted(order, key=lambda p: -value[p])[: total - 1])


def paths_of(tree: Any) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(2, 40), st.integers(1, 5), st.integers(1, 5))
def test_the_tree_is_eagle_2s(seed: int, total: int, depth: int, k: int) -> None:
    oracle = Oracle(seed)
    tree = grow_dynamic(oracle, torch.tensor([3]), TreeSettings(total, depth, k))
    paths = paths_of(tree)
    assert set(paths[1:]) == by_hand(Oracle(seed), total, depth, k)
    assert len(paths) == len(set(paths)) == min(total, k + (depth - 1) * k * k + 1)
    assert tree.forwards == depth == len(oracle.calls) + 1
    for path, c, v in list(zip(paths, tree.confidence.tolist(), tree.value.tolist()))[1:]:
        assert c == pytest.approx(math.exp(oracle.logp(path[:-1])[path[-1]]), rel=1e-4)
        assert v == pytest.approx(math.exp(sum(oracle.logp(path[:i])[path[i]] for i in range(len(path)))), rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 999), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5),
    st.booleans(), st.sampled_from(["value", "confidence"]), st.booleans(),
)  # fmt: skip
def test_a_kept_node_keeps_its_parent_even_in_ties(
    seed: int, total: int, depth: int, k: int, coarse: bool, by: Any, rerank: bool
) -> None:
    tree = grow_dynamic(Oracle(seed, coarse=coarse), torch.tensor([3]), TreeSettings(total, depth, k, by, rerank))
    parents, c = tree.parents.tolist(), tree.candidates
    assert parents[0] == -1 and all(0 <= p < i for i, p in enumerate(parents) if i)
    assert int(tree.depth.max()) <= depth and len(tree) <= total
    # what is kept hangs together as it was scored: the candidate's parent is the node's parent
    for row, node in enumerate(c.node.tolist()):
        if node >= 0:
            above = c.parents[row].item()
            assert tree.tokens[node] == c.tokens[row] and tree.depth[node] == c.depth[row]
            assert parents[node] == (0 if above < 0 else c.node[above].item())
    siblings = list(zip(parents, tree.tokens.tolist()))
    assert len(siblings) == len(set(siblings))


def test_without_rerank_the_beam_itself_is_the_tree() -> None:
    tree = grow_dynamic(Oracle(5), torch.tensor([3]), TreeSettings(100, 4, 3, rerank=False))
    assert len(tree) == 1 + 3 * 4
    assert [int((tree.depth == d).sum()) for d in range(1, 5)] == [3, 3, 3, 3]


def test_expanding_by_confidence_ignores_the_path() -> None:
    by_value = grow_dynamic(Oracle(8), torch.tensor([3]), TreeSettings(30, 4, 3))
    by_confidence = grow_dynamic(Oracle(8), torch.tensor([3]), TreeSettings(30, 4, 3, expand_by="confidence"))
    assert paths_of(by_value) != paths_of(by_confidence)


def test_a_vocabulary_smaller_than_top_k() -> None:
    tree = grow_dynamic(Oracle(1, vocab=3), torch.tensor([3]), TreeSettings(60, 3, 10))
    assert len(tree) == 1 + 3 + 9 + 9


def test_a_template_beyond_the_vocabulary_drafts_nothing() -> None:
    template = Template.parse([[5], [5, 0]]).cut(6, ranks=3)
    tree = grow_template(Oracle(1, vocab=3), torch.tensor([3]), template)
    assert tree.tokens.tolist() == [3] and tree.forwards == 1


def test_the_default_template_is_the_references() -> None:
    assert len(EAGLE1_TREE.paths) == 25
    assert [sum(len(p) == d for p in EAGLE1_TREE.paths) for d in range(1, 6)] == [4, 8, 8, 3, 2]
    assert Template.parse(EAGLE1_TREE.paths) == EAGLE1_TREE


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 999), st.sets(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)
)
def test_a_template_holds_each_inner_nodes_likeliest_children(seed: int, leaves: set[tuple[int, ...]]) -> None:
    ranks = {leaf[:i] for leaf in leaves for i in range(1, len(leaf) + 1)}
    template = Template.parse(list(ranks))
    oracle = Oracle(seed)
    tree = grow_template(oracle, torch.tensor([3]), template)
    for path, rank_path in zip(paths_of(tree)[1:], template.paths, strict=True):
        assert path[-1] == oracle.logp(path[:-1]).topk(rank_path[-1] + 1).indices[-1]
    assert sum(oracle.calls) == len({p[:-1] for p in template.paths} - {()})  # only inner nodes are run
    assert tree.forwards == max(map(len, template.paths))


@pytest.mark.parametrize("paths,names", [
    ([], "empty"), ([[0, 1]], "[0]"), ([[0], [-1]], "-1"), ([[0], [0, 99]], "99"), ([[0], ["a"]], "a"),
    ([[i] for i in range(64)] + [[i, j] for i in range(4) for j in range(60)], "256"), ([[]], "[]"), ([[True]], "True"),
])  # fmt: skip
def test_a_bad_template_is_refused_with_the_offending_path(paths: Any, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names.replace("[", r"\[").replace("]", r"\]")):
        Template.parse(paths)


@settings(deadline=None)
@given(st.integers(1, 256), st.integers(0, 99))
def test_the_ancestor_mask_is_the_closure_of_the_parents(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n)])
    mask = ancestor_mask(parents, n)
    for i, parent in enumerate(parents.tolist()):
        expected = torch.zeros(n, dtype=torch.bool) if parent < 0 else mask[parent].clone()
        expected[i] = True
        assert torch.equal(mask[i], expected)
