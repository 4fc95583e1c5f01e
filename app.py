"""The page: widgets and handlers, nothing else.

    python app.py                              opens on a recorded trace; loads the models with the first message
    python app.py --target T --drafter D       another pair: hub ids or folders

A handler turns a request into messages for the stage (`viz.stage`), which draws. The engine is imported when the
first message is sent, so the page is there at once and can be read without any model. Each visitor has a `Visit`;
one visitor at a time has the models, the others wait in a `Line` and see how many are before them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from eagle_core.errors import EagleError, InvalidRequest
from eagle_core.events import Event, dump, load_trace
from eagle_core.metrics import Run
from eagle_core.pairs import DEFAULT, PRESETS
from viz.export import numbers_csv, parts, replay, trace
from viz.stage import Teller, message
from viz.verdict import beside
from viz.words import LANGUAGES, WORDS, say

if TYPE_CHECKING:
    from eagle_core import Pair

STAGE = Path(__file__).parent / "assets" / "stage"
TRACES = Path(__file__).parent / "assets" / "traces"
USES: dict[str, tuple[str, ...]] = {
    "vanilla": (),
    "lookup": ("total_token", "depth"),
    "chain": ("total_token", "depth"),
    "chain-sampled": ("total_token", "depth"),
    "eagle1": ("depth", "static_tree"),
    "eagle2": ("total_token", "depth", "top_k", "expand_by", "rerank"),
    "eagle3": ("total_token", "depth", "top_k", "expand_by", "rerank"),
}
"""Which knobs of the tree each method reads: `METHODS` without importing torch; a test holds them equal."""

CHARTS = ("length", "histogram", "acceptance", "calibration", "time", "race", "size")
"""Charts below the stage, the names of `viz.charts.CHARTS`; plotly is imported when they are first looked at."""

MAX_TRACE = 32 << 20
"""Characters of an uploaded trace."""

BEAT = 0.05
"""Seconds between two messages at least: what a browser can take without falling behind."""


# ------------------------------------------------------------------------------------------- behind the widgets


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


@dataclass
class Visit:
    """One visitor: the conversation, what the page shows of it, and the handle that stops the answer under way.

    `key` is what the stage shows for itself when it asks the server for something: gradio tells a component's own
    functions nothing of the session they are called from.
    """

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    talk: list[dict[str, str]] = field(default_factory=list)
    shown: dict[str, Shown] = field(default_factory=dict)
    cancel: threading.Event = field(default_factory=threading.Event)

    def start_over(self) -> None:
        self.cancel.set()
        self.talk, self.shown = [], {}


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


class Models:
    """The pair, loaded when it is first needed."""

    def __init__(self, target: str | None, drafter: str | None) -> None:
        self._names = target, drafter
        self._pair: Pair | None = None
        self._lock = threading.Lock()

    @property
    def loaded(self) -> bool:
        return self._pair is not None

    def pair(self) -> Pair:
        with self._lock:
            if self._pair is None:
                from eagle_core import load_pair

                self._pair = load_pair(*self._names)
            return self._pair

    def look(self, target: str, drafter: str, language: str) -> Iterator[str]:
        """What a pair is and needs, read from its files without loading weights into memory; lines of text."""
        import torch
        from transformers import AutoModelForCausalLM

        from eagle_core.checkpoints import inspect
        from eagle_core.pairs import target_config

        config = target_config(target or None)
        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        size = sum(p.numel() for p in model.parameters())
        dtype = config.dtype if torch.cuda.is_available() and config.dtype else torch.float32
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        yield say(
            language, "models.memory", name=target or config.name_or_path, parameters=round(size / 1e6),
            weights=round(size * dtype.itemsize / 1e6), dtype=str(dtype).removeprefix("torch."),
            kv=round(2 * text.num_hidden_layers * heads * width * dtype.itemsize / 1e3, 1), context=text.max_position_embeddings,
        )  # fmt: skip
        if drafter:
            facts = inspect(drafter, config)
            yield from (f"{key}: {value}" for key, value in facts.items() if value not in (None, [], {}))

    def load(self, target: str, drafter: str) -> Pair:
        """Take another pair into use; what was there stays if it cannot be loaded."""
        from eagle_core import load_pair

        pair = load_pair(target or None, drafter or None)
        with self._lock:
            self._pair = pair
        return pair


_DONE = object()


def batches(events: Iterator[Event], cancel: threading.Event) -> Iterator[list[Event]]:
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

    engine = threading.Thread(target=produce, daemon=True, name="engine")
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

    def __init__(self, models: Models, shelf: Shelf, opening: Recording | None) -> None:
        self.models, self.shelf, self.opening = models, shelf, opening
        self.line = Line()
        self._visits: dict[str, Visit] = {}

    def visit(self, request: gr.Request | None) -> Visit:
        """The visit of a browser session; a new one sees the opening recording."""
        key = str(request.session_hash) if request else ""
        if key not in self._visits:
            visit = self._visits[key] = Visit()
            if self.opening:
                visit.shown[self.opening.name] = self.opening.shown()
        return self._visits[key]

    def _holder(self, key: object) -> Visit | None:
        return next((visit for visit in self._visits.values() if visit.key == key), None)

    def leave(self, request: gr.Request) -> None:
        """A visitor closed the page: whatever was running for them stops."""
        if visit := self._visits.pop(str(request.session_hash), None):
            visit.cancel.set()

    def stop(self, request: gr.Request) -> str:
        self.visit(request).cancel.set()
        return message(note={"key": "status.stopping"})

    def fresh(self, request: gr.Request) -> str:
        self.visit(request).start_over()
        return message(clear=True)

    def play(self, visit: Visit, recording: Recording, at: dict[str, Any] | None = None) -> str:
        """Put a recording on stage, in place of whatever was there."""
        visit.start_over()
        visit.shown[recording.name] = shown = recording.shown()
        return shown.teller.recall(recording.told, clear=True, at=at, visit=visit.key)

    def answer(self, visit: Visit, text: str, *, race: bool, system: str | None, **wish: Any) -> Iterator[str]:
        """Messages for the stage while one prompt is answered, and checked if `race`."""
        cancel = visit.cancel = threading.Event()
        with self.line.ticket() as ticket:
            while n := self.line.ahead(ticket, 1.0):
                if cancel.is_set():
                    yield message(note={"key": "status.cancelled"})
                    return
                yield message(note={"key": "status.queue", "n": n})
            if not self.models.loaded:
                yield message(note={"key": "status.loading"})
            try:
                yield from self._answer(self.models.pair(), visit, cancel, text, race, system, wish)
            except EagleError as e:
                yield message(note={"key": "status.error", "text": str(e)})
                gr.Warning(str(e))

    def _answer(
        self,
        pair: Pair,
        visit: Visit,
        cancel: threading.Event,
        text: str,
        race: bool,
        system: str | None,
        wish: dict[str, Any],
    ) -> Iterator[str]:
        from eagle_core import Sampling, TreeSettings
        from eagle_core.compare import Verdict, judge

        method, most = wish["method"], wish["max_new_tokens"]
        if why := pair.why_not(method):
            yield message(note={"key": "status.error", "text": why})
            return
        sampling = Sampling(wish["temperature"], wish["sampling_top_k"], wish["top_p"], wish["min_p"], wish["seed"])
        tree = _paths(wish["static_tree"]) if "static_tree" in USES[method] else None
        settings = TreeSettings(
            wish["total_token"], wish["depth"], wish["top_k"], wish["expand_by"], wish["rerank"], tree
        )
        asked = [*visit.talk, {"role": "user", "content": text}]
        request: dict[str, Any] = {"sampling": sampling, "settings": settings, "max_new_tokens": most, "cancel": cancel}
        name = uuid.uuid4().hex[:8]

        events = pair.generate(asked, method=method, system=system, **request)
        if not visit.talk:  # the first message takes the place of the recording
            visit.shown = {}
            yield message(clear=True, note={"key": "status.prefill"})
        shown = visit.shown[name] = Shown(Teller(name, ask=text), text)
        yield shown.teller.tell([], note={"key": "status.prefill"})
        for batch in batches(events, cancel):
            yield shown.teller.tell(batch)
        ours = shown.run
        visit.talk = [*asked, {"role": "assistant", "content": ours.text}]
        if not race or method == "vanilla" or cancel.is_set() or not ours.starts:
            return

        yield message(note={"key": "status.plain"})
        plain = shown.plain = Teller(f"{name}.plain", role="plain", of=name)
        for batch in batches(pair.generate(ours.starts[0].prompt_ids, method="vanilla", **request), cancel):
            yield plain.tell(batch)
        if cancel.is_set():
            shown.plain = None
            yield message(note=None)
            return
        theirs = Run.collect(plain.events)
        if pair.drafter(method).rule == "ratio" and not sampling.greedy:
            found = Verdict(None)  # ids cannot tell
        else:
            found = judge(pair.target, ours.starts[0].prompt_ids, ours.ids, theirs.ids, sampling)
        shown.verdict = beside(ours, theirs, found)
        yield shown.teller.tell([], verdict=shown.verdict)

    def stream(self, prompt: str, method: str, most: int, temperature: float, seed: int, *tree: int) -> Iterator[str]:
        """The events of one answer as JSON lines, for programs. A program that leaves stops its answer."""
        from eagle_core import Sampling, TreeSettings

        cancel = threading.Event()
        with self.line.ticket() as ticket:
            while self.line.ahead(ticket, 1.0):
                pass
            try:
                settings, sampling = TreeSettings(*tree), Sampling(temperature=temperature, seed=seed)
                events = self.models.pair().generate(
                    prompt, method=method, sampling=sampling, settings=settings, max_new_tokens=most, cancel=cancel
                )
                for batch in batches(events, cancel):
                    yield from map(dump, batch)
            except EagleError as e:
                raise gr.Error(str(e)) from e

    def look(self, target: str | None, drafter: str, language: str) -> str:
        try:
            return "\n".join(self.models.look((target or "").strip(), drafter.strip(), language))
        except EagleError as e:
            return str(e)

    def load(self, target: str | None, drafter: str, language: str) -> Iterator[str]:
        target = (target or "").strip()
        yield say(language, "models.loading", name=target or DEFAULT)
        with self.line.ticket() as ticket:
            while self.line.ahead(ticket, 1.0):
                pass
            try:
                pair = self.models.load(target, drafter.strip())
            except EagleError as e:
                yield str(e)
                return
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
    ) -> Iterator[tuple[str, Any]]:
        """Sentence and figure after every setting of a sweep; the models are free for others between two answers."""
        from eagle_core import Sampling, TreeSettings
        from eagle_core.metrics import METRICS
        from viz.charts import sweep

        lines = [line.strip() for line in prompts.splitlines() if line.strip()][:8]
        try:
            grid = [(t, v) for t in _numbers(temperatures, float) for v in _numbers(values, int)]
        except ValueError:
            yield say(language, "lab.bad", text=f"{values} / {temperatures}"), gr.skip()
            return
        cancel = visit.cancel = threading.Event()
        rows: list[dict[str, float]] = []
        for done, (t, value) in enumerate(grid):
            yield (
                say(language, "lab.progress", done=done, all=len(grid), knob=say(language, knob), value=value, t=t),
                gr.skip(),
            )
            runs = []
            try:
                settings = TreeSettings(**{knob: value})
                for line in lines:
                    with self.line.ticket() as ticket:
                        while self.line.ahead(ticket, 0.5) and not cancel.is_set():
                            pass
                        if cancel.is_set():
                            break
                        events = self.models.pair().generate(
                            line, method=method, sampling=Sampling(temperature=t), settings=settings, max_new_tokens=tokens,
                            cancel=cancel, record=False,
                        )  # fmt: skip
                        runs.append(Run.collect(event for batch in batches(events, cancel) for event in batch))
            except EagleError as e:
                yield str(e), gr.skip()
                return
            if cancel.is_set():
                break
            pooled = Run.pool(runs)
            names = ("tau", "tokens_per_second", "step_ms")
            rows.append({"temperature": t, "value": value} | {n: METRICS[n].of(pooled) or 0.0 for n in names})  # type: ignore[dict-item]
            yield gr.skip(), sweep(rows, knob, language)
        yield "\n".join(_best(rows, knob, language)), gr.skip()

    # What the stage asks for by itself. Everything a browser sends is checked.

    def keep(self, asked: list[Any]) -> dict[str, str]:
        """A file of what is on stage: [key of the visit, kind, name of the run, index of the step]."""
        key, kind, name, index = (*asked, None, None, None, None)[:4]
        visit = self._holder(key)
        shown = visit.shown.get(str(name)) if visit else None
        steps = shown.run.steps if shown else ()
        if shown is None or not isinstance(index, int) or not 0 <= index < len(steps):
            return {"error": "this run is no longer on the server; record it again"}
        events, method = shown.teller.events, shown.run.starts[0].method
        if kind == "trace":
            return {"name": f"eagle-{method}-{name}.jsonl", "type": "application/x-ndjson", "text": trace(events)}
        if kind == "replay":
            page = replay(events, ask=shown.ask, verdict=shown.verdict)
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
        """A visitor's own trace, [key of the visit, file name, text]: on stage, or why not, and then nothing changes."""
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

    def charts(self, request: gr.Request, language: str) -> list[Any]:
        """Figures of the last answer on the page."""
        from viz.charts import figures

        shown = next(reversed(self.visit(request).shown.values()), None)
        run = shown.run if shown else Run()
        plain = Run.collect(shown.plain.events) if shown and shown.plain else None
        return list(figures(run, plain, language).values())


