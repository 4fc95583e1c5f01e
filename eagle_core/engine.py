"""The loop: prefill, then draft, verify, walk, commit, tell, until a reason to stop.

`generate` is the only place that runs a method and the only place that stops. It yields events; lists, streams and
pages are consumers. A step touches the host once: everything the event needs is packed on the device and copied in
one piece (`_Packed`), after the walk and before the next draft.

    feedback ─► drafter.propose ─► session.verify ─► draws ─► walk ─► one copy ─► stop? emit, commit ─► feedback

One target gives one answer at a time: a second `generate` on it raises `EngineBusy`. Closing the iterator, an
exception in any forward, or a consumer that walks away leaves the target ready for the next answer.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from eagle_core.drafters import METHODS, Drafter, Feedback, TreeSettings
from eagle_core.errors import EngineBusy, InvalidRequest, NotFinite
from eagle_core.events import SOURCES, Candidate, Choice, Event, Finish, Node, Source, Start, Step
from eagle_core.target import Session, Target
from eagle_core.text import Labels, TextStream
from eagle_core.tree import DraftTree, root_tree
from eagle_core.verify import Noise, Sampling, draws, ratio_draws, walk

__all__ = ["generate"]

_TOP = 5  # the target's likeliest tokens told where the walk stopped


def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    method: str,
    sampling: Sampling | None = None,
    settings: TreeSettings | None = None,
    max_new_tokens: int = 128,
    stop: Sequence[str] | str = (),
    cancel: threading.Event | None = None,
    pair: dict[str, Any] | None = None,
    prompt_text: str | None = None,
    record: bool = True,
    **unknown: Any,
) -> Iterator[Event]:
    """Answer a prompt, telling everything that happens.

    The ids emitted are those that plain decoding of the same target gives: argmax at temperature 0, and at any
    temperature the same draws for the same seed (the ratio rule of `chain-sampled` keeps the distribution only).

    Args:
        target: the model that answers.
        drafter: what guesses; `METHODS[method].make` builds it.
        prompt_ids: the whole prompt, template applied; at least one id.
        method: the drafter's name in `METHODS`.
        sampling: how to draw; greedy by default.
        settings: the tree's budget; `total_token` −1 needs `costs` (`budget.measure_costs`).
        max_new_tokens: exactly so many unless something else ends the answer first.
        stop: strings that end the answer, or a single one; the text ends before the earliest one. They are looked for
            in the text, which holds no special tokens.
        cancel: set it from any thread; the answer ends before the next forward.
        pair: what `Start` should say of target and drafter, beyond what they say of themselves.
        prompt_text: the prompt as text, for the trace.
        unknown: anything else, such as `repetition_penalty` or `num_beams`, is refused by name.
        record: tell each step's nodes and candidates; False tells only what was emitted, to measure what telling
            costs: such steps have no tree and are not for traces.

    Returns:
        An iterator of one `Start`, the `Step`s, one `Finish`. Arguments are checked at once, before the first `next`.

    Raises:
        InvalidRequest: an argument cannot be honoured; nothing was run.
        EngineBusy: from the first `next`, while another answer is being generated on this target.
        NotFinite: from any `next`, where the target computed NaN or infinity.
    """
    if unknown:
        raise InvalidRequest(
            f"{', '.join(sorted(unknown))} cannot be honoured and must be left out: draws are processed by temperature,"
            " top-k, top-p and min-p alone, not by penalties or beams"
        )
    sampling, settings = sampling or Sampling(), settings or TreeSettings()
    prompt = [int(t) for t in prompt_ids]
    stop = [stop] if isinstance(stop, str) else list(stop)
    _check(target, prompt, method, settings, max_new_tokens, stop)
    answer = _Answer(target, drafter, prompt, method, sampling, settings, max_new_tokens, stop, cancel, record)
    return answer.run(pair or {}, prompt_text)


def _check(
    target: Target, prompt: list[int], method: str, settings: TreeSettings, max_new_tokens: int, stop: Sequence[str]
) -> None:
    if method not in METHODS:
        raise InvalidRequest(f"there is no method {method!r}; choose one of {', '.join(METHODS)}")
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token")
    if bad := next((t for t in prompt if not 0 <= t < target.vocab_size), None):
        raise InvalidRequest(f"the prompt holds id {bad}; {target.name} has ids 0 to {target.vocab_size - 1}")
    if max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
    if len(prompt) >= target.context:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens and {target.name} holds {target.context}, answer included;"
            " shorten the prompt"
        )
    if settings.total_token == -1 and settings.costs is None:
        raise InvalidRequest("total_token is -1 without measured costs to decide by; a pair measures them by itself")
    if stop and target.tokenizer is None:
        raise InvalidRequest("stop strings need a tokenizer, and this target has none")
    if any(not s for s in stop):
        raise InvalidRequest("an empty stop string would end every answer at once; leave it out")
    if any("\ud800" <= c <= "\udfff" for s in stop for c in s):
        raise InvalidRequest("a stop string holds bytes that are no text (half of a surrogate pair); leave them out")


class _Clock:
    """Marks on the time line of the device: wall clock on a CPU, events of the stream on CUDA (no host sync).

    Attributes:
        waits: work goes on after the call that asked for it, so that a commit's time falls into the next forward's.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.waits = device.type != "cpu"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Between two marks; on CUDA both must have passed, which the packed copy guarantees."""
        return float(start.elapsed_time(end)) if self._cuda else (end - start) * 1e3


def _awaited(flat: Tensor) -> Tensor:
    """On the host: the one place of a step that waits for the device, and says so to PyTorch's detector of waits."""
    if flat.device.type != "cuda":
        return flat.cpu()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        return flat.cpu()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class _Packed:
    """One device-to-host copy of many small tensors. Ids are exact in float32 up to 2**24, past any vocabulary."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        flat = _awaited(torch.cat([t.reshape(-1).to(torch.float32) for t in parts.values()])).tolist()
        self._parts: dict[str, list[float]] = {}
        at = 0
        for name, part in parts.items():
            self._parts[name] = flat[at : at + part.numel()]
            at += part.numel()

    def has(self, name: str) -> bool:
        return name in self._parts

    def floats(self, name: str) -> list[float]:
        return self._parts[name]

    def ints(self, name: str) -> list[int]:
        return [int(x) for x in self._parts[name]]

    def sources(self, name: str, count: int) -> list[Source | None]:
        """By name; `count` times None where the method has one source."""
        return [SOURCES[i] for i in self.ints(name)] if self.has(name) else [None] * count


class _Answer:
    """The state of one answer: everything between its `Start` and its `Finish`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: list[int],
        method: str,
        sampling: Sampling,
        settings: TreeSettings,
        max_new_tokens: int,
        stop: list[str],
        cancel: threading.Event | None,
        record: bool,
    ) -> None:
        self.target, self.drafter, self.method = target, drafter, method
        self.sampling, self.settings = sampling, settings
        self.max_new_tokens, self.stop, self.cancel, self.record = max_new_tokens, stop, cancel, record
        self.prompt = prompt
        self.room = min(len(prompt) + max_new_tokens, target.context) + drafter.nodes(settings)
        self.ids = list(prompt)
        self.labels = Labels(target.tokenizer)
        self.stream = TextStream(target.tokenizer, stop)
        self.clock = _Clock(target.device)
        self.noise = Noise(sampling.seed, target.device)
        self.totals = {"draft_ms": 0.0, "verify_ms": 0.0, "commit_ms": 0.0, "other_ms": 0.0}
        self.prefill_ms = 0.0
        self.steps = self.drafted = self.accepted = 0
        self.note: str | None = None

    def run(self, pair: dict[str, Any], prompt_text: str | None) -> Iterator[Event]:
        if not self.target.lock.acquire(blocking=False):
            raise EngineBusy(f"{self.target.name} is giving another answer; finish, cancel or close that one first")
        session: Session | None = None
        reason: str | None = None
        try:
            session = self.target.session(self.room, self.drafter.capture)
            if self._speculates:
                self.drafter.reset(self.room, self.settings, self.sampling, self.noise)
            first, features = self._prefill(session)
            if first is None:
                reason = "cancelled"
            else:
                reason = self._take(first.token)
                yield self._start(first, pair, prompt_text)
                feedback = self._first_feedback(first.token, features)
            while reason is None:
                if self._cancelled:
                    reason = "cancelled"
                else:
                    step, feedback, reason = self._step(session, feedback)
                    yield step
            yield self._finish(reason)
        finally:
            if session is not None:
                self.target.release(session)
            self.target.lock.release()

    @property
    def _cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()

    @property
    def _speculates(self) -> bool:
        """False once the text is longer than the drafter can follow; the answer then goes on plainly."""
        return len(self.ids) < self.drafter.context

    @torch.inference_mode()
    def _prefill(self, session: Session) -> tuple[Choice | None, Tensor]:
        """Read the prompt and draw the first token; None if cancelled before the prompt was read."""
        began = time.perf_counter()
        tokens = torch.tensor(self.prompt).to(self.target.device)
        logits, features = session.prefill(tokens, lambda: self._cancelled)
        if len(features) < len(self.prompt):
            return None, features
        choice, probs = draws(logits, root_tree(tokens[-1:]), len(self.prompt) - 1, self.sampling, self.noise, 0)
        self._check_finite(bool(_drawn(logits, choice, probs).isfinite()), len(self.prompt) - 1)
        token = int(choice)
        p = 1.0 if probs is None else float(probs[0, token])
        self.prefill_ms = (time.perf_counter() - began) * 1e3
        return Choice(token, self.labels[token], p), features

    def _first_feedback(self, token: int, features: Tensor) -> Feedback:
        device = self.target.device
        return Feedback(self.ids, torch.tensor(self.prompt).to(device), features, torch.tensor([token]).to(device))

    def _propose(self, feedback: Feedback) -> tuple[DraftTree, TreeSettings]:
        """A tree in which neither the target's positions nor the drafter's run out, and the settings it obeys."""
        position = feedback.position
        room = min(self.target.context, self.drafter.context) - 1 - position
        if room < 1:
            if not self._speculates and self.note is None:
                self.note = f"speculation ended at token {position + 1}: the drafter follows {self.drafter.context}"
            return root_tree(feedback.root), self.settings
        settings = self.settings.capped(room)
        return self.drafter.propose(replace(feedback, room=room), settings), settings

    @torch.inference_mode()
    def _step(self, session: Session, feedback: Feedback) -> tuple[Step, Feedback, str | None]:
        began, begin = time.perf_counter(), self.clock.mark()
        position = feedback.position
        tree, settings = self._propose(feedback)
        proposed = self.clock.mark()
        logits, features = session.verify(tree)
        verified = self.clock.mark()
        rule = ratio_draws if self.drafter.rule == "ratio" else draws
        deepest = min(self.drafter.reach(settings), len(tree) - 1)
        choices, probs = rule(logits, tree, position, self.sampling, self.noise, deepest)
        alive = walk(tree, choices)
        host = _Packed(self._told(tree, logits, choices, probs, alive))
        self._check_finite(all(host.ints("finite")), position)

        path = [i for i, lives in enumerate(host.ints("alive")) if lives]
        draw, token = host.ints("draw"), host.ints("token")
        emitted, reason = [], None
        for t in (*(token[i] for i in path[1:]), draw[path[-1]]):
            emitted.append(t)
            if (reason := self._take(t)) is not None:
                break
        committing = time.perf_counter()
        if reason is None:
            index = alive.to(torch.int8).argsort(descending=True, stable=True)[: len(path)]
            session.commit(index, len(path), straight=path[-1] == len(path) - 1)
            root = choices[index[-1:]]
            feedback = Feedback(self.ids, tree.tokens[index], features[index], root, tree, choices)
        committed = time.perf_counter()
        self.drafted += len(tree) - 1
        self.accepted += min(len(emitted), len(path) - 1)
        step = self._tell(host, position, path, emitted, settings, tree.forwards)
        draft_ms = self.clock.milliseconds(begin, proposed)
        verify_ms = self.clock.milliseconds(proposed, verified)
        commit_ms = 0.0 if self.clock.waits else (committed - committing) * 1e3
        other_ms = max((time.perf_counter() - began) * 1e3 - draft_ms - verify_ms - commit_ms, 0.0)
        spent = {"draft_ms": draft_ms, "verify_ms": verify_ms, "commit_ms": commit_ms, "other_ms": other_ms}
        step.timing.update(spent)
        for name, ms in spent.items():
            self.totals[name] += ms
        self.steps += 1
        return step, feedback, reason

    def _check_finite(self, finite: bool, position: int) -> None:
        if not finite:
            raise NotFinite(
                f"{self.target.name} computed NaN or infinity at token {position + 1} in {self._dtype}, so nothing can"
                " be drawn; its weights are damaged, or it needs a wider dtype: try float32"
            )

    @property
    def _dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    def _take(self, token: int) -> str | None:
        """Add a token to the answer; the reason to stop right after it, if there is one."""
        self.ids.append(token)
        stopped = self.stream.add(token)
        if token in self.target.eos_ids:
            return "eos"
        if stopped:
            return "stop"
        if len(self.ids) - len(self.prompt) >= self.max_new_tokens:
            return "length"
        return "context" if len(self.ids) >= self.target.context else None

    def _told(
        self, tree: DraftTree, logits: Tensor, choices: Tensor, probs: Tensor | None, alive: Tensor
    ) -> dict[str, Tensor]:
        """What the event needs, on the device."""
        parents = tree.parents.clamp_min(0)
        if probs is None:  # greedy is one-hot: a node has probability 1 if it equals its parent's draw
            target_p = choices[parents] == tree.tokens
            draw_p = torch.ones_like(target_p)
        else:
            target_p = probs[parents, tree.tokens]
            draw_p = _drawn(logits, choices, probs)
        last = (alive * torch.arange(len(tree), device=alive.device)).argmax()
        top = logits.index_select(0, last[None])[0].softmax(-1).topk(min(_TOP, logits.shape[-1]))
        told = {
            "token": tree.tokens,
            "alive": alive,
            "draw": choices,
            "draw_p": draw_p,
            "finite": _drawn(logits, choices, probs).isfinite(),
            "top": top.indices,
            "top_p": top.values,
        }
        if not self.record:
            return told
        told |= {
            "parent": tree.parents,
            "depth": tree.depth,
            "confidence": tree.confidence,
            "value": tree.value,
            "target_p": target_p,
        }
        if tree.source is not None:
            told["source"] = tree.source
        if (draftable := self.drafter.draftable) is not None:
            told["outside"] = ~draftable[choices]
        if (c := tree.candidates) is not None:
            told |= {
                "c_token": c.tokens,
                "c_parent": c.parents,
                "c_depth": c.depth,
                "c_confidence": c.confidence,
                "c_value": c.value,
                "c_node": c.node,
            }
            if c.source is not None:
                told["c_source"] = c.source
        return told

    def _tell(
        self, host: _Packed, position: int, path: list[int], emitted: list[int], settings: TreeSettings, forwards: int
    ) -> Step:
        """The event of a step. Runs on the host alone."""
        labels = self.labels
        draw, draw_p = host.ints("draw"), host.floats("draw_p")
        lived = path[1 : len(emitted) + 1]
        nodes, dropped, accepted = self._nodes(host, path, lived) if self.record else ([], [], [0])
        last = path[-1]
        return Step(
            index=self.steps,
            position=position,
            nodes=nodes,
            dropped=dropped,
            accepted=accepted,
            bonus=Choice(draw[last], labels[draw[last]], draw_p[last]),
            top=[Choice(t, labels[t], p) for t, p in zip(host.ints("top"), host.floats("top_p"), strict=True)],
            outside=[i for i, out in enumerate(host.ints("outside")) if out] if host.has("outside") else [],
            emitted=emitted,
            text=self.stream.take(),
            timing={},
            forwards=forwards,
            settings=_plain(settings),
        )

    def _nodes(self, host: _Packed, path: list[int], lived: list[int]) -> tuple[list[Node], list[Candidate], list[int]]:
        """The rows of a step: its nodes, the candidates left out, and the ids of the accepted path."""
        labels = self.labels
        token, parent, depth = host.ints("token"), host.ints("parent"), host.ints("depth")
        n = len(token)
        left_out: list[tuple[int, ...]] = []
        numbers: list[int] = []
        if host.has("c_token"):
            node, c_parent = host.ints("c_node"), host.ints("c_parent")
            numbers = [i for i, tree_node in enumerate(node) if tree_node == -1]
            id_of = dict(zip(numbers, range(n, n + len(numbers)), strict=True))
            c_token, c_depth = host.ints("c_token"), host.ints("c_depth")
            for i in numbers:
                above = c_parent[i]
                up = 0 if above < 0 else node[above] if node[above] >= 0 else id_of[above]
                left_out.append((id_of[i], c_token[i], up, c_depth[i]))
        source = [None, *host.sources("source", n)[1:]]
        every = host.sources("c_source", len(host.ints("c_token"))) if numbers else []
        c_source = [every[i] for i in numbers]
        children = [*zip(parent[1:], source[1:]), *zip((row[2] for row in left_out), c_source)]
        expanded = {up for up, drafted_by in children if drafted_by != "lookup"}
        walked, alive = set(path), {0, *lived}
        fates = [
            "root" if i == 0
            else "accepted" if i in alive
            else "past the stop" if i in walked
            else "not the draw" if parent[i] in walked
            else "parent rejected"
            for i in range(n)
        ]  # fmt: skip
        nodes = [
            Node(i, t, labels[t], up, d, c, v, 1.0 if i == 0 else p, fate, x, labels[x], x_p, i in expanded, s)
            for i, (t, up, d, c, v, p, fate, x, x_p, s) in enumerate(
                zip(
                    token,
                    parent,
                    depth,
                    host.floats("confidence"),
                    host.floats("value"),
                    host.floats("target_p"),
                    fates,
                    host.ints("draw"),
                    host.floats("draw_p"),
                    source,
                    strict=True,
                )
            )
        ]
        dropped = []
        if left_out:
            c_confidence, c_value = host.floats("c_confidence"), host.floats("c_value")
            dropped = [
                Candidate(i, t, labels[t], up, d, c_confidence[row], c_value[row], i in expanded, s)
                for row, (i, t, up, d), s in zip(numbers, left_out, c_source, strict=True)
            ]
        return nodes, dropped, [0, *lived]

    def _start(self, first: Choice, pair: dict[str, Any], prompt_text: str | None) -> Start:
        target = self.target
        described = {
            "name": target.name,
            "layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "context": target.context,
            "eos_ids": sorted(target.eos_ids),
            "not_applied": target.not_applied,
        }
        return Start(
            method=self.method,
            pair={
                "target": described | pair.get("target", {}),
                "drafter": self.drafter.describe() | pair.get("drafter", {}),
                **{k: v for k, v in pair.items() if k not in ("target", "drafter")},
            },
            sampling=asdict(self.sampling),
            settings=_plain(self.settings),
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            prompt_ids=self.prompt,
            prompt_text=prompt_text,
            first=first,
            emitted=[first.token],
            text=self.stream.take(),
            prefill_ms=self.prefill_ms,
            device=target.device.type,
            dtype=self._dtype,
            attention=target.attention,
            threads=torch.get_num_threads(),
            versions=_versions(),
            machine=_machine(target.device),
        )

    def _finish(self, reason: str) -> Finish:
        return Finish(
            reason=reason,
            text=self.stream.finish(),
            steps=self.steps,
            tokens=len(self.ids) - len(self.prompt),
            drafted=self.drafted,
            accepted=self.accepted,
            seconds=(self.prefill_ms + sum(self.totals.values())) / 1e3,
            timing={"prefill_ms": self.prefill_ms, **self.totals},
            note=self.note,
        )


def _drawn(logits: Tensor, choices: Tensor, probs: Tensor | None) -> Tensor:
    """[N, 1], what won each draw: NaN or infinite exactly where its row holds such, as both win an argmax."""
    return (logits if probs is None else probs).gather(1, choices[:, None])


@lru_cache(maxsize=64)
def _plain(settings: TreeSettings) -> dict[str, Any]:
    """The settings as JSON holds them: lists for tuples, and only what is set. Steps of equal settings share it."""

    def listed(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: listed(v) for k, v in value.items()}
        return [listed(v) for v in value] if isinstance(value, tuple) else value

    return {k: listed(v) for k, v in asdict(settings).items() if v is not None}


def _versions() -> dict[str, str]:
    import transformers

    import eagle_core

    return {
        "eagle_core": eagle_core.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@cache
def _machine(device: torch.device) -> str:
    """The processor's name, as people know it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            name = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        name = ""
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
