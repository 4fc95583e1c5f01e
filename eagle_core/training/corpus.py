"""Let a target write the text that its drafter learns from.

    python -m eagle_core corpus --target T --tokens N --out DIR [--prompts FILE] [--seed S]

A drafter has to foresee what *this* target says, so the target writes both sides: a user turn, sampled after the
template's user header (from a few opening words of a `Kind`, so that all that people ask occurs), and its answer,
for a turn or several. With `--prompts` the user turns come from a file and only the answers are written.

Continuous batching: `slots` conversations are written side by side, one forward a step for all of them, and a slot
whose conversation ended takes the next one at once. A conversation's draws come from (seed, its number), and every
`block` of conversations starts from empty slots, so a corpus that was interrupted continues with the block that
was lost and ends up the same, number for number.

    slot 0   user: How do I…  │ assistant: …                       │ user: Summarize… │ assistant: …
    slot 1   user: Write an article… │ assistant: …    │ next conversation…
                                       one column = one forward
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_core.errors import TrainingError
from eagle_core.training.store import Conversation, Corpus, Prompt, disk_errors

__all__ = ["configure", "default_states", "export_text", "fill_features", "import_text", "read_prompts", "run", "write"]

_OPENING_FREE = 60  # tokens a target may add to a prompt that is an opening


def default_states(num_layers: int, more: Sequence[int] = ()) -> list[int]:
    """What a feature file holds: all that EAGLE-3, EAGLE-2 and soft targets need, and `more` boundaries, if any.

    Raises:
        TrainingError: there is no such boundary.
    """
    from eagle_core.heads import POST_NORM, default_capture

    if unknown := [j for j in more if not POST_NORM <= j < num_layers]:
        raise TrainingError(f"There are no states at boundaries {unknown}; give 0 … {num_layers - 1}.")
    usual = default_capture(num_layers)
    return [*usual, *sorted({*more} - {*usual, POST_NORM}), POST_NORM]


def _agree(corpus: Corpus, settings: Mapping[str, Any]) -> None:
    """Refuse to continue a corpus with other settings than it was begun with, each named."""
    begun = {"prompts_sha256": settings.get("prompts_sha256")}  # which older records lack
    begun |= {**corpus.about["writer"], "capture": list(corpus.capture)}
    differing = [f"{k} {begun.get(k)} there, {v} here" for k, v in settings.items() if begun.get(k) != v]
    if differing:
        raise TrainingError(
            f"{corpus.folder} was begun with other settings: {'; '.join(differing)}."
            " Continue it with those, or name another folder."
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def write(
    target: Any,
    folder: Path,
    tokens: int,
    *,
    seed: int = 0,
    keep_states: bool = True,
    prompts: Sequence[Sequence[Prompt]] | None = None,
    capture: Sequence[int] = (),
    slots: int = 16,
    limit: int = 1024,
    answer_tokens: int = 300,
    minutes: float = 0.0,
    progress: bool = True,
) -> Corpus:
    """Write until the corpus in `folder` holds `tokens` tokens, the prompts are used up, or `minutes` (if any) pass.

    A corpus that is there is continued. Time is looked at between blocks only: it decides how much is written, not
    what. States are kept for as long as every conversation before has its own; `fill_features` brings the others.

    Args:
        capture: boundaries whose states are kept besides the usual ones.

    Raises:
        TrainingError: a corpus of another target, or one begun with other settings, is in `folder`; full disk;
            another process writes there.
    """
    from tqdm import tqdm

    from eagle_core.training.writer import Writer

    states = default_states(target.num_layers, capture)
    block = 3 * slots
    settings: dict[str, Any] = {"seed": seed, "prompts": None, "slots": slots, "limit": limit,
                                "answer_tokens": answer_tokens}  # fmt: skip
    if prompts is not None:
        text = json.dumps([[(prompt.text, prompt.free) for prompt in turns] for turns in prompts])
        settings |= {"prompts": len(prompts), "prompts_sha256": _digest(text.encode())}
    begun = Corpus.open(folder, target) if Corpus.exists(folder) else None
    if begun is not None:
        _agree(begun, {**settings, "capture": states})
        keep_states = keep_states and begun.featured == len(begun)
    writer = Writer(
        target, seed=seed, capture=states if keep_states else (), prompts=prompts, slots=slots, limit=limit,
        answer_tokens=answer_tokens,
    )  # fmt: skip
    corpus = Corpus.create(folder, target, states, next=0, **settings) if begun is None else begun
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    with (
        corpus.writing(),
        tqdm(
            total=tokens, initial=corpus.tokens, unit=" tokens", unit_scale=True, disable=not progress, file=sys.stderr
        ) as bar,
    ):
        while corpus.tokens < tokens and time.monotonic() < end:
            first = int(corpus.about["writer"]["next"])
            last = first + block if prompts is None else min(first + block, len(prompts))
            if first >= last:
                break
            finished: dict[int, list[Conversation]] = {}
            for number, conversations in writer.block(range(first, last)):
                finished[number] = conversations
                bar.update(sum(len(c.tokens) for c in conversations))
            corpus.remember(next=last)
            corpus.append([c for number in range(first, last) for c in finished[number]])
    return corpus


def fill_features(corpus: Corpus, target: Any, *, progress: bool = True) -> None:
    """Compute the states of conversations that came without, one forward each, and keep them in the corpus.

    Raises:
        TrainingError: states that are there are not what this target computes; another process writes there.
    """
    import torch
    from tqdm import tqdm

    from eagle_core.training.writer import STATE_LIMIT

    def states(tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens.astype(np.int64)).to(target.device)
        session = target.session(len(ids), corpus.capture)
        found = session.prefill(ids)[1].float().clamp(-STATE_LIMIT, STATE_LIMIT).half().cpu().numpy()
        target.release(session)
        return found

    if corpus.featured:
        first = int(corpus.array("lengths")[0])
        mine = states(corpus.array("tokens")[:first]).astype(np.float32)
        kept = np.asarray(corpus.array("features")[:first], np.float32)
        width = target.hidden_size  # the last entry is the state the LM head reads: of the same size everywhere
        error = np.abs(mine[:-1, -width:] - kept[:-1, -width:]).mean() / (np.abs(kept[:-1, -width:]).mean() + 1e-6)
        if not error < 0.1:
            raise TrainingError(
                f"{corpus.folder} holds states that {target.name} does not compute (they differ by {error:.0%}): "
                "it was written by another model, or by other weights of this one."
            )
    if corpus.featured == len(corpus):
        return
    with corpus.writing(), tqdm(
        total=corpus.tokens, initial=int(corpus.about["featured_tokens"]), unit=" tokens", unit_scale=True,
        desc="states", disable=not progress, file=sys.stderr,
    ) as bar:  # fmt: skip
        tokens, offsets = corpus.array("tokens"), corpus.offsets()
        while corpus.featured < len(corpus):
            numbers = range(corpus.featured, min(corpus.featured + 32, len(corpus)))
            part = [states(tokens[offsets[i] : offsets[i + 1]]) for i in numbers]
            corpus.append_features(part)
            bar.update(sum(len(x) for x in part))


def import_text(path: Path, folder: Path, target: Any, capture: Sequence[int] = ()) -> Corpus:
    """A corpus from a NumPy archive of tokens, answer, lengths and temperature, without states. One that is there with
    this very text is left as it is.

    Raises:
        TrainingError: the file is no such archive, or holds ids that the target does not have; `folder` holds something
            else already.
    """
    states = default_states(target.num_layers, capture)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrainingError(f"{path} cannot be read as an archive of text: {error.strerror}.") from error
    record = {"source": path.name, "archive": _digest(content)}
    corpus = Corpus.open(folder, target) if Corpus.exists(folder) else None
    if corpus is not None:
        before = corpus.about["writer"]
        if "source" not in before or (len(corpus) and before.get("archive", record["archive"]) != record["archive"]):
            holds = f"text imported from {before['source']}" if "source" in before else "text that its target wrote"
            raise TrainingError(f"{folder} holds {holds}, not the text of {path}; name another folder for that.")
        _agree(corpus, {"capture": states})
        if len(corpus):
            return corpus
    new = _conversations(path, content, target)
    corpus = Corpus.create(folder, target, states, **record) if corpus is None else corpus
    with corpus.writing():
        if not len(corpus):
            corpus.remember(**record)
            corpus.append(new)
    return corpus


def _conversations(path: Path, content: bytes, target: Any) -> list[Conversation]:
    """What an archive holds."""
    keys = ("tokens", "answer", "lengths", "temperature")
    try:
        with np.load(io.BytesIO(content)) as archive:
            tokens, answer, lengths, temperature = (archive[key] for key in keys)
    except Exception as error:  # a damaged file: whatever the reader of its format raises
        raise TrainingError(
            f"{path} is no archive of {', '.join(keys)} ({type(error).__name__}: {error}); make one with --export-text."
        ) from error
    kinds = ((tokens, "iu"), (answer, "iub"), (lengths, "iu"), (temperature, "iuf"))
    whole = all(x.ndim == 1 and x.dtype.kind in kind for x, kind in kinds)
    if not whole or len(answer) != len(tokens) or len(temperature) != len(lengths) or int(lengths.sum()) != len(tokens):
        raise TrainingError(f"{path} contradicts itself: its lengths do not add up to its tokens.")
    if not len(tokens) or int(lengths.min()) < 1:
        raise TrainingError(f"{path} holds no text, or conversations without any; export it again.")
    if int(tokens.min()) < 0 or int(tokens.max()) >= target.vocab_size:
        raise TrainingError(
            f"{path} holds tokens {int(tokens.min())} … {int(tokens.max())}, and {target.name} has {target.vocab_size}:"
            " another target's text."
        )
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return [
        Conversation(tokens[a:b], answer[a:b].astype(bool), float(t))
        for a, b, t in zip(offsets[:-1], offsets[1:], temperature, strict=True)
    ]


def export_text(corpus: Corpus, path: Path) -> None:
    """The corpus without its states, as the archive that `import_text` reads."""
    small = np.uint16 if int(corpus.about["target"]["vocab_size"]) <= 1 << 16 else np.uint32
    with disk_errors(path):
        np.savez_compressed(
            path, tokens=corpus.array("tokens").astype(small), answer=np.asarray(corpus.array("answer")),
            lengths=np.asarray(corpus.array("lengths")), temperature=np.asarray(corpus.array("temperature")),
        )  # fmt: skip


def read_prompts(path: Path) -> list[list[Prompt]]:
    """The user turns of a prompts file: JSON lines, or one JSON list, of any of these forms.

        {"prompt": "…"}                                                    one turn
        {"turns": ["…", "…"]}                                              Spec-Bench
        {"messages": [{"role": "user", "content": "…"}, …]}                chat
        {"conversations": [{"from": "human", "value": "…"}, …]}            ShareGPT
        {"opening": "…"}                                                   one turn, which the target completes

    Raises:
        TrainingError: the file is missing or empty, or an entry has none of these forms; names the entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} cannot be read as prompts: {error}") from error
    try:
        entries = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(x) for x in text.splitlines() if x.strip()]
        )
    except ValueError as error:
        raise TrainingError(f"{path} is neither a JSON list nor JSON lines: {error}") from error
    found = []
    for number, entry in enumerate(entries, 1):
        entry = entry if isinstance(entry, dict) else {}
        free = _OPENING_FREE if "opening" in entry else 0
        turns = entry.get("turns") or next(([entry[k]] for k in ("prompt", "opening") if entry.get(k)), None)
        for key, role, said in (("messages", "role", "content"), ("conversations", "from", "value")):
            if turns is None and isinstance(entry.get(key), list):
                turns = [m.get(said) for m in entry[key] if isinstance(m, dict) and m.get(role) in ("user", "human")]
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise TrainingError(
                f"Entry {number} of {path} has no user turns (prompt, opening, turns, messages or conversations)."
            )
        found.append([Prompt(turn, free) for turn in turns])
    if not found:
        raise TrainingError(f"{path} holds no prompts.")
    return found


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="the target: a hub id or a folder (default: the default target)")
    parser.add_argument("--tokens", type=int, default=0, help="how large the corpus shall be")
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus; one that is there is continued")
    parser.add_argument(
        "--prompts", type=Path, help="user turns: JSON lines or ShareGPT; without it the target writes them"
    )
    parser.add_argument(
        "--import-text", type=Path, metavar="FILE.npz", help="make the corpus of this text instead of writing one"
    )
    parser.add_argument("--export-text", type=Path, metavar="FILE.npz", help="also write the text without states here")
    parser.add_argument(
        "--no-states", action="store_true", help="keep no captured states (training computes them once)"
    )
    parser.add_argument(
        "--capture", type=int, nargs="+", default=[], metavar="BOUNDARY",
        help="also keep the states at these, for `train --capture` (kept in any case: 2, n//2, n-3, and the last)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after the block that is in work then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0, help="conversations side by side (default: 16, on a GPU 256)")
    parser.add_argument("--limit", type=int, default=1024, help="most tokens of a conversation")
    parser.add_argument("--answer-tokens", type=int, default=300, help="most tokens of an answer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from eagle_core.bench import writable
    from eagle_core.pairs import load_target

    if args.import_text is None and args.tokens <= 0:
        raise TrainingError("Say how large the corpus shall be: --tokens N.")
    writable(args.export_text)
    prompts = read_prompts(args.prompts) if args.prompts else None
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    if args.import_text is not None:
        corpus = import_text(args.import_text, args.out, target, args.capture)
    else:
        slots = args.slots or (256 if target.device.type == "cuda" else 16)
        corpus = write(
            target, args.out, args.tokens, seed=args.seed, keep_states=not args.no_states, prompts=prompts,
            capture=args.capture, slots=slots, limit=args.limit, answer_tokens=args.answer_tokens, minutes=args.minutes,
        )  # fmt: skip
    if not args.no_states:
        fill_features(corpus, target)
    if args.export_text:
        export_text(corpus, args.export_text)
    return {"out": str(args.out), "conversations": len(corpus), "tokens": corpus.tokens, "with_states": corpus.featured}