def _paths(text: str) -> tuple[tuple[int, ...], ...] | None:
    """EAGLE-1's tree as the visitor wrote it; None for the reference's own."""
    if not text.strip():
        return None
    try:
        return tuple(tuple(path) for path in json.loads(text))
    except (ValueError, TypeError) as e:
        raise InvalidRequest(f"the static tree is no JSON list of rank paths such as [[0],[1],[0,0]] ({e})") from None


def _numbers(text: str, kind: type) -> list[Any]:
    return [kind(part) for part in text.replace(",", " ").split()][:24]


def _best(rows: list[dict[str, float]], knob: str, language: str) -> Iterator[str]:
    """For each temperature: which value was fastest, and why the largest τ need not be."""
    for t in sorted({r["temperature"] for r in rows}):
        mine = [r for r in rows if r["temperature"] == t]
        best, most = max(mine, key=lambda r: r["tokens_per_second"]), max(mine, key=lambda r: r["tau"])
        yield say(
            language, "lab.same" if best is most else "lab.best", t=t, knob=say(language, knob), value=best["value"],
            tps=f"{best['tokens_per_second']:.1f}", tau=f"{best['tau']:.2f}", most=f"{most['tau']:.2f}", at=most["value"],
            ms=f"{most['step_ms']:.0f}", best_ms=f"{best['step_ms']:.0f}",
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

    @property
    def titles(self) -> list[tuple[str, str]]:
        """Titles and names, in the order of the index."""
        return [(row["title"], name) for name, row in self._rows.items()]

    def put(self, recording: Recording) -> None:
        """Add a run that lies in no file."""
        self._rows[recording.name] = {"title": recording.title or recording.name}
        self._read[recording.name] = recording


# ------------------------------------------------------------------------------------------- the widgets


def theme() -> gr.themes.Base:
    fonts = [
        "system-ui",
        "-apple-system",
        "Segoe UI",
        "Roboto",
        "Noto Sans",
        "PingFang SC",
        "Microsoft YaHei",
        "sans-serif",
    ]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]
    blue = gr.themes.Color(
        c50="#eef6fb", c100="#d8ebf6", c200="#b0d6ec", c300="#82bfe2", c400="#4da3de", c500="#1d86c4", c600="#0072b2",
        c700="#005c90", c800="#00466e", c900="#00304c", c950="#001e30",
    )  # fmt: skip
    return gr.themes.Base(primary_hue=blue, secondary_hue=blue, neutral_hue="slate", font=fonts, font_mono=mono).set(
        body_background_fill="#f6f7f9", body_background_fill_dark="#0e1218",
        body_text_color="#1b2230", body_text_color_dark="#e8ecf2",
        body_text_color_subdued="#596273", body_text_color_subdued_dark="#a0abbb",
        background_fill_primary="#ffffff", background_fill_primary_dark="#161b24",
        background_fill_secondary="#f6f7f9", background_fill_secondary_dark="#0e1218",
        block_background_fill="transparent", block_background_fill_dark="transparent",
        block_border_width="0px", block_shadow="none", block_shadow_dark="none", block_padding="2px 0",
        block_label_background_fill="transparent", block_label_background_fill_dark="transparent",
        block_title_text_weight="500", block_title_text_size="13px", block_info_text_size="12px",
        block_info_text_color="#596273", block_info_text_color_dark="#a0abbb",
        border_color_primary="#dfe3e9", border_color_primary_dark="#2c3441",
        input_background_fill="#ffffff", input_background_fill_dark="#161b24",
        input_border_color="#dfe3e9", input_border_color_dark="#2c3441", input_border_width="1px", input_shadow="none",
        input_radius="10px", button_large_radius="10px", button_small_radius="8px", button_medium_radius="10px",
        button_primary_background_fill="#0072b2", button_primary_background_fill_dark="#4da3de",
        button_primary_text_color="#ffffff", button_primary_text_color_dark="#06121c",
        button_primary_background_fill_hover="#005c90", button_primary_background_fill_hover_dark="#82bfe2",
        slider_color="#0072b2", slider_color_dark="#4da3de",
    )  # fmt: skip


