"""Heads made here: the law of training-time test, exact resumption, corpora, and errors that say what to do."""

from __future__ import annotations

import argparse
import errno
import json
import shlex
from dataclasses import asdict, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_core.checkpoints import load_head, save_head
from eagle_core.errors import TrainingError
from eagle_core.heads import POST_NORM, EagleHead, HeadCache, HeadConfig
from eagle_core.target import Target
from eagle_core.training import store
from eagle_core.training.card import command
from eagle_core.training.corpus import default_states, export_text, fill_features, import_text, read_prompts, write
from eagle_core.training.initial import draft_vocabulary, initial_head
from eagle_core.training.losses import Batch, Objective, TrainingTimeTest, chain_steps
from eagle_core.training.muon import Muon
from eagle_core.training.runs import Library, Run, held_out_report
from eagle_core.training.store import Conversation, Corpus, Prompt
from eagle_core.training.trainer import Recipe, configure, train
from eagle_core.training.writer import Template, Writer
from tests.conftest import VOCAB, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


@cache
def letters() -> Any:
    """A tokenizer of single characters, with the template above: ids of the tiny models' vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|unk|>", "<|begin|>", "<|end|>", *"\n abcdefghijklmnopqrstuvwxyzATWS.,:?'0123456789-()+=/*"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words[:VOCAB])}, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<|unk|>", additional_special_tokens=["<|begin|>", "<|end|>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chatty(family: str = "llama", seed: int = 0) -> Target:
    target = Target(tiny_model(family, seed), letters(), name="tiny")
    target.eos_ids = frozenset([2])
    return target


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Corpus]:
    """A corpus of a few thousand tokens, written by the tiny target with its states."""
    target = chatty()
    folder = tmp_path_factory.mktemp("corpus")
    return target, write(target, folder, 4000, seed=1, slots=8, limit=200, answer_tokens=40, progress=False)


# ------------------------------------------------------------------------------------------------------ the law

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "qk_norm": {"qk_norm": True},
    "two layers": {"num_layers": 2},
    "biases": {"fc_bias": True, "qkv_bias": True, "o_bias": True},
    "logit_scale": {"logit_scale": 0.5},
}


def random_head(family: str, target: Target, **flags: Any) -> EagleHead:
    torch.manual_seed(3)
    config = HeadConfig(
        family=family, hidden_size=32, target_hidden_size=32, intermediate_size=40, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, draft_vocab_size=41 if family == "eagle3" else VOCAB,
        capture=(1, 2, 3) if family == "eagle3" else (POST_NORM,), max_position_embeddings=256, **flags,
    )  # fmt: skip
    ids = torch.randperm(VOCAB)[:41].sort().values if family == "eagle3" else None
    head = EagleHead(config, own_lm_head=family == "eagle3", draft_to_target=ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    head.borrow(target.embedding, target.lm_head)
    return head.eval()


def random_batch(head: EagleHead, lengths: list[list[int]]) -> Batch:
    """Rows of packed conversations with random tokens and features."""
    torch.manual_seed(5)
    t = max(sum(row) for row in lengths)
    segment, position = torch.full((len(lengths), t), -1), torch.zeros(len(lengths), t, dtype=torch.long)
    for r, row in enumerate(lengths):
        at = 0
        for s, n in enumerate(row):
            segment[r, at : at + n], position[r, at : at + n] = s, torch.arange(n)
            at += n
    tokens = torch.randint(VOCAB, segment.shape)
    features = torch.randn(*segment.shape, head.config.feature_size)
    return Batch(tokens, segment, position, segment >= 0, features, torch.randn(*segment.shape, 32))


def drafted(head: EagleHead, tokens: Tensor, features: Tensor, start: int, steps: int) -> Tensor:
    """What inference drafts: pairs 0 … start are committed, then the head feeds itself. Returns logits [steps, Vd]."""
    cache = HeadCache(head.config, len(tokens) + steps, torch.device("cpu"), torch.float32)
    at = torch.arange(start + 1)
    g, read = head(tokens[None, 1 : start + 2], head.fuse(features[None, : start + 1]), at[None], cache)
    cache.length = cache.start = start + 1
    rows = [head.logits(read[0, -1])]
    g = g[:, -1:]
    for k in range(1, steps):
        pair = start + k
        g, read = head(tokens[None, pair + 1 : pair + 2], g, torch.tensor([[pair]]), cache)
        cache.start += 1
        rows.append(head.logits(read[0, -1]))
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
@pytest.mark.parametrize("flags", FLAGS)
def test_training_step_k_is_what_inference_drafts_k_deep(family: str, flags: str) -> None:
    settings = FLAGS[flags]
    if family == "eagle1" and set(settings) & {"norm_before_residual", "norm_before_fc", "fc_norm"}:
        pytest.skip("a flag of EAGLE-3 heads")
    target, steps = chatty(), 4
    head = random_head(family, target, **settings)
    batch = random_batch(head, [[9, 12, 7], [20]])
    with torch.no_grad():
        chains = chain_steps(head, batch, steps)
        for r, row in enumerate([[9, 12, 7], [20]]):
            at = 0
            for n in row:
                tokens, features = batch.tokens[r, at : at + n], batch.features[r, at : at + n]
                for start in range(n - steps - 1):
                    told = drafted(head, tokens, features, start, steps)
                    trained = torch.stack([head.logits(read[r, at + start]) for _, read in chains])
                    torch.testing.assert_close(trained, told, atol=5e-4, rtol=1e-3)
                at += n


@pytest.mark.parametrize("fault", ["position", "earlier step forgotten", "neighbour's chain", "segment"])
def test_the_law_notices_each_way_to_get_it_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = chatty()
    head = random_head("eagle3", target)
    batch = random_batch(head, [[9, 12]])
    if fault == "position":
        batch = replace(batch, position=batch.position * 2)
    elif fault == "segment":
        batch = replace(batch, segment=torch.zeros_like(batch.segment))
    else:
        right = TrainingTimeTest.__call__

        def wrong(self: TrainingTimeTest, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if fault == "earlier step forgotten" and len(self.entries.get(layer, [])) == 2:
                del self.entries[layer][1]
            if fault == "neighbour's chain" and self.entries.get(layer):
                k, v = k.roll(1, 2), v.roll(1, 2)
            return right(self, layer, q, k, v)

        monkeypatch.setattr(TrainingTimeTest, "__call__", wrong)
    with torch.no_grad():
        chains = chain_steps(head, batch, 3)
        trained = torch.stack([head.logits(read[0, 9 + 4]) for _, read in chains])
        told = drafted(head, batch.tokens[0, 9:], batch.features[0, 9:], 4, 3)
    assert (trained - told).abs().max() > 1e-3


def test_labels_are_the_targets_own_words(text: tuple[Target, Corpus]) -> None:
    """A head whose read is the target's state two tokens on is told that it is right, everywhere, at every step."""
    target, corpus = text
    batch = Library([corpus], (POST_NORM,)).batch([(0, 0), (0, 1), (0, 2)], 200).to(torch.device("cpu"))
    head = random_head("eagle1", target)
    ids = torch.arange(VOCAB)
    objective = Objective(head, target.lm_head.weight.detach(), ids, noise=0.0)

    def perfect(h: EagleHead, b: Batch, steps: int, features: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        return [(x, x) for k in range(steps) for x in [b.final.roll(-k - 1, 1)]]

    import eagle_core.training.losses as losses

    original, losses.chain_steps = losses.chain_steps, perfect  # type: ignore[assignment]
    try:
        tally = objective(batch, 3)
    finally:
        losses.chain_steps = original
    for k in range(3):
        assert int(tally.count[k]) > 50
        assert int(tally.agree[k]) == int(tally.count[k])
        assert float(tally.parts[f"feature_loss_{k + 1}"]) == 0


# ------------------------------------------------------------------------------------------------------- the run


def recipe(method: str = "eagle3", **changes: Any) -> Recipe:
    base = Recipe(
        method=method,
        updates=12,
        batch_tokens=150,
        row_tokens=100,
        draft_vocab=40,
        capture=(1, 2, 3) if method == "eagle3" else (),
        chain=3,
        growth=0.5,
        muon_block=16,
        held_out=300,
        evaluate_every=6,
        log_every=2,
    )
    return replace(base, **changes)


@pytest.mark.parametrize("method", ["eagle2", "eagle3"])
def test_a_resumed_run_is_the_unbroken_one(method: str, text: tuple[Target, Corpus], tmp_path: Path) -> None:
    target, corpus = with_states(text, tmp_path)
    whole = Run(recipe(method), target, [corpus], tmp_path / "whole")
    losses = [whole.update()["loss"] for _ in range(12)]
    first = Run(recipe(method), target, [corpus], tmp_path / "broken")
    broken = [first.update()["loss"] for _ in range(5)]
    first.save()
    broken += [first.update()["loss"] for _ in range(2)]  # lost by the kill
    second = Run(recipe(method), target, [corpus], tmp_path / "broken", resume=True)
    broken = broken[:5] + [second.update()["loss"] for _ in range(7)]
    assert broken == losses
    for a, b in zip(whole.head.parameters(), second.head.parameters()):
        assert torch.equal(a, b)


def with_states(text: tuple[Target, Corpus], tmp_path: Path) -> tuple[Target, Corpus]:
    """The module's corpus again, with the states at 1, 2, 3 that a four-layer target's head can tell apart."""
    target, corpus = text
    folder = tmp_path / "states"
    made = Corpus.create(folder, target, [1, 2, 3, POST_NORM])
    offsets = corpus.offsets()
    made.append(
        Conversation(corpus.array("tokens")[a:b], corpus.array("answer")[a:b], float(t))
        for a, b, t in zip(offsets[:-1], offsets[1:], corpus.array("temperature"))
    )
    fill_features(made, target, progress=False)
    return target, made


@pytest.mark.parametrize("method", ["eagle2", "eagle3"])
def test_training_learns_and_ships_a_head_that_loads(method: str, text: tuple[Target, Corpus], tmp_path: Path) -> None:
    target, corpus = with_states(text, tmp_path)
    out = tmp_path / "run"
    result = train(recipe(method, updates=60, evaluate_every=30, first_chain=2, chain=2), target, [corpus], out)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    held = [line["held_out"] for line in lines if "held_out" in line]
    learn = [line for line in lines if "loss" in line]
    losses = [line["loss"] for line in learn]
    assert sum(losses[-10:]) < sum(losses[:10]), "a third of the run, since two updates are mostly their text"
    assert len(held) == 3 and held[-1]["predictions"] > 30
    assert held[-1] == {k: result[k] for k in held[-1]}
    assert (out / "curve.png").read_bytes()[:4] == b"\x89PNG"
    run = Run(recipe(method, updates=60, chain=2), target, [corpus], out, resume=True)
    save_head(run.head, tmp_path / "head", dtype=torch.float32)
    loaded = load_head(tmp_path / "head", target)
    again = held_out_report(loaded, run.held_out(), 5)
    assert again == held_out_report(run.head, run.held_out(), 5)


def test_a_number_that_is_none_stops_the_run_and_names_the_batch(text: tuple[Target, Corpus], tmp_path: Path) -> None:
    target, corpus = with_states(text, tmp_path)
    run = Run(recipe(), target, [corpus], tmp_path / "run")
    before = {name: p.clone() for name, p in run.head.named_parameters()}
    with torch.no_grad():
        run.head.fc.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"step 1 \(pass 1, batch 1: conversations \d+ of states"):
        run.update()
    assert all(torch.equal(p, before[n]) for n, p in run.head.named_parameters() if n != "fc.weight")


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(
    text: tuple[Target, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, corpus = with_states(text, tmp_path)
    run = Run(recipe(), target, [corpus], tmp_path / "run")
    run.update()
    run.save()
    kept = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    run.update()

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TrainingError, match=r"disk of .*checkpoint\.pt is full"):
        run.save()
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == kept


@pytest.mark.parametrize(
    ("changes", "resume", "message"),
    [
        ({"method": "medusa"}, False, "no training for 'medusa'"),
        ({"updates": 0}, False, "how long"),
        ({"updates": 5, "hours": 1.0}, False, "how long"),
        ({}, True, "no checkpoint to resume"),
        ({"capture": (0, 2, 3)}, False, "write or import the text again"),
    ],
)
def test_bad_runs_are_refused(
    changes: dict[str, Any], resume: bool, message: str, text: tuple[Target, Corpus], tmp_path: Path
) -> None:
    target, corpus = with_states(text, tmp_path)
    with pytest.raises(TrainingError, match=message):
        Run(recipe(**changes), target, [corpus], tmp_path / "run", resume=resume)


def test_a_run_is_not_overwritten(text: tuple[Target, Corpus], tmp_path: Path) -> None:
    target, corpus = with_states(text, tmp_path)
    Run(recipe(), target, [corpus], tmp_path / "run").save()
    with pytest.raises(TrainingError, match="--resume"):
        Run(recipe(), target, [corpus], tmp_path / "run")
    with pytest.raises(TrainingError, match="a run of eagle3, not of eagle2"):
        Run(recipe("eagle2"), target, [corpus], tmp_path / "run", resume=True)


def test_muon_makes_orthogonal_steps() -> None:
    torch.manual_seed(0)
    for shape in ((24, 48), (48, 24)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape)
        Muon([weight], lr=1.0, iterations=5).step()
        singular = torch.linalg.svdvals(weight.detach()) / max(1.0, shape[0] / shape[1]) ** 0.5
        assert float(singular.min()) > 0.5 and float(singular.max()) < 1.3
        whole = weight.detach().clone()
        weight.data.zero_()
        Muon([weight], lr=1.0, iterations=5, block=8).step()
        assert torch.linalg.svdvals(weight.detach()).min() > 0 and not torch.equal(whole, weight)


def test_a_head_begins_with_what_the_target_knows() -> None:
    target = chatty()
    ids = draft_vocabulary(torch.arange(VOCAB).roll(5), 30)
    head, unmatched = initial_head("eagle3", target, capture=(1, 2, 3), draft_ids=ids)
    assert unmatched == [] and head.lm_head is not None and head.draft_to_target is not None
    assert ids.tolist() == sorted(ids.tolist()) and len(ids) == 30
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[ids])
    last = target.model.model.layers[-1]
    assert torch.equal(head.layers[0].mlp.up_proj.weight, last.mlp.up_proj.weight)
    other, missing = initial_head("eagle3", chatty("gpt2"), capture=(1, 2, 3), draft_ids=ids)
    assert "norm" in missing and other.lm_head is not None


