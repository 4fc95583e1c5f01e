"""Behind the page: the line before the models, the visitors and what each one sees. No widgets, no gradio.

    visitor ──► Playground.answer ──► Line ──► Models ──► engine thread ──► batches ──► messages for the stage

A `Visit` is one visitor's conversation and the runs on their page. One visitor at a time has the models; the others
wait in a `Line` and see how many are before them. The engine runs on its own thread and never waits for a page:
events are collected and handed on at most every `BEAT` seconds. Leaving an iterator stops the work behind it.
"""

from __future__ import annotations

import contextvars
import gzip
import json
import logging
import queue
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eagle_core.errors import EagleError, InvalidRequest
from eagle_core.events import Event, dump, load_trace
from eagle_core.metrics import METRICS, Run
from eagle_core.pairs import DEFAULT
from viz.export import numbers_csv, replay, trace
from viz.lesson import page
from viz.models import Models
from viz.stage import Teller, message
from viz.verdict import beside
from viz.words import WORDS, auto, say, target_name

if TYPE_CHECKING:
    from eagle_core.compare import Verdict

__all__ = ["BEAT", "MAX_TRACE", "Line", "Models", "Playground", "Recording", "Shelf", "Visit", "batches"]

TRACES = Path(__file__).parent.parent / "assets" / "traces"
WARM = 2.0
"""Seconds after a page was opened until the models begin to load: long enough for the page to be drawn first."""

MAX_VISITS = 200
"""Visitors remembered; beyond that the oldest idle ones are forgotten."""

MAX_SHOWN = 24
"""Runs kept for a visitor, with all their events."""

MAX_ROWS = 400_000
"""Nodes and candidates of a visitor's kept runs; the newest run is kept whatever it has. A row takes some 270 bytes."""

MAX_TRACE = 32 << 20
"""Characters of an uploaded trace."""

BEAT = 0.05
"""Seconds between two messages at least: what a browser can take without falling behind."""


@dataclass
class Shown:
    """One answer on a page: its events, the reference run beside it, and the verdict."""

    teller: Teller
    ask: str | None = None
    plain: Teller | None = None
    verdict: dict[str, Any] | None = None

    @property
    def run(self) -> Run:
        return Run.collect(self.teller.events)

    @property
    def rows(self) -> int:
        """Nodes and candidates that are kept of it."""
        return sum(len(step.nodes) + len(step.dropped) for step in self.run.steps)


@dataclass
class Visit:
    """One visitor: the conversation, what the page shows of it, and the handles that stop what is under way: `cancel`
    the answer and its check, `lab` the sweep.

    `key` is what the stage shows for itself when it asks the server for something: gradio tells a component's own
    functions nothing of the session they are called from.
    """

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    talk: list[dict[str, str]] = field(default_factory=list)
    shown: dict[str, Shown] = field(default_factory=dict)
    cancel: threading.Event = field(default_factory=threading.Event)
    lab: threading.Event = field(default_factory=threading.Event)
    answering: bool = False
    checking: bool = False
    charting: bool = False
    refused: bool = False

    @property
    def idle(self) -> bool:
        return not (self.answering or self.checking)

    def start_over(self) -> None:
        self.cancel.set()
        self.talk, self.shown = [], {}

    def make_room(self) -> None:
        """Forget the oldest runs, as far as the newest ones are more than a visitor may keep."""
        rows = 0
        for n, (name, shown) in enumerate(reversed(list(self.shown.items()))):
            rows += shown.rows
            if n >= MAX_SHOWN or (n and rows > MAX_ROWS):
                del self.shown[name]


