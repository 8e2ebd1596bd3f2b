"""Test that docs/wiring.md lists every dataclass of callables and every observer, with the files that call them.

Other classes of zero and engine take at most one callable, and callables that are assigned later are listed too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import windlass
from tests.paused_collection import paused_collection

ROOT = Path(windlass.__file__).parent
PAGE = (ROOT.parent / "docs" / "wiring.md").read_text("utf-8")
# Assignments that `later_assignments` reports only because another class's callable has the attribute's name.
OTHER_ATTRIBUTES = {("CompressionClock.source", "zero/sharded_init/deferred")}
SECTIONS = {result[1]: result[2] for result in re.finditer(r"(?ms)^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE)}


def callable_fields(node: ast.ClassDef) -> list[str]:
    """Return the callables and nested callbacks of a frozen dataclass if three quarters of its fields are callables."""
    if not any("dataclass(" in (text := ast.unparse(item)) and "frozen=True" in text for item in node.decorator_list):
        return []
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    calls = [item for item in fields if ast.unparse(item.annotation).startswith("Callable")]
    if len(calls) < 2 or 4 * len(calls) < 3 * len(fields):
        return []
    kept = [item for item in fields if item in calls or ast.unparse(item.annotation).endswith("Callbacks")]
    return [item.target.id for item in kept if isinstance(item.target, ast.Name)]


def observer_methods(node: ast.ClassDef) -> list[str]:
    """Return the methods of an observer's base class, which have only a docstring."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    is_base = not node.bases and node.name.endswith("Observer") and all(len(item.body) == 1 for item in methods)
    return [item.name for item in methods] if is_base else []


def is_callable(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).startswith("Callable")


def decorators(node: ast.ClassDef) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


def constructor_callables(node: ast.ClassDef) -> list[str]:
    """Return the parameters of a class's constructor that are callables, also of a dataclass."""
    if "dataclass" in decorators(node):
        return [
            ast.unparse(item.target)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and is_callable(item.annotation)
        ]
    inits = [item.args for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return [item.arg for args in inits for item in (*args.args, *args.kwonlyargs) if is_callable(item.annotation)]


def callable_attributes(tree: ast.Module) -> dict[str, str]:
    """Return the owner of each attribute of a file that is annotated as a callable, and can be assigned.

    The owner is a public class, or "" for a variable of the module.
    """
    owners: dict[str, str] = {}
    for owner in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        name = owner.name if isinstance(owner, ast.ClassDef) else ""
        if name.startswith("_") or (isinstance(owner, ast.ClassDef) and "frozen=True" in decorators(owner)):
            continue
        for node in owner.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_callable(node.annotation):
                owners[node.target.id] = name
        for method in owner.body if name else ():
            if isinstance(method, ast.FunctionDef):
                args = {
                    item.arg for item in (*method.args.args, *method.args.kwonlyargs) if is_callable(item.annotation)
                }
                for node in ast.walk(method):
                    if isinstance(node, ast.AnnAssign) and is_callable(node.annotation):
                        owners[ast.unparse(node.target).removeprefix("self.")] = name
                    if isinstance(node, ast.Assign) and ast.unparse(node.value) in args:
                        owners[ast.unparse(node.targets[0]).removeprefix("self.")] = name
    return owners


def assigned_attributes(tree: ast.Module) -> set[str]:
    """Return the names of attributes of other objects to which a file assigns anything but True or False."""
    return {
        node.attr
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) not in ("True", "False")
        for target in statement.targets
        for node in ast.walk(target)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) not in ("self", "cls")
    }


def later_assignments(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Return pairs (attribute annotated as a callable, other file that assigns to an attribute of that name)."""
    owners: dict[str, dict[str, str]] = {}
    for file, tree in trees.items():
        for attribute, owner in callable_attributes(tree).items():
            owners.setdefault(attribute, {})[file] = owner or file
    found = {
        (f"{owner}.{attribute}", file)
        for file, tree in trees.items()
        for attribute in assigned_attributes(tree) & owners.keys()
        if file not in owners[attribute]
        for owner in owners[attribute].values()
    }
    return found - OTHER_ATTRIBUTES


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of the package's files, by path without suffix."""
    with paused_collection():
        return {
            str(path.relative_to(ROOT).with_suffix("")): ast.parse(path.read_text("utf-8"))
            for path in sorted(ROOT.rglob("*.py"))
        }


@pytest.fixture(scope="module")
def wires(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the members of each dataclass of callables and of each observer in the package."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: results for node in classes if (results := callable_fields(node) or observer_methods(node))}


def rows(section: str) -> dict[str, str]:
    """Return, for each member in a section's table, the file in which it is called."""
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


def test_other_classes_of_zero_and_engine_take_at_most_one_callable(
    trees: dict[str, ast.Module], wires: dict[str, list[str]]
) -> None:
    classes = [
        node
        for file, tree in trees.items()
        if file.startswith(("zero/", "engine/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name not in wires
    ]
    assert len(classes) > 100
    assert {node.name: names for node in classes if len(names := constructor_callables(node)) > 1} == {}
    loose = ast.parse(
        "class A:\n    def __init__(self, a: Callable[[], None], *, b: Callable[[], int] | None) -> None: ..."
    )
    assert isinstance(loose.body[0], ast.ClassDef) and constructor_callables(loose.body[0]) == ["a", "b"]


def test_the_page_lists_callables_that_other_files_assign(trees: dict[str, ast.Module]) -> None:
    table = PAGE.partition("## Callables that are assigned later")[2].splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table if line.startswith("| `")]
    assert later_assignments(trees) == {(row[0], row[1]) for row in cells}
    defining = ast.parse(
        "hook: Callable[[], None] = print\n"
        "class A:\n    def __init__(self):\n        self.call: Callable[[], None] = print"
    )
    assigning = ast.parse("from x import hooks\nhooks.hook = abs\na.call = abs\na.other = abs")
    assert later_assignments({"hooks": defining, "user": assigning}) == {("hooks.hook", "user"), ("A.call", "user")}


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
    assert callable_fields(wire) == []  # two of three fields are callables: under three quarters
    del wire.body[2]
    assert callable_fields(wire) == ["call", "other"]
