"""The README says what is so: methods, definitions, files, commands."""

from __future__ import annotations

import re

from eagle_core.__main__ import COMMANDS
from eagle_core.drafters import METHODS
from eagle_core.events import FATES, Finish, Node, Start, Step
from eagle_core.metrics import glossary
from tests.conftest import HERE

ROOT = HERE.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_method_and_command_is_listed() -> None:
    assert [m for m in METHODS if f"| `{m}` |" not in README] == []
    assert [c for c in COMMANDS if not re.search(rf"python -m eagle_core (?:\w+ \| )*{c}\b", README)] == []


def test_definitions_are_the_table_itself() -> None:
    assert glossary() in README


def test_every_event_field_is_documented() -> None:
    fields = {name for event in (Start, Step, Finish) for name in event.__dataclass_fields__ if name != "kind"}
    assert [f for f in sorted(fields | set(Node._fields)) if f"`{f}`" not in README] == []
    assert [f for f in FATES if f"`{f}`" not in README] == []


def test_every_module_is_on_the_map_and_every_linked_file_exists() -> None:
    modules = [p.name for p in (ROOT / "eagle_core").glob("*.py") if not p.name.startswith("__")]
    assert [m for m in modules if m not in README] == []
    linked = re.findall(r"\]\((?!http|#)([^)]+)\)", README) + re.findall(r"`(tests/[\w.]+\.py)`", README)
    assert [path for path in linked if not (ROOT / path).exists()] == []


def test_the_engine_imports_neither_the_page_nor_pictures() -> None:
    for file in (ROOT / "eagle_core").rglob("*.py"):
        assert not re.search(r"^\s*(?:import|from) (?:viz|gradio|app)\b", file.read_text(encoding="utf-8"), re.M), file
    for file in (ROOT / "viz").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        lazy = file.name in ("playground.py", "models.py")  # they alone load models, when they are asked for
        indent = "" if lazy else r"\s*"
        assert not re.search(rf"^{indent}(?:import|from) (?:torch|gradio|app)\b", text, re.M), file