class Line:
    """Who waits for the models, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[object] = deque()
        self._moved = threading.Condition()

    @contextmanager
    def ticket(self) -> Iterator[object]:
        """A place in the line, given up when the block is left, however that happens."""
        mine = object()
        with self._moved:
            self._waiting.append(mine)
        try:
            yield mine
        finally:
            with self._moved:
                self._waiting.remove(mine)
                self._moved.notify_all()

    def ahead(self, mine: object, timeout: float) -> int:
        """How many are before this ticket, after something changed or the time is over."""
        with self._moved:
            if self._waiting.index(mine):
                self._moved.wait(timeout)
            return self._waiting.index(mine)


_DONE = object()


Item = TypeVar("Item")


def batches(events: Iterator[Item], cancel: threading.Event) -> Iterator[list[Item]]:
    """The events as they come, a list every `BEAT` at most. The engine runs on its own thread and never waits for the
    page; leaving this iterator early stops it and waits for its last forward."""
    box: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def produce() -> None:
        try:
            for event in events:
                box.put(event)
            box.put(_DONE)
        except BaseException as e:  # handed over whole, and raised again on the consumer's side
            box.put(e)

    context = contextvars.copy_context()  # a place that lends GPUs asks there whose request this is
    engine = threading.Thread(target=context.run, args=(produce,), daemon=True, name="engine")
    engine.start()
    try:
        while True:
            batch = [box.get()]
            pause = threading.Event()
            pause.wait(BEAT)
            while not box.empty():
                batch.append(box.get())
            last = batch[-1]
            if last is _DONE or isinstance(last, BaseException):
                batch.pop()
            if batch:
                yield batch
            if isinstance(last, BaseException):
                raise last
            if last is _DONE:
                return
    except BaseException:
        cancel.set()
        raise
    finally:
        engine.join()


class Playground:
    """What the handlers share: the models, the line before them, the visitors, the recordings."""

    def __init__(self, models: Models, shelf: Shelf, opening: Recording | None, eager: bool = False) -> None:
        self.models, self.shelf, self.opening, self._eager = models, shelf, opening, eager
        self.line = Line()
        self._visits: dict[str, Visit] = {}

    def visit(self, session: str) -> Visit:
        """The visit of a browser session; a new one sees the opening recording."""
        if session not in self._visits:
            for old in [name for name, v in self._visits.items() if v.idle][: max(0, len(self._visits) - MAX_VISITS)]:
                del self._visits[old]  # browsers that never said goodbye
            visit = self._visits[session] = Visit()
            if self.opening:
                visit.shown[self.opening.name] = self.opening.shown()
        return self._visits[session]

    def _holder(self, key: object) -> Visit | None:
        return next((visit for visit in self._visits.values() if visit.key == key), None)

    def welcome(self) -> None:
        """Somebody has opened the page: an eager ground brings the models in, once the page has had its share."""
        if self._eager and not self.models.loaded:
            waiting = threading.Timer(WARM, self.models.warm)
            waiting.daemon = True
            waiting.start()

    def leave(self, session: str) -> None:
        """A visitor closed the page: whatever was running for them stops."""
        if visit := self._visits.pop(session, None):
            visit.cancel.set()
            visit.lab.set()

    def stop(self, session: str) -> str:
        self.visit(session).cancel.set()
        return message(note={"key": "status.stopping"})

    def stop_lab(self, session: str) -> None:
        self.visit(session).lab.set()

    def fresh(self, session: str) -> str:
        self.visit(session).start_over()
        return message(clear=True)

    def play(self, visit: Visit, recording: Recording, at: dict[str, Any] | None = None, **extra: Any) -> str:
        """Put a recording on stage, in place of whatever was there. `extra` fields travel along."""
        visit.start_over()
        visit.shown[recording.name] = shown = recording.shown()
        return shown.teller.recall(recording.told, clear=True, at=at, visit=visit.key, **extra)

    def answer(self, visit: Visit, text: str, *, race: bool, system: str | None, **wish: Any) -> Iterator[str]:
        """Messages for the stage while one prompt is answered, and checked if `race`. `visit.refused` then says whether
        it failed."""
        visit.refused = False
        if visit.answering:
            yield message(note={"key": "status.busy"})
            return
        visit.cancel.set()  # a check of the last answer that is still under way gives place
        cancel = visit.cancel = threading.Event()
        visit.answering = True
        try:
            yield from self._in_line(visit, cancel, text, race, system, wish)
        except EagleError as e:
            visit.refused = True
            yield message(note={"key": "status.error", "text": str(e)})
        except Exception:
            logging.getLogger(__name__).exception("an answer broke off")
            visit.refused = True
            yield message(note={"key": "status.broken"})
        finally:
            if visit.cancel is cancel:
                visit.answering = False

    def _in_line(
        self,
        visit: Visit,
        cancel: threading.Event,
        text: str,
        race: bool,
        system: str | None,
        wish: dict[str, Any],
    ) -> Iterator[str]:
        with self.line.ticket() as ticket:
            while n := self.line.ahead(ticket, 1.0):
                if cancel.is_set():
                    yield message(note={"key": "status.cancelled"})
                    return
                yield message(note={"key": "status.queue", "n": n})
            for what, done in self.models.coming():
                if cancel.is_set():  # it goes on loading, for whoever asks next
                    yield message(note={"key": "status.cancelled"})
                    return
                yield message(note={"key": "status.loading", "what": what, "done": round(done, 3)})
            yield from self._answer(visit, cancel, text, race, system, wish)

    def _answer(
        self,
        visit: Visit,
        cancel: threading.Event,
        text: str,
        race: bool,
        system: str | None,
        wish: dict[str, Any],
    ) -> Iterator[str]:
        from eagle_core import Sampling, TreeSettings

        method, most = wish["method"], wish["max_new_tokens"]
        if why := self.models.pair().why_not(method):
            raise InvalidRequest(why)
        seed = wish["seed"] or 0  # an emptied box says nothing
        sampling = Sampling(wish["temperature"], wish["sampling_top_k"], wish["top_p"], wish["min_p"], seed)
        tree = _paths(wish["static_tree"]) if method == "eagle1" else None
        settings = TreeSettings(
            wish["total_token"], wish["depth"], wish["top_k"], wish["expand_by"], wish["rerank"], tree,
            coupled=wish["coupled"],
        )  # fmt: skip
        asked = [*visit.talk, {"role": "user", "content": text}]
        request: dict[str, Any] = {
            "method": method, "sampling": sampling, "settings": settings, "max_new_tokens": most,
        }  # fmt: skip
        name = uuid.uuid4().hex[:8]

        events = self.models.answer(asked, cancel, system=system, **request)
        if not visit.talk:  # the first message takes the place of the recording
            visit.shown = {}
            yield message(clear=True, note={"key": "status.prefill"})
        shown = visit.shown[name] = Shown(Teller(name, ask=text), text)
        visit.make_room()
        # A page that lost its connection comes back as a new visit, whose key the stage learns here.
        yield shown.teller.tell([], note={"key": "status.prefill"}, visit=visit.key)
        for batch in batches(events, cancel):
            told = shown.teller.tell(batch)
            if visit.shown.get(name) is shown:  # else the visitor has begun anew meanwhile, and this run is over
                yield told
        if visit.shown.get(name) is not shown:
            return
        ours = shown.run
        visit.talk = [*asked, {"role": "assistant", "content": ours.text}]
        if not race or method == "vanilla" or cancel.is_set() or not ours.starts:
            return

        visit.answering, visit.checking = False, True
        try:
            yield message(note={"key": "status.plain"})
            plain = shown.plain = Teller(f"{name}.plain", role="plain", of=name)
            found: Verdict | None = None
            for mixed in batches(self.models.check(ours.starts[0].prompt_ids, ours.ids, cancel, **request), cancel):
                events_of_plain = [item for item in mixed if isinstance(item, Event)]
                found = next((item for item in mixed if not isinstance(item, Event)), found)
                told = plain.tell(events_of_plain)
                if visit.shown.get(name) is shown:
                    yield told
            if found is None or cancel.is_set():
                shown.plain = None
                yield message(note=False)
                return
            shown.verdict = beside(ours, Run.collect(plain.events), found)
            yield shown.teller.tell([], verdict=shown.verdict)
        finally:
            visit.checking = False

    def stream(self, prompt: str, method: str, most: int, temperature: float, seed: int, *tree: int) -> Iterator[str]:
        """The events of one answer as JSON lines, for programs. A program that leaves stops its answer."""
        from eagle_core import Sampling, TreeSettings

        cancel = threading.Event()
        with self.line.ticket() as ticket:
            while self.line.ahead(ticket, 1.0):
                pass
            self.models.pair()
            settings, sampling = TreeSettings(*tree), Sampling(temperature=temperature, seed=seed)
            events = self.models.answer(
                prompt, cancel, method=method, sampling=sampling, settings=settings, max_new_tokens=most
            )
            for batch in batches(events, cancel):
                yield from map(dump, batch)

    def look(self, target: str | None, drafter: str, language: str) -> str:
        try:
            return "\n".join(self.models.look((target or "").strip(), drafter.strip(), language))
        except EagleError as e:
            return str(e)

    def load(self, target: str | None, drafter: str, language: str) -> Iterator[str]:
        target = (target or "").strip()
        name = target or DEFAULT
        with self.line.ticket() as ticket:
            while n := self.line.ahead(ticket, 1.0):
                yield say(language, "status.queue", n=n)
            try:
                for what, done in self.models.replace(target or None, drafter.strip() or None):
                    yield f"{_bar(done)}  {say(language, 'models.loading', name=name)} {say(language, what)}"
            except EagleError as e:
                yield str(e)
                return
            pair = self.models.pair()
            ready = say(language, "models.ready", name=pair.target.name, methods=", ".join(pair.methods))
            yield "\n".join([ready, *pair.failures])

    def sweep(
        self,
        visit: Visit,
        prompts: str,
        knob: str,
        values: str,
        temperatures: str,
        tokens: int,
        method: str,
        language: str,
    ) -> Iterator[tuple[str | None, Any]]:
        """Sentence and figure after every setting of a sweep; the models are free for others between two answers."""
        from eagle_core import Sampling, TreeSettings
        from viz.charts import sweep

        lines = [line.strip() for line in prompts.splitlines() if line.strip()][:8]
        try:
            grid = [(t, v) for t in _numbers(temperatures, float) for v in _numbers(values, int)]
            wishes = [(Sampling(temperature=t), TreeSettings(**{knob: value})) for t, value in grid]
        except ValueError as e:  # no numbers, or numbers that the engine would refuse
            bad = isinstance(e, EagleError)
            yield str(e) if bad else say(language, "lab.bad", text=f"{values} / {temperatures}"), None
            return
        if not grid or not lines:
            yield say(language, "lab.bad", text=f"{values} / {temperatures}"), None
            return
        cancel = visit.lab = threading.Event()
        rows: list[dict[str, Any]] = []
        about = ""
        try:
            for what, share in self.models.coming():
                yield f"{_bar(share)}  {say(language, 'status.loading', what=say(language, what))}", None
            for done, ((t, value), (sampling, settings)) in enumerate(zip(grid, wishes, strict=True)):
                slots = {"done": done, "all": len(grid), "knob": say(language, knob), "value": auto(value, language)}
                yield f"{_bar(done / len(grid))}  {say(language, 'lab.progress', t=f'{t:g}', **slots)}", None
                runs: list[Run] = []
                # The first answer of all only warms up: caches, threads, the drafter's own first forward.
                for line in [*lines[: not done], *lines]:
                    with self.line.ticket() as ticket:
                        while self.line.ahead(ticket, 0.5) and not cancel.is_set():
                            pass
                        if cancel.is_set():
                            break
                        events = self.models.answer(
                            line, cancel, method=method, sampling=sampling, settings=settings, max_new_tokens=tokens,
                            record=False,
                        )  # fmt: skip
                        runs.append(Run.collect(event for batch in batches(events, cancel) for event in batch))
                if cancel.is_set():
                    break
                pooled = Run.pool(runs[-len(lines) :])
                names = ("tau", "tokens_per_second", "step_ms")
                rows.append({"temperature": t, "value": value} | {n: METRICS[n].of(pooled) or 0.0 for n in names})
                about = about or _about(runs[0], language, prompts=len(lines))
                yield None, sweep(rows, knob, language, about)
        except EagleError as e:
            yield str(e), None
            return
        yield "\n".join(_best(rows, knob, language)) or say(language, "status.cancelled"), None

    # What the stage asks for by itself. Everything a browser sends is checked.

    def keep(self, asked: list[Any]) -> dict[str, str]:
        """A file of what is on stage: [key of the visit, kind, name of the run, index of the step, language]."""
        key, kind, name, index, language = (*asked, None, None, None, None, None)[:5]
        visit = self._holder(key)
        shown = visit.shown.get(str(name)) if visit else None
        steps = shown.run.steps if shown else ()
        if shown is None or not isinstance(index, int) or not 0 <= index < len(steps):
            return {"error": "this run is no longer on the server; record it again"}
        events, method = shown.teller.events, shown.run.starts[0].method
        if kind == "trace":
            return {"name": f"eagle-{method}-{name}.jsonl", "type": "application/x-ndjson", "text": trace(events)}
        if kind == "replay":
            plain = shown.plain.events if shown.plain else None
            spoken = language if language in WORDS else "en"
            page = replay(events, ask=shown.ask, verdict=shown.verdict, plain=plain, language=spoken)
            return {"name": f"eagle-{method}-{name}.html", "type": "text/html", "text": page}
        if kind == "csv":
            return {"name": f"eagle-{method}-{name}.csv", "type": "text/csv", "text": numbers_csv(events)}
        if kind == "graphml":
            from viz.graph import graphml

            return {
                "name": f"eagle-{method}-{name}-step{index + 1}.graphml",
                "type": "application/xml",
                "text": graphml(steps[index]),
            }
        return {"error": f"there is nothing of the kind {str(kind)[:40]!r} to keep"}

    def open_trace(self, asked: list[Any]) -> dict[str, str]:
        """A visitor's own trace, [key of the visit, file name, text]: on stage, or why not, and nothing changes."""
        key, name, text = (*asked, None, None, None)[:3]
        visit = self._holder(key)
        if visit is None or not isinstance(name, str) or not isinstance(text, str):
            return {"error": "this page is no longer known to the server; load it again"}
        if len(text) > MAX_TRACE:
            return {"error": f"this trace has {len(text) >> 20} MB, more than {MAX_TRACE >> 20}"}
        try:
            recording = Recording.of(f"{Path(name).stem[:40]}-{uuid.uuid4().hex[:6]}", load_trace(text.split("\n")))
        except EagleError as e:
            return {"error": str(e)}
        if len(recording.events) < 2:
            return {"error": "this trace holds no step"}
        return {"message": self.play(visit, recording)}

    def lesson(self, asked: list[Any]) -> dict[str, str]:
        """A page of the lesson, [key of the visit, number of the page, name of the run on stage]."""
        key, index, on_stage = (*asked, None, None, None)[:3]
        visit = self._holder(key)
        if visit is None or not isinstance(index, int):
            return {"error": "this page is no longer known to the server; load it again"}
        told = page(self.shelf, index)
        if told is None:
            return {"error": "there is no such page of the lesson, or no recording to show it on"}
        if told["run"] == on_stage and on_stage in visit.shown:
            return {"message": message(lesson=told)}
        return {"message": self.play(visit, self.shelf[told["run"]], lesson=told)}

    def charts(self, visit: Visit, language: str) -> list[Any]:
        """Figures of the last answer on the page."""
        from viz.charts import figures

        shown = next(reversed(visit.shown.values()), None)
        run = shown.run if shown else Run()
        plain = Run.collect(shown.plain.events) if shown and shown.plain else None
        verdict = shown.verdict if shown else None
        return list(figures(run, plain, language, verdict).values())


