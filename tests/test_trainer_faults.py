"""What went wrong in training once: dtypes, devices, leaks, wrong resumption, torn logs, foreign heads, odd targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_core.checkpoints import load_head, save_head
from eagle_core.errors import InvalidRequest, TrainingError
from eagle_core.heads import POST_NORM, EagleHead, HeadConfig
from eagle_core.target import Target
from eagle_core.training import runs
from eagle_core.training.card import ship
from eagle_core.training.corpus import fill_features
from eagle_core.training.losses import LogitLaw, Objective, chain_steps
from eagle_core.training.runs import Library, Run
from eagle_core.training.store import Conversation, Corpus
from eagle_core.training.trainer import Recipe, draw_curve, train
from tests.conftest import VOCAB, tiny_model, tiny_target

LENGTH, FIRST = 30, 8  # tokens of a conversation, and where its answer begins


def texts(count: int, seed: int = 0) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, VOCAB - 1, LENGTH) for _ in range(count)]


def talk(tokens: list[np.ndarray]) -> list[Conversation]:
    return [Conversation(ids, np.arange(LENGTH) >= FIRST, float(i % 2)) for i, ids in enumerate(tokens)]


def corpus_of(target: Target, folder: Path, tokens: list[np.ndarray]) -> Corpus:
    corpus = Corpus.create(folder, target, [1, 2, 3, POST_NORM])
    corpus.append(talk(tokens))
    fill_features(corpus, target, progress=False)
    return corpus


def grow(corpus: Corpus, target: Target, tokens: list[np.ndarray]) -> None:
    corpus.append(talk(tokens))
    fill_features(corpus, target, progress=False)


def recipe(method: str = "eagle3", **changes: Any) -> Recipe:
    base = Recipe(
        method=method, updates=4, batch_tokens=90, row_tokens=60, draft_vocab=40,
        capture=(1, 2, 3) if method == "eagle3" else (), chain=2, muon_block=16, held_out=60, evaluate_every=2,
        log_every=1,
    )  # fmt: skip
    return replace(base, **changes)


@pytest.fixture
def target() -> Target:
    return tiny_target()


@pytest.fixture
def corpus(target: Target, tmp_path: Path) -> Corpus:
    return corpus_of(target, tmp_path / "corpus", texts(50))


# ---------------------------------------------------------------------------------------------- dtypes and devices


@pytest.mark.parametrize("method", ["eagle2", "eagle3"])
def test_a_bfloat16_target_is_trained_for_evaluated_and_shipped(method: str, tmp_path: Path) -> None:
    import copy

    target = Target(copy.deepcopy(tiny_model("llama")).bfloat16(), name="tiny")
    corpus = corpus_of(target, tmp_path / "corpus", texts(30))
    result = train(recipe(method), target, [corpus], tmp_path / "run", export=tmp_path / "head")
    assert result is not None and result["updates"] == 4 and result["predictions"] > 0
    head = load_head(tmp_path / "head", target)
    assert head.fc.weight.dtype == torch.bfloat16


def test_the_head_stays_where_the_target_is(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "device", property(lambda self: torch.device("meta")))  # accelerate's own choice
    run = Run(recipe(), target, [corpus], tmp_path / "run")
    assert {p.device.type for p in run.objective.parameters()} == {"cpu"}
    assert run.update()["loss"] > 0


# ------------------------------------------------------------------------------------------------------ held out


@pytest.mark.parametrize("quoting", [6, 8])
def test_a_quote_of_held_out_text_is_not_learnt(quoting: int, target: Target, tmp_path: Path) -> None:
    secret = VOCAB - 1  # said in conversation 7 and by its neighbour, nowhere else
    tokens = texts(50)
    tokens[7][20] = tokens[quoting][21] = secret
    library = Library([corpus_of(target, tmp_path / "corpus", tokens)], (1, 2, 3))
    learn, held = library.split()
    assert [i for _, i in held] == [7, 47] and {i for _, i in learn} == set(range(50)) - {6, 7, 8, 46, 47, 48}
    assert int(library.frequencies(VOCAB)[secret]) == 0
    assert int(library.frequencies(VOCAB).sum()) == len(learn) * (LENGTH - FIRST)
    assert not any(bool((library.batch([key], 1).tokens == secret).any()) for key in learn)


# ----------------------------------------------------------------------------------------------------- resumption


def begun(target: Target, corpora: list[Corpus], out: Path, updates: int = 3) -> Run:
    run = Run(recipe(updates=40), target, corpora, out)
    for _ in range(updates):
        run.update()
    run.save()
    return run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"batch_tokens": 120}, "batch_tokens was 90 and is 120"),
        ({"everywhere": False}, "everywhere was True and is False"),
        ({"draft_vocab": 30}, "draft_vocab was 40 and is 30"),
        ({"capture": (3, 2, 1)}, r"capture was \[1, 2, 3\] and is \[3, 2, 1\]"),
    ],
)
def test_other_settings_do_not_resume(
    changes: dict[str, Any], message: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    begun(target, [corpus], tmp_path / "run")
    with pytest.raises(TrainingError, match=message):
        Run(recipe(**{"updates": 40, **changes}), target, [corpus], tmp_path / "run", resume=True)
    free = recipe(updates=0, hours=1.0, rate=0.1, evaluate_every=7, chain=3, clip=1.0)
    assert Run(free, target, [corpus], tmp_path / "run", resume=True).at.update == 3


def test_other_corpora_do_not_resume(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    other = corpus_of(target, tmp_path / "other", texts(20, 1))
    begun(target, [corpus, other], tmp_path / "run")
    for wrong in ([other, corpus], [corpus], [other]):
        with pytest.raises(TrainingError, match=r"corpora was \['corpus', 'other'\] and is"):
            Run(recipe(updates=40), target, wrong, tmp_path / "run", resume=True)
    small = corpus_of(target, tmp_path / "x" / "other", texts(10, 1))
    with pytest.raises(TrainingError, match="other has 10 of 20 conversations"):
        Run(recipe(updates=40), target, [corpus, small], tmp_path / "run", resume=True)


def test_a_grown_corpus_resumes_as_if_it_had_not_till_the_pass_ends(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    whole = begun(target, [corpus], tmp_path / "run")
    names = []
    expected = [whole._next()[1] for _ in range(30)]
    grow(corpus, target, texts(20, 2))
    run = Run(recipe(updates=40), target, [corpus], tmp_path / "run", resume=True)
    assert run.at.counts == (50,)
    names = [run._next()[1] for _ in range(30)]
    first = [name for name in expected if name.startswith("pass 1,")]
    assert len(first) > 5 and names[: len(first)] == first
    assert run.at.epoch == 1 and run.at.counts == (70,)


def test_added_corpora_begin_a_new_pass(
    target: Target, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(target, [corpus], tmp_path / "run")
    more = corpus_of(target, tmp_path / "more", texts(20, 1))
    run = Run(recipe(updates=40), target, [corpus, more], tmp_path / "run", resume=True)
    assert "more was added; a new pass begins" in capsys.readouterr().err
    assert (run.at.update, run.at.epoch, run.at.batch, run.at.counts) == (3, 1, 0, ())
    run.update()
    assert run.at.counts == (50, 20)
    assert [c["folder"] for c in json.loads((tmp_path / "run" / "recipe.json").read_text())["corpora"]] == [
        "corpus",
        "more",
    ]
    run.save()
    again = Run(recipe(updates=40), target, [corpus, more], tmp_path / "run", resume=True)
    assert (again.at.epoch, again.at.batch, again.at.counts) == (1, 1, (50, 20))


def test_a_checkpoint_of_an_older_version_resumes(
    target: Target, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = begun(target, [corpus], tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    torch.save({k: v for k, v in saved.items() if k not in ("bound", "config", "unmatched")}, path)
    run = Run(recipe(updates=40), target, [corpus], tmp_path / "run", resume=True)
    assert "older version" in capsys.readouterr().err
    assert (run.at.update, run.at.epoch, run.at.counts) == (3, 1, ())
    assert all(torch.equal(a, b) for a, b in zip(old.head.parameters(), run.head.parameters(), strict=True))
    run.update()


def test_a_torn_log_is_mended(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe(), target, [corpus], out)
    log = out / "log.jsonl"
    good = log.read_text()
    log.write_text(good + '{"step": 5, "tokens": 9}\n{"step": 6, "tok\n{"step": 4, "to')
    run = Run(recipe(), target, [corpus], out, resume=True)
    assert log.read_text() == good
    run.log(step=4, tokens=run.at.tokens, held_out=run.evaluate())
    draw_curve(log, out / "curve.png")
    ship(run, tmp_path / "head")


def test_processes_wait_for_what_the_first_one_sees(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(recipe(), target, [corpus], tmp_path / "run")
    run.workers = 2
    monkeypatch.setattr(torch.distributed, "broadcast", lambda x, _: x.fill_(60))  # the first process sees 60
    monkeypatch.setattr(runs.time, "sleep", lambda _: grow(Corpus.open(corpus.folder), target, texts(10, 3)))
    run._begin_epoch()
    assert run.at.counts == (60,) and run.texts.counts() == [60]
    monkeypatch.setattr(torch.distributed, "broadcast", lambda x, _: x.fill_(99))
    monkeypatch.setattr(runs, "_PATIENCE", -1.0)
    with pytest.raises(TrainingError, match="has 60 of 99 conversations"):
        run._begin_epoch()


def test_only_the_first_process_reports(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda self: False))
    assert train(recipe(), target, [corpus], tmp_path / "run", export=tmp_path / "head") is None
    assert not (tmp_path / "head").exists()


# ------------------------------------------------------------------------------------------------- foreign heads


def foreign(target: Target, folder: Path, own_lm_head: bool = True, **changes: Any) -> EagleHead:
    """A head as others make them: biases, norms, an own embedding, flags that no tensor shows."""
    torch.manual_seed(4)
    settings: dict[str, Any] = {
        "family": "eagle3", "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 40,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "draft_vocab_size": 41,
        "capture": (1, 2, 3), "max_position_embeddings": 100, "rms_norm_eps": 1e-5, "hidden_act": "gelu",
        "rope": {"rope_type": "default", "rope_theta": 5000.0}, "fc_bias": True, "qkv_bias": True, "o_bias": True,
        "fc_norm": True, "norm_before_residual": True, "norm_output": True, "logit_scale": 0.5,
    }  # fmt: skip
    config = HeadConfig(**{**settings, **changes})
    fused = config.family == "eagle3"
    head = EagleHead(
        config, own_embedding=fused, own_lm_head=own_lm_head,
        draft_to_target=torch.randperm(VOCAB)[:41].sort().values if fused else None,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    head.borrow(target.embedding, target.lm_head)
    save_head(head, folder)
    return head


def test_a_foreign_head_goes_on_as_what_it_is(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    old = foreign(target, tmp_path / "foreign")
    run = Run(recipe(), target, [corpus], tmp_path / "run", start_from=tmp_path / "foreign")
    assert run.head.config == replace(old.config, draft_vocab_size=40)
    theirs, mine = old.state_dict(), run.head.state_dict()
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if name != "lm_head.weight")
    assert old.draft_to_target is not None and run.head.lm_head is not None and old.lm_head is not None
    for row, token in enumerate(run.ids.tolist()):
        at = (old.draft_to_target == token).nonzero()
        expected = old.lm_head.weight[int(at)] if len(at) else target.lm_head.weight[token] / 0.5
        assert torch.equal(run.head.lm_head.weight[row], expected)
    assert run.head.embed_tokens is not None
    before = run.head.embed_tokens.weight.clone()
    run.update()
    run.save()
    assert torch.equal(run.head.embed_tokens.weight, before), "an embedding that was taken over stays"
    again = Run(recipe(), target, [corpus], tmp_path / "run", resume=True)
    assert again.head.config == run.head.config
    assert all(torch.equal(a, b) for a, b in zip(again.head.parameters(), run.head.parameters(), strict=True))
    assert again.update()["loss"] == run.update()["loss"]
    ship(again, tmp_path / "head")
    assert load_head(tmp_path / "head", target).config == run.head.config


@pytest.mark.parametrize(
    ("changes", "method", "message"),
    [
        ({"capture": (1, 2, 4)}, "eagle3", r"states at \[1, 2, 4\], and this run at \[1, 2, 3\]"),
        ({}, "eagle2", "a head of eagle3, and this run is of eagle1"),
        (
            {
                "family": "eagle1",
                "capture": (POST_NORM,),
                "draft_vocab_size": VOCAB,
                "norm_before_residual": False,
                "norm_output": False,
                "fc_norm": False,
            },
            "eagle2",
            "an lm_head of its own",
        ),
        ({"hidden_size": 16}, "eagle3", "hidden_size is 16, the target's 32"),
    ],
)
def test_heads_that_cannot_go_on_are_refused(
    changes: dict[str, Any], method: str, message: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    foreign(target, tmp_path / "foreign", **changes)
    with pytest.raises(TrainingError, match=message):
        Run(recipe(method), target, [corpus], tmp_path / "run", start_from=tmp_path / "foreign")


# ------------------------------------------------------------------------------------- targets with laws of their own


def odd_target(family: str) -> Target:
    from transformers import AutoConfig, AutoModelForCausalLM

    extra: dict[str, Any] = {
        "granite": {"logits_scaling": 8.0},
        "cohere": {"logit_scale": 0.0625},
        "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    }[family]
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, **extra,
    )  # fmt: skip
    torch.manual_seed(2)
    how = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=how, dtype=torch.float32)
    return Target(model, name=f"tiny-{family}")


@pytest.mark.parametrize(("family", "scale", "cap"), [("granite", 0.125, 0), ("cohere", 0.0625, 0), ("gemma2", 1, 5)])
def test_soft_targets_are_the_targets_own_distribution(family: str, scale: float, cap: float, tmp_path: Path) -> None:
    target = odd_target(family)
    assert LogitLaw.of(target) == LogitLaw(scale, cap)
    tokens = texts(10)
    corpus = corpus_of(target, tmp_path / "corpus", tokens)
    for method in ("eagle2", "eagle3"):
        run = Run(recipe(method, draft_vocab=VOCAB), target, [corpus], tmp_path / method)
        objective, batch = run.objective, run.texts.batch([(0, 0)], 1).to(target.device)
        assert isinstance(objective, Objective)
        with torch.no_grad():
            own = target.model(torch.from_numpy(tokens[0])[None]).logits[0].softmax(-1)
            told = objective.law(torch.nn.functional.linear(batch.final[0], objective.lm_rows)).softmax(-1)
            _, read = chain_steps(run.head, batch, 1)[0]
            entropy = -(own[1:-1] * objective._logits(read[0, :-2]).log_softmax(-1)).sum(-1).mean()
            learnt = objective(batch, 1).parts["token_loss_1"]
        torch.testing.assert_close(told, own, atol=2e-2, rtol=0)
        torch.testing.assert_close(learnt, entropy, atol=1e-3, rtol=1e-3)
    # An EAGLE-2 head whose feature is right drafts what the target would say, once it has been written and read too.
    head = Run(recipe("eagle2", draft_vocab=VOCAB), target, [corpus], tmp_path / "again").head
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head", target)
    assert loaded.config.logit_scale == scale
    if not cap:
        with torch.no_grad():
            torch.testing.assert_close(loaded.logits(batch.final[0]).softmax(-1), own, atol=2e-2, rtol=0)


def test_a_fused_head_begins_at_the_targets_scale(tmp_path: Path) -> None:
    target = odd_target("granite")
    run = Run(recipe(), target, [corpus_of(target, tmp_path / "corpus", texts(10))], tmp_path / "run")
    assert run.head.lm_head is not None and run.head.config.logit_scale == 1.0
    assert torch.equal(run.head.lm_head.weight, target.lm_head.weight[run.ids] / 8)


def test_logits_of_no_known_law_are_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Target.forward

    def odd(self: Target, *args: Any) -> Any:
        logits, features = forward(self, *args)
        return logits.sign() * logits.abs().sqrt(), features

    monkeypatch.setattr(Target, "forward", odd)
    with pytest.raises(TrainingError, match="no multiple of what its LM head says"):
        LogitLaw.of(target)


# ------------------------------------------------------------------------------------------------- numbers and settings


def test_a_gradient_that_is_no_number_changes_nothing(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    run = Run(recipe(), target, [corpus], tmp_path / "run")
    before = {name: p.clone() for name, p in run.head.named_parameters()}
    run.head.fc.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(TrainingError, match=r"gradient became \w+ at step 1 \(pass 1, batch 1: conversations"):
        run.update()
    assert all(torch.equal(p, before[name]) for name, p in run.head.named_parameters()) and run.at.update == 0


def test_broken_weights_are_neither_saved_nor_shipped(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    run = begun(target, [corpus], tmp_path / "run")
    kept = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    with torch.no_grad():
        run.head.fc.weight[0, 0] = 1e6
    with pytest.raises(InvalidRequest, match=r"fc\.weight of this head reaches 1e\+06, beyond .* torch.float16"):
        ship(run, tmp_path / "head")
    with torch.no_grad():
        run.head.fc.weight[0, 0] = float("nan")
    with pytest.raises(InvalidRequest, match=r"fc\.weight of this head holds NaN"):
        ship(run, tmp_path / "head")
    assert not list((tmp_path / "head").iterdir())
    with pytest.raises(TrainingError, match=r"After step 3 fc\.weight of the head are not finite"):
        run.save()
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": 0}, "evaluate_every is 0; it must be at least 1"),
        ({"chain": 0}, "chain is 0"),
        ({"draft_vocab": 0}, "draft_vocab is 0"),
        ({"first_chain": 4, "chain": 2, "growth": 0.1}, "first_chain is 4 and chain 2"),
        ({"growth": 1.5}, "growth is 1.5; it must be at least 0 and at most 1"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"hours": -1.0}, r"hours is -1\.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Recipe(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "2", "--capture", "0", "2", "3"], "write or import the text again"),
        (["--steps", "2", "--resume"], "no checkpoint to resume"),
        ([], "how long"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_states_are_computed(
    options: list[str], message: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    from eagle_core import pairs
    from eagle_core.training import corpus, trainer

    Corpus.create(tmp_path / "corpus", target, [1, 2, 3, POST_NORM]).append(talk(texts(5)))
    monkeypatch.setattr(pairs, "load_target", lambda *_, **__: target)
    monkeypatch.setattr(corpus, "fill_features", lambda *_: pytest.fail("hours of computing"))
    parser = argparse.ArgumentParser()
    trainer.configure(parser)
    line = ["eagle3", "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "run"), *options]
    with pytest.raises(TrainingError, match=message):
        trainer.run(parser.parse_args(line))


def test_an_eagle1_head_keeps_its_logit_scale(target: Target, tmp_path: Path) -> None:
    old = foreign(
        target, tmp_path / "head", False, family="eagle1", capture=(POST_NORM,), draft_vocab_size=VOCAB,
        norm_before_residual=False, norm_output=False, fc_norm=False,
    )  # fmt: skip
    assert load_head(tmp_path / "head", target).config.logit_scale == old.config.logit_scale == 0.5