CSS = """
.gradio-container { --layout-gap: 10px; }
main.fillable { padding: 14px 22px 8px !important; }
.sidebar { background: var(--background-fill-primary) !important; }
.form { background: transparent !important; border: 0 !important; gap: 12px; box-shadow: none !important; }
.sidebar .block { overflow: visible; } .sidebar input[type=number] { max-width: 64px; }
.sidebar .head { align-items: center; } .sidebar .reset-button { min-width: 24px; }
#brand h1 { font-size: 19px; font-weight: 650; margin: 0; letter-spacing: -.01em; } #brand p { color: var(--body-text-color-subdued); font-size: 13px; margin: 2px 0 6px; }
#composer { align-items: flex-end; gap: 8px; flex-wrap: nowrap; } #composer button { height: 42px; }
#stage { padding: 0 !important; overflow: visible; }
@media (max-width: 760px) { main.fillable { padding: 10px 12px !important; } #composer { flex-wrap: wrap; } }
"""

HEAD = """<script>
if (innerWidth < 900) { // an open sidebar would cover a phone's page
  const look = setInterval(() => { const b = document.querySelector(".sidebar.open .toggle-button"); if (b) { b.click(); clearInterval(look); } }, 100);
  setTimeout(() => clearInterval(look), 8000);
}
</script>"""