# ----------------------------------------------------------------------------------------------------- the corpus


def test_states_kept_while_writing_are_those_of_a_fresh_forward(text: tuple[Target, Corpus]) -> None:
    target, corpus = text
    offsets, kept = corpus.offsets(), corpus.array("features")
    assert corpus.featured == len(corpus) > 20 and corpus.tokens >= 4000
    for i in range(len(corpus)):
        ids = torch.from_numpy(corpus.array("tokens")[offsets[i] : offsets[i + 1]].astype(np.int64))
        session = target.session(len(ids), corpus.capture)
        fresh = session.prefill(ids)[1].numpy()
        np.testing.assert_allclose(kept[offsets[i] : offsets[i + 1]].astype(np.float32), fresh, atol=2e-3, rtol=2e-3)


def test_answers_are_what_the_target_says(text: tuple[Target, Corpus]) -> None:
    """Greedy answers are its argmax at every place, and every answer is within its likeliest tokens."""
    target, corpus = text
    tokens, answer, offsets = corpus.array("tokens"), corpus.array("answer"), corpus.offsets()
    greedy = 0
    for i, temperature in enumerate(corpus.array("temperature")):
        ids = torch.from_numpy(tokens[offsets[i] : offsets[i + 1]].astype(np.int64))
        mine = answer[offsets[i] : offsets[i + 1]].astype(bool)
        with torch.no_grad():
            best = target.model(ids[None]).logits[0].topk(2).indices
        assert mine.any() and not mine[0]
        first = np.flatnonzero(mine & ~np.roll(mine, 1))  # an answer's first word never ends it
        for at in np.flatnonzero(mine):
            if temperature == 0:
                expected = best[at - 1, 1] if at in first and int(best[at - 1, 0]) == 2 else best[at - 1, 0]
                greedy += 1
                assert int(ids[at]) == int(expected)
    assert greedy > 200


