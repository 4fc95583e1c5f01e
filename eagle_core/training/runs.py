"""A training run, step by step; `trainer` drives it.

`Library` turns corpora on disk into batches. `Run` owns head, optimizers and counters, and knows how to make one
update, how to be saved, and how to go on from what was saved. What an update does depends on the seed and the
counters alone.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_core.errors import TrainingError
from eagle_core.heads import POST_NORM, EagleHead, default_capture
from eagle_core.training.initial import draft_vocabulary, initial_head, regress
from eagle_core.training.losses import Batch, Objective, ahead, chain_steps
from eagle_core.training.muon import Muon
from eagle_core.training.store import Corpus, disk_errors, replace_file
from eagle_core.training.trainer import METHODS, Recipe

__all__ = ["Library", "Run", "held_out_report"]


class Library:
    """Corpora as one list of conversations, split into a part to learn from and a held-out part.

    Every fortieth conversation is held out, whatever is added later. `grown` sees what writers have added.
    """

    def __init__(self, corpora: Sequence[Corpus], wanted: Sequence[int]) -> None:
        self.corpora = list(corpora)
        for corpus in self.corpora:
            missing = [j for j in wanted if j not in corpus.capture]
            if missing:
                raise TrainingError(
                    f"{corpus.folder} holds the states at boundaries {list(corpus.capture)},"
                    f" and the head reads {list(wanted)};"
                    " write or import the text again with these boundaries."
                )
        self.wanted = tuple(wanted)
        self.grown()

    def grown(self) -> int:
        """Look again. Returns the number of conversations, which names this state of the corpora."""
        self._parts = []
        for corpus in self.corpora:
            corpus.refresh()
            arrays = {kind: corpus.array(kind) for kind in ("tokens", "answer", "temperature", "features")}
            self._parts.append((corpus, arrays, corpus.offsets(), corpus.featured))
        return sum(part[3] for part in self._parts)

    def split(self, counts: Sequence[int] | None = None) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(corpus, conversation) to learn from and held out, of the first `counts` of each corpus."""
        counts = counts or self.counts()
        learn: list[tuple[int, int]] = []
        held: list[tuple[int, int]] = []
        for c, n in enumerate(counts):
            for i in range(n):
                (held if i % 40 == 7 else learn).append((c, i))
        return learn, held

    def counts(self) -> list[int]:
        return [part[3] for part in self._parts]

    def length(self, key: tuple[int, int]) -> int:
        offsets = self._parts[key[0]][2]
        return int(offsets[key[1] + 1] - offsets[key[1]])

    def temperature(self, key: tuple[int, int]) -> float:
        return float(self._parts[key[0]][1]["temperature"][key[1]])

    def frequencies(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each id was written in answers to learn from."""
        counts = np.zeros(vocab_size, np.int64)
        for _, arrays, offsets, featured in self._parts:
            end = offsets[featured]
            mask = arrays["answer"][:end].astype(bool)
            for i in range(7, featured, 40):
                mask[offsets[i] : offsets[i + 1]] = False
            counts += np.bincount(arrays["tokens"][:end][mask], minlength=vocab_size)
        return torch.from_numpy(counts)

    def batch(self, keys: Sequence[tuple[int, int]], row_tokens: int, name: str = "") -> Batch:
        """Pack conversations into rows, in order."""
        rows: list[list[tuple[int, int]]] = []
        room = 0
        for key in keys:
            n = self.length(key)
            if n > room or not rows:
                rows.append([])
                room = max(row_tokens, n)
            rows[-1].append(key)
            room -= n
        t = max(sum(self.length(key) for key in row) for row in rows)
        hidden = int(self.corpora[0].about["target"]["hidden_size"])
        tokens, segment, position = (np.zeros((len(rows), t), np.int64) for _ in range(3))
        segment -= 1
        answer = np.zeros((len(rows), t), bool)
        features = np.zeros((len(rows), t, len(self.wanted) * hidden), np.float16)
        final = np.zeros((len(rows), t, hidden), np.float16)
        for r, row in enumerate(rows):
            at = 0
            for s, (c, i) in enumerate(row):
                corpus, arrays, offsets, _ = self._parts[c]
                a, b = int(offsets[i]), int(offsets[i + 1])
                here = slice(at, at + b - a)
                tokens[r, here], answer[r, here] = arrays["tokens"][a:b], arrays["answer"][a:b]
                segment[r, here], position[r, here] = s, np.arange(b - a)
                states = np.asarray(arrays["features"][a:b]).reshape(b - a, -1, hidden)
                features[r, here] = states[:, [corpus.capture.index(j) for j in self.wanted]].reshape(b - a, -1)
                final[r, here] = states[:, corpus.capture.index(POST_NORM)]
                at += b - a
        t_, s_, p_, a_, f_, e_ = map(torch.from_numpy, (tokens, segment, position, answer, features, final))
        return Batch(t_, s_, p_, a_, f_, e_, name)


def _order(
    learn: Sequence[tuple[int, int]], library: Library, recipe: Recipe, epoch: int
) -> list[list[tuple[int, int]]]:
    """The batches of one pass over the corpus, the same for the same seed, pass and conversations."""
    order = np.random.default_rng([recipe.seed, epoch]).permutation(len(learn))
    batches: list[list[tuple[int, int]]] = []
    room = 0
    for j in order:
        if room <= 0:
            batches.append([])
            room = recipe.batch_tokens
        batches[-1].append(learn[j])
        room -= library.length(learn[j])
    return batches


@dataclass(slots=True)
class Progress:
    """Where a run stands; everything of a checkpoint besides tensors."""

    update: int = 0
    epoch: int = 0
    batch: int = 0  # within the epoch
    tokens: int = 0
    seconds: float = 0.0
    counts: tuple[int, ...] = ()  # conversations of each corpus that the epoch is drawn from


class Run:
    """One training run in `out`. `train` makes one and drives it; tests step it by hand."""

    def __init__(
        self,
        recipe: Recipe,
        target: Any,
        corpora: Sequence[Corpus],
        out: Path,
        *,
        resume: bool = False,
        start_from: Path | str | None = None,
    ) -> None:
        if recipe.method not in METHODS:
            raise TrainingError(f"There is no training for {recipe.method!r}; choose one of {', '.join(METHODS)}.")
        if (recipe.updates > 0) == (recipe.hours > 0):
            raise TrainingError("Say how long to train: a number of steps or hours, one of the two.")
        from accelerate import Accelerator

        self.recipe, self.target, self.out = recipe, target, Path(out)
        cuda = target.device.type == "cuda"
        self.accelerator = Accelerator(cpu=not cuda, mixed_precision="bf16" if cuda else "no")
        self.main = self.accelerator.is_main_process
        self.workers = self.accelerator.num_processes
        fused = recipe.family == "eagle3"
        wanted = (recipe.capture or default_capture(target.num_layers)) if fused else (POST_NORM,)
        self.library = Library(corpora, wanted)
        self.at = Progress()
        saved = self._read_checkpoint() if resume else None
        if saved is None and (self.out / "checkpoint.pt").exists() and not resume:
            raise TrainingError(f"{self.out} already holds a run; give --resume to continue it, or another folder.")
        frequencies = self.library.frequencies(target.vocab_size)
        if int(frequencies.sum()) == 0:
            raise TrainingError("The corpus holds no answers to learn from; write more of it.")
        if saved is not None:
            ids = saved["ids"]
        else:
            ids = draft_vocabulary(frequencies, min(recipe.draft_vocab, target.vocab_size))
        self.ids = ids
        self.coverage = float(frequencies[ids].sum() / frequencies.sum())
        self.head, self.unmatched = initial_head(
            recipe.family, target, capture=wanted, draft_ids=ids if fused else None, seed=recipe.seed
        )
        self.started_from = saved.get("started_from", "") if saved else str(start_from or "")
        if start_from is not None and saved is None:
            inherit(self.head, start_from, target)
        elif saved is None:
            some = [key for key in self.library.split()[0] if self.library.length(key) > 3][:200]
            regress(self.head, (self.library.batch([key], 1).to(target.device) for key in some))
        row_of = torch.full((target.vocab_size,), -1)
        row_of[ids] = torch.arange(len(ids))
        where = ids.to(target.device)
        bias = getattr(target.lm_head, "bias", None)
        objective = Objective(
            self.head, target.lm_head.weight.detach()[where].float(), row_of.to(target.device),
            lm_bias=None if bias is None else bias.detach()[where].float(), decay=recipe.decay,
            token_weight=recipe.token_weight, noise=recipe.feature_noise, everywhere=recipe.everywhere,
        )  # fmt: skip
        output = [p for n, p in self.head.named_parameters() if n.startswith("lm_head")]
        inner = [p for n, p in self.head.named_parameters() if not n.startswith("lm_head")]
        groups = [{"params": [p for p in inner if p.ndim != 2], "lr": recipe.rate}]
        if output:
            groups.append({"params": output, "lr": recipe.head_rate})
        optimizers: list[torch.optim.Optimizer] = [
            Muon(
                [p for p in inner if p.ndim == 2],
                lr=recipe.matrix_rate,
                iterations=recipe.muon_iterations,
                block=recipe.muon_block,
            ),
            torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        # Rates and the like are this recipe's, also where moments and momenta come from a checkpoint.
        settings = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
        self.rates = [[float(group["lr"]) for group in groups_] for groups_ in settings]
        if saved is not None:
            self.head.load_state_dict(saved["head"])
            for optimizer, state, mine in zip(optimizers, saved["optimizers"], settings, strict=True):
                optimizer.load_state_dict(state)
                for group, setting in zip(optimizer.param_groups, mine, strict=True):
                    group.update(setting)
            self.at = Progress(**{**saved["progress"], "counts": tuple(saved["progress"]["counts"])})
        self.objective = self.accelerator.prepare(objective)
        self.optimizers = optimizers
        self.batches: list[list[tuple[int, int]]] = []
        self._held: list[tuple[Batch, Tensor, bool]] | None = None
        if self.main and saved is None:
            with disk_errors(self.out):
                self.out.mkdir(parents=True, exist_ok=True)
                (self.out / "log.jsonl").write_text("")
            replace_file(self.out / "recipe.json", json.dumps(self.about(), indent=1).encode())

    def about(self) -> dict[str, Any]:
        """The run in words and numbers, for `recipe.json` and the model card."""
        return {
            **asdict(self.recipe),
            "target": self.target.name,
            "corpora": [
                {"folder": c.folder.name, "conversations": len(c), "tokens": c.tokens} for c in self.library.corpora
            ],
            "coverage": round(self.coverage, 4),
            "parameters": sum(p.numel() for p in self.head.parameters()),
            "began_as_noise": self.unmatched,
            "started_from": self.started_from,
        }

    def progress(self) -> float:
        """0 at the start of the run, 1 at its end; the same on every worker."""
        if self.recipe.updates:
            return min(1.0, self.at.update / self.recipe.updates)
        done = torch.tensor(self.at.seconds / (self.recipe.hours * 3600), device=self.target.device)
        if self.workers > 1:
            torch.distributed.broadcast(done, 0)
        return min(1.0, float(done))

    def _next(self) -> tuple[list[tuple[int, int]], str]:
        """This worker's conversations of the next update, and their name."""
        per_update = self.workers
        if not self.at.counts:
            self._begin_epoch()
        if not self.batches:
            learn, _ = self.library.split(self.at.counts)
            self.batches = _order(learn, self.library, self._shared_recipe(), self.at.epoch)
        if self.at.batch + per_update > len(self.batches):
            if len(self.batches) < per_update:
                raise TrainingError(
                    f"The corpus makes {len(self.batches)} batches for {per_update} devices; write more of it."
                )
            self.at.epoch += 1
            self._begin_epoch()
            return self._next()
        keys = self.batches[self.at.batch + self.accelerator.process_index]
        name = (
            f"pass {self.at.epoch + 1}, batch {self.at.batch + 1}: conversations "
            + ", ".join(f"{i} of {self.library.corpora[c].folder.name}" for c, i in keys[:6])
            + (" …" if len(keys) > 6 else "")
        )
        self.at.batch += per_update
        return keys, name

    def _shared_recipe(self) -> Recipe:
        return replace(self.recipe, batch_tokens=max(1, self.recipe.batch_tokens // self.workers))

    def _begin_epoch(self) -> None:
        self.library.grown()
        counts = torch.tensor(self.library.counts(), device=self.target.device)
        if self.workers > 1:
            torch.distributed.broadcast(counts, 0)
        self.at.counts = tuple(counts.tolist())
        self.at.batch = 0
        self.batches = []

    def update(self) -> dict[str, Any]:
        """One optimizer update. Returns its numbers: loss, accuracy of each chain step, tokens.

        Raises:
            TrainingError: the loss is not a number; names the batch. Nothing was changed by it.
        """
        started = time.perf_counter()
        progress, recipe = self.progress(), self.recipe
        keys, name = self._next()
        batch = self.library.batch(keys, recipe.row_tokens, name).to(self.target.device)
        steps = recipe.chain_length(progress)
        noise = torch.Generator().manual_seed(
            (recipe.seed * 1_000_003 + self.at.update) * 64 + self.accelerator.process_index
        )
        self.objective.train()
        with self.accelerator.autocast():
            tally = self.objective(batch, steps, noise)
        loss = float(tally.loss.detach())
        if not math.isfinite(loss):
            raise TrainingError(
                f"The loss became {loss} at step {self.at.update + 1} ({batch.name}). "
                "The last checkpoint is from before it; lower the learning rates, or look at that text, and resume."
            )
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(tally.loss)
        if recipe.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip)
        factor = recipe.rate_factor(progress, self.at.update)
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
        self.at.update += 1
        tokens = int((batch.segment >= 0).sum())
        self.at.tokens += tokens * self.workers
        self.at.seconds += time.perf_counter() - started
        return {
            "loss": loss,
            "agree": [int(x) for x in tally.agree],
            "count": [int(x) for x in tally.count],
            "parts": {key: float(value) for key, value in tally.parts.items()},
            "rate_factor": factor,
        }

    # ------------------------------------------------------------------------------------------- what is kept

    def save(self) -> None:
        """Replace the checkpoint in one move."""
        if not self.main:
            return
        progress = {**asdict(self.at), "counts": list(self.at.counts)}
        state = {
            "method": self.recipe.method,
            "ids": self.ids,
            "started_from": self.started_from,
            "head": self.head.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": progress,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        replace_file(self.out / "checkpoint.pt", buffer.getvalue())

    def _read_checkpoint(self) -> dict[str, Any]:
        path = self.out / "checkpoint.pt"
        if not path.exists():
            raise TrainingError(f"{self.out} holds no checkpoint to resume from.")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if METHODS[saved["method"]] != self.recipe.family:
            raise TrainingError(f"{self.out} holds a run of {saved['method']}, not of {self.recipe.method}.")
        return dict(saved)

    def log(self, **line: Any) -> None:
        if self.main:
            with disk_errors(self.out), open(self.out / "log.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def held_out(self) -> list[tuple[Batch, Tensor, bool]]:
        """Held-out conversations with the target's argmax after each token; `greedy` says how they were answered."""
        if self._held is None:
            _, keys = self.library.split()
            keys = sorted(keys, key=lambda key: (key[1], key[0]))
            held, tokens = [], 0
            for key in keys:
                if tokens >= self.recipe.held_out:
                    break
                batch = self.library.batch([key], 1).to(self.target.device)
                tokens += batch.tokens.shape[1]
                with torch.no_grad():
                    best = self.target.lm_head(batch.final[0].to(self.target.dtype)).argmax(-1)
                held.append((batch, best, self.library.temperature(key) == 0))
            self._held = held
        return self._held

    def evaluate(self) -> dict[str, Any]:
        return held_out_report(self.head, self.held_out(), max(5, self.recipe.chain))


@torch.no_grad()
def inherit(head: EagleHead, source: Path | str, target: Any) -> None:
    """Give a head the weights of a trained one. Draft vocabularies may differ: what both can draft is taken over.

    Raises:
        TrainingError: a head of another shape. CheckpointError: no sound head at `source`.
    """
    from eagle_core.checkpoints import load_head

    old = load_head(source, target)
    mine, theirs = head.state_dict(), old.state_dict()
    other = [
        name for name in mine
        if name != "lm_head.weight" and (name not in theirs or theirs[name].shape != mine[name].shape)
    ]  # fmt: skip
    if other or old.config.capture != head.config.capture:
        raise TrainingError(
            f"The head at {source} cannot be continued: it differs in {', '.join(other) or 'the states it reads'}."
        )
    for name, weight in theirs.items():
        if name != "lm_head.weight":
            mine[name].copy_(weight)
    if head.lm_head is None or old.lm_head is None:
        return
    everything = torch.arange(target.vocab_size, device=target.device)
    row = torch.full_like(everything, -1)
    ids = everything if old.draft_to_target is None else old.draft_to_target
    row[ids] = torch.arange(len(ids), device=target.device)
    wanted = row[everything if head.draft_to_target is None else head.draft_to_target]
    mine["lm_head.weight"][wanted >= 0] = theirs["lm_head.weight"][wanted[wanted >= 0]].float()


@torch.no_grad()
def held_out_report(head: EagleHead, held: Sequence[tuple[Batch, Tensor, bool]], steps: int) -> dict[str, Any]:
    """Agreement with the target on text the head never saw.

    Returns `agreement`: for each chain step, how often the head's first choice is the target's (over the target's
    whole vocabulary), along the text as it was written; `tau`: on greedily answered text, 1 + the mean number of
    drafts in a row, of a chain of `steps`, that are what the target says, from every position; and `predictions`.
    """
    hits, count = np.zeros(steps), np.zeros(steps)
    kept, starts = 0.0, 0
    for batch, best, greedy in held:
        t = batch.tokens.shape[1]
        alive: Tensor | None = None
        run = torch.zeros(t, device=best.device)
        for k, (_, read) in enumerate(chain_steps(head, batch, steps)):
            s = torch.nonzero(ahead(batch.answer, k + 2)[0])[:, 0]
            logits = head.logits(read[0, s].to(read.dtype))
            choice = logits.argmax(-1)
            if head.draft_to_target is not None:
                choice = head.draft_to_target[choice]
            right = choice == best[s + k + 1]
            hits[k] += int(right.sum())
            count[k] += len(s)
            if greedy:
                row = torch.zeros(t, device=best.device)
                row[s] = right.float()
                alive = row if alive is None else alive * row
                run += alive
        if greedy:
            begin = ahead(batch.answer, 2)[0]
            kept += float(run[begin].sum())
            starts += int(begin.sum())
    report: dict[str, Any] = {
        "agreement": [round(float(h / max(1, n)), 4) for h, n in zip(hits, count, strict=True)],
        "predictions": int(count[0]),
    }
    if starts:
        report["tau"] = round(1 + kept / starts, 3)
    return report
