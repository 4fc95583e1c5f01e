"""The law: whatever is drafted, what is emitted is what plain decoding of the target emits.

At temperature 0 the yardstick is transformers' own `generate`; at any temperature, plain decoding with the same
seed. The last tests break the engine on purpose: each fault must be caught by the very comparison used here.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_core import engine
from eagle_core import target as target_module
from eagle_core.budget import Costs
from eagle_core.cache import LiveCache
from eagle_core.drafters import METHODS, TreeSettings
from eagle_core.drafters.plain import Vanilla
from eagle_core.engine import generate
from eagle_core.events import dump, load
from eagle_core.heads import POST_NORM
from eagle_core.metrics import Run
from eagle_core.target import Target
from eagle_core.tree import DraftTree
from eagle_core.verify import Sampling
from tests.adversaries import Adversary
from tests.conftest import FAMILIES, VOCAB, drafter_for, greedy, tiny_target

PROMPT = [5, 17, 42, 3, 8, 8, 21, 60, 1, 17, 42]
COUNT = 24
CHOSEN = [  # total_token −1 where rows are free, where trees are small, where nothing pays
    TreeSettings(-1, 5, 6, costs=Costs((1, 64), (10.0, last), draft, draft))
    for last, draft in ((10.0, 0.1), (60.0, 1.0), (640.0, 40.0))
]
SEEDED = [name for name, method in METHODS.items() if name != "chain-sampled"]


def answer(target: Any, drafter: Any, method: str = "vanilla", prompt: list[int] = PROMPT, **how: Any) -> list[int]:
    how.setdefault("max_new_tokens", COUNT)
    events = list(generate(target, drafter, prompt, method=method, **how))
    ids = [t for e in events if e.kind != "finish" for t in e.emitted]
    assert len(ids) == events[-1].tokens
    for step in events[1:-1]:
        assert step.position == len(prompt) + sum(len(e.emitted) for e in events[: step.index + 1]) - 1
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_adversarial_trees_equals_generate(family: str) -> None:
    target = tiny_target(family)
    want = greedy(target.model, PROMPT, COUNT)
    for seed in range(4):
        truth = PROMPT + want if seed % 2 else None
        drafter = Adversary(seed, VOCAB, truth, capture=(1, POST_NORM, 4, 2))
        budget = TreeSettings(total_token=(2, 9, 33, 64)[seed], depth=(1, 3, 6, 12)[seed])
        assert answer(target, drafter, settings=budget) == want
        assert max(drafter.widths) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_every_method_equals_generate(method: str, family: str) -> None:
    target = tiny_target(family)
    want = greedy(target.model, PROMPT, COUNT)
    fixed = TreeSettings(), TreeSettings(1, 1, 1), TreeSettings(64, 8, 10), TreeSettings(5, 4, 1)
    for budget in (*fixed, *CHOSEN):
        assert answer(target, drafter_for(method, target, family), method, settings=budget) == want


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(list(METHODS)),
    total=st.integers(1, 64),
    depth=st.integers(1, 9),
    top_k=st.integers(1, 12),
    expand_by=st.sampled_from(["value", "confidence"]),
    rerank=st.booleans(),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
)
def test_no_setting_changes_the_text(
    method: str, total: int, depth: int, top_k: int, expand_by: Any, rerank: bool, prompt: list[int]
) -> None:
    target = tiny_target()
    budget = TreeSettings(total, depth, top_k, expand_by, rerank)
    assert answer(target, drafter_for(method, target), method, prompt, settings=budget, max_new_tokens=12) == greedy(
        target.model, prompt, 12
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_same_seed_same_text_at_any_temperature(temperature: float) -> None:
    target = tiny_target()
    for seed in range(3):
        sampling = Sampling(temperature, seed=seed)
        want = answer(target, Vanilla(), sampling=sampling)
        for method in SEEDED:
            for budget in (TreeSettings(), TreeSettings(coupled=False), *CHOSEN):
                drafter = drafter_for(method, target)
                assert answer(target, drafter, method, sampling=sampling, settings=budget) == want, method
        adversary = Adversary(seed, VOCAB, PROMPT + want)
        assert answer(target, adversary, sampling=sampling, settings=TreeSettings(40, 6)) == want


@pytest.mark.parametrize("sampling", [
    Sampling(0.8, top_k=k, top_p=p, min_p=m, seed=4)
    for k in (0, 1, 7, 500) for p in (0.0, 0.6, 1.0) for m in (0.0, 0.1, 1.0)
])  # fmt: skip
def test_every_filter_gives_the_same_text_as_plain_decoding(sampling: Sampling) -> None:
    target = tiny_target()
    want = answer(target, Vanilla(), sampling=sampling)
    assert answer(target, Adversary(1, VOCAB, PROMPT + want), sampling=sampling, settings=TreeSettings(30, 5)) == want


def test_seeds_matter_and_repeat() -> None:
    target = tiny_target()
    texts = [answer(target, Vanilla(), sampling=Sampling(1.0, seed=s)) for s in (1, 2, 1)]
    assert texts[0] != texts[1] and texts[0] == texts[2]


def test_beyond_a_sliding_window_nothing_changes() -> None:
    for family in ("mistral", "gemma3_text", "gpt_oss"):
        target = tiny_target(family)
        prompt = [random.Random(3).randrange(VOCAB) for _ in range(40)]  # far longer than the window of 6 or 7
        want = greedy(target.model, prompt, 20)
        assert answer(target, Adversary(2, VOCAB, prompt + want), prompt=prompt, settings=TreeSettings(32, 6),
                      max_new_tokens=20) == want  # fmt: skip


def test_longrope_ends_where_its_frequencies_would_change() -> None:
    """One forward uses one set of frequencies, chosen by its last position: a deep draft must not change that."""
    from transformers import AutoModelForCausalLM

    config = deepcopy(tiny_target().config)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 3.0], "factor": 8.0}
    config.rope_parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **rope}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()

    def faults(target: Target) -> int:
        want = answer(target, Vanilla(), max_new_tokens=40)
        trees = [Adversary(seed, VOCAB, PROMPT + want) for seed in range(6)]
        return sum(answer(target, tree, settings=TreeSettings(20, 6), max_new_tokens=40) != want for tree in trees)

    target = Target(model, name="long")
    assert target.context == 32 and faults(target) == 0
    assert answer(target, Vanilla(), max_new_tokens=40) == greedy(model, PROMPT, 32 - len(PROMPT))
    target.context = 256
    assert faults(target), "this model would not notice"


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.needs != "nothing"])
def test_a_drafter_that_overflows_costs_only_speed(method: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of NaN, as half precision gives them, may neither hang a node on the wrong parent nor reach an event."""
    target = tiny_target()
    drafter = drafter_for(method, target)
    dice = torch.Generator().manual_seed(5)

    def spoiled(logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(torch.rand(len(logits), 1, generator=dice) < share, torch.nan)

    if METHODS[method].needs == "draft model":
        plain = drafter.draft.forward

        def forward(*how: Any) -> Any:
            logits, features = plain(*how)
            return spoiled(logits), features

        monkeypatch.setattr(drafter.draft, "forward", forward)
    else:
        monkeypatch.setattr(drafter.head, "logits", lambda read, plain=drafter.head.logits: spoiled(plain(read)))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, seed=3)
        events = list(generate(target, drafter, PROMPT, method=method, max_new_tokens=COUNT, sampling=sampling))
        assert [load(dump(event)) for event in events] == events
        if method in SEEDED or not temperature:
            assert Run.collect(events).ids == answer(target, Vanilla(), sampling=sampling)