def test_the_template_stands_around_every_turn(text: tuple[Target, Corpus]) -> None:
    target, corpus = text
    template, offsets = Template.of(target), corpus.offsets()
    decode = letters().decode
    assert decode(list(template.before_user)) == "<|begin|>user\n"
    assert decode(list(template.to_answer)) == "<|end|>\n<|begin|>assistant\n"
    assert template.ends == {2}
    before, to_answer = list(template.before_user), list(template.to_answer)
    several = 0
    for i in range(len(corpus)):
        ids = corpus.array("tokens")[offsets[i] : offsets[i + 1]].tolist()
        mine = corpus.array("answer")[offsets[i] : offsets[i + 1]].astype(bool)
        begins = np.flatnonzero(mine & ~np.roll(mine, 1))
        assert ids[: len(before)] == before
        assert all(ids[at - len(to_answer) : at] == to_answer for at in begins)
        several += len(begins) > 1
    assert several > 0, "the seed should give conversations of several turns"


def same(a: Corpus, b: Corpus) -> bool:
    return all(
        np.array_equal(a.array(k), b.array(k)) for k in ("tokens", "answer", "lengths", "temperature", "features")
    )


def test_a_killed_corpus_goes_on_to_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = chatty()
    settings: dict[str, Any] = {"seed": 4, "slots": 3, "limit": 60, "answer_tokens": 20, "progress": False}
    whole = write(target, tmp_path / "whole", 1500, **settings)
    append, calls = Corpus.append, 0

    def killed(self: Corpus, conversations: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the data is on disk, the count is not
            monkeypatch.setattr(Corpus, "_commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        append(self, conversations)

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            write(target, tmp_path / "broken", 1500, **settings)
    monkeypatch.undo()
    half = Corpus.open(tmp_path / "broken", target)
    assert 0 < len(half) < len(whole)
    assert (half.folder / "tokens.u32").stat().st_size > 4 * half.tokens
    assert same(write(target, tmp_path / "broken", 1500, **settings), whole)
    assert not same(write(target, tmp_path / "other", 1500, **{**settings, "seed": 5}), whole)
    with pytest.raises(TrainingError, match="other settings"):
        write(target, tmp_path / "broken", 2000, **{**settings, "slots": 4})


def test_text_alone_gets_its_states_later(text: tuple[Target, Corpus], tmp_path: Path) -> None:
    target, corpus = text
    export_text(corpus, tmp_path / "text.npz")
    again = import_text(tmp_path / "text.npz", tmp_path / "again", target)
    assert again.featured == 0 and Library([again], (POST_NORM,)).counts() == [0]
    fill_features(again, target, progress=False)
    assert again.featured == len(corpus)
    assert np.array_equal(again.array("tokens"), corpus.array("tokens"))
    np.testing.assert_allclose(
        again.array("features").astype(np.float32), corpus.array("features").astype(np.float32), atol=4e-3, rtol=4e-3
    )


def test_prompts_of_every_form(tmp_path: Path) -> None:
    lines = [
        {"prompt": "tell me"},
        {"turns": ["one", "two"]},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "x"},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b"},
                {"from": "human", "value": "c"},
            ]
        },
        {"opening": "why"},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(x) for x in lines))
    (tmp_path / "p.json").write_text(json.dumps(lines))
    expected = [["tell me"], ["one", "two"], ["hi"], ["a", "c"], ["why"]]
    for name in ("p.jsonl", "p.json"):
        found = read_prompts(tmp_path / name)
        assert [[p.text for p in turns] for turns in found] == expected
        assert [turns[0].free > 0 for turns in found] == [False] * 4 + [True]
    for bad, message in (('{"text": "x"}', "Entry 1"), ("", "no prompts"), ("{", "neither")):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(TrainingError, match=message):
            read_prompts(tmp_path / "bad.jsonl")


