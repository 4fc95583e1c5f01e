"""The page: widgets and handlers, nothing else.

    python app.py                              opens on a recorded trace; the models load behind it
    python app.py --target T --drafter D       another pair: hub ids or folders

A handler turns a request into messages for the stage (`viz.stage`), which draws. The engine is imported once somebody
has opened the page, so the page is there at once and can be read without any model. What stands behind the
widgets is in `viz.playground`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from eagle_core.drafters import METHODS
from eagle_core.errors import EagleError, InvalidRequest
from eagle_core.events import load_trace
from eagle_core.pairs import PRESETS
from viz.export import parts
from viz.models import Models
from viz.playground import Playground, Recording, Shelf
from viz.stage import message
from viz.words import LANGUAGES, WORDS, say

STAGE = Path(__file__).parent / "assets" / "stage"
USES = {name: method.settings for name, method in METHODS.items()}
"""Which knobs of the tree each method reads."""

CHARTS = ("length", "histogram", "acceptance", "calibration", "time", "race", "size")
"""Charts below the stage, the names of `viz.charts.CHARTS`; plotly is imported when they are first looked at."""


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
        block_title_text_color="#596273", block_title_text_color_dark="#a0abbb",
        block_label_text_color="#596273", block_label_text_color_dark="#a0abbb",
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
.dark input[type="range"] { --neutral-200: #2c3441; }
.gradio-container { --layout-gap: 10px; }
main.fillable { padding: 12px 22px 8px !important; }
.sidebar { background: var(--background-fill-primary) !important; }
.sidebar .sidebar-content { padding: 16px 18px !important; }
.form { background: transparent !important; border: 0 !important; gap: 10px; box-shadow: none !important; }
.sidebar .column, .sidebar .form { gap: 10px !important; }
.sidebar .block { overflow: visible !important; }
.sidebar .head { align-items: baseline !important; margin: 0 !important; gap: 8px; }
.sidebar .head label { margin: 0; }
.sidebar input[type=number] { max-width: 56px; height: 26px; padding: 0 4px !important; text-align: right; }
.sidebar input[type=number] { border-radius: 6px; }
.sidebar #seed input[type=number] { max-width: none; height: 34px; padding: 0 12px !important; text-align: left; }
.sidebar .tab-like-container { border: 0 !important; box-shadow: none !important; height: 26px; }
.sidebar .tab-like-container { background: none !important; }
.sidebar .reset-button, .sidebar .min_value, .sidebar .max_value { display: none !important; }
.sidebar .slider_input_container { margin-top: 2px; } .sidebar .wrap-inner { padding: 4px 6px !important; }
.sidebar .info-text { margin: 0 0 2px !important; line-height: 1.35 !important; }
#brand h1 { font-size: 19px; font-weight: 650; margin: 0; letter-spacing: -.01em; }
#brand p { color: var(--body-text-color-subdued); font-size: 13px; line-height: 1.4; margin: 2px 0 2px; }
#composer { align-items: flex-end; gap: 8px; flex-wrap: nowrap; } #composer button { height: 42px; }
.gradio-container :is(button, input, textarea, a, summary, [tabindex]):focus-visible {
  outline: 2px solid var(--color-accent) !important; outline-offset: 2px; }
.gradio-container .wrap-inner:focus-within { outline: 2px solid var(--color-accent); border-radius: 10px; }
.gradio-container .wrap-inner input:focus-visible { outline: none !important; }
#stage { padding: 0 !important; overflow: visible; }
@media (max-width: 760px) { main.fillable { padding: 10px 12px !important; } #composer { flex-wrap: wrap; } }
"""

HEAD = (
    f"<script>{(STAGE / 'pictures.js').read_text(encoding='utf-8')}</script>"
    + """<script>
if (innerWidth < 900) { // an open sidebar would cover a phone's page
  const look = setInterval(() => {
    const b = document.querySelector(".sidebar.open .toggle-button");
    if (b) { b.click(); clearInterval(look); }
  }, 100);
  setTimeout(() => clearInterval(look), 8000);
}
</script>"""
)