class Fault:
    """Breaks one thing in the engine. Every one of them must change an answer."""

    @staticmethod
    def causal_mask(patch: pytest.MonkeyPatch) -> None:
        plain = target_module.Session.verify

        def verify(self: Any, tree: DraftTree) -> Any:
            n = len(tree)
            causal = torch.ones(n, n, dtype=torch.bool).tril()
            # depth comes from the true tree, the visibility does not
            visible = torch.cat((causal.new_ones(n, self.cache.length), causal), 1)
            positions = self.cache.length + tree.depth
            return (
                self.target.forward(self.cache, tree.tokens, positions, visible, self.capture, 0)
                if n > 1
                else plain(self, tree)
            )

        patch.setattr(target_module.Session, "verify", verify)

    @staticmethod
    def positions_by_slot(patch: pytest.MonkeyPatch) -> None:
        plain = target_module.Target.forward

        def forward(self: Any, cache: Any, tokens: Any, positions: Any, *rest: Any) -> Any:
            return plain(self, cache, tokens, torch.arange(len(tokens)) + cache.length, *rest)

        patch.setattr(target_module.Target, "forward", forward)

    @staticmethod
    def stale_keys_after_commit(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(LiveCache, "commit", lambda self, path, count: self.advance(count))

    @staticmethod
    def dropped_bonus(patch: pytest.MonkeyPatch) -> None:
        plain = engine.Feedback
        patch.setattr(
            engine,
            "Feedback",
            lambda ids, tokens, features, root, *rest: plain(
                ids, tokens, features, tokens[-1:] if rest else root, *rest
            ),
        )

    @staticmethod
    def draws_of_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
        plain = engine.draws

        def shifted(logits: Any, *rest: Any) -> Any:
            return plain(logits.roll(1, 0), *rest)

        patch.setattr(engine, "draws", shifted)

    @staticmethod
    def walk_ignores_ancestors(patch: pytest.MonkeyPatch) -> None:
        def loose(tree: DraftTree, choices: Any) -> Any:
            match = choices[tree.parents.clamp_min(0)] == tree.tokens
            match[0] = True
            last = match.nonzero()[-1]
            return tree.ancestors[last[0]]

        patch.setattr(engine, "walk", loose)


@pytest.mark.parametrize("fault", [name for name in vars(Fault) if not name.startswith("_")])
def test_each_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    want = greedy(target.model, PROMPT, COUNT)
    getattr(Fault, fault)(monkeypatch)
    wrong = 0
    for seed in range(4):
        try:
            got = answer(target, Adversary(seed, VOCAB, PROMPT + want), settings=TreeSettings(40, 6))
        except AssertionError:  # the events contradict themselves
            wrong += 1
        else:
            wrong += got != want
    assert wrong, f"the fault {fault} went unnoticed"


def test_a_wrong_layer_is_caught_by_the_reference_rounds() -> None:
    """Losslessness hides a wrong capture (it only costs acceptance), so the golden trees must not."""
    from tests.test_goldens import cases, first_difference

    case = next(c for c in cases() if c.name.startswith("eagle3"))
    assert first_difference(case) is None

    def shift(head: Any) -> None:
        head.config = replace(head.config, capture=tuple(j + 1 for j in head.config.capture))

    assert first_difference(case, shift) is not None
