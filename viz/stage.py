"""From events to the stage: compact JSON that the page only has to draw.

The stage keeps what it was told, so a message carries what is new, plus the last few events again: a dropped
update loses nothing. Whatever needs judgement (fates, why a node is where it is, running numbers, which piece of
text a token became) is decided here; the browser owns geometry and time.

    teller = Teller("a1b2", ask="Why a tree?")
    teller.tell([start])            → '{"run":"a1b2","role":"answer","ask":"Why a tree?","events":[{"n":0,…}]}'
    teller.tell([step, step])       → '{"run":"a1b2",…,"events":[{"n":1,…},{"n":2,…}]}'

A step is columnar: row i of every list is node i, the candidates that were left out follow the nodes.

    t ids · x labels · p parents · c confidence · v value · e expanded · w index into `why.REASONS`   (all rows)
    s index into `events.SOURCES`, −1 for none; absent where a method has one source (all rows)
    q target probability · f index into `events.FATES` · g, gx, gp the target's draw: id, label, probability  (nodes)

Text of models never meets HTML here: "<" travels as \\u003c, and the stage writes it as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from eagle_core.drafters import METHODS
from eagle_core.events import FATES, SOURCES, Candidate, Event, Finish, Node, Start, Step
from eagle_core.metrics import SHORTEST, Run, measure
from viz.why import reason, reasons
from viz.words import knows_the_dice, target_name

__all__ = ["OVERLAP", "Teller", "message", "pieces"]

OVERLAP = 1
"""Events told again with every message."""

_FATE = {name: i for i, name in enumerate(FATES)}


class Teller:
    """Tells one run to the stage, event by event.

    Args:
        run: a name unique on the page; events of the same run belong together.
        ask: what the visitor wrote; None for a run whose prompt is only known as the target saw it.
        role: "answer", or "plain" for a reference run.
        of: the answer to which a reference run belongs.
        title: a name for people, where there is one.
    """

    def __init__(
        self, run: str, *, ask: str | None = None, role: str = "answer", of: str | None = None, title: str | None = None
    ) -> None:
        self._head = {"run": run, "role": role, "of": of, "ask": ask, "title": title}
        self._events: list[Event] = []
        self._told: list[dict[str, Any]] = []
        self._emitted = 0
        self._milliseconds = 0.0

    @property
    def events(self) -> list[Event]:
        """Everything told so far."""
        return self._events

    def tell(self, events: Iterable[Event], **extra: Any) -> str:
        """The message for these new events. `extra` fields (a note, a verdict) travel along."""
        fresh = [self._compact(event) for event in events]
        last = [*self._told, *fresh][-(OVERLAP + len(fresh)) :]
        self._told = last[-OVERLAP:]
        return message(**self._head, events=last, **extra)

    def recall(self, told: list[dict[str, Any]], **extra: Any) -> str:
        """The message for a whole run that was told before: `told` are its events as they went out."""
        return message(**self._head, events=told, whole=True, **extra)

    def _compact(self, event: Event) -> dict[str, Any]:
        n = len(self._events)
        self._events.append(event)
        if isinstance(event, Start):
            return self._start(n, event)
        if isinstance(event, Step):
            return self._step(n, event)
        return self._finish(n, event)

    def _start(self, n: int, event: Start) -> dict[str, Any]:
        return {
            "n": n,
            "kind": "start",
            "method": event.method,
            "sampling": event.sampling,
            "settings": event.settings,
            "coupled": knows_the_dice(event),
            "uses": METHODS[event.method].settings if event.method in METHODS else list(event.settings),
            "prompt": event.prompt_text,
            "prompt_tokens": len(event.prompt_ids),
            "text": pieces([event.first.text][: len(event.emitted)], event.text),
            "ids": event.emitted,
            "ms": _short(event.prefill_ms),
            "note": _note(event.pair.get("prompt")),
            "target": target_name(event.pair),
            "where": f"{event.device} · {event.dtype} · {event.machine}",
        }

    def _step(self, n: int, event: Step) -> dict[str, Any]:
        rows: list[Node | Candidate] = [*event.nodes, *event.dropped]
        nodes = event.nodes
        start = self._events[0]
        labels = [nodes[i].text for i in event.accepted[1:]] + [event.bonus.text]
        self._emitted += len(event.emitted)
        self._milliseconds += sum(event.timing.values())
        told = {
            "n": n,
            "kind": "step",
            "at": event.position,
            "t": [r.token for r in rows],
            "x": [r.text for r in rows],
            "p": [r.parent for r in rows],
            "c": [_short(r.confidence) for r in rows],
            "v": [_short(r.value) for r in rows],
            "e": [int(r.expanded) for r in rows],
            "w": reasons(event),
            "q": [_short(r.target_p) for r in nodes],
            "f": [_FATE[r.fate] for r in nodes],
            "g": [r.draw for r in nodes],
            "gx": [r.draw_text for r in nodes],
            "gp": [_short(r.draw_p) for r in nodes],
            "floor": _short(min((r.value for r in nodes[1:]), default=1.0)),
            "a": event.accepted,
            "bonus": [event.bonus.token, event.bonus.text, _short(event.bonus.p), reason("bonus")],
            "top": [[c.token, c.text, _short(c.p)] for c in event.top],
            "text": pieces(labels[: len(event.emitted)], event.text),
            "ids": event.emitted,
            "ms": [_short(event.timing.get(k, 0.0)) for k in ("draft_ms", "verify_ms", "other_ms")],
            "fw": event.forwards,
            "tau": _short(self._emitted / (event.index + 1)),
            "tps": _short(1000 * self._emitted / self._milliseconds) if self._milliseconds > SHORTEST else None,
        }
        if any(r.source for r in rows):
            told["s"] = [SOURCES.index(r.source) if r.source else -1 for r in rows]
        if not isinstance(start, Start) or event.settings != start.settings:
            told["settings"] = event.settings
        return told

    def _finish(self, n: int, event: Finish) -> dict[str, Any]:
        numbers = measure(
            Run.collect(self._events), "tau", "steps", "tokens", "drafted", "accepted", "tokens_per_second"
        )
        return {
            "n": n,
            "kind": "finish",
            "reason": event.reason,
            "text": event.text,
            "note": event.note,
            "seconds": _short(event.seconds),
            "numbers": {
                name: value if isinstance(value, int) or value is None else _short(value)
                for name, value in numbers.items()
            },
        }


def _note(prompt: Any) -> str | None:
    """What the engine has to say of how it read the prompt; a trace from elsewhere may hold anything there."""
    note = prompt.get("note") if isinstance(prompt, dict) else None
    return note if isinstance(note, str) else None


def message(**fields: Any) -> str:
    """A message for the stage: JSON that is safe inside HTML and JavaScript, without empty fields."""
    text = json.dumps(
        {k: v for k, v in fields.items() if v is not None}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def pieces(labels: Sequence[str], text: str) -> list[str]:
    """Which part of `text` each token became; together they are exactly `text`.

    Most tokens are their label. One that is only part of a character becomes nothing, and the token that
    completes the character becomes all of it; what no label explains goes to the last such token.

    >>> pieces([" a", "0xF0 9F", "0x98 80", " b"], " a😀 b")
    [' a', '', '😀', ' b']
    """
    out = [""] * len(labels)
    done, open_ = 0, -1  # characters of text given out; last token still without any
    for i, label in enumerate(labels):
        at = text.find(label, done) if label else -1
        if at < 0 or (at > done and open_ < 0):
            open_ = i
            continue
        if at > done:
            out[open_] = text[done:at]
        out[i] = label
        done, open_ = at + len(label), -1
    if done < len(text) and labels:
        out[open_ if open_ >= 0 else -1] += text[done:]
    return out


def _short(x: float) -> float:
    """Four digits that matter: what a screen can show. What is less than one stays less than one."""
    short = float(f"{x:.4g}")
    return 0.9999 if x < 1 <= short else short