def test_answers_to_given_prompts(tmp_path: Path) -> None:
    target = chatty()
    prompts = [[Prompt("tell me of trees")], [Prompt("one"), Prompt("two")], [Prompt("a" * 70)]]
    corpus = write(target, tmp_path / "c", 10**6, prompts=prompts, slots=2, limit=200, answer_tokens=12, progress=False)
    assert len(corpus) == 3
    offsets = corpus.offsets()
    said = [letters().decode(corpus.array("tokens")[a:b].tolist()) for a, b in pairwise(offsets)]
    assert said[0].startswith("<|begin|>user\ntell me of trees<|end|>\n<|begin|>assistant\n")
    assert "<|begin|>user\none<|end|>" in said[1] and "<|begin|>user\ntwo<|end|>" in said[1]
    assert "a" * 70 in said[2]


def test_quoting_kinds_hand_the_answer_back(tmp_path: Path) -> None:
    from eagle_core.training.kinds import Kind

    kind = Kind("summary", ("Write ",), free=4, answer=20, more_turns=0, quoting=(("Sum: ", " ok"),))
    writer = Writer(chatty(), kinds=[kind], slots=2, limit=150)
    for _, conversations in writer.block(range(4)):
        first, second = (letters().decode(c.tokens.tolist()) for c in conversations)
        answer = first.split("<|begin|>assistant\n")[1].replace("<|end|>", "").strip()
        assert f"user\nSum: {answer} ok<|end|>" in second


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "gpt2"])
def test_other_families_write_too(family: str, tmp_path: Path) -> None:
    target = chatty(family)
    corpus = write(target, tmp_path / "c", 300, slots=3, limit=110, answer_tokens=15, progress=False)
    fresh = Corpus.create(tmp_path / "f", target, default_states(4))
    offsets = corpus.offsets()
    fresh.append(
        Conversation(corpus.array("tokens")[a:b], corpus.array("answer")[a:b], 0.0) for a, b in pairwise(offsets)
    )
    fill_features(fresh, target, progress=False)
    np.testing.assert_allclose(
        fresh.array("features").astype(np.float32), corpus.array("features").astype(np.float32), atol=1e-2, rtol=1e-2
    )