LAB_PROMPTS = """Why is the sky blue?
Write a Python function that adds two numbers.
Name three fruits and say why they are healthy."""

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
  onKeep: (visit, kind, run, k, language) => server.keep(visit, kind, run, k, language),
  onOpen: (visit, name, text) => server.open_trace(visit, name, text),
  onStage: () => queueMicrotask(() => trigger("select")),
  onLesson: (visit, index, run) => server.lesson(visit, index, run),
});
window.stage = stage;
stage.feed(props.value);
watch("value", () => stage.feed(props.value));
"""

ON_STAGE = "() => { const names = %s, run = window.stage?.state.run; return names.includes(run) ? run : null; }"
"""The recording that is on stage: the menu shows that one, or none while an answer is there."""

SPEAK = "(code) => { window.stage.speak(code); return code; }"

COPY_LINK = """(...values) => {
  const shelf = %s, names = %s, url = new URL(location.href), state = window.stage.state;
  url.search = "";
  names.forEach((name, i) => { if (values[i] !== "" && values[i] !== null) url.searchParams.set(name, values[i]); });
  const view = shelf.includes(state.run) ? { recording: state.run, step: state.k + 1, phase: state.phase } : {};
  for (const [name, value] of Object.entries(view)) url.searchParams.set(name, value);
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


def who(request: gr.Request) -> str:
    """The browser session a request comes from."""
    return str(request.session_hash)


def build(ground: Playground, total_token: int, public: bool) -> gr.Blocks:
    """The page."""
    word = Words()
    limit_max, depth_max, top_k_max = (256, 10, 16) if public else (1024, 16, 32)
    markup, _, script = parts()

    with gr.Blocks(title=say("en", "title"), fill_width=True) as page:
        with gr.Sidebar(width=284):
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
            depth = word(gr.Slider, 1, depth_max, 6, step=1, keys=label("depth"), elem_id="depth")
            top_k = word(gr.Slider, 1, top_k_max, 8, step=1, keys=label("top_k"), elem_id="top_k")
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
                coupled = word(gr.Checkbox, True, keys=label("coupled", True), elem_id="coupled")
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

        def lesson(asked: list[Any]) -> dict[str, str]:
            return ground.lesson(asked)

        stage = gr.HTML(
            ground.opening.opening() if ground.opening else None, html_template=markup, js_on_load=script + MOUNT,
            apply_default_css=False, elem_id="stage", server_functions=[keep, open_trace, lesson],
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
            with gr.Row():
                charts_svg, charts_png = (
                    word(gr.Button, keys={"value": f"charts.{kind}"}, size="sm", scale=0, min_width=220)
                    for kind in ("svg", "png")
                )
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
                            "1, 4, 8, 16, 24, 32, 48, 64, auto",
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
                lab_svg = word(gr.Button, keys={"value": "charts.svg"}, scale=0, min_width=220, elem_id="lab_svg")
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
            "method": method, "total_token": total, "depth": depth, "top_k": top_k, "temperature": temperature,
            "top_p": top_p, "sampling_top_k": sampling_top_k, "min_p": min_p, "seed": seed, "max_new_tokens": limit,
            "expand_by": expand_by, "rerank": rerank, "coupled": coupled, "static_tree": static,
        }  # fmt: skip
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

        def halt(request: gr.Request) -> str:
            return ground.stop(who(request))

        def halt_lab(request: gr.Request) -> None:
            ground.stop_lab(who(request))

        def fresh(request: gr.Request) -> str:
            return ground.fresh(who(request))

        def leave(request: gr.Request) -> None:
            ground.leave(who(request))

        def open_charts(request: gr.Request, language: str) -> list[Any]:
            visit = ground.visit(who(request))
            visit.charting = True
            return ground.charts(visit, language)

        def close_charts(request: gr.Request) -> None:
            ground.visit(who(request)).charting = False

        def draw_charts(request: gr.Request, language: str) -> list[Any]:
            """What is new on stage, in the charts too, as long as they are open."""
            visit = ground.visit(who(request))
            return ground.charts(visit, language) if visit.charting else [gr.skip()] * len(CHARTS)

        def answer(request: gr.Request, text: str, race: bool, system: str, *values: Any) -> Iterator[tuple[Any, ...]]:
            text = text.strip()
            if not text:
                yield gr.skip(), gr.skip(), gr.skip()
                return
            wish, visit = dict(zip(knobs, values, strict=True)), ground.visit(who(request))
            yield gr.skip(), gr.skip() if visit.answering else "", gr.update(interactive=True)
            for told in ground.answer(visit, text, race=race, system=system.strip() or None, **wish):
                yield told, gr.skip(), gr.skip()
            yield gr.skip(), text if visit.refused else gr.skip(), gr.update(interactive=not visit.idle)

        gr.on(
            [send.click, prompt.submit], answer, [prompt, race, system, *knobs.values()], [stage, prompt, stop],
            concurrency_limit=None, trigger_mode="multiple", **quiet,
        ).then(draw_charts, language, plots, **quiet)  # fmt: skip

        def sweep(request: gr.Request, *wish: Any) -> Iterator[tuple[str, Any]]:
            for told, figure in ground.sweep(ground.visit(who(request)), *wish):
                yield gr.skip() if told is None else told, gr.skip() if figure is None else figure

        lab = [lab_prompts, lab_knob, lab_values, lab_heat, lab_tokens, method, language]
        lab_run.click(sweep, lab, [lab_say, lab_plot], concurrency_limit=None, trigger_mode="once", **quiet)
        for button, where, kind, name in (
            (charts_svg, "#charts", "svg", "eagle-charts"),
            (charts_png, "#charts", "png", "eagle-charts"),
            (lab_svg, "#lab", "svg", "eagle-lab"),
        ):
            button.click(None, js=f"() => {{ keepCharts('{where}', '{kind}', '{name}'); }}")
        lab_stop.click(halt_lab, None, None, queue=False, **quiet)
        if not public:
            look.click(ground.look, [own_target, own_drafter, language], facts, **quiet)
            load.click(ground.load, [own_target, own_drafter, language], facts, concurrency_limit=1, **quiet)
        stop.click(halt, None, stage, queue=False, **quiet)
        new.click(fresh, None, stage, queue=False, **quiet)

        def fit_knobs(name: str, language: str) -> list[Any]:
            """Words of the method, and a reason under every knob it does not have."""
            uses = USES[name]
            out: list[Any] = [gr.update(choices=_methods(language), info=say(language, f"method.{name}.explain"))]
            reason = say(language, "unused", method=say(language, f"method.{name}"))
            for key in ("total_token", "depth", "top_k", "expand_by", "rerank", "coupled"):
                info = say(language, f"{key}.info") if f"{key}.info" in WORDS[language] else None
                choices = {"choices": _expansions(language)} if key == "expand_by" else {}
                out.append(gr.update(interactive=key in uses, info=info if key in uses else reason, **choices))
            return out

        fitted = [method, total, depth, top_k, expand_by, rerank, coupled]
        method.change(fit_knobs, [method, language], fitted, **quiet)

        def play(request: gr.Request, name: str) -> str | None:
            return ground.play(ground.visit(who(request)), ground.shelf[name]) if name in ground.shelf else None

        shelf.input(play, shelf, stage, **quiet).then(draw_charts, language, plots, **quiet)
        on_shelf = json.dumps([name for _, name in ground.shelf.titles])
        stage.select(None, None, shelf, js=ON_STAGE % on_shelf)

        def fit_shelf(language: str) -> Any:
            return gr.update(choices=ground.shelf.called(language))

        language.change(word.speak, language, word.widgets, js=SPEAK, **quiet).then(
            fit_knobs, [method, language], fitted, **quiet
        ).then(fit_shelf, language, shelf, **quiet).then(draw_charts, language, plots, **quiet)
        charts.expand(open_charts, language, plots, **quiet)
        charts.collapse(close_charts, None, None, **quiet)
        told = COPY_LINK % (on_shelf, json.dumps(["prompt", "system", *knobs]))
        link.click(None, [prompt, system, *knobs.values()], None, js=told)

        def arrive(request: gr.Request) -> list[Any]:
            """Restore what a link says; whatever in it is not one of ours is ignored."""
            said, visit = dict(request.query_params), ground.visit(who(request))
            ground.welcome()
            out: list[Any] = [_read(prompt, said.get("prompt")), _read(system, said.get("system"))]
            out += [_read(knob, said.get(name)) for name, knob in knobs.items()]
            out.append(said["language"] if said.get("language") in LANGUAGES else gr.skip())
            name = said.get("recording")
            recording = ground.opening if name is None else ground.shelf.get(name, None)
            if recording and (name or "step" in said):
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
                method: vanilla, lookup, chain, chain-sampled, eagle1, eagle2, eagle3 or hybrid.
                max_new_tokens: length of the answer at most.
                temperature: 0 is greedy.
                seed: the same seed draws the same text.
                total_token: nodes of a tree, root included; -1 chooses by measuring.
                depth: deepest level of a draft.
                top_k: children of a node, nodes expanded on a level.
            """
            try:
                if public:
                    refuse_above(depth=(depth, depth_max), top_k=(top_k, top_k_max))
                yield from ground.stream(
                    prompt[:20000], method, min(max_new_tokens, limit_max), temperature, seed, total_token, depth, top_k
                )
            except EagleError as e:
                raise gr.Error(str(e)) from e

        gr.api(generate, api_name="generate", concurrency_limit=None)
        page.load(arrive, None, [prompt, system, *knobs.values(), language, stage], **quiet)
        page.unload(leave)
    return page


def refuse_above(**knobs: tuple[int, int]) -> None:
    """Refuse what a public page does not compute for strangers: name = (value, most).

    Raises:
        InvalidRequest: one is too large; names it.
    """
    for name, (value, most) in knobs.items():
        if value > most:
            raise InvalidRequest(f"{name} is {value}; this public page takes {most} at most")


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


def lent() -> Callable[..., Any] | None:
    """`spaces.GPU` in a Hugging Face Space that lends GPUs; None elsewhere. It wants to be imported before torch."""
    try:
        import spaces
    except ImportError:
        return None
    decorator: Callable[..., Any] = spaces.GPU
    return decorator


def opening(trace: str | None, shelf: Shelf) -> Recording | None:
    """What the page shows first: the trace asked for, else the first recording, else nothing."""
    if trace is None:
        return next((shelf[name] for _, name in shelf.titles), None)
    path = Path(trace)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        return Recording.of(name, load_trace(lines), title=name)


def start(
    page: gr.Blocks,
    host: str | None,
    port: int | None,
    *,
    share: bool = False,
    public: bool = False,
    block: bool = True,
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


def options() -> argparse.ArgumentParser:
    """The command line. The second names are those of the reference implementation's web page."""
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
    parser.add_argument("--host", help="address to listen on (default: GRADIO_SERVER_NAME, else 127.0.0.1)")
    parser.add_argument("--port", type=int, default=None, help="port (default: the first free one from 7860)")
    parser.add_argument("--share", action="store_true", help="also open a public link through gradio's relay")
    parser.add_argument(
        "--public", action="store_true", help="limits for a page that strangers use; always on in a Hugging Face Space"
    )
    parser.add_argument("--trace", metavar="FILE", help="a recorded run to open on")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = options()
    args = parser.parse_args(arguments)
    try:
        shelf = Shelf()
        models = Models(args.target, args.drafter, lent())
        ground = Playground(models, shelf, opening(args.trace, shelf), eager=True)
    except (EagleError, OSError, UnicodeDecodeError) as e:
        parser.error(str(e))
    public = args.public or "SPACE_ID" in os.environ
    start(build(ground, args.total_token, public), args.host, args.port, share=args.share, public=public)


if __name__ == "__main__":
    main()
