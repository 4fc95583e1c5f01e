"""A corpus, a target or a result that is not what it is taken for, is damaged or cannot be kept: each is told."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eagle_core import bench
from eagle_core.__main__ import main
from eagle_core.bench import read_prompts, writable
from eagle_core.errors import InvalidRequest, TrainingError
from eagle_core.heads import POST_NORM
from eagle_core.target import Target
from eagle_core.training import evaluate, recipe
from eagle_core.training.corpus import default_states, fill_features, import_text, write
from eagle_core.training.store import Conversation, Corpus, Prompt, identity, weights
from eagle_core.training.writer import Template, Writer
from eagle_core.verify import Sampling
from tests.conftest import tiny_model
from tests.test_compare import command, save_tiny
from tests.test_training import chatty, letters

SMALL: dict[str, Any] = {"slots": 3, "limit": 90, "answer_tokens": 10, "progress": False}


def said(*lengths: int) -> list[Conversation]:
    return [Conversation(np.arange(n) % 7, np.arange(n) > 1, 0.0) for n in lengths]


def archive(path: Path, *lengths: int, **other: Any) -> Path:
    """A text that may be imported."""
    n = sum(lengths)
    whole = {"tokens": np.arange(n) % 7, "answer": np.ones(n, np.uint8), "lengths": np.array(lengths),
             "temperature": np.zeros(len(lengths), np.float32)}  # fmt: skip
    np.savez_compressed(path, **(whole | other))
    return path


def retrained(target: Target) -> Target:
    """The same model with weights that were trained on."""
    model = deepcopy(target.model)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.add_(0.01)
    return Target(model, target.tokenizer, target.name)


# ------------------------------------------------------------------------------------------------------- imports


@pytest.mark.parametrize("fault", ["missing", "empty", "cut short", "one array", "no archive", "no text", "no lengths"])
def test_what_cannot_be_imported_is_told_and_leaves_no_corpus(fault: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "text.npz", 5, 4)
    if fault == "cut short":
        path.write_bytes(path.read_bytes()[:-200])
    elif fault == "one array":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    elif fault == "no text":
        archive(path)
    elif fault == "no lengths":
        archive(path, 5, 4, lengths=np.array([9.0]), temperature=np.zeros(1))
    else:
        path.write_bytes({"missing": b"", "empty": b"", "no archive": b"hello"}[fault])
        if fault == "missing":
            path.unlink()
    with pytest.raises(TrainingError, match=r"text\.npz"):
        import_text(path, tmp_path / "corpus", chatty())
    assert not Corpus.exists(tmp_path / "corpus")


def test_a_killed_import_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, path = chatty(), archive(tmp_path / "text.npz", 5, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "append", lambda self, new: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_text(path, tmp_path / "corpus", target)
    assert len(Corpus.open(tmp_path / "corpus", target)) == 0
    for _ in range(2):  # the second time it is there, and stays as it is
        assert len(import_text(path, tmp_path / "corpus", target)) == 2
    assert Corpus.open(tmp_path / "corpus", target).tokens == 9


def test_another_text_does_not_pass_for_the_one_that_is_there(tmp_path: Path) -> None:
    target, a, b = chatty(), archive(tmp_path / "a.npz", 5, 4), archive(tmp_path / "b.npz", 3)
    corpus = import_text(a, tmp_path / "imported", target)
    write(target, tmp_path / "written", 100, **SMALL)
    with pytest.raises(TrainingError, match=r"imported from a\.npz, not the text of .*b\.npz"):
        import_text(b, tmp_path / "imported", target)
    with pytest.raises(TrainingError, match="its target wrote"):
        import_text(a, tmp_path / "written", target)
    with pytest.raises(TrainingError, match="other settings: seed None there, 0 here"):
        write(target, tmp_path / "imported", 100, **SMALL)
    del corpus.about["writer"]["archive"]  # as it was recorded once
    corpus._commit()
    assert len(import_text(a, tmp_path / "imported", target)) == 2


# --------------------------------------------------------------------------------------------------- two at a time


def test_one_process_writes_and_all_may_read(tmp_path: Path) -> None:
    target = chatty()
    mine = write(target, tmp_path / "corpus", 100, **SMALL)
    text = archive(tmp_path / "text.npz", 3)
    with mine.writing():
        other = Corpus.open(tmp_path / "corpus", target)
        for attempt in (
            lambda: other.append(said(4)),
            lambda: write(target, tmp_path / "corpus", 10**6, **SMALL),
        ):
            with pytest.raises(TrainingError, match="Another process is writing"):
                attempt()
        before = len(other)
        fill_features(other, target, progress=False)  # every state is there: only compared
        mine.append(said(6))
        other.refresh()
        assert len(other) == before + 1 and other.array("tokens")[-6:].tolist() == [0, 1, 2, 3, 4, 5]
        with pytest.raises(TrainingError, match="Another process is writing"):
            fill_features(other, target, progress=False)
    fill_features(other, target, progress=False)
    assert import_text(text, tmp_path / "new", target).tokens == 3


def test_writers_that_take_turns_lose_nothing(tmp_path: Path) -> None:
    target = chatty()
    a = Corpus.create(tmp_path, target, [POST_NORM])
    b = Corpus.open(tmp_path, target)
    a.append(said(5))
    b.append(said(4))  # it was opened before
    a.append(said(3))
    assert Corpus.open(tmp_path, target).array("lengths").tolist() == [5, 4, 3]
    with pytest.raises(TrainingError, match="already holds"):
        Corpus.create(tmp_path, target, [POST_NORM])


def test_a_file_that_lost_its_end_is_not_filled_with_zeros(tmp_path: Path) -> None:
    corpus = Corpus.create(tmp_path, chatty(), [POST_NORM])
    corpus.append(said(5, 4))
    path = tmp_path / "tokens.u32"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TrainingError, match=r"tokens\.u32 is shorter than corpus\.json says \(32 bytes, not 36\)"):
        corpus.append(said(3))
    assert path.stat().st_size == 32 and len(Corpus.open(tmp_path)) == 2


# ---------------------------------------------------------------------------------------------- whose weights


def test_another_training_of_a_target_has_another_digest() -> None:
    target = chatty()
    half = Target(deepcopy(target.model).to(torch.bfloat16), target.tokenizer, "tiny")
    assert weights(target) == weights(half) != weights(retrained(target)) != weights(chatty(seed=1))
    half = Target(deepcopy(target.model).half(), target.tokenizer, "tiny")
    assert "weights" in identity(target) and "weights" not in identity(half)


def test_a_corpus_is_continued_by_the_weights_that_began_it(tmp_path: Path) -> None:
    target = chatty()
    corpus = write(target, tmp_path, 100, **SMALL)
    with pytest.raises(TrainingError, match=r"another target.*weights"):
        write(retrained(target), tmp_path, 200, **SMALL)
    del corpus.about["target"]["weights"]  # as it was recorded once
    corpus._commit()
    assert write(target, tmp_path, 200, **SMALL).tokens >= 200


def test_answers_are_of_the_weights_that_gave_them(tmp_path: Path) -> None:
    target = chatty()
    prompts = [(bench.Prompt(1, "qa", ("a",)), [3, 14, 15, 9])]

    def answers(target: Target, path: Path, **drop: Any) -> list[int]:
        request = {"target": "tiny", "weights": weights(target), "max_new_tokens": 8}
        request = {k: v for k, v in request.items() if k not in drop}
        return evaluate._answers(target, prompts, request, Sampling(), path)[1]

    path = tmp_path / "answers.json"
    mine, theirs = answers(target, path), answers(retrained(target), path)
    assert len(json.loads(path.read_text())) == 2
    assert (mine, theirs) == (answers(target, path), answers(retrained(target), path))
    old = tmp_path / "old.json"
    answers(target, old, weights=None)
    kept = {key: [7, 7] for key in json.loads(old.read_text())}  # as they were kept once
    old.write_text(json.dumps(kept))
    assert answers(target, old) == [7, 7]


def test_traces_are_of_weights_and_of_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = save_tiny(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["w5"]}))
    line = ["evaluate", "--drafter", head, "--target", target, "--prompts", str(prompts), "--max-new-tokens", "6"]
    traces = tmp_path / "new" / "out.traces"

    def measured() -> int:
        command(capsys, *line, "--json", str(tmp_path / "new" / "out.json"))
        return len(list(traces.glob("*.jsonl.gz")))

    assert [measured(), measured()] == [1, 1]
    tiny_model("llama", 1).save_pretrained(target)
    assert [measured(), measured()] == [2, 2]
    monkeypatch.setattr(evaluate, "DRAFTING", evaluate.DRAFTING + 1)
    assert measured() == 3


# ------------------------------------------------------------------------------------------ before it costs time


def test_two_questions_of_one_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    row = {"question_id": 81, "category": "qa", "turns": ["a"]}
    path.write_text("\n".join(map(json.dumps, (row, {**row, "question_id": 82}, {**row, "turns": ["b"]}))))
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl, line 3 has the question_id 81 of line 1"):
        read_prompts(path)
    path.write_text(json.dumps({**row, "question_id": [81]}))
    with pytest.raises(InvalidRequest, match="line 1 is no prompt"):
        read_prompts(path)


def test_a_place_for_results_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    writable(tmp_path / "a" / "b" / "out.json", None, kept)
    assert list((tmp_path / "a" / "b").iterdir()) == [] and kept.read_text() == "old"
    for path in (tmp_path, kept / "out.json"):
        with pytest.raises(InvalidRequest, match="nothing can be written to"):
            writable(path)


@pytest.mark.parametrize("name", ["bench", "evaluate", "corpus"])
def test_results_that_cannot_be_written_are_told_before_anything_is_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import eagle_core.pairs

    for loads in ("load_pair", "load_target"):
        monkeypatch.setattr(eagle_core.pairs, loads, lambda *a, **k: pytest.fail("loaded first"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["a"]}))
    place = str(prompts / "out.json")  # in a file
    line = ["--tokens", "9", "--out", str(tmp_path / "c"), "--export-text", place]
    if name != "corpus":
        line = ["--prompts", str(prompts), "--drafter", "lookup", "--json", place]
    assert main([name, *line]) == 2
    assert "nothing can be written to" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- continuing a corpus


def test_a_corpus_keeps_the_boundaries_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert default_states(30, [9, 2, 5, 9]) == [2, 15, 27, 5, 9, POST_NORM]
    chatty().model.save_pretrained(tmp_path / "model")
    letters().save_pretrained(tmp_path / "model")
    line = ["corpus", "--target", str(tmp_path / "model"), "--device", "cpu", "--slots", "3", "--limit", "90"]
    for name, source in (
        ("written", ["--tokens", "100"]),
        ("imported", ["--import-text", str(archive(tmp_path / "text.npz", 5, 4))]),
    ):
        asked = [*line, *source, "--out", str(tmp_path / name)]
        _, told = command(capsys, *asked, "--capture", "3")
        corpus = Corpus.open(tmp_path / name)
        assert corpus.capture == (2, 2, 1, 3, POST_NORM) and told["with_states"] == told["conversations"] > 0
        assert main(asked) == 2 and "capture [2, 2, 1, 3, -1] there, [2, 2, 1, -1] here" in capsys.readouterr().err
        assert main([*asked, "--capture", "4"]) == 2 and "no states at boundaries [4]" in capsys.readouterr().err


def test_other_prompts_of_the_same_number_are_told(tmp_path: Path) -> None:
    target, prompts, others = chatty(), [[Prompt("tell me")], [Prompt("why")]], [[Prompt("tell me")], [Prompt("how")]]
    corpus = write(target, tmp_path, 10, prompts=prompts[:], **{**SMALL, "slots": 1})
    with pytest.raises(TrainingError, match=r"other settings: prompts_sha256 .* there, .* here"):
        write(target, tmp_path, 10**6, prompts=others, **{**SMALL, "slots": 1})
    with pytest.raises(TrainingError, match="other settings: prompts 2 there, 1 here"):
        write(target, tmp_path, 10**6, prompts=prompts[:1], **{**SMALL, "slots": 1})
    with pytest.raises(TrainingError, match="other settings: prompts 2 there, None here"):
        write(target, tmp_path, 10**6, **{**SMALL, "slots": 1})
    del corpus.about["writer"]["prompts_sha256"]  # as it was recorded once
    corpus._commit()
    write(target, tmp_path, 10**6, prompts=prompts, **{**SMALL, "slots": 1})
    with pytest.raises(TrainingError, match="other settings: prompts 2 there, 1 here"):
        write(target, tmp_path, 10**6, prompts=prompts[:1], **{**SMALL, "slots": 1})


def test_a_corpus_goes_on_with_or_without_states(tmp_path: Path) -> None:
    target = chatty()
    whole = write(target, tmp_path / "whole", 2500, **SMALL)
    corpus = write(target, tmp_path / "parts", 100, keep_states=False, **SMALL)
    fill_features(corpus, target, progress=False)  # as `train` does
    n = len(corpus)
    corpus = write(target, tmp_path / "parts", 1000, keep_states=False, **SMALL)
    assert corpus.featured == n < len(corpus)
    corpus = write(target, tmp_path / "parts", 2500, **SMALL)  # with states, behind conversations that lack theirs
    fill_features(corpus, target, progress=False)
    assert corpus.featured == len(corpus) == len(whole)
    assert np.array_equal(corpus.array("tokens"), whole.array("tokens"))
    np.testing.assert_allclose(
        corpus.array("features").astype(np.float32), whole.array("features").astype(np.float32), atol=4e-3, rtol=4e-3
    )


def test_a_mistaken_size_begins_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="allow at least"):
        write(chatty(), tmp_path / "corpus", 100, **{**SMALL, "limit": 9})
    assert not Corpus.exists(tmp_path / "corpus")


# ---------------------------------------------------------------------------------------------------- templates


def spaced(template: str, scheme: str = "first") -> Any:
    """A tokenizer as SentencePiece makes them: the space belongs to the word behind it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "▁[]/INSTWabcdefghijklmnopqrstuvwxyz")]
    pieces += [(piece, -4.0) for piece in ("▁[", "▁W", "▁t", "▁s")]
    core = Tokenizer(models.Unigram(pieces, unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_given_words_are_the_ids_of_the_whole_text(scheme: str) -> None:
    target = Target(tiny_model("llama"), spaced(INST, scheme), "spaced")
    target.eos_ids = frozenset([1])
    encode = lambda text: target.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    assert Template.of(target).before_user == tuple(encode("[INST]")), "the space is the next word's"
    prompts = [[Prompt("Why so"), Prompt("tell me")]]
    writer = Writer(target, prompts=prompts, slots=1, limit=200, answer_tokens=12)
    ((_, (conversation,)),) = writer.block(range(1))
    tokens, answer = conversation.tokens.tolist(), conversation.answer
    first, last = int(np.argmax(answer)), len(answer) - int(np.argmax(~answer[::-1]))
    asked, again = encode("[INST] Why so [/INST]"), encode("[INST] Why so [/INST] a</s>[INST] tell me [/INST]")
    assert tokens[:first] == asked
    assert tokens[last - len(again) + again.index(1) + 1 : last] == again[again.index(1) + 1 :]


def test_a_turn_that_flows_into_the_template_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "Wordone": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}! {% endfor %}"
    target = SimpleNamespace(tokenizer=tokenizer, name="words", eos_ids=frozenset([1]))
    with pytest.raises(TrainingError, match="joins the end of a turn"):
        Template.of(target)


# ------------------------------------------------------------------------------------------------------- recipe


def test_every_stage_of_the_recipe_runs_on_the_device_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []
    monkeypatch.setattr("eagle_core.__main__.main", lambda line: lines.append(line) or 0)
    assert recipe.main(["--out", str(tmp_path), "--prompts", "p.jsonl", "--device", "cpu"]) == 0
    assert [line[0] for line in lines] == ["corpus", "train", "train", "evaluate", "evaluate"]
    assert [line[line.index("--device") + 1] for line in lines] == ["cpu"] * 5
