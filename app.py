"""The page: widgets and handlers, nothing else.

    python app.py                              opens on a recorded trace; loads the models with the first message
    python app.py --target T --drafter D       another pair: hub ids or folders

A handler turns a request into messages for the stage (`viz.stage`), which draws. The engine is imported when the
first message is sent, so the page is there at once and can be read without any model. Each visitor has a `Visit`;
one visitor at a time has the models, the others wait in a `Line` and see how many are before them.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from eagle_core.errors import EagleError
from eagle_core.events import Event, Finish, load_trace
from viz.export import parts
from viz.stage import Teller, message
from viz.words import LANGUAGES, WORDS, say

if TYPE_CHECKING:
    from eagle_core import Pair

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

BEAT = 0.05
"""Seconds between two messages at least: what a browser can take without falling behind."""


# ------------------------------------------------------------------------------------------- behind the widgets


@dataclass
class Visit:
    """One visitor: the conversation, and the handle that stops the answer under way."""

    talk: list[dict[str, str]] = field(default_factory=list)
    tellers: list[Teller] = field(default_factory=list)
    cancel: threading.Event = field(default_factory=threading.Event)


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
    """What the handlers share: the models, the line before them, the visitors."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.line = Line()
        self._visits: dict[str, Visit] = {}

    def visit(self, request: gr.Request | None) -> Visit:
        return self._visits.setdefault(str(request.session_hash) if request else "", Visit())

    def leave(self, request: gr.Request) -> None:
        """A visitor closed the page: whatever was running for them stops."""
        if visit := self._visits.pop(str(request.session_hash), None):
            visit.cancel.set()

    def stop(self, request: gr.Request) -> str:
        self.visit(request).cancel.set()
        return message(note={"key": "status.stopping"})

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
        self, pair: Pair, visit: Visit, cancel: threading.Event, text: str, race: bool, system: str | None, wish: dict[str, Any]
    ) -> Iterator[str]:
        from eagle_core import Sampling, TreeSettings
        from eagle_core.compare import judge
        from eagle_core.metrics import Run

        method, most = wish["method"], wish["max_new_tokens"]
        if why := pair.why_not(method):
            yield message(note={"key": "status.error", "text": why})
            return
        sampling = Sampling(wish["temperature"], wish["sampling_top_k"], wish["top_p"], wish["min_p"], wish["seed"])
        settings = TreeSettings(wish["total_token"], wish["depth"], wish["top_k"], wish["expand_by"], wish["rerank"])
        asked = [*visit.talk, {"role": "user", "content": text}]
        request: dict[str, Any] = {"sampling": sampling, "settings": settings, "max_new_tokens": most}
        name = uuid.uuid4().hex[:8]

        teller = Teller(name, ask=text)
        yield message(note={"key": "status.prefill"})
        for batch in batches(pair.generate(asked, method=method, system=system, cancel=cancel, **request), cancel):
            yield teller.tell(batch)
        ours = Run.collect(teller.events)
        visit.tellers.append(teller)
        visit.talk = [*asked, {"role": "assistant", "content": ours.text}]
        if not race or method == "vanilla" or cancel.is_set():
            return

        yield message(note={"key": "status.plain"})
        plain = Teller(f"{name}.plain", role="plain")
        for batch in batches(pair.generate(ours.starts[0].prompt_ids, method="vanilla", cancel=cancel, **request), cancel):
            yield plain.tell(batch)
        if cancel.is_set():
            yield message(note=None)
            return
        theirs = Run.collect(plain.events)
        verdict: dict[str, Any]
        if pair.drafter(method).rule == "ratio" and not sampling.greedy:
            verdict = {"verdict": "none", "key": "ratio"}
        else:
            found = judge(pair.target, ours.starts[0].prompt_ids, ours.ids, theirs.ids, sampling)
            verdict = {"verdict": found.verdict, "key": found.verdict, "n": len(ours.ids), "at": found.position, "gap": found.gap}
        seconds = [run.finishes[0].seconds for run in (ours, theirs)]
        yield teller.tell([], verdict=verdict | {"speedup": seconds[1] / seconds[0]})


