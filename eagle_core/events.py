"""What happened, as plain Python: `Start`, then one `Step` per target forward, then `Finish`.

A run is a sequence of events; a trace is the same sequence, one JSON object a line. Events are frozen, hold
no tensors, import no torch, and survive the round trip: `load(dump(e)) == e`. Whatever the page, the command
line or a reader of a trace shows is drawn from these alone.

    Start   ids [the prompt]            → first token, drawn by the prefill
    Step 0  tree → verdicts → emitted   ┐
    Step 1  …                           ├ ids of the answer = Start.emitted + Step.emitted + …
    Finish  reason, counts              ┘ its text          = Start.text + Step.text + … + Finish.text

Times are milliseconds of wall clock, probabilities lie in 0..1 under the *processed* distribution (after
temperature, top-k, top-p, min-p; one-hot at temperature 0), ids are target token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from eagle_core.drafters.base import MAX_NODES
from eagle_core.errors import TraceError

__all__ = [
    "FATES",
    "SCHEMA",
    "SOURCES",
    "Candidate",
    "Choice",
    "Event",
    "Fate",
    "Finish",
    "Node",
    "Source",
    "Start",
    "Step",
    "dump",
    "load",
    "load_trace",
]

SCHEMA = 2
"""Version of the event schema. A reader refuses a newer one and must read every older one.

2: a node and a candidate may name their `source`; a step's timing names what its commit took.
"""

Fate = Literal["root", "accepted", "not the draw", "parent rejected", "past the stop"]
FATES: tuple[str, ...] = get_args(Fate)

Source = Literal["head", "lookup", "both"]
SOURCES: tuple[Source, ...] = get_args(Source)
"""Who drafted a node, where a method has two sources; "both" where they agreed on it."""


class Choice(NamedTuple):
    """A token of the target: its id, its label, its processed probability."""

    token: int
    text: str
    p: float


class Node(NamedTuple):
    """One node of the verified tree.

    `confidence` is the drafter's probability given the parent, `value` the product along the path, `target_p`
    the target's probability under the parent's processed distribution (1 for the root). `draw` is what the
    target drew at this node: the child that equals it lives on. `expanded` says that the drafter ran on this
    node (it was in the beam, or is inside the template), so that it could have children. `source` says who drafted it,
    for a method of two sources; None for the root, for all other methods, and in traces of schema 1.
    """

    id: int
    token: int
    text: str
    parent: int
    depth: int
    confidence: float
    value: float
    target_p: float
    fate: Fate
    draw: int
    draw_text: str
    draw_p: float
    expanded: bool
    source: Source | None = None


class Candidate(NamedTuple):
    """A token the drafter scored and rerank left out. `id` continues the numbering of the nodes; `parent` is a
    node's or a candidate's id; `expanded` is true where the beam had kept it and drafted below it."""

    id: int
    token: int
    text: str
    parent: int
    depth: int
    confidence: float
    value: float
    expanded: bool
    source: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The request, the machine, and the token drawn by the prefill.

    `pair` names target and drafter and what was read from them (layers, draft vocabulary, context limits);
    `sampling` and `settings` are what is in force, after defaults and limits.
    """

    kind: ClassVar[str] = "start"
    schema: int = SCHEMA
    method: str
    pair: dict[str, Any]
    sampling: dict[str, Any]
    settings: dict[str, Any]
    max_new_tokens: int
    stop: list[str]
    prompt_ids: list[int]
    prompt_text: str | None
    first: Choice
    emitted: list[int]
    text: str
    prefill_ms: float
    device: str
    dtype: str
    attention: str
    threads: int
    versions: dict[str, str]
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round of draft, verify, walk and commit.

    `position` is the root's absolute position, which is also the number of tokens the target's cache held
    before the step. `accepted` are node ids, root first; `emitted` the ids this step added to the answer (cut
    at a stop), `text` the text that became final with them. `top` are the target's likeliest tokens where the
    walk stopped, before temperature. `outside` are the nodes whose draw the drafter's vocabulary does not hold, so
    that no draft could have met it.
    """

    kind: ClassVar[str] = "step"
    index: int
    position: int
    nodes: list[Node]
    dropped: list[Candidate]
    accepted: list[int]
    bonus: Choice
    top: list[Choice]
    outside: list[int]
    emitted: list[int]
    text: str
    timing: dict[str, float]
    forwards: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why it ended and what it took. `reason`: eos, stop (a stop string), length (max_new_tokens), context (the
    target's limit) or cancelled. `text` is what was held back and is now final (an unfinished character)."""

    kind: ClassVar[str] = "finish"
    reason: str
    text: str
    steps: int
    tokens: int
    drafted: int
    accepted: int
    seconds: float
    timing: dict[str, float] = field(default_factory=dict)
    note: str | None = None


