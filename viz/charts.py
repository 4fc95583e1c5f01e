"""The numbers people look at, as plotly figures. A pure function of runs: the same run gives the same figure.

    figures(run, plain, "en")  → {"length": Figure, "histogram": Figure, …}, in the order of `CHARTS`

Every value comes from `eagle_core.metrics`. Series differ by more than colour: hatching, dashes, marker shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go

from eagle_core.metrics import METRICS, Run, accepted_length
from viz.words import about, auto, say

__all__ = ["CHARTS", "figures", "sweep"]

ACCENT, SKY, ORANGE, GREY = "#0072b2", "#56b4e9", "#e69f00", "#8993a2"
_INK = "#6b7584"  # contrast ≥ 4.5 on white and on the dark surface


_FONT = "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, PingFang SC, Microsoft YaHei, sans-serif"

_BAR = {"remove": ["toImage", "lasso2d", "select2d", "autoScale2d"], "bgcolor": "rgba(0,0,0,0)", "color": _INK}
"""Plotly's own camera would take a picture without its caption; the page's buttons take it with one."""


def figures(
    run: Run, plain: Run | None = None, language: str = "en", verdict: Mapping[str, Any] | None = None
) -> dict[str, go.Figure]:
    """All charts of a run; `plain` is the reference run, where one was made, and `verdict` what came of it. Each
    carries its caption as `layout.meta`: method, settings, pair, hardware, verdict."""
    out = {}
    caption = about(run.starts[0], language, verdict) if run.starts else ""
    for name, draw in CHARTS.items():
        word = partial(say, language)
        figure = go.Figure()
        if run.steps:
            draw(figure, run, plain, word)
        else:
            figure.add_annotation(text=say(language, "chart.empty"), showarrow=False, font_size=14)
        figure.update_layout(
            title={"text": say(language, f"chart.{name}"), "font_size": 14, "x": 0, "xref": "paper", "y": 0.96},
            height=290,
            margin={"l": 48, "r": 12, "t": 62, "b": 44},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"color": _INK, "size": 12, "family": _FONT},
            legend={"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0, "xanchor": "left", "font_size": 11},
            bargap=0.15,
            hovermode="x unified",
            modebar=_BAR,
            meta={"caption": caption},
        )
        figure.update_xaxes(showgrid=False, linecolor=_INK, zeroline=False)
        figure.update_yaxes(gridcolor="rgba(137,147,162,.25)", zeroline=False, rangemode="tozero")
        out[name] = figure
    return out


def sweep(rows: Sequence[Mapping[str, Any]], knob: str, language: str = "en", caption: str = "") -> go.Figure:
    """τ and tokens per second of a swept knob, a pair of lines for each temperature.

    Args:
        rows: {value, temperature, tau, tokens_per_second}, in any order; the values stand evenly, auto (-1) last.
        knob: key of `viz.words` that names the knob.
        caption: what the picture says of itself when it is kept.
    """
    figure = go.Figure()
    order = sorted({r["value"] for r in rows}, key=lambda v: (v == -1, v))
    for i, t in enumerate(sorted({r["temperature"] for r in rows})):
        mine = sorted((r for r in rows if r["temperature"] == t), key=lambda r: order.index(r["value"]))
        x = [auto(r["value"], language) for r in mine]
        dash = ("solid", "dash", "dot", "dashdot")[i % 4]
        for key, color, symbol, axis in (
            ("tau", ACCENT, "circle", "y"),
            ("tokens_per_second", ORANGE, "diamond", "y2"),
        ):
            name = f"{'τ' if key == 'tau' else say(language, 'axis.speed')} · T {t:g}"
            look = {"line": {"color": color, "dash": dash, "width": 3}, "marker": {"symbol": symbol, "size": 9}}
            figure.add_scatter(x=x, y=[r[key] for r in mine], name=name, yaxis=axis, mode="lines+markers", **look)
    figure.update_layout(
        title={"text": say(language, "chart.sweep"), "font_size": 14, "x": 0, "xref": "paper"},
        height=380,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _INK, "size": 12, "family": _FONT},
        xaxis={
            "title": say(language, knob),
            "showgrid": False,
            "zeroline": False,
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [auto(v, language) for v in order],
        },
        yaxis={"title": say(language, "axis.tau"), "rangemode": "tozero", "gridcolor": "rgba(137,147,162,.25)"},
        yaxis2={
            "title": say(language, "axis.speed"),
            "rangemode": "tozero",
            "overlaying": "y",
            "side": "right",
            "showgrid": False,
        },
        legend={"orientation": "h", "y": -0.25},
        margin={"l": 52, "r": 52, "t": 44, "b": 44},
        hovermode="x unified",
        modebar=_BAR,
        meta={"caption": caption},
    )
    return figure


Word = Callable[..., str]


def _axes(figure: go.Figure, word: Word, x: str, y: str, **kw: Any) -> None:
    figure.update_layout(xaxis_title=word(f"axis.{x}"), yaxis_title=word(f"axis.{y}"), **kw)


def _length(figure: go.Figure, run: Run, plain: Run | None, word: Word) -> None:
    x = [s.index + 1 for s in run.steps]
    drafted = [accepted_length(s) for s in run.steps]
    figure.add_bar(x=x, y=drafted, name=word("series.accepted"), marker_color=ACCENT)
    bonus = [len(s.emitted) - n for s, n in zip(run.steps, drafted)]
    figure.add_bar(x=x, y=bonus, name=word("series.bonus"), marker={"color": ORANGE, "pattern_shape": "/"})
    tau = METRICS["tau"].of(run)
    figure.add_scatter(
        x=[x[0], x[-1]], y=[tau, tau], mode="lines", name=word("series.tau"), line={"dash": "dash", "color": _INK}
    )
    _axes(figure, word, "step", "tokens", barmode="stack")


def _histogram(figure: go.Figure, run: Run, plain: Run | None, word: Word) -> None:
    rows = METRICS["lengths"].of(run)
    figure.add_bar(x=[r.accepted for r in rows], y=[r.steps for r in rows], marker_color=ACCENT, showlegend=False)  # type: ignore[union-attr]
    _axes(figure, word, "tokens", "steps", xaxis_dtick=1)


def _acceptance(figure: go.Figure, run: Run, plain: Run | None, word: Word) -> None:
    rows: Any = METRICS["acceptance"].of(run)
    x = [r.depth for r in rows]
    figure.add_scatter(
        x=x, y=[r.unconditional for r in rows], name=word("series.unconditional"), mode="lines+markers",
        line={"color": ACCENT, "width": 3}, marker={"size": 8}, text=[f"{r.reached}/{r.steps}" for r in rows],
    )  # fmt: skip
    figure.add_scatter(
        x=x, y=[r.conditional for r in rows], name=word("series.conditional"), mode="lines+markers",
        line={"color": ORANGE, "dash": "dot", "width": 3}, marker={"size": 9, "symbol": "diamond"},
    )  # fmt: skip
    _axes(figure, word, "depth", "share", yaxis_range=[0, 1.04], xaxis_dtick=1)


def _calibration(figure: go.Figure, run: Run, plain: Run | None, word: Word) -> None:
    rows: Any = METRICS["confidence_calibration"].of(run)
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", name=word("series.ideal"), line={"dash": "dash", "color": _INK, "width": 1}
    )
    most = max((r.nodes for r in rows), default=1)
    figure.add_scatter(
        x=[r.score for r in rows], y=[r.accepted for r in rows], mode="markers+text", showlegend=False,
        textposition="top center",         text=[str(r.nodes) for r in rows],
        marker={"color": ACCENT, "size": [8 + 22 * (r.nodes / most) ** 0.5 for r in rows], "opacity": 0.85},
    )  # fmt: skip
    _axes(figure, word, "confidence", "accepted", xaxis_range=[0, 1.02], yaxis_range=[0, 1.12], hovermode="closest")


def _time(figure: go.Figure, run: Run, plain: Run | None, word: Word) -> None:
    x = [s.index + 1 for s in run.steps]
    for part, color, pattern in (("draft", SKY, "\\"), ("verify", ACCENT, ""), ("other", GREY, ".")):
        y = [s.timing.get(f"{part}_ms", 0.0) for s in run.steps]
        figure.add_bar(x=x, y=y, name=word(f"cost.{part}"), marker={"color": color, "pattern_shape": pattern})
    _axes(figure, word, "step", "ms", barmode="stack")


def _race(figure: go.Figure, run: Run, plain: Run | None, word: Word) -> None:
    looks = ((run, ACCENT, "solid"), (plain, GREY, "dash"))
    for one, color, dash in looks:
        if one is None or not one.starts:
            continue
        seconds = [0.0, *accumulate(sum(s.timing.values()) / 1000 for s in one.steps)]
        tokens = list(accumulate([len(one.starts[0].emitted), *(len(s.emitted) for s in one.steps)]))
        name = word(f"method.{one.starts[0].method}")
        figure.add_scatter(
            x=seconds, y=tokens, name=name, mode="lines", line={"color": color, "dash": dash, "shape": "hv", "width": 3}
        )
    _axes(figure, word, "seconds", "tokens", hovermode="closest")


def _size(figure: go.Figure, run: Run, plain: Run | None, word: Word) -> None:
    deepest = max(n.depth for s in run.steps for n in s.nodes)
    x = list(range(1, deepest + 1))
    steps = len(run.steps)
    drafted = [sum(n.depth == d for s in run.steps for n in s.nodes) / steps for d in x]
    accepted = [sum(accepted_length(s) >= d for s in run.steps) / steps for d in x]
    figure.add_bar(x=x, y=drafted, name=word("series.drafted"), marker={"color": SKY, "pattern_shape": "\\"})
    figure.add_bar(x=x, y=accepted, name=word("series.accepted"), marker_color=ACCENT)
    _axes(figure, word, "depth", "nodes", barmode="group", xaxis_dtick=1)


CHARTS: dict[str, Callable[[go.Figure, Run, Run | None, Word], None]] = {
    "length": _length,
    "histogram": _histogram,
    "acceptance": _acceptance,
    "calibration": _calibration,
    "time": _time,
    "race": _race,
    "size": _size,
}
"""Name → how to draw it; the title is `chart.<name>` of `viz.words`."""