# ------------------------------------------------------------------------------------------- the widgets


def theme() -> gr.themes.Base:
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "PingFang SC", "Microsoft YaHei", "sans-serif"]
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
.sidebar .form, #composer .form { background: transparent; border: 0; gap: 12px; box-shadow: none; }
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

MOUNT = """
const stage = mountStage(element.querySelector(".stage"), { ...OPTIONS, onStop: () => document.querySelector("#stop")?.click() });
window.stage = stage;
stage.feed(props.value);
watch("value", () => stage.feed(props.value));
"""


class Stage(gr.HTML):
    """The component that draws; its value is a message of `viz.stage`."""

    def __init__(self, value: str | None = None, **kw: Any) -> None:
        markup, _, script = parts()
        super().__init__(value, html_template=markup, js_on_load=script + MOUNT, apply_default_css=False, **kw)

    def get_block_name(self) -> str:
        return "html"


def build(models: Models, opening: str | None, total_token: int) -> gr.Blocks:
    """The page. `opening`: the message that the stage shows before anything was asked."""
    ground = Playground(models)
    language = "en"

    def word(key: str) -> str:
        return say(language, key)

    with gr.Blocks(title=word("title"), fill_width=True) as page:
        with gr.Sidebar(width=308):
            gr.Markdown(f"# {word('title')}\n\n{word('tagline')}", elem_id="brand")
            method = gr.Dropdown(_methods(language), value="eagle3", label=word("method"), info=word("method.eagle3.explain"), elem_id="method")
            total = gr.Slider(-1, 256, total_token, step=1, label=word("total_token"), info=word("total_token.info"), elem_id="total_token")
            depth = gr.Slider(1, 16, 6, step=1, label=word("depth"), info=word("depth.info"), elem_id="depth")
            top_k = gr.Slider(1, 32, 8, step=1, label=word("top_k"), info=word("top_k.info"), elem_id="top_k")
            temperature = gr.Slider(0, 2, 0, step=0.05, label=word("temperature"), info=word("temperature.info"), elem_id="temperature")
            limit = gr.Slider(1, 1024, 128, step=1, label=word("max_new_tokens"), elem_id="max_new_tokens")
            seed = gr.Number(0, label=word("seed"), precision=0, minimum=0, elem_id="seed")
            race = gr.Checkbox(True, label=word("race"), info=word("race.info"), elem_id="race")
            with gr.Accordion(word("more.knobs"), open=False):
                top_p = gr.Slider(0.05, 1, 1, step=0.01, label=word("top_p"), elem_id="top_p")
                sampling_top_k = gr.Slider(0, 200, 0, step=1, label=word("sampling_top_k"), info=word("sampling_top_k.info"))
                min_p = gr.Slider(0, 0.5, 0, step=0.01, label=word("min_p"))
                expand_by = gr.Dropdown([(word(f"expand_by.{k}"), k) for k in ("value", "confidence")], value="value", label=word("expand_by"))
                rerank = gr.Checkbox(True, label=word("rerank"))
                system = gr.Textbox("", label=word("system"), lines=2, max_lines=6)
        stage = Stage(opening, elem_id="stage")
        with gr.Row(elem_id="composer"):
            prompt = gr.Textbox(show_label=False, placeholder=word("prompt.hint"), lines=1, max_lines=6, scale=8, elem_id="prompt", max_length=20000)
            send = gr.Button(word("send"), variant="primary", scale=1, min_width=88, elem_id="send")
            stop = gr.Button(word("stop"), scale=1, min_width=80, elem_id="stop", interactive=False)
            new = gr.Button(word("new.short"), scale=1, min_width=72, elem_id="new")

        knobs = {
            "method": method, "total_token": total, "depth": depth, "top_k": top_k, "temperature": temperature, "top_p": top_p,
            "sampling_top_k": sampling_top_k, "min_p": min_p, "seed": seed, "max_new_tokens": limit, "expand_by": expand_by,
            "rerank": rerank,
        }  # fmt: skip

        def answer(text: str, race: bool, system: str, *values: Any, request: gr.Request) -> Iterator[tuple[Any, ...]]:
            text = text.strip()
            if not text:
                yield gr.skip(), gr.skip(), gr.skip()
                return
            wish = dict(zip(knobs, values, strict=True))
            yield message(note={"key": "status.prefill"}), "", gr.update(interactive=True)
            for told in ground.answer(ground.visit(request), text, race=race, system=system.strip() or None, **wish):
                yield told, gr.skip(), gr.skip()
            yield gr.skip(), gr.skip(), gr.update(interactive=False)

        asked = gr.on(
            [send.click, prompt.submit], answer, [prompt, race, system, *knobs.values()], [stage, prompt, stop],
            show_progress="hidden", concurrency_limit=None, trigger_mode="once", api_visibility="private",
        )  # fmt: skip
        del asked
        stop.click(ground.stop, None, stage, queue=False, show_progress="hidden", api_visibility="private")

        def fresh(request: gr.Request) -> str:
            visit = ground.visit(request)
            visit.cancel.set()
            visit.talk, visit.tellers = [], []
            return message(clear=True)

        new.click(fresh, None, stage, queue=False, show_progress="hidden", api_visibility="private")

        def fit_knobs(name: str) -> list[Any]:
            uses, label = USES[name], word(f"method.{name}")
            out: list[Any] = [gr.update(info=word(f"method.{name}.explain"))]
            for key in ("total_token", "depth", "top_k", "expand_by", "rerank"):
                info = word(f"{key}.info") if f"{key}.info" in WORDS[language] else None
                out.append(gr.update(interactive=key in uses, info=info if key in uses else word("unused").replace("{method}", label)))
            return out

        method.change(fit_knobs, method, [method, total, depth, top_k, expand_by, rerank], show_progress="hidden", api_visibility="private")
        page.unload(ground.leave)
    return page