LAB_PROMPTS = "Why is the sky blue?\nWrite a Python function that adds two numbers.\nName three fruits and say why they are healthy."

EDITOR = '<div class="ed" role="application"></div>'


def editor() -> str:
    """Script of the static tree's editor; it works on the text of the box above it."""
    script = (STAGE / "editor.js").read_text(encoding="utf-8")
    return (
        script + '\nmountEditor(element.querySelector(".ed"), () => document.querySelector("#static_tree textarea"));\n'
    )


MOUNT = """
const stage = mountStage(element.querySelector(".stage"), {
  ...OPTIONS,
  onStop: () => document.querySelector("#stop")?.click(),
  onKeep: (visit, kind, run, k) => server.keep(visit, kind, run, k),
  onOpen: (visit, name, text) => server.open_trace(visit, name, text),
});
window.stage = stage;
stage.feed(props.value);
watch("value", () => stage.feed(props.value));
"""

SPEAK = "(code) => { window.stage.speak(code); return code; }"

COPY_LINK = """(...values) => {
  const names = %s, url = new URL(location.href), state = window.stage.state;
  url.search = "";
  names.forEach((name, i) => { if (values[i] !== "" && values[i] !== null) url.searchParams.set(name, values[i]); });
  if (state.run) { url.searchParams.set("recording", state.run); url.searchParams.set("step", state.k + 1); url.searchParams.set("phase", state.phase); }
  url.searchParams.set("language", state.language);
  history.replaceState(null, "", url);
  navigator.clipboard?.writeText(url.href).catch(() => {});
  return [];
}"""