def _paths(text: str) -> tuple[tuple[int, ...], ...] | None:
    """EAGLE-1's tree as the visitor wrote it; None for the reference's own."""
    if not text.strip():
        return None
    try:
        return tuple(tuple(path) for path in json.loads(text))
    except (ValueError, TypeError) as e:
        raise InvalidRequest(f"the static tree is no JSON list of rank paths such as [[0],[1],[0,0]] ({e})") from None


def _numbers(text: str, kind: type) -> list[Any]:
    """Numbers as a visitor lists them, "auto" for -1; each once."""
    parts = text.replace(",", " ").replace("，", " ").split()
    return list(dict.fromkeys(kind("-1" if part.lower() in ("auto", "自动") else part) for part in parts))[:24]


def _bar(done: float) -> str:
    """A share as a bar of ten, for boxes that hold only text."""
    return "▰" * round(10 * done) + "▱" * (10 - round(10 * done)) + f" {100 * done:.0f} %"


def _about(run: Run, language: str, prompts: int) -> str:
    """What a picture of a sweep has to say of itself: method, pair, hardware, how much was run."""
    start = run.starts[0]
    where = f"{start.device} · {start.dtype} · {start.machine}"
    count = say(language, "lab.about", n=prompts, m=start.max_new_tokens)
    return "  ·  ".join([say(language, f"method.{start.method}"), target_name(start.pair), where, count])


