"""Keep and share: one HTML file that replays a run offline, the trace, the numbers.

    replay(events, ask="10+2=")        one HTML page
    trace(events)                      JSON lines, which `events.load_trace` reads back
    numbers_csv(events)                every scalar metric of the run, and the counts and times of every step

The page holds the stage itself (the same html, css and js the page mounts) and the run's messages; it asks no
server for anything and needs no model. `parts` hands the same pieces to the page.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from eagle_core.events import FATES, SOURCES, Event, dump
from eagle_core.metrics import METRICS, Run, accepted_length
from viz.stage import Teller, message
from viz.why import REASONS
from viz.words import WORDS, say

__all__ = ["numbers_csv", "parts", "replay", "trace"]

_STAGE = Path(__file__).parent.parent / "assets" / "stage"


@cache
def parts() -> tuple[str, str, str]:
    """Markup, style sheet and script of the stage. The script ends with `OPTIONS`, what `mountStage` wants to know."""
    markup, style, script = ((_STAGE / f"stage.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    options = message(words=WORDS, fates=FATES, sources=SOURCES, reasons=REASONS)
    return markup, style, f"{script}\nconst OPTIONS = {options};\n"


def replay(
    events: Iterable[Event],
    *,
    ask: str | None = None,
    title: str | None = None,
    language: str = "en",
    verdict: dict[str, object] | None = None,
    plain: Iterable[Event] | None = None,
) -> str:
    """A self-contained page that replays one run; with `plain`, the reference run, also the race."""
    markup, style, script = parts()
    told = Teller("run", ask=ask, title=title).tell(events, whole=True, verdict=verdict)
    return _PAGE.format(
        language={"zh": "zh-CN"}.get(language, language),
        title=html.escape(title or ask or say(language, "title")),
        style=style,
        markup=markup,
        script=script,
        speak=json.dumps(language),
        told=told,
        plain=Teller("run.plain", role="plain", of="run").tell(plain) if plain else "null",
    )


def trace(events: Iterable[Event]) -> str:
    """The events as JSON lines."""
    return "".join(dump(event) + "\n" for event in events)


def numbers_csv(events: Iterable[Event]) -> str:
    """A tidy table: scope (run or step), index of the step, name, value, unit. Tables stay in the trace."""
    run = Run.collect(events)
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["scope", "step", "name", "value", "unit"])
    for metric in METRICS.values():
        value = metric.of(run)
        if not isinstance(value, tuple):
            table.writerow(["run", "", metric.name, "" if value is None else value, metric.unit])
    for step in run.steps:
        rows = [
            ("nodes", len(step.nodes), "nodes"),
            ("dropped", len(step.dropped), "nodes"),
            ("accepted", accepted_length(step), "tokens"),
            ("emitted", len(step.emitted), "tokens"),
            ("forwards", step.forwards, "forwards"),
            *((name, ms, "ms") for name, ms in step.timing.items()),
        ]
        table.writerows(["step", step.index, *row] for row in rows)
    return out.getvalue()


_PAGE = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title><style>{style}
body {{ margin: 0; padding: 20px 28px; background: var(--st-ground); }}
body.dark {{ color-scheme: dark; }}</style></head>
<body class="st-page">{markup}
<script>
{script}
const night = matchMedia("(prefers-color-scheme: dark)");
const dress = () => document.body.classList.toggle("dark", night.matches);
dress(); night.addEventListener("change", dress);
const stage = mountStage(document.querySelector(".stage"), {{ ...OPTIONS, language: {speak} }});
stage.feed(JSON.stringify({told}));
stage.feed(JSON.stringify({plain} ?? {{}}));
</script></body></html>
"""
