"""Test that no file but those of an engine's own classes touches a private attribute of an engine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import windlass

ROOT = Path(windlass.__file__).parent
ENGINE_CLASSES = {"training_engine.py", "pipeline_engine.py", "checkpoint_methods.py", "query_methods.py"}
FILES = [
    path for folder in ("engine", "verify") for path in (ROOT / folder).glob("*.py") if path.name not in ENGINE_CLASSES
]


def private_accesses(source: str) -> list[str]:
    """Return the private attributes that a module reads or sets on `engine`, `self.engine` or `self._engine`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.strip("_") in ("engine", "Engine"):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_uses_no_private_attribute_of_an_engine(path: Path) -> None:
    assert not private_accesses(path.read_text())


def test_private_accesses_are_found() -> None:
    """Each form of a private access is found, and public names and other owners are not."""
    source = "engine._sharded.units\nself._engine._config = 1\nEngine._scaling_engine\nengine.module\nself._sharded"
    assert len(private_accesses(source)) == 3
