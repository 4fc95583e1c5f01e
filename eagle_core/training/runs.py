"""A training run, step by step; `trainer` drives it.

`Library` turns corpora on disk into batches. `Run` owns head, optimizers and counters, and knows how to make one
update, how to be saved, and how to go on from what was saved. What an update does depends on the seed and the
counters alone.
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_core.errors import TrainingError
from eagle_core.heads import POST_NORM, EagleHead, HeadConfig, default_capture
from eagle_core.training.initial import draft_vocabulary, initial_head, regress
from eagle_core.training.losses import Batch, LogitLaw, Objective, ahead, chain_steps
from eagle_core.training.muon import Muon
from eagle_core.training.store import Corpus, disk_errors, replace_file
from eagle_core.training.trainer import METHODS, Recipe

__all__ = ["Library", "Run", "check", "held_out_report"]

_PATIENCE = 60.0  # seconds for a process to see what the first one saw of a corpus that grows


def check(recipe: Recipe, target: Any, corpora: Sequence[Corpus], out: Path, *, resume: bool) -> tuple[int, ...]:
    """Everything that can be refused before any work is done. Returns the states that the head will read.

    Raises:
        TrainingError: what does not fit.
    """
    if recipe.method not in METHODS:
        raise TrainingError(f"There is no training for {recipe.method!r}; choose one of {', '.join(METHODS)}.")
    if (recipe.updates > 0) == (recipe.hours > 0):
        raise TrainingError("Say how long to train: a number of steps or hours, one of the two.")
    if resume != (there := (out / "checkpoint.pt").exists()):
        raise TrainingError(
            f"{out} already holds a run; give --resume to continue it, or another folder."
            if there
            else f"{out} holds no checkpoint to resume from."
        )
    fused = recipe.family == "eagle3"
    wanted = (recipe.capture or default_capture(target.num_layers)) if fused else (POST_NORM,)
    for corpus in corpora:
        if not {*wanted, POST_NORM} <= {*corpus.capture}:
            raise TrainingError(
                f"{corpus.folder} holds the states at boundaries {list(corpus.capture)}, and training needs"
                f" {sorted({*wanted, POST_NORM})} (-1: after the final norm);"
                " write or import the text again with these boundaries (`corpus --capture`)."
            )
    return tuple(wanted)


class Library:
    """Corpora as one list of conversations, split into a part to learn from and a held-out part.

    Every fortieth conversation is held out, whatever is added later. Its neighbours are neither learnt from nor
    counted: a conversation may quote the answer of the one before it. `grown` sees what writers have added.
    """

    def __init__(self, corpora: Sequence[Corpus], wanted: Sequence[int]) -> None:
        self.corpora = list(corpora)
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
            held += [(c, i) for i in range(n) if i % 40 == 7]
            learn += [(c, i) for i in range(n) if i % 40 not in (6, 7, 8)]
        return learn, held

    def counts(self) -> list[int]:
        return [part[3] for part in self._parts]

    def lacks(self, counts: Sequence[int]) -> str:
        """Which corpora hold fewer conversations with states than `counts` of them; empty if none does."""
        pairs = zip(self.corpora, self.counts(), counts, strict=False)
        return "; ".join(f"{c.folder} has {n} of {wanted} conversations" for c, n, wanted in pairs if n < wanted)

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
            for i in range(6, featured, 40):
                mask[offsets[i] : offsets[min(i + 3, featured)]] = False
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
        wanted = check(recipe, target, corpora, Path(out), resume=resume)
        from accelerate import Accelerator

        self.recipe, self.target, self.out = recipe, target, Path(out)
        cuda = target.device.type == "cuda"
        # What is trained stays where the target is, which need not be the device that accelerate would choose.
        self.accelerator = Accelerator(cpu=not cuda, mixed_precision="bf16" if cuda else "no", device_placement=False)
        self.main = self.accelerator.is_main_process
        self.workers = self.accelerator.num_processes
        self.texts = Library(corpora, wanted)
        self.at = Progress()
        saved = self._read_checkpoint() if resume else None
        frequencies = self.texts.frequencies(target.vocab_size)
        if int(frequencies.sum()) == 0:
            raise TrainingError("The corpus holds no answers to learn from; write more of it.")
        if saved is not None:
            ids = saved["ids"]
        else:
            ids = draft_vocabulary(frequencies, min(recipe.draft_vocab, target.vocab_size))
        self.ids = ids
        self.coverage = float(frequencies[ids].sum() / frequencies.sum())
        law = LogitLaw.of(target)
        self.started_from = saved.get("started_from", "") if saved else str(start_from or "")
        self.unmatched: list[str] = saved.get("unmatched", []) if saved else []
        if saved is not None and "config" in saved:
            self.head = _laid_out(HeadConfig(**saved["config"]), saved["head"], ids, target)
        elif saved is None and start_from is not None:
            self.head = inherit(start_from, target, recipe.family, wanted, ids, law.scale)
        else:
            self.head, self.unmatched = initial_head(
                recipe.family, target, capture=wanted, draft_ids=ids if recipe.family == "eagle3" else None,
                seed=recipe.seed, scale=law.scale,
            )  # fmt: skip
            if saved is None:
                some = [key for key in self.texts.split()[0] if self.texts.length(key) > 3][:200]
                regress(self.head, (self.texts.batch([key], 1).to(target.device) for key in some))
        row_of = torch.full((target.vocab_size,), -1)
        row_of[ids] = torch.arange(len(ids))
        bias = getattr(target.lm_head, "bias", None)
        objective = Objective(
            self.head, _rows(target.lm_head.weight, ids, target), row_of.to(target.device),
            lm_bias=None if bias is None else _rows(bias, ids, target), law=law, decay=recipe.decay,
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
            self.at = self._progress(saved)
        self.objective = self.accelerator.prepare(objective)
        self.optimizers = optimizers
        self.batches: list[list[tuple[int, int]]] = []
        self._held: list[tuple[Batch, Tensor, bool]] | None = None
        if self.main:
            with disk_errors(self.out):
                self.out.mkdir(parents=True, exist_ok=True)
            log = self.out / "log.jsonl"
            replace_file(log, _until(log, self.at.update) if saved is not None and log.exists() else b"")
            replace_file(self.out / "recipe.json", json.dumps(self.about(), indent=1).encode())

    def about(self) -> dict[str, Any]:
        """The run in words and numbers, for `recipe.json` and the model card."""
        return {
            **asdict(self.recipe),
            "target": self.target.name,
            "corpora": [
                {"folder": c.folder.name, "conversations": len(c), "tokens": c.tokens} for c in self.texts.corpora
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
            learn, _ = self.texts.split(self.at.counts)
            self.batches = _order(learn, self.texts, self._shared_recipe(), self.at.epoch)
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
            + ", ".join(f"{i} of {self.texts.corpora[c].folder.name}" for c, i in keys[:6])
            + (" …" if len(keys) > 6 else "")
        )
        self.at.batch += per_update
        return keys, name

    def _shared_recipe(self) -> Recipe:
        return replace(self.recipe, batch_tokens=max(1, self.recipe.batch_tokens // self.workers))

    def _begin_epoch(self) -> None:
        """A pass over what the first process sees now; the others wait until they see it too."""
        self.texts.grown()
        counts = torch.tensor(self.texts.counts(), device=self.target.device)
        if self.workers > 1:
            torch.distributed.broadcast(counts, 0)
        self.at.counts = tuple(counts.tolist())
        end = time.monotonic() + _PATIENCE
        while short := self.texts.lacks(self.at.counts):
            if time.monotonic() > end:
                raise TrainingError(f"This process does not see all that the first one does: {short}.")
            time.sleep(0.2)
            self.texts.grown()
        self.at.batch = 0
        self.batches = []

    def update(self) -> dict[str, Any]:
        """One optimizer update. Returns its numbers: loss, accuracy of each chain step, tokens.

        Raises:
            TrainingError: the loss or its gradient is not finite; names the batch. Nothing was changed by it.
        """
        started = time.perf_counter()
        progress, recipe = self.progress(), self.recipe
        keys, name = self._next()
        batch = self.texts.batch(keys, recipe.row_tokens, name).to(self.target.device)
        steps = recipe.chain_length(progress)
        noise = torch.Generator().manual_seed(
            (recipe.seed * 1_000_003 + self.at.update) * 64 + self.accelerator.process_index
        )
        self.objective.train()
        with self.accelerator.autocast():
            tally = self.objective(batch, steps, noise)
        loss = float(tally.loss.detach())
        self._stop_unless_finite("loss", loss, batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(tally.loss)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.head.parameters() if p.grad is not None])
        self._stop_unless_finite("gradient", float(norm), batch)
        if recipe.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self.head.parameters(), recipe.clip, norm)
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

    def _stop_unless_finite(self, what: str, value: float, batch: Batch) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                f"The {what} became {value} at step {self.at.update + 1} ({batch.name}). "
                "The last checkpoint is from before it; lower the learning rates, or look at that text, and resume."
            )

    # ------------------------------------------------------------------------------------------- what is kept

    def save(self) -> None:
        """Replace the checkpoint in one move.

        Raises:
            TrainingError: a full disk, or weights that are not finite; the last checkpoint stays.
        """
        if not self.main:
            return
        broken = [name for name, p in self.head.named_parameters() if not bool(torch.isfinite(p).all())]
        if broken:
            raise TrainingError(
                f"After step {self.at.update} {', '.join(broken)} of the head are not finite, so it is not saved. "
                "The last checkpoint is from before that; lower the learning rates and resume."
            )
        progress = {**asdict(self.at), "counts": list(self.at.counts)}
        state = {
            "method": self.recipe.method,
            "bound": self._bound(),
            "config": asdict(self.head.config),
            "unmatched": self.unmatched,
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
        saved = torch.load(self.out / "checkpoint.pt", map_location="cpu", weights_only=True)
        if METHODS[saved["method"]] != self.recipe.family:
            raise TrainingError(f"{self.out} holds a run of {saved['method']}, not of {self.recipe.method}.")
        now = self._bound()
        was = {**now, **saved.get("bound", {})}
        if now["corpora"][: len(was["corpora"])] == was["corpora"]:  # further ones may follow
            was["corpora"] = now["corpora"]
        differing = [f"{key} was {was[key]!r} and is {now[key]!r}" for key in now if was[key] != now[key]]
        if short := self.texts.lacks(saved["progress"]["counts"]):
            differing.append(short)
        if differing:
            raise TrainingError(
                f"{self.out} cannot be resumed with what it was not begun with: {'; '.join(differing)}. "
                "Give what was given then (corpora in the same order, further ones after them), or begin another run."
            )
        return dict(saved)

    def _bound(self) -> dict[str, Any]:
        """What the counters of a checkpoint, and the shape of its head, mean only together with."""
        kept = {key: getattr(self.recipe, key) for key in ("draft_vocab", "seed", "batch_tokens", "everywhere")}
        corpora = [corpus.folder.resolve().name for corpus in self.texts.corpora]
        return {**kept, "capture": list(self.texts.wanted), "workers": self.workers, "corpora": corpora}

    def _progress(self, saved: dict[str, Any]) -> Progress:
        """Where a checkpoint stands; at the start of a new pass where the text is not the one its pass went over."""
        at = Progress(**{**saved["progress"], "counts": tuple(saved["progress"]["counts"])})
        added = self._bound()["corpora"][len(at.counts) :]
        if at.counts and (added or "bound" not in saved):
            if self.main:
                why = f"{', '.join(added)} was added" if added else "an older version held out other conversations"
                print(f"{self.out}: {why}; a new pass begins over all of the text.", file=sys.stderr)
            at = replace(at, epoch=at.epoch + 1, batch=0, counts=())
        return at

    def log(self, **line: Any) -> None:
        if self.main:
            with disk_errors(self.out), open(self.out / "log.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def held_out(self) -> list[tuple[Batch, Tensor, bool]]:
        """Held-out conversations with the target's argmax after each token; `greedy` says how they were answered."""
        if self._held is None:
            _, keys = self.texts.split()
            keys = sorted(keys, key=lambda key: (key[1], key[0]))
            held, tokens = [], 0
            for key in keys:
                if tokens >= self.recipe.held_out:
                    break
                batch = self.texts.batch([key], 1).to(self.target.device)
                tokens += batch.tokens.shape[1]
                with torch.no_grad():
                    best = self.target.lm_head(batch.final[0].to(self.target.dtype)).argmax(-1).to(self.target.device)
                held.append((batch, best, self.texts.temperature(key) == 0))
            self._held = held
        return self._held

    def evaluate(self) -> dict[str, Any]:
        return held_out_report(self.head, self.held_out(), max(5, self.recipe.chain))