def test_the_corpus_of_another_target_is_refused(text: tuple[Target, Corpus]) -> None:
    _, corpus = text
    with pytest.raises(TrainingError, match="another target"):
        Corpus.open(corpus.folder, Target(tiny_model("llama"), None, "no tokenizer"))
    with pytest.raises(TrainingError, match="states that tiny does not compute"):
        fill_features(corpus, chatty(seed=9), progress=False)
    with pytest.raises(TrainingError, match="no corpus"):
        Corpus.open(corpus.folder / "nowhere")


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(TrainingError, match="no chat template"):
        Writer(Target(tiny_model("llama"), None, "bare"))


def test_a_full_disk_while_writing_keeps_what_was_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = chatty()
    settings: dict[str, Any] = {"slots": 3, "limit": 90, "answer_tokens": 10, "progress": False}
    before = len(write(target, tmp_path / "c", 200, **settings))
    monkeypatch.setattr(store.os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(TrainingError, match="full"):
        write(target, tmp_path / "c", 2000, **settings)
    monkeypatch.undo()
    assert len(Corpus.open(tmp_path / "c", target)) == before


# ------------------------------------------------------------------------------------------------- whole commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model of eight layers, as people have theirs: a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, bos_token_id=None, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    where = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(where)
    letters().save_pretrained(where)
    return where


def test_the_whole_recipe_on_a_small_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eagle_core.training.recipe import main

    prompts = tmp_path / "prompts.jsonl"
    asked = [{"question_id": i, "category": "qa", "turns": [f"tell me {i}"]} for i in range(3)]
    prompts.write_text("".join(json.dumps(x) + "\n" for x in asked))
    where = ["--out", str(tmp_path / "out"), "--target", str(folder), "--prompts", str(prompts), "--device", "cpu"]
    size = ["--minutes", "0.03", "--tokens", "3000", "--batch-tokens", "300"]
    line = [*where, *size, "--", "--draft-vocab", "40", "--muon-block", "16"]
    assert main(line) == 0
    told = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    assert told[0]["with_states"] == told[0]["conversations"] > 0
    assert [x["method"] for x in told[1:3]] == ["eagle3", "eagle2"]
    for method in ("eagle3", "eagle2"):
        made = tmp_path / "out" / method
        card = (made / "README.md").read_text()
        assert f"train {method} --target" in card and "| step 1 |" in card and (made / "curve.png").exists()
        assert (tmp_path / "out" / f"{method}.json").exists()
    assert main(line) == 0, "the same line goes on with what is there"


def test_two_processes_train_one_head(folder: Path, tmp_path: Path) -> None:
    """As on several devices: half of each batch on each, one log, one checkpoint."""
    import os
    import subprocess
    import sys

    from eagle_core.pairs import load_target

    write(load_target(folder), tmp_path / "corpus", 3000, slots=6, limit=120, answer_tokens=20, progress=False)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "eagle_core",
        "train",
        "eagle3", "--target", str(folder), "--corpus", str(tmp_path / "corpus"),
        "--out", str(tmp_path / "run"), "--steps", "4", "--batch-tokens", "400", "--draft-vocab", "40",
        "--muon-block", "16", "--export", str(tmp_path / "head"),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, "\n".join(x for x in done.stderr.splitlines() if "train:" in x or "Error" in x)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["progress"]["update"] == 4 and saved["progress"]["batch"] == 8
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "head" / "README.md").exists()


