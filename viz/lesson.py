"""A short lesson on the recordings: one page for each idea, on a real step that shows it.

    page(shelf, 0)  → {"index": 0, "count": 10, "key": "draft", "run": "sky3", "step": 3, "phase": "grow", …}

Where a page stands is found in the recordings, never written down: the same lesson holds for other recordings.
`lesson.<key>` of `viz.words` is the page's title, `lesson.<key>.text` what it says, with `slots` filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eagle_core.events import Step
from eagle_core.metrics import METRICS, Run
from viz.words import number, visible

if TYPE_CHECKING:
    from viz.playground import Recording, Shelf

__all__ = ["PAGES", "page"]


def page(shelf: Shelf, index: int) -> dict[str, Any] | None:
    """Page `index` of the lesson on these recordings; None where there is no such page, or nothing to show it on."""
    keys = list(PAGES)
    if not 0 <= index < len(keys) or next(_grown(shelf), None) is None:
        return None
    key = keys[index]
    phase, find = PAGES[key]
    recording, step, row, slots = find(shelf)
    place = {"run": recording.name, "step": step.index, "phase": phase, "row": row}
    return {"index": index, "count": len(keys), "key": key, **place, "slots": slots}


Place = tuple["Recording", Step, int | None, Mapping[str, object]]


def _steps(recording: Recording) -> list[Step]:
    return [event for event in recording.events if isinstance(event, Step)]


def _all(shelf: Shelf) -> Iterator[Recording]:
    """The recordings in order, each read only when it is reached."""
    return (shelf[name] for _, name in shelf.titles)


def _grown(shelf: Shelf) -> Iterator[Recording]:
    """Those whose trees were grown and reranked."""
    return (recording for recording in _all(shelf) if any(step.dropped for step in _steps(recording)))


def _main(shelf: Shelf) -> tuple[Recording, Step]:
    """The first grown recording, and the step in which it accepts most: one step carries the first seven pages."""
    recording = next(_grown(shelf))
    return recording, max(_steps(recording), key=lambda step: (len(step.accepted), -step.index))


def _tau(recording: Recording) -> float:
    value = METRICS["tau"].of(Run.collect(recording.events))
    return value if isinstance(value, float) else 0.0


def _draft(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    made = len(step.nodes) - 1 + len(step.dropped)
    return recording, step, None, {"forwards": step.forwards, "made": made, "root": visible(step.nodes[0].text)}


def _value(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    node = max(step.nodes, key=lambda n: (n.depth >= 2, n.value))  # deep enough that value is a product
    parent = step.nodes[max(node.parent, 0)]
    slots = {
        "token": visible(node.text), "c": number(node.confidence), "v": number(node.value),
        "parent": visible(parent.text), "pv": number(parent.value),
    }  # fmt: skip
    return recording, step, node.id, slots


def _rerank(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    kept = len(step.nodes) - 1
    return recording, step, None, {"kept": kept, "made": kept + len(step.dropped)}


def _mask(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    node = max(step.nodes, key=lambda n: (n.depth, n.value))
    return recording, step, node.id, {"n": len(step.nodes), "token": visible(node.text), "a": node.depth}


def _verify(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    root = step.nodes[0]
    return recording, step, None, {"n": len(step.nodes), "root": visible(root.text), "draw": visible(root.draw_text)}


def _accept(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    return recording, step, None, {"a": len(step.accepted) - 1, "bonus": visible(step.bonus.text)}


def _rollback(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    n, kept = len(step.nodes), len(step.accepted)
    slots = {"n": n, "kept": kept, "gone": n - kept, "e": len(step.emitted), "bonus": visible(step.bonus.text)}
    return recording, step, None, slots


def _hit(shelf: Shelf) -> Place:
    recording = max(_all(shelf), key=_tau)
    step = max(_steps(recording), key=lambda step: (len(step.accepted), -step.index))
    return recording, step, None, {"a": len(step.accepted) - 1, "tau": f"{_tau(recording):.2f}"}


def _miss(shelf: Shelf) -> Place:
    recording = min(_grown(shelf), key=_tau)
    step = min(_steps(recording), key=lambda step: (len(step.accepted), len(step.nodes) == 1, step.index))
    drafted, draw = len(step.nodes) - 1, visible(step.bonus.text)
    return recording, step, None, {"n": drafted, "draw": draw, "tau": f"{_tau(recording):.2f}"}


def _slower(shelf: Shelf) -> Place:
    recording, step = _main(shelf)
    run = Run.collect(recording.events)
    tau, ms = _tau(recording), METRICS["step_ms"].of(run)
    slots = {"tau": f"{tau:.2f}"}
    whole = ms if isinstance(ms, float) else 0.0
    slots |= {"ms": f"{whole:.3g}", "even": f"{whole / max(tau, 1.0):.3g}"}
    for part in ("draft", "verify"):
        share = METRICS[f"{part}_share"].of(run)
        slots[part] = f"{whole * (share if isinstance(share, float) else 0.0):.3g}"
    return recording, step, None, slots


PAGES: dict[str, tuple[str, Callable[[Shelf], Place]]] = {
    "draft": ("grow", _draft),
    "value": ("grow", _value),
    "rerank": ("rerank", _rerank),
    "mask": ("mask", _mask),
    "verify": ("verify", _verify),
    "accept": ("accept", _accept),
    "rollback": ("commit", _rollback),
    "hit": ("accept", _hit),
    "miss": ("accept", _miss),
    "slower": ("accept", _slower),
}
"""Key of a page → the phase it shows, and how its place is found. In the order of the lesson."""
