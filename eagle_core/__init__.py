"""EAGLE playground, the engine: lossless speculative decoding of a real model, told as events.

    from eagle_core import load_pair

    pair = load_pair()
    for event in pair.generate("What is speculative decoding?", method="eagle3"):
        print(event.text, end="", flush=True)

Importing this package imports no torch; each name below loads what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "load_pair": "pairs",
    "load_target": "pairs",
    "Pair": "pairs",
    "Target": "target",
    "generate": "engine",
    "Sampling": "verify",
    "TreeSettings": "drafters",
    "METHODS": "drafters",
    "Start": "events",
    "Step": "events",
    "Finish": "events",
    "dump": "events",
    "load": "events",
    "load_trace": "events",
    "EagleError": "errors",
    "InvalidRequest": "errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
