"""Drafting with the noise of the draw: what a drafter makes of it, and that the text never changes by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.drafters.chain import Chain
from eagle_core.engine import generate
from eagle_core.events import Step
from eagle_core.metrics import Run
from eagle_core.verify import Noise, Sampling, coupled, draws, processed
from tests.adversaries import tree_of
from tests.conftest import VOCAB, drafter_for, eagle_head, tiny_target

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 9, 2, 6]


def run(method: str, drafter: Any, target: Any, sampling: Sampling, settings: TreeSettings) -> Run:
    return Run.collect(
        generate(target, drafter, PROMPT, method=method, sampling=sampling, settings=settings, max_new_tokens=40)
    )


def test_at_temperature_zero_nothing_is_told() -> None:
    logits = torch.randn(3, 8)
    assert coupled(logits, 5, Sampling(), Noise(0, CPU), 8) is logits


FILTERED = [Sampling(1.3, top_k=1), Sampling(1, top_k=4), Sampling(0.8, top_p=0.3), Sampling(1, top_p=0.9, min_p=0.1)]


@pytest.mark.parametrize("sampling", [Sampling(0.3), Sampling(1.0), Sampling(2.0), *FILTERED])
def test_whoever_knows_the_target_knows_the_draw(sampling: Sampling) -> None:
    torch.manual_seed(1)
    for seed in range(200):
        noise, logits = Noise(seed, CPU), torch.randn(1, 30) * 2
        choice, _ = draws(logits, tree_of([0], [-1]), 7, sampling, noise, 0)
        assert coupled(logits.log_softmax(-1), 8, sampling, noise, 30).argmax() == choice


def test_confidence_is_the_chance_of_the_draw_where_errors_are_gumbels() -> None:
    """The drafter is wrong about log p by independent Gumbel errors; the share of its first guesses that are drawn is
    its mean confidence in them. 20,000 targets of one drafter: one standard error is 0.0035."""
    torch.manual_seed(2)
    believed, sampling, noise = torch.randn(1, 12) * 1.5, Sampling(0.8), Noise(4, CPU)
    said = coupled(believed, 3, sampling, noise, 12).softmax(-1)[0]
    errors = -torch.empty(20000, 12).exponential_().log()
    drawn = coupled(believed + errors, 3, sampling, noise, 12).argmax(-1)
    assert torch.bincount(drawn, minlength=12) / 20000 == pytest.approx(said, abs=0.015)


@pytest.mark.parametrize("sampling", FILTERED)
def test_what_the_filters_strike_out_comes_after_the_first_guess(sampling: Sampling) -> None:
    """However lucky a token is, if the drafter thinks that it cannot be drawn it is not the first guess, and it is as
    unlikely as the drafter would have to be wrong."""
    torch.manual_seed(4)
    for seed in range(100):
        logits, noise = torch.randn(2, 40) * 2, Noise(seed, CPU)
        kept = processed(logits, sampling) > 0
        said = coupled(logits, 6, sampling, noise, 40)
        plain = coupled(logits, 6, Sampling(sampling.temperature), noise, 40)
        assert kept.gather(1, said.argmax(-1, keepdim=True)).all()
        assert torch.equal(said[kept], plain[kept])
        short = logits.masked_fill(~kept, torch.inf).amin(-1, keepdim=True) - logits
        assert ((said.amax(-1, keepdim=True) - said)[~kept] >= short[~kept] - 1e-5).all()


def test_ids_of_a_draft_vocabulary_take_their_targets_noise() -> None:
    logits, noise, ids = torch.randn(2, 5), Noise(3, CPU), torch.tensor([40, 3, 17, 60, 8])
    full = torch.zeros(2, VOCAB).index_copy(1, ids, logits)
    assert torch.equal(
        coupled(logits, 9, Sampling(1.2), noise, VOCAB, ids),
        coupled(full, 9, Sampling(1.2), noise, VOCAB)[:, ids],
    )  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(0.5, seed=3), Sampling(1.7, seed=3), *FILTERED[1:]])
def test_a_draft_model_that_is_the_target_is_never_wrong(sampling: Sampling) -> None:
    """And without the noise it is, so it is the noise that helps."""
    target = tiny_target()
    twin = copy.copy(tiny_target())
    accepted = {}
    for known in (True, False):
        settings = TreeSettings(5, 4, 1, coupled=known)
        found = run("chain", Chain(twin, VOCAB, sampled=False), target, sampling, settings)
        steps = [s for s in found.steps if len(s.nodes) == 5][:-1]
        accepted[known] = sum(len(s.accepted) - 1 for s in steps) / sum(len(s.nodes) - 1 for s in steps)
    assert accepted[True] == 1 > accepted[False]


@pytest.mark.parametrize("method", ["eagle1", "eagle2", "eagle3", "hybrid"])
def test_every_level_of_a_tree_uses_the_noise_of_its_own_position(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that has no opinion drafts the tokens that the noise favours there, of those it has."""
    target = tiny_target()
    drafter = drafter_for(method, target)
    monkeypatch.setattr(drafter, "head", drafter.head)
    monkeypatch.setattr(type(drafter.head), "logits", lambda self, read: read.new_zeros(len(read), width))
    width = drafter.head.config.draft_vocab_size
    ids = drafter.head.draft_to_target
    ids = torch.arange(VOCAB) if ids is None else ids
    sampling, noise = Sampling(1.0, seed=6), Noise(6, CPU)
    found = run(method, drafter, target, sampling, TreeSettings(10, 3, 3))
    seen = set()
    for step in found.steps:
        for row in [*step.nodes[1:], *step.dropped]:
            if row.source not in (None, "head"):
                continue
            best = ids[noise.exponential(step.position + row.depth, VOCAB)[ids].argsort()[:4]].tolist()
            assert row.token in best, (step.index, row.depth)
            seen.add(row.depth)
    assert {1, 2, 3} <= seen


@pytest.mark.parametrize("method", [m for m in METHODS if "coupled" in METHODS[m].settings])
@pytest.mark.parametrize("sampling", [Sampling(0.7, seed=1), Sampling(1.3, top_k=5, top_p=0.8, seed=2)])
def test_known_or_not_the_text_is_the_same(method: str, sampling: Sampling) -> None:
    target = tiny_target()
    texts = {
        tuple(run(method, drafter_for(method, target), target, sampling, TreeSettings(12, 3, 4, coupled=known)).ids)
        for known in (True, False)
    }
    plain = METHODS["vanilla"].make(None, target)
    assert texts == {tuple(run("vanilla", plain, target, sampling, TreeSettings()).ids)}


def test_trees_tell_whether_the_noise_was_known() -> None:
    target = tiny_target()
    drafter = METHODS["eagle2"].make(eagle_head("eagle1"), target)
    events = list(
        generate(target, drafter, PROMPT, method="eagle2", sampling=Sampling(1.0), settings=TreeSettings(coupled=False))
    )
    assert all(e.settings["coupled"] is False for e in events if isinstance(e, Step))
