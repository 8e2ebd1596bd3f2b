"""Test that docs/wiring.md lists every dataclass of callables and every observer, with the files that call them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import windlass
from tests.paused_collection import paused_collection

ROOT = Path(windlass.__file__).parent
PAGE = (ROOT.parent / "docs" / "wiring.md").read_text("utf-8")
SECTIONS = {result[1]: result[2] for result in re.finditer(r"(?ms)^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE)}


def callable_fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a frozen dataclass if it is one of callables: most of its fields are."""
    if not any("dataclass(" in (text := ast.unparse(item)) and "frozen=True" in text for item in node.decorator_list):
        return []
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    calls = [item for item in fields if ast.unparse(item.annotation).startswith("Callable")]
    if len(calls) < 2 or 4 * len(calls) < 3 * len(fields):
        return []
    kept = [item for item in fields if item in calls or ast.unparse(item.annotation).endswith("Callbacks")]
    return [item.target.id for item in kept if isinstance(item.target, ast.Name)]


def observer_methods(node: ast.ClassDef) -> list[str]:
    """Return the methods of an observer's base class; they do nothing but have a docstring."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    is_base = not node.bases and node.name.endswith("Observer") and all(len(item.body) == 1 for item in methods)
    return [item.name for item in methods] if is_base else []


@pytest.fixture(scope="module")
def wires() -> dict[str, list[str]]:
    """Return the members of each dataclass of callables and of each observer in the package."""
    with paused_collection():
        classes = [
            node
            for path in sorted(ROOT.rglob("*.py"))
            if "Callable" in (text := path.read_text("utf-8")) or "Observer" in text
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ClassDef)
        ]
    return {node.name: results for node in classes if (results := callable_fields(node) or observer_methods(node))}


def rows(section: str) -> dict[str, str]:
    """Return the file of the call by the member, from a section's table."""
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    column = table[0].index("called in")
    return {row[0].strip("`"): row[column].strip("`") for row in table[2:]}


def test_the_page_lists_the_wires_of_the_package_and_no_others(wires: dict[str, list[str]]) -> None:
    assert sorted(SECTIONS) == sorted(wires)


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_each_member_has_a_row_whose_file_uses_it(wires: dict[str, list[str]], name: str) -> None:
    listed = rows(SECTIONS[name])
    assert list(listed) == wires[name]
    for member, file in listed.items():
        assert f".{member}" in (ROOT / f"{file}.py").read_text("utf-8"), (member, file)


@pytest.mark.parametrize("name", sorted(name for name in SECTIONS if not name.endswith("Observer")))
def test_a_dataclass_is_created_in_the_named_file(name: str) -> None:
    result = re.search(r"Created in `([\w/]+)`", SECTIONS[name])
    assert result is not None and f"{name}(" in (ROOT / f"{result[1]}.py").read_text("utf-8")


def test_dataclasses_of_callables_are_told_from_others() -> None:
    source = """
@dataclass(frozen=True)
class Wire:
    call: Callable[[], None]
    other: Callable[[], None] = print
    inner: InnerCallbacks = None

@dataclass(frozen=True)
class Record:
    read: Callable[[], None]
    size: int
"""
    wire, record = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    assert callable_fields(record) == []
    assert callable_fields(wire) == []  # two of three: under three quarters
    del wire.body[2]
    assert callable_fields(wire) == ["call", "other"]