def _until(log: Path, update: int) -> bytes:
    """The whole lines of a log up to an update. A kill leaves lines past the checkpoint, a full disk half a line."""
    kept = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("step", update + 1) <= update:
            kept.append(line + "\n")
    return "".join(kept).encode()


def _rows(weight: Tensor, ids: Tensor, target: Any) -> Tensor:
    """Rows of the target's LM head as float32 beside the head; a target may be spread over several devices."""
    return weight.detach()[ids.to(weight.device)].float().to(target.device)


def _laid_out(config: HeadConfig, weights: Mapping[str, Tensor], ids: Tensor, target: Any) -> EagleHead:
    """A head to train, with these weights. An embedding of its own, which public heads took over, stays as it is."""
    fused = config.family == "eagle3"
    head = EagleHead(
        config, own_embedding="embed_tokens.weight" in weights, own_lm_head=fused,
        draft_to_target=ids if fused else None,
    )  # fmt: skip
    head.load_state_dict({name: weight.float() for name, weight in weights.items()})
    if head.embed_tokens is not None:
        head.embed_tokens.requires_grad_(False)
    head.to(target.device)
    head.borrow(target.embedding, target.lm_head)
    return head


@torch.no_grad()
def inherit(
    source: Path | str, target: Any, family: str, wanted: tuple[int, ...], ids: Tensor, scale: float
) -> EagleHead:
    """The head at `source` as one to train: its weights and flags, but a draft vocabulary of `ids`.

    Args:
        wanted: the states that the corpora hold for it.
        scale: the factor between what the target's LM head says and its logits. Rows of ids that the old head could
            not draft begin as the target's.

    Raises:
        TrainingError: a head that cannot be trained here. CheckpointError: no sound head at `source`.
    """
    from eagle_core.checkpoints import load_head

    old = load_head(source, target)
    config, fused = old.config, family == "eagle3"
    differing = []
    if config.family != family:
        differing.append(f"it is a head of {config.family}, and this run is of {family}")
    elif config.capture != wanted:
        differing.append(f"it reads the states at {list(config.capture)}, and this run at {list(wanted)} (--capture)")
    if config.hidden_size != target.hidden_size:
        differing.append(f"its hidden_size is {config.hidden_size}, the target's {target.hidden_size}")
    if not fused and old.lm_head is not None:
        differing.append("it has an lm_head of its own, where EAGLE-1/2 is trained on the target's")
    if differing:
        raise TrainingError(f"The head at {source} cannot be continued: {'; '.join(differing)}.")
    weights = {name: weight for name, weight in old.state_dict().items() if name != "lm_head.weight"}
    if fused:
        rows = _rows(target.lm_head.weight, ids, target) * (scale / config.logit_scale)
        if old.lm_head is not None:
            known = torch.arange(target.vocab_size) if old.draft_to_target is None else old.draft_to_target.cpu()
            row = torch.full((target.vocab_size,), -1)
            row[known] = torch.arange(len(known))
            at = row[ids].to(target.device)
            rows[at >= 0] = old.lm_head.weight[at[at >= 0]].float()
        weights["lm_head.weight"] = rows
        config = replace(config, draft_vocab_size=len(ids))
    return _laid_out(config, weights, ids, target)


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