Event: TypeAlias = Start | Step | Finish

_KINDS: dict[str, type[Start] | type[Step] | type[Finish]] = {cls.kind: cls for cls in (Start, Step, Finish)}
_LIMIT = 1 << 24  # characters in one line of a trace; a step of a 256-node tree needs about 2^17


def dump(event: Event) -> str:
    """One event as one line of JSON, without a newline. Never contains NaN (ValueError instead)."""
    plain: dict[str, Any] = {"kind": event.kind}
    for f in fields(event):
        value = getattr(event, f.name)
        if value and isinstance(value, list) and hasattr(value[0], "_asdict"):
            value = [_row(row) for row in value]
        elif hasattr(value, "_asdict"):
            value = value._asdict()
        plain[f.name] = value
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _row(row: Any) -> dict[str, Any]:
    """A named tuple as an object; optional fields that say nothing are left out."""
    plain = row._asdict()
    for name in row._field_defaults:
        if plain[name] is None:
            del plain[name]
    return plain


def load(line: str) -> Event:
    """The event of one line. Raises `TraceError` naming the field that is missing, unknown or of a wrong type."""
    if len(line) > _LIMIT:
        raise TraceError(
            f"this line of the trace has {len(line)} characters, more than {_LIMIT}; it is no trace of ours"
        )
    try:
        plain = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise TraceError(f"not a line of JSON ({e}); a trace holds one JSON object a line") from None
    kind = plain.pop("kind", None) if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(kind, str) or kind not in _KINDS:
        raise TraceError(f"expected an object with kind start, step or finish, found {str(kind)[:80]!r}")
    cls = _KINDS[kind]
    if cls is Start and plain.get("schema") not in range(1, SCHEMA + 1):
        raise TraceError(
            f"this trace has schema {str(plain.get('schema'))[:20]}, this version reads 1 to {SCHEMA};"
            " update, or record it again"
        )
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(set(plain) - set(known)):
        raise TraceError(f"unknown field {unknown[0][:80]!r} in a {cls.kind} event")
    for name, f in known.items():
        if name not in plain:
            raise TraceError(f"a {cls.kind} event without its field {name!r}; the trace is incomplete")
        plain[name] = _read(plain[name], str(f.type), f"{cls.kind}.{name}")
    if cls is Step:
        _check_tree(plain)
    return cls(**plain)


