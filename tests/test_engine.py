"""The loop's behaviour: where it stops, what it tells, and that nothing can leave it broken."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_core.drafters import METHODS, Drafter, Feedback, TreeSettings
from eagle_core.drafters.chain import Chain
from eagle_core.drafters.plain import Vanilla
from eagle_core.engine import generate
from eagle_core.errors import EngineBusy, InvalidRequest, NotFinite
from eagle_core.events import dump, load, load_trace
from eagle_core.target import Target
from eagle_core.verify import Sampling
from tests.adversaries import Adversary, tree_of
from tests.conftest import VOCAB, drafter_for, greedy, tiny_model

PROMPT = [5, 17, 42, 3, 8]


def fresh(eos: set[int] | None = None, context: int | None = None) -> Target:
    """A target of its own: tests here change it."""
    target = Target(tiny_model("llama"), name="tiny")
    target.eos_ids = frozenset(eos or ())
    target.context = context or target.context
    return target


def ids_of(events: list[Any]) -> list[int]:
    return [t for e in events if e.kind != "finish" for t in e.emitted]


def run(target: Target, drafter: Drafter, **how: Any) -> list[Any]:
    prompt = how.pop("prompt", PROMPT)
    how.setdefault("settings", TreeSettings(30, 6))
    return list(generate(target, drafter, prompt, method=how.pop("method", "vanilla"), **how))


class Oracle(Drafter):
    """Drafts a chain that is right for `right` tokens: accepted lengths to order."""

    def __init__(self, truth: list[int], right: int) -> None:
        self.truth, self.right = truth, right

    def propose(self, feedback: Feedback, settings: TreeSettings) -> Any:
        at = feedback.position + 1
        chain = self.truth[at : at + self.right]
        if at + self.right < len(self.truth):
            chain = [*chain, (self.truth[at + self.right] + 1) % VOCAB]
        chain = chain[: settings.depth]
        return tree_of([feedback.ids[-1], *chain], list(range(-1, len(chain))))


@pytest.mark.parametrize("right", range(0, 6))
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 12, 20])
def test_exactly_max_new_tokens(right: int, count: int) -> None:
    target = fresh()
    truth = PROMPT + greedy(target.model, PROMPT, 32)
    events = run(target, Oracle(truth, right), max_new_tokens=count)
    assert ids_of(events) == truth[len(PROMPT) :][:count]
    assert events[-1].reason == "length" and events[-1].tokens == count
    if count > right + 2:  # every full step emits the right drafts and the bonus
        assert all(len(e.emitted) == right + 1 for e in events[1:-2])


@pytest.mark.parametrize("at", range(0, 12))
def test_an_end_token_inside_the_accepted_path_ends_the_answer_there(at: int) -> None:
    target = fresh()
    plain = greedy(target.model, PROMPT, 24)
    eos = plain[at]
    first = plain.index(eos)
    target.eos_ids = frozenset({eos, 999})
    events = run(target, Oracle(PROMPT + plain, 4), max_new_tokens=24)
    assert ids_of(events) == plain[: first + 1]
    assert events[-1].reason == "eos"
    if len(events) > 2:
        last = events[-2]
        fates = [n.fate for n in last.nodes]
        assert len(last.emitted) == fates.count("accepted") + (len(last.emitted) > fates.count("accepted"))
        walked = fates.count("accepted") + fates.count("past the stop")
        assert walked >= fates.count("accepted")
        if first == at and at % 5 not in (0,):
            assert "past the stop" in fates or last.emitted[-1] == eos


def test_a_node_past_the_stop_is_told_as_such() -> None:
    target = fresh()
    plain = greedy(target.model, PROMPT, 24)
    stop_at = next(i for i in range(2, 20) if plain[i] not in plain[:i])
    target.eos_ids = frozenset({plain[stop_at]})
    events = run(target, Oracle(PROMPT + plain, 20), max_new_tokens=24, settings=TreeSettings(30, 20))
    step = events[-2]
    assert [n.fate for n in step.nodes].count("past the stop") > 0
    assert step.emitted == plain[1 : stop_at + 1] and events[-1].reason == "eos"


def test_the_context_limit_of_the_target() -> None:
    for context in (len(PROMPT) + 1, 9, 16, 17):
        target = fresh(context=context)
        plain = greedy(target.model, PROMPT, 24)
        for right in (0, 3):
            events = run(target, Oracle(PROMPT + plain, right), max_new_tokens=24)
            assert len(PROMPT) + events[-1].tokens == context and events[-1].reason == "context"
            assert ids_of(events) == plain[: context - len(PROMPT)]
    with pytest.raises(InvalidRequest, match=r"5 tokens.*5"):
        generate(fresh(context=5), Vanilla(), PROMPT, method="vanilla")


@pytest.mark.parametrize("method", ["eagle1", "eagle2", "eagle3", "chain"])
@pytest.mark.parametrize("limit", [1, 5, 6, 7, 14])
def test_the_drafters_smaller_limit_ends_speculation_not_the_answer(method: str, limit: int) -> None:
    target = fresh()
    drafter = drafter_for(method, target)
    drafter.context = limit
    seen: list[int] = []
    plain_propose = drafter.propose

    def propose(feedback: Feedback, settings: TreeSettings) -> Any:
        tree = plain_propose(feedback, settings)
        seen.append(feedback.position + int(tree.depth.max()))
        return tree

    drafter.propose = propose
    events = run(target, drafter, method=method, max_new_tokens=20)
    assert ids_of(events) == greedy(target.model, PROMPT, 20)
    assert all(position < limit for position in seen)
    assert "follows" in (events[-1].note or "")


class Bomb(Exception):
    pass


def burning(left: list[int], plain: Any) -> Any:
    """`plain`, until it has been called `left` times."""

    def wrapped(*args: Any, **kw: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Bomb
        return plain(*args, **kw)

    return wrapped


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["target", "drafter"])
def test_an_exception_in_any_forward_leaves_the_engine_ready(method: str, where: str, monkeypatch: Any) -> None:
    target = fresh()
    drafter = drafter_for(method, target)
    want = ids_of(run(target, drafter, method=method, max_new_tokens=12))
    for fuse in range(1, 9):
        burn = partial(burning, [fuse])
        with monkeypatch.context() as patch:
            if where == "target":
                patch.setattr(target, "forward", burn(target.forward))
            else:
                patch.setattr(drafter, "propose", burn(drafter.propose))
            with suppress(Bomb):
                run(target, drafter, method=method, max_new_tokens=12)
        assert not target.lock.locked()
        assert ids_of(run(target, drafter, method=method, max_new_tokens=12)) == want


def overflowing(left: list[int], plain: Any, where: Any, bad: float) -> Any:
    """`plain`, the last row of whose logits is spoiled once it has been called `left` times."""

    def forward(*how: Any) -> Any:
        logits, features = plain(*how)
        left[0] -= 1
        if left[0] < 0:
            logits[-1, where] = bad
        return logits, features

    return forward


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("one", [True, False])
def test_a_target_that_overflows_is_told_and_never_drawn_from(
    method: str, bad: float, one: bool, monkeypatch: Any
) -> None:
    """One value of a row (only −inf may stand alone), or all of them; in the prefill or later; greedy and sampled."""
    if one and bad == -torch.inf:
        return
    target = fresh()
    drafter = drafter_for(method, target)
    for temperature in (0.0, 1.0):
        for good in (0, 2):
            events: list[Any] = []
            with monkeypatch.context() as patch:
                patch.setattr(target, "forward", overflowing([good], target.forward, 7 if one else slice(None), bad))
                with pytest.raises(NotFinite, match="float32"):
                    for event in generate(
                        target, drafter, PROMPT, method=method, sampling=Sampling(temperature, top_p=0.9)
                    ):
                        events.append(event)
            assert len(events) == good and not target.lock.locked()
            assert all(load(dump(event)) == event for event in events)
            run(target, drafter, method=method, max_new_tokens=3)


@pytest.mark.parametrize("method", METHODS)
def test_closing_or_cancelling_at_any_event_leaves_the_engine_ready(method: str) -> None:
    target = fresh()
    drafter = drafter_for(method, target)
    want = ids_of(run(target, drafter, method=method, max_new_tokens=10))
    for stop_after in range(0, 8):
        events = generate(target, drafter, PROMPT, method=method, max_new_tokens=10)
        for _ in range(stop_after):
            next(events, None)
        events.close()
        assert not target.lock.locked()
        cancel = threading.Event()
        got = []
        for event in generate(target, drafter, PROMPT, method=method, max_new_tokens=10, cancel=cancel):
            got.append(event)
            if len(got) == stop_after:
                cancel.set()
        assert got[-1].kind == "finish" and ids_of(got) == want[: len(ids_of(got))]
        assert ids_of(run(target, drafter, method=method, max_new_tokens=10)) == want


def test_cancelled_before_it_began_tells_so() -> None:
    cancel = threading.Event()
    cancel.set()
    events = run(fresh(), Vanilla(), cancel=cancel, prompt=[3] * 200)
    assert events[-1].reason == "cancelled" and events[-1].tokens <= 1


def test_an_abandoned_iterator_frees_the_target() -> None:
    target = fresh()
    events = generate(target, Vanilla(), PROMPT, method="vanilla")
    next(events)
    assert target.lock.locked()
    del events
    assert not target.lock.locked()


def test_two_answers_cannot_interleave() -> None:
    target = fresh()
    first = generate(target, Vanilla(), PROMPT, method="vanilla", max_new_tokens=8)
    next(first)
    with pytest.raises(EngineBusy, match="another answer"):
        next(generate(target, Vanilla(), PROMPT, method="vanilla"))
    assert len(ids_of(list(first))) == 7  # undisturbed; its first token went to the `next` above

    results: list[Any] = []

    def worker(seed: int) -> None:
        while True:
            try:
                results.append(ids_of(run(target, Adversary(seed, VOCAB), max_new_tokens=16)))
                return
            except EngineBusy:
                threading.Event().wait(0.002)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [greedy(target.model, PROMPT, 16)] * 4


def test_inference_mode_does_not_leak_into_the_consumer() -> None:
    for _ in generate(fresh(), Vanilla(), PROMPT, method="vanilla", max_new_tokens=3):
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


@pytest.mark.parametrize("how,names", [
    ({"method": "eagle9"}, "eagle9"), ({"prompt": []}, "empty"), ({"prompt": [1, VOCAB]}, str(VOCAB)),
    ({"prompt": [-1]}, "-1"),
    ({"max_new_tokens": 0}, "max_new_tokens"), ({"stop": ["x"]}, "tokenizer"), ({"prompt": [1] * 256}, "256"),
    ({"settings": TreeSettings(-1)}, "total_token"), ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"num_beams": 4}, "num_beams"),
])  # fmt: skip
def test_bad_requests_are_refused_before_anything_runs(how: dict[str, Any], names: str) -> None:
    target = fresh()
    target.forward = None  # type: ignore[assignment,method-assign]
    with pytest.raises(InvalidRequest, match=names):
        generate(target, Vanilla(), how.pop("prompt", PROMPT), method=how.pop("method", "vanilla"), **how)


def test_a_bad_static_tree_is_refused_at_once() -> None:
    target = fresh()
    for paths in (((0, 1),), ((99,),), ()):
        with pytest.raises(InvalidRequest, match="static tree"):
            generate(
                target, drafter_for("eagle1", target), PROMPT, method="eagle1", settings=TreeSettings(static_tree=paths)
            )


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [VOCAB - 11, VOCAB + 11])
def test_a_draft_model_with_fewer_or_more_padding_rows(rows: int, sampled: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = deepcopy(tiny_model("qwen2").config)
    config.vocab_size, config.max_position_embeddings = rows, 20
    draft = Target(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32))
    target = fresh()
    prompt = [VOCAB - 1, *PROMPT]  # ids that the smaller table lacks
    events = run(target, Chain(draft, target.vocab_size, sampled=sampled), prompt=prompt, max_new_tokens=24)
    assert ids_of(events) == greedy(target.model, prompt, 24)
    assert max(ids_of(events)) >= VOCAB - 11 and any(len(event.nodes) > 1 for event in events[1:-1])
    assert all(n.token < min(rows, VOCAB) for event in events[1:-1] for n in event.nodes[1:])


def test_a_stop_string_that_is_no_text_is_refused() -> None:
    from tests.test_pairs import _tokenizer

    target = fresh()
    target.tokenizer = _tokenizer()
    for stop, names in (("a\udcff", "surrogate"), ("", "empty")):
        with pytest.raises(InvalidRequest, match=names):
            generate(target, Vanilla(), PROMPT, method="vanilla", stop=stop)


@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_end_every_method_at_the_same_token(method: str) -> None:
    from tests.test_pairs import _tokenizer

    target = fresh()
    target.tokenizer = _tokenizer()
    drafter = drafter_for(method, target)
    words = target.tokenizer.decode(greedy(target.model, PROMPT, 24)).split(" ")
    for at in range(12):
        first = words.index(words[at])
        for stop in (words[at], [words[at]], [words[at], "no such word"]):
            events = run(target, drafter, method=method, max_new_tokens=24, stop=stop)
            text = "".join(event.text for event in events)
            whole = " ".join(words)
            assert text == whole[: whole.index(words[at])] and events[-1].reason == "stop"
            assert len(ids_of(events)) <= first + 1


@pytest.mark.parametrize("field,value", [
    ("total_token", 0), ("total_token", -2), ("total_token", 257), ("depth", 0), ("depth", 33), ("top_k", 0),
    ("top_k", 33),
    ("expand_by", "luck"),
])  # fmt: skip
def test_tree_settings_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field):
        TreeSettings(**{field: value})


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(list(METHODS)),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 64),
    st.integers(1, 7),
    st.integers(0, 50),
)
def test_events_tell_the_truth(method: str, temperature: float, total: int, depth: int, seed: int) -> None:
    target = fresh()
    drafter = drafter_for(method, target)
    if method == "vanilla":
        drafter = Adversary(seed, VOCAB, PROMPT + greedy(target.model, PROMPT, 12))
    budget = TreeSettings(total, depth, 5)
    events = run(
        target, drafter, method=method, settings=budget, sampling=Sampling(temperature, seed=seed), max_new_tokens=12
    )
    for event in events:
        assert load(dump(event)) == event
        assert "NaN" not in dump(event)
    assert list(load_trace(dump(e) for e in events)) == events
    start, steps, finish = events[0], events[1:-1], events[-1]
    assert start.method == method and start.prompt_ids == PROMPT and start.sampling["seed"] == seed
    assert finish.steps == len(steps) and finish.drafted == sum(len(s.nodes) - 1 for s in steps)
    assert finish.accepted == sum(len(s.accepted) - 1 for s in steps)
    for step in steps:
        nodes, everything = step.nodes, [*step.nodes, *step.dropped]
        assert len(nodes) <= max(drafter.nodes(budget), 1)
        assert nodes[0].fate == "root" and nodes[0].parent == -1 and step.accepted[0] == 0
        for row in everything[1:]:
            assert row.depth == everything[row.parent].depth + 1 <= drafter.reach(budget)
            assert 0 <= row.confidence <= 1 and 0 <= row.value <= everything[row.parent].value * 1.0001
        for node in nodes[1:]:
            drawn = nodes[node.parent].draw == node.token
            walked = nodes[node.parent].fate in ("root", "accepted", "past the stop")
            assert 0 <= node.target_p <= 1 and 0 <= node.draw_p <= 1.0001
            if node.fate in ("accepted", "past the stop"):
                assert drawn and walked
            elif node.fate == "parent rejected":
                assert not walked
            else:
                assert walked
        path = [nodes[i].token for i in step.accepted[1:]]
        assert step.emitted in (path, [*path, step.bonus.token])
        assert {i for i, n in enumerate(nodes) if n.fate == "accepted"} == set(step.accepted[1:])
        ran = {row.parent for row in everything if row.source != "lookup"}  # a looked-up child needs no drafter
        assert all(row.expanded == (row.id in ran) for row in everything)
        assert step.timing.keys() == {"draft_ms", "verify_ms", "commit_ms", "other_ms"}
        assert min(step.timing.values()) >= 0
        assert [t.p for t in step.top] == sorted((t.p for t in step.top), reverse=True)
        assert step.settings["total_token"] == total


def test_candidates_hold_all_that_was_scored() -> None:
    target = fresh()
    for event in run(target, drafter_for("eagle3", target), method="eagle3", settings=TreeSettings(12, 4, 5)):
        if event.kind == "step":
            assert len(event.nodes) - 1 + len(event.dropped) == 5 + 3 * 25
            assert event.forwards == 4
            best_out = max(c.value for c in event.dropped)
            assert all(n.value >= best_out for n in event.nodes)


def test_draws_outside_the_draft_vocabulary_are_told() -> None:
    target = fresh()
    drafter = drafter_for("eagle3", target)
    known = set(drafter.head.draft_to_target.tolist())
    told = 0
    for event in run(target, drafter, method="eagle3", max_new_tokens=20):
        if event.kind == "step":
            assert event.outside == [n.id for n in event.nodes if n.draw not in known]
            told += len(event.outside)
    assert told


def test_what_is_emitted_does_not_depend_on_being_recorded() -> None:
    target = fresh()
    drafter = drafter_for("eagle3", target)
    told, untold = (run(target, drafter, method="eagle3", record=record) for record in (True, False))
    assert ids_of(told) == ids_of(untold)
    assert told[-1].accepted == untold[-1].accepted and told[-1].drafted == untold[-1].drafted


def test_nothing_grows_over_many_answers() -> None:
    target = fresh()
    drafter = drafter_for("eagle3", target)
    run(target, drafter, method="eagle3", max_new_tokens=4)
    import gc

    sizes = []
    for i in range(12):
        run(target, drafter, method="eagle3", max_new_tokens=4, sampling=Sampling(1.0, seed=i))
        gc.collect()
        alive = sum(type(o) is torch.Tensor for o in gc.get_objects())
        sizes.append((target._spare.nbytes, drafter._cache.rows.nbytes, alive))
    assert sizes[3] == sizes[-1]


def test_a_long_prompt_is_read_in_chunks_and_the_head_follows() -> None:
    model = tiny_model("llama", 3)
    target = Target(model, name="tiny")
    target.context = 256
    prompt = [(7 * i) % VOCAB for i in range(180)]
    want = greedy(model, prompt, 10)
    from eagle_core import target as module
    from eagle_core.drafters import eagle

    drafter = drafter_for("eagle3", target)
    whole = run(target, drafter, method="eagle3", prompt=prompt, max_new_tokens=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PREFILL_CHUNK", 7)
        patch.setattr(eagle, "_EXTEND_CHUNK", 11)
        parts = run(target, drafter, method="eagle3", prompt=prompt, max_new_tokens=10)
    assert ids_of(whole) == ids_of(parts) == want
    for a, b in zip(whole[1:-1], parts[1:-1], strict=True):
        assert [(n.token, n.parent) for n in a.nodes] == [(n.token, n.parent) for n in b.nodes]


def test_the_trace_of_a_run_is_plain_json() -> None:
    for line in (dump(e) for e in run(fresh(), Vanilla(), max_new_tokens=3)):
        plain = json.loads(line)
        assert plain["kind"] in ("start", "step", "finish")