class Words:
    """The widgets' words: each widget says which keys it shows, and a change of language updates them all."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, dict[str, str]]] = []

    def __call__(self, make: Callable[..., Any], *args: Any, keys: dict[str, str], **kw: Any) -> Any:
        widget = make(*args, **{prop: say("en", key) for prop, key in keys.items()}, **kw)
        self.rows.append((widget, keys))
        return widget

    @property
    def widgets(self) -> list[Any]:
        return [widget for widget, _ in self.rows]

    def speak(self, language: str) -> list[Any]:
        return [gr.update(**{prop: say(language, key) for prop, key in keys.items()}) for _, keys in self.rows]


def label(key: str, info: bool = False) -> dict[str, str]:
    """The words of a knob: its label and, if it has one, the line below."""
    return {"label": key} | ({"info": f"{key}.info"} if info else {})


def build(ground: Playground, total_token: int, public: bool) -> gr.Blocks:
    """The page."""
    word = Words()
    limit_max = 256 if public else 1024
    markup, _, script = parts()

    with gr.Blocks(title=say("en", "title"), fill_width=True) as page:
        with gr.Sidebar(width=308):
            word(gr.Markdown, keys={"value": "brand"}, elem_id="brand")
            shelf = word(
                gr.Dropdown, ground.shelf.titles,
                value=ground.opening.name if ground.opening and ground.opening.name in ground.shelf else None,
                keys=label("recording", True), elem_id="recording", visible=bool(ground.shelf.titles),
            )  # fmt: skip
            method = word(
                gr.Dropdown,
                _methods("en"),
                value="eagle3",
                keys={"label": "method"},
                elem_id="method",
                info=say("en", "method.eagle3.explain"),
            )
            total = word(
                gr.Slider, -1, 256, total_token, step=1, keys=label("total_token", True), elem_id="total_token"
            )
            depth = word(gr.Slider, 1, 16, 6, step=1, keys=label("depth"), elem_id="depth")
            top_k = word(gr.Slider, 1, 32, 8, step=1, keys=label("top_k"), elem_id="top_k")
            temperature = word(gr.Slider, 0, 2, 0, step=0.05, keys=label("temperature"), elem_id="temperature")
            limit = word(gr.Slider, 1, limit_max, 128, step=1, keys=label("max_new_tokens"), elem_id="max_new_tokens")
            seed = word(gr.Number, 0, precision=0, minimum=0, keys=label("seed"), elem_id="seed")
            race = word(gr.Checkbox, True, keys=label("race", True), elem_id="race")
            with word(gr.Accordion, keys={"label": "more.knobs"}, open=False):
                top_p = word(gr.Slider, 0.05, 1, 1, step=0.01, keys=label("top_p"), elem_id="top_p")
                sampling_top_k = word(gr.Slider, 0, 200, 0, step=1, keys=label("sampling_top_k", True))
                min_p = word(gr.Slider, 0, 0.5, 0, step=0.01, keys=label("min_p"))
                expand_by = word(
                    gr.Dropdown, _expansions("en"), value="value", keys=label("expand_by"), elem_id="expand_by"
                )
                rerank = word(gr.Checkbox, True, keys=label("rerank"), elem_id="rerank")
                system = word(
                    gr.Textbox, "", lines=2, max_lines=6, max_length=4000, keys=label("system"), elem_id="system"
                )
            with gr.Row():
                codes = [(name, code) for code, name in LANGUAGES.items()]
                language = gr.Dropdown(
                    codes, value="en", show_label=False, container=False, min_width=120, elem_id="language"
                )
                link = word(gr.Button, keys={"value": "link"}, min_width=110, elem_id="link", size="md")

        def keep(asked: list[Any]) -> dict[str, str]:
            return ground.keep(asked)

        def open_trace(asked: list[Any]) -> dict[str, str]:
            return ground.open_trace(asked)

        stage = gr.HTML(
            ground.opening.opening() if ground.opening else None, html_template=markup, js_on_load=script + MOUNT,
            apply_default_css=False, elem_id="stage", server_functions=[keep, open_trace],
        )  # fmt: skip
        with gr.Row(elem_id="composer"):
            prompt = word(
                gr.Textbox,
                show_label=False,
                keys={"placeholder": "prompt.hint"},
                lines=1,
                max_lines=6,
                scale=8,
                elem_id="prompt",
                max_length=20000,
            )
            send = word(gr.Button, keys={"value": "send"}, variant="primary", scale=1, min_width=88, elem_id="send")
            stop = word(gr.Button, keys={"value": "stop"}, scale=1, min_width=80, elem_id="stop", interactive=False)
            new = word(gr.Button, keys={"value": "new.short"}, scale=1, min_width=72, elem_id="new")
        with word(gr.Accordion, keys={"label": "tab.charts"}, open=False, elem_id="charts") as charts:
            plots = []
            for row in range(0, len(CHARTS), 2):
                with gr.Row():
                    plots += [gr.Plot(show_label=False, min_width=380) for _ in CHARTS[row : row + 2]]

        with word(gr.Accordion, keys={"label": "tab.lab"}, open=False, elem_id="lab"):
            with gr.Row():
                lab_prompts = word(
                    gr.Textbox, LAB_PROMPTS, lines=3, max_lines=8, max_length=4000, scale=3, keys=label("lab.prompts")
                )
                with gr.Column(scale=2):
                    with gr.Row():
                        lab_knob = word(
                            gr.Dropdown,
                            ["total_token", "depth", "top_k"],
                            value="total_token",
                            keys=label("lab.knob"),
                            min_width=120,
                        )
                        lab_values = word(
                            gr.Textbox,
                            "1, 4, 8, 16, 24, 32, 48, 64",
                            max_length=200,
                            keys=label("lab.values"),
                            min_width=160,
                        )
                    with gr.Row():
                        lab_heat = word(
                            gr.Textbox, "0, 1", max_length=80, keys=label("lab.temperatures"), min_width=120
                        )
                        lab_tokens = word(gr.Slider, 8, 128, 32, step=1, keys=label("lab.tokens"), min_width=160)
            with gr.Row():
                lab_run = word(gr.Button, keys={"value": "lab.run"}, elem_id="lab_run", scale=0, min_width=160)
                lab_stop = word(gr.Button, keys={"value": "lab.cancel"}, elem_id="lab_cancel", scale=0, min_width=110)
            lab_say = gr.Textbox(
                show_label=False, interactive=False, lines=1, max_lines=6, container=False, elem_id="lab_say"
            )
            lab_plot = gr.Plot(show_label=False)
        with word(gr.Accordion, keys={"label": "tab.tree"}, open=False, elem_id="static"):
            static = word(
                gr.Textbox,
                "",
                lines=2,
                max_lines=6,
                max_length=8000,
                keys={"label": "tree.paths", "info": "tree.hint"},
                elem_id="static_tree",
            )
            gr.HTML(html_template=EDITOR, js_on_load=editor(), apply_default_css=False, elem_id="editor")
        with word(gr.Accordion, keys={"label": "tab.models"}, open=False, elem_id="models"):
            if public:
                word(gr.Markdown, keys={"value": "models.off"})
            else:
                with gr.Row():
                    own_target = word(
                        gr.Dropdown,
                        list(PRESETS),
                        value=None,
                        allow_custom_value=True,
                        keys=label("models.target"),
                        scale=2,
                    )
                    own_drafter = word(gr.Textbox, "", max_length=500, keys=label("models.drafter"), scale=2)
                with gr.Row():
                    look = word(gr.Button, keys={"value": "models.look"}, scale=0, min_width=180, elem_id="look")
                    load = word(gr.Button, keys={"value": "models.load"}, scale=0, min_width=110, elem_id="load")
                facts = gr.Textbox(
                    show_label=False, interactive=False, lines=1, max_lines=24, container=False, elem_id="facts"
                )

        knobs = {
            "method": method, "total_token": total, "depth": depth, "top_k": top_k, "temperature": temperature, "top_p": top_p,
            "sampling_top_k": sampling_top_k, "min_p": min_p, "seed": seed, "max_new_tokens": limit, "expand_by": expand_by,
            "rerank": rerank, "static_tree": static,
        }  # fmt: skip
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

        def answer(request: gr.Request, text: str, race: bool, system: str, *values: Any) -> Iterator[tuple[Any, ...]]:
            text = text.strip()
            if not text:
                yield gr.skip(), gr.skip(), gr.skip()
                return
            wish = dict(zip(knobs, values, strict=True))
            yield gr.skip(), "", gr.update(interactive=True)
            for told in ground.answer(ground.visit(request), text, race=race, system=system.strip() or None, **wish):
                yield told, gr.skip(), gr.skip()
            yield gr.skip(), gr.skip(), gr.update(interactive=False)

        gr.on(
            [send.click, prompt.submit], answer, [prompt, race, system, *knobs.values()], [stage, prompt, stop],
            concurrency_limit=None, trigger_mode="once", **quiet,
        )  # fmt: skip

        def sweep(request: gr.Request, *wish: Any) -> Iterator[tuple[str, Any]]:
            yield from ground.sweep(ground.visit(request), *wish)

        lab = [lab_prompts, lab_knob, lab_values, lab_heat, lab_tokens, method, language]
        lab_run.click(sweep, lab, [lab_say, lab_plot], concurrency_limit=None, trigger_mode="once", **quiet)
        lab_stop.click(ground.stop, None, stage, queue=False, **quiet)
        if not public:
            look.click(ground.look, [own_target, own_drafter, language], facts, **quiet)
            load.click(ground.load, [own_target, own_drafter, language], facts, concurrency_limit=1, **quiet)
        stop.click(ground.stop, None, stage, queue=False, **quiet)
        new.click(ground.fresh, None, stage, queue=False, **quiet)

        def fit_knobs(name: str, language: str) -> list[Any]:
            """Words of the method, and a reason under every knob it does not have."""
            uses = USES[name]
            out: list[Any] = [gr.update(choices=_methods(language), info=say(language, f"method.{name}.explain"))]
            reason = say(language, "unused", method=say(language, f"method.{name}"))
            for key in ("total_token", "depth", "top_k", "expand_by", "rerank"):
                info = say(language, f"{key}.info") if f"{key}.info" in WORDS[language] else None
                out.append(gr.update(interactive=key in uses, info=info if key in uses else reason))
            return out

        fitted = [method, total, depth, top_k, expand_by, rerank]
        method.change(fit_knobs, [method, language], fitted, **quiet)

        def play(request: gr.Request, name: str) -> str | None:
            return ground.play(ground.visit(request), ground.shelf[name]) if name in ground.shelf else None

        shelf.input(play, shelf, stage, **quiet)
        language.change(word.speak, language, word.widgets, js=SPEAK, **quiet).then(
            fit_knobs, [method, language], fitted, **quiet
        )
        charts.expand(ground.charts, language, plots, **quiet)
        link.click(None, [prompt, *knobs.values()], None, js=COPY_LINK % json.dumps(["prompt", *knobs]))

        def arrive(request: gr.Request) -> list[Any]:
            """Restore what a link says; whatever in it is not one of ours is ignored."""
            said, visit = dict(request.query_params), ground.visit(request)
            out: list[Any] = [said["prompt"][:20000] if "prompt" in said else gr.skip()]
            out += [_read(knob, said.get(name)) for name, knob in knobs.items()]
            out.append(said["language"] if said.get("language") in LANGUAGES else gr.skip())
            name = said.get("recording", "")
            recording = ground.shelf[name] if name in ground.shelf else ground.opening
            if recording and ("recording" in said or "step" in said):
                step = said.get("step", "1")
                at = {
                    "step": int(step) - 1 if step.isdecimal() and len(step) < 6 else 0,
                    "phase": said.get("phase", "")[:20],
                }
                return [*out, ground.play(visit, recording, at)]
            return [*out, message(visit=visit.key)]

        def generate(
            prompt: str,
            method: str = "eagle3",
            max_new_tokens: int = 128,
            temperature: float = 0.0,
            seed: int = 0,
            total_token: int = 24,
            depth: int = 6,
            top_k: int = 8,
        ) -> Iterator[str]:
            """Answer a prompt and stream what happens: each item is one event as JSON (start, step…, finish).

            Args:
                prompt: what the user says; the target's own chat template is applied.
                method: vanilla, lookup, chain, chain-sampled, eagle1, eagle2 or eagle3.
                max_new_tokens: length of the answer at most.
                temperature: 0 is greedy.
                seed: the same seed draws the same text.
                total_token: nodes of a tree, root included; -1 chooses by measuring.
                depth: deepest level of a draft.
                top_k: children of a node, nodes expanded on a level.
            """
            yield from ground.stream(
                prompt[:20000], method, min(max_new_tokens, limit_max), temperature, seed, total_token, depth, top_k
            )

        gr.api(generate, api_name="generate", concurrency_limit=None)
        page.load(arrive, None, [prompt, *knobs.values(), language, stage], **quiet)
        page.unload(ground.leave)
    return page


def _read(knob: Any, said: str | None) -> Any:
    """A knob's value from a link, if it is one the knob can have."""
    if said is None:
        return gr.skip()
    if isinstance(knob, gr.Checkbox):
        return said == "true"
    if isinstance(knob, gr.Textbox):
        return said[: knob.max_length]
    if isinstance(knob, gr.Dropdown):
        return said if said in [value for _, value in knob.choices] else gr.skip()
    try:
        value = float(said)
    except ValueError:
        return gr.skip()
    low, high = knob.minimum, knob.maximum
    if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        return gr.skip()
    return int(value) if value == int(value) else value