def test_a_head_can_begin_as_another_one(text: tuple[Target, Corpus], tmp_path: Path) -> None:
    target, corpus = with_states(text, tmp_path)
    first = Run(recipe(updates=6), target, [corpus], tmp_path / "first")
    for _ in range(6):
        first.update()
    save_head(first.head, tmp_path / "head")
    second = Run(recipe(draft_vocab=50), target, [corpus], tmp_path / "second", start_from=tmp_path / "head")
    assert torch.equal(second.head.fc.weight, first.head.fc.weight)
    assert first.head.lm_head is not None and second.head.lm_head is not None
    for row, token in enumerate(second.ids.tolist()):
        same_token = (first.ids == token).nonzero()
        old = first.head.lm_head.weight[int(same_token)] if len(same_token) else target.lm_head.weight[token]
        assert torch.equal(second.head.lm_head.weight[row], old)
    with pytest.raises(TrainingError, match="cannot be continued"):
        Run(recipe(capture=(3, 2, 1)), target, [corpus], tmp_path / "third", start_from=tmp_path / "head")


def test_help_needs_no_torch() -> None:
    import subprocess
    import sys

    for name in ("corpus", "train"):
        code = (
            f"import sys; from eagle_core.__main__ import main\ntry: main([{name!r}, '--help'])\n"
            "except SystemExit: pass\nsys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "--target" in done.stdout


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(method="eagle2", hours=1.5, token_weight=0.5, seed=3),
        Recipe(updates=90, everywhere=False, capture=(1, 2, 3), chain=2, matrix_rate=0.002),
    ],
)
def test_the_command_on_a_card_asks_for_the_same_recipe(recipe):
    about = {**asdict(recipe), "target": "T", "corpora": [{"folder": "C"}], "started_from": "H"}
    parser = argparse.ArgumentParser()
    configure(parser)
    args = parser.parse_args(shlex.split(command(about))[4:])
    said = {f.name: getattr(args, f.name, None) for f in fields(Recipe)}
    said |= {"updates": args.steps, "everywhere": not args.answers_only, "capture": tuple(args.capture)}
    said["log_every"] = recipe.log_every
    assert Recipe(**said) == recipe and (args.target, args.start_from) == ("T", "H")
