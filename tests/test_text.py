"""Text that is right at every step, for byte-level BPE, SentencePiece-like with byte fallback, and WordPiece."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle_core.text import Labels, TextStream, decode

SAMPLES = [
    "The quick brown fox. def f(x):\n    return x<y && y>z  # <tag> &amp; $a_b$",
    "Příliš žluťoučký kůň úpěl ďábelské ódy; 猫は魚が好き。 செல்வம் تجري الرياح",
    "emoji: 👩‍👩‍👧‍👦 🦅🇨🇿 \u0301\u200d end\t\ttabs\r\n",
    "<s>[INST] not special </s>",
]


@cache
def tokenizer(kind: str) -> Any:
    special = ["<s>", "</s>", "<unk>"]
    if kind == "bytes":
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tok.train_from_iterator(SAMPLES[:1], trainer)
    elif kind == "sentencepiece":
        vocab = (
            special
            + [f"<0x{b:02X}>" for b in range(256)]
            + ["▁", "▁the", "t", "h", "e", "▁qu", "i", "c", "k", "▁a", "a", ".", "fox"]
        )
        tok = Tokenizer(
            models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=[], byte_fallback=True, unk_token="<unk>")
        )
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tok.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        words = [*special, "[UNK]", "the", "qu", "##ick", "fox", "##es", ".", ",", "a", "b", "##b"]
        tok = Tokenizer(models.WordPiece(vocab={t: i for i, t in enumerate(words)}, unk_token="[UNK]"))
        tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tok.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = ["bytes", "sentencepiece", "wordpiece"]


def stream(
    tok: Any, ids: list[int], stop: list[str] | None = None, group: int = 1
) -> tuple[list[str], str, TextStream]:
    out, text = [], TextStream(tok, stop or [])
    for i in range(0, len(ids), group):
        for token in ids[i : i + group]:
            if text.add(token):
                break
        out.append(text.take())
        if text.stopped:
            break
    return out, text.finish(), text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole(kind: str, data: Any) -> None:
    tok = tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, len(tok) - 1), max_size=40))
    pieces, rest, _ = stream(tok, ids, group=data.draw(st.integers(1, 5)))
    assert "".join(pieces) + rest == decode(tok, ids)
    given_so_far = ""
    for i, piece in enumerate(pieces):
        given_so_far += piece
        assert decode(tok, ids).startswith(given_so_far) or kind == "wordpiece", i


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_real_text_never_shows_a_broken_character(kind: str, sample: str) -> None:
    tok = tokenizer(kind)
    ids = tok.encode(sample, add_special_tokens=False)
    pieces, rest, _ = stream(tok, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + rest == decode(tok, ids)


def test_a_real_replacement_character_is_kept() -> None:
    tok = tokenizer("bytes")
    sample = "a\ufffdb\ufffd"
    pieces, rest, _ = stream(tok, tok.encode(sample, add_special_tokens=False))
    assert "".join(pieces) + rest == sample


@settings(max_examples=80, deadline=None)
@given(
    st.text(alphabet="abEND.\n🦅 ", max_size=30),
    st.lists(st.text(alphabet="abEND.\n🦅 ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_across_token_borders(text: str, stops: list[str]) -> None:
    tok = tokenizer("bytes")
    ids = tok.encode(text, add_special_tokens=False)
    pieces, rest, state = stream(tok, ids, stops, group=2)
    found = [text.find(s) for s in stops if s in text]
    got = "".join(pieces) + rest
    if not found:
        assert got == text and state.stopped is None
        return
    assert state.stopped is not None
    assert not any(s in got for s in stops)
    assert text.startswith(got) and text[len(got) :].startswith(state.stopped)


def test_labels_show_spaces_bytes_and_specials() -> None:
    labels = Labels(tokenizer("bytes"))
    tok = tokenizer("bytes")
    eagle = tok.encode("🦅", add_special_tokens=False)
    assert "".join(labels[t] for t in eagle) == "<0xF0><0x9F><0xA6><0x85>"
    assert labels[tok.convert_tokens_to_ids("</s>")] == "</s>"
    assert labels[tok.encode(" q", add_special_tokens=False)[0]].startswith(" ")
    spm = Labels(tokenizer("sentencepiece"))
    ids = tokenizer("sentencepiece").convert_tokens_to_ids(["▁the", "▁", "<0xF0>", "fox"])
    assert [spm[i] for i in ids] == [" the", " ", "<0xF0>", "fox"]
    assert Labels(None)[7] == "#7"
    assert labels[10_000] == "<#10000>"


def test_special_tokens_are_no_text() -> None:
    tok = tokenizer("bytes")
    ids = [*tok.encode("hi", add_special_tokens=False), tok.eos_token_id]
    pieces, rest, _ = stream(tok, ids)
    assert "".join(pieces) + rest == "hi"


def test_without_a_tokenizer_there_is_no_text() -> None:
    pieces, rest, _ = stream(None, [1, 2, 3])
    assert "".join(pieces) + rest == ""