def _best(rows: list[dict[str, Any]], knob: str, language: str) -> Iterator[str]:
    """For each temperature: which value was fastest, and why the largest τ need not be."""
    for t in sorted({r["temperature"] for r in rows}):
        mine = [r for r in rows if r["temperature"] == t]
        best, most = max(mine, key=lambda r: r["tokens_per_second"]), max(mine, key=lambda r: r["tau"])
        yield say(
            language, "lab.same" if best is most else "lab.best", t=f"{t:g}", knob=say(language, knob),
            value=auto(best["value"], language), tps=f"{best['tokens_per_second']:.1f}", tau=f"{best['tau']:.2f}",
            most=f"{most['tau']:.2f}", at=auto(most["value"], language), ms=f"{most['step_ms']:.0f}",
            best_ms=f"{best['step_ms']:.0f}",
        )  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """A recorded run and what the stage is told of it, computed once."""

    name: str
    events: list[Event]
    told: list[dict[str, Any]]
    ask: str | None = None
    title: str | None = None

    @classmethod
    def of(cls, name: str, events: Iterable[Event], ask: str | None = None, title: str | None = None) -> Recording:
        teller = Teller(name, ask=ask, title=title)
        told = json.loads(teller.tell(events))["events"]
        return cls(name, teller.events, told, ask, title)

    def shown(self) -> Shown:
        teller = Teller(self.name, ask=self.ask, title=self.title)
        teller.events.extend(self.events)
        return Shown(teller, self.ask)

    def opening(self) -> str:
        """The message that puts it on an empty stage."""
        return self.shown().teller.recall(self.told)