def load_trace(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a trace file, in order; blank lines are skipped.

    Raises `TraceError` where the sequence is not Start, Step…, Finish with steps numbered from 0. A trace cut
    off before its Finish is fine: every event that was written is returned. So is a lone Finish, which is all that
    is told of an answer cancelled before its prompt was read.
    """
    expected = -1  # index of the next step; −1: no start seen yet, −2: finished
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = load(line)
        except TraceError as e:
            raise TraceError(f"line {number}: {e}") from None
        begins = isinstance(event, Start) or (expected == -1 and isinstance(event, Finish) and event.tokens == 0)
        if begins is not (expected == -1) or expected == -2:
            raise TraceError(f"line {number}: a trace is one start, its steps, one finish; found {event.kind} here")
        if isinstance(event, Step) and event.index != expected:
            raise TraceError(f"line {number}: step {event.index} where step {expected} belongs; a line is missing")
        expected = -2 if isinstance(event, Finish) else expected + 1
        yield event


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_ROWS: dict[str, Any] = {"Choice": Choice, "Node": Node, "Candidate": Candidate}
_SCALARS: dict[str, Any] = {"int": int, "str": str, "float": (int, float), "bool": bool, "Fate": str, "Source": str}
_LARGEST = 1 << 53  # numbers beyond are not exact in a browser, and may not fit a float
_NESTED = 16  # levels of lists and objects in a field of any shape


def _read(value: Any, type_: str, where: str) -> Any:
    """Check `value` against an annotation of this module and turn row objects back into named tuples."""
    if type_.endswith(" | None"):
        return None if value is None else _read(value, type_.removesuffix(" | None"), where)
    if type_.startswith("list["):
        if not isinstance(value, list):
            raise TraceError(f"{where} should be a list, found {type(value).__name__}")
        return [_read(v, type_[5:-1], where) for v in value]
    if type_.startswith("dict["):
        if not isinstance(value, Mapping):
            raise TraceError(f"{where} should be an object, found {type(value).__name__}")
        values = type_.removeprefix("dict[str, ").removesuffix("]")
        return {_read(k, "str", where): _read(v, values, f"{where}.{k}") for k, v in value.items()}
    if type_ == "Any":
        return _read_any(value, where, _NESTED)
    if type_ in _ROWS:
        row = _ROWS[type_]
        optional = set(row._field_defaults)
        if not isinstance(value, Mapping) or not set(row._fields) - optional <= set(value) <= set(row._fields):
            raise TraceError(f"{where} should be an object with exactly {', '.join(row._fields)}")
        types = {k: row.__annotations__[k].__forward_arg__ for k in row._fields}
        read = {k: _read(value[k], types[k], f"{where}.{k}") for k in row._fields if k in value}
        if not all(read[k] <= 1.001 for k in read if types[k] == "float"):  # in a row, all are probabilities
            raise TraceError(f"{where} holds a probability above 1")
        return row(**read)
    wanted = _SCALARS[type_]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise TraceError(f"{where} should be of type {type_}, found {type(value).__name__}")
    if type_ == "float" and not 0 <= value < _LARGEST:
        raise TraceError(f"{where} is not a finite number from 0")
    if type_ == "int" and not -1 <= value < _LARGEST:
        raise TraceError(f"{where} is out of range")
    if isinstance(value, str) and not _is_text(value):
        raise TraceError(f"{where} holds half of a surrogate pair, which is no text")
    names = {"Fate": FATES, "Source": SOURCES}.get(type_)
    if names is not None and value not in names:
        raise TraceError(f"{where} should be one of {', '.join(names)}, found {value[:80]!r}")
    return value


def _read_any(value: Any, where: str, levels: int) -> Any:
    """A value of any shape, if it can be written again: finite numbers, real text, not nested without end."""
    if not levels:
        raise TraceError(f"{where} is nested too deeply")
    if isinstance(value, list):
        return [_read_any(v, where, levels - 1) for v in value]
    if isinstance(value, Mapping):
        return {_read(k, "str", where): _read_any(v, where, levels - 1) for k, v in value.items()}
    if isinstance(value, str):
        return _read(value, "str", where)
    if isinstance(value, int | float) and not abs(value) < 1 << 64:  # seeds are the largest
        raise TraceError(f"{where} is not a finite number, or too large")
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_tree(step: dict[str, Any]) -> None:
    """Refuse a step whose ids do not form a tree: everything that draws it may then rely on it."""
    nodes, dropped = step["nodes"], step["dropped"]
    if not nodes or nodes[0].parent != -1:
        raise TraceError(f"step {step['index']} has no root: its first node must have parent -1")
    if len(nodes) > MAX_NODES:
        raise TraceError(f"step {step['index']} has {len(nodes)} nodes, more than {MAX_NODES}")
    depth = []
    for i, row in enumerate([*nodes, *dropped]):
        parent_ok = (
            row.parent == -1 if i == 0 else 0 <= row.parent < (i if i < len(nodes) else len(nodes) + len(dropped))
        )
        if row.id != i or not parent_ok:
            raise TraceError(
                f"step {step['index']}: node {i} has id {row.id} and parent {row.parent}, which is no tree"
            )
        depth.append(row.depth)
    if any(row.depth != (depth[row.parent] + 1 if row.parent >= 0 else 0) for row in [*nodes, *dropped]):
        raise TraceError(f"step {step['index']}: a node's depth is not its parent's plus one")
    walk = step["accepted"]
    if not walk or walk[0] != 0 or any(not 0 <= b < len(nodes) or nodes[b].parent != a for a, b in pairwise(walk)):
        raise TraceError(f"step {step['index']}: accepted {walk[:20]} is not a path from the root")
    walked = ("root", "accepted", "past the stop")
    for row in nodes:
        hangs = row.id > 0 and nodes[row.parent].fate not in walked
        if (row.fate == "root") is not (row.id == 0) or (row.fate == "parent rejected") is not hangs:
            raise TraceError(f"step {step['index']}: node {row.id} cannot have the fate {row.fate!r} where it hangs")
    if any(nodes[i].fate not in walked for i in walk):
        raise TraceError(f"step {step['index']}: accepted {walk[:20]} holds a rejected node")
    if not 1 <= len(step["emitted"]) <= len(walk):
        raise TraceError(f"step {step['index']} emitted {len(step['emitted'])} tokens on a path of {len(walk)}")
    if any(not 0 <= i < len(nodes) for i in step["outside"]):
        raise TraceError(f"step {step['index']}: outside {step['outside'][:20]} names a node that is not there")