def _methods(language: str) -> list[tuple[str, str]]:
    return [(say(language, f"method.{name}"), name) for name in USES]


# ------------------------------------------------------------------------------------------- starting


def opening(trace: str | None) -> str | None:
    """What the page shows first: the trace asked for, else the first recording, else nothing."""
    path = Path(trace) if trace else next(iter(sorted(TRACES.glob("*.jsonl"))), None)
    if path is None:
        return None
    with path.open(encoding="utf-8") as lines:
        return Teller(path.stem).tell(load_trace(lines), whole=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="EAGLE playground: watch speculative decoding happen.")
    parser.add_argument("--target", "--base-model-path", help="the model that answers: a hub id or a folder (default: the small model shipped)")
    parser.add_argument("--drafter", "--ea-model-path", help="an EAGLE head for it: a hub id or a folder (default: those shipped)")
    parser.add_argument("--total-token", type=int, default=24, help="nodes of a draft tree, root included; -1 measures (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=None, help="port (default: the first free one from 7860)")
    parser.add_argument("--share", action="store_true", help="also open a public link through gradio's relay")
    parser.add_argument("--public", action="store_true", help="limits for a page that strangers use")
    parser.add_argument("--trace", metavar="FILE", help="a recorded run to open on")
    args = parser.parse_args(arguments)
    try:
        first = opening(args.trace)
    except (EagleError, OSError) as e:
        parser.error(str(e))
    page = build(Models(args.target, args.drafter), first, args.total_token)
    page.queue(max_size=64).launch(
        server_name=args.host,
        server_port=args.port,
        share=args.share,
        theme=theme(),
        css=parts()[1] + CSS,
        head=HEAD,
        run_history=False,
        footer_links=["api"],
        max_file_size="32mb",
        show_error=not args.public,
        quiet=True,
    )


if __name__ == "__main__":
    main()