class Shelf:
    """The recorded runs of assets/traces, by the index there; each is read when it is first asked for."""

    def __init__(self, folder: Path = TRACES) -> None:
        index = folder / "index.json"
        rows = json.loads(index.read_text(encoding="utf-8")) if index.exists() else []
        self._folder = folder
        self._rows: dict[str, dict[str, str]] = {row["name"]: row for row in rows}
        self._read: dict[str, Recording] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Recording:
        if name not in self._read:
            row = self._rows[name]
            with gzip.open(self._folder / row["file"], "rt", encoding="utf-8") as lines:
                self._read[name] = Recording.of(name, load_trace(lines), row["ask"], row["title"])
        return self._read[name]

    def get(self, name: str, otherwise: Recording | None) -> Recording | None:
        return self[name] if name in self._rows else otherwise

    @property
    def titles(self) -> list[tuple[str, str]]:
        """Titles and names, in the order of the index."""
        return self.called("en")

    def called(self, language: str) -> list[tuple[str, str]]:
        """The same in a language, where the words have a title for it."""
        words = WORDS[language]
        return [(words.get(f"recording.{name}", row["title"]), name) for name, row in self._rows.items()]

    def put(self, recording: Recording) -> None:
        """Add a run that lies in no file."""
        self._rows[recording.name] = {"title": recording.title or recording.name}
        self._read[recording.name] = recording