def _expansions(language: str) -> list[tuple[str, str]]:
    return [(say(language, f"expand_by.{name}"), name) for name in ("value", "confidence")]


def _methods(language: str) -> list[tuple[str, str]]:
    return [(say(language, f"method.{name}"), name) for name in USES]


# ------------------------------------------------------------------------------------------- starting


def opening(trace: str | None, shelf: Shelf) -> Recording | None:
    """What the page shows first: the trace asked for, else the first recording, else nothing."""
    if trace is None:
        return next((shelf[name] for _, name in shelf.titles), None)
    path = Path(trace)
    with path.open(encoding="utf-8") as lines:
        return Recording.of(path.stem, load_trace(lines), title=path.stem)


def start(
    page: gr.Blocks, host: str, port: int | None, *, share: bool = False, public: bool = False, block: bool = True
) -> str:
    """Open the page; returns its address, at once if not `block`."""
    _, address, _ = page.queue(max_size=64).launch(
        server_name=host,
        server_port=port,
        share=share,
        theme=theme(),
        css=parts()[1] + CSS,
        head=HEAD,
        run_history=False,
        footer_links=["api"],
        max_file_size="32mb",
        show_error=not public,
        prevent_thread_lock=not block,
    )
    return str(address)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="EAGLE playground: watch speculative decoding happen.")
    parser.add_argument(
        "--target",
        "--base-model-path",
        help="the model that answers: a hub id or a folder (default: the small model shipped)",
    )
    parser.add_argument(
        "--drafter", "--ea-model-path", help="an EAGLE head for it: a hub id or a folder (default: those shipped)"
    )
    parser.add_argument(
        "--total-token",
        type=int,
        default=24,
        help="nodes of a draft tree, root included; -1 measures (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=None, help="port (default: the first free one from 7860)")
    parser.add_argument("--share", action="store_true", help="also open a public link through gradio's relay")
    parser.add_argument("--public", action="store_true", help="limits for a page that strangers use")
    parser.add_argument("--trace", metavar="FILE", help="a recorded run to open on")
    args = parser.parse_args(arguments)
    try:
        shelf = Shelf()
        ground = Playground(Models(args.target, args.drafter), shelf, opening(args.trace, shelf))
    except (EagleError, OSError, UnicodeDecodeError) as e:
        parser.error(str(e))
    start(build(ground, args.total_token, args.public), args.host, args.port, share=args.share, public=args.public)


if __name__ == "__main__":
    main()
