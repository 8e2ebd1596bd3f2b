"""Tests of the engine's interfaces: no other file touches a private attribute of an engine, and the files of its class
share only what `EngineParts` declares."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import windlass
from windlass.engine.engine_parts import EngineParts

ROOT = Path(windlass.__file__).parent
ENGINE_CLASSES = {"training_engine.py", "pipeline_engine.py", "checkpoint_methods.py", "query_methods.py"}
FILES = [
    path for folder in ("engine", "verify") for path in (ROOT / folder).glob("*.py") if path.name not in ENGINE_CLASSES
]


def private_accesses(source: str) -> list[str]:
    """Return the private attributes that a module reads or sets on `engine`, `self.engine` or `self._engine`."""
    results = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.strip("_") in ("engine", "Engine"):
                results.append(f"line {node.lineno}: {ast.unparse(node)}")
    return results


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_uses_no_private_attribute_of_an_engine(path: Path) -> None:
    assert not private_accesses(path.read_text())


def test_private_accesses_are_found() -> None:
    """Each form of a private access is found; public names and attributes of other objects are not."""
    source = "engine._sharded.units\nself._engine._config = 1\nEngine._scaling_engine\nengine.module\nself._sharded"
    assert len(private_accesses(source)) == 3


CLASS_FILES = [ROOT / "engine" / name for name in sorted(ENGINE_CLASSES)]
CLASS_FILES += [ROOT / "compat" / name for name in ("deepspeed_engine.py", "deepspeed_pipeline.py")]


def private_names(source: str) -> tuple[set[str], set[str]]:
    """Return the private names that a file uses on `self` or `super()`, and those that it defines or assigns."""
    used, own = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
            (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ClassDef):
            own |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            targets = [
                item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None) for item in node.body
            ]
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
    return tuple({name for name in names if name[0] == "_" and name[:2] != "__"} for names in (used, own))


NAMES = {path.name: private_names(path.read_text()) for path in CLASS_FILES}
SHARED = private_names((ROOT / "engine" / "engine_parts.py").read_text())[1]
SHARED |= {name for name in EngineParts.__annotations__ if name[0] == "_"}


@pytest.mark.parametrize("file", sorted(NAMES))
def test_private_names_that_cross_a_file_are_declared(file: str) -> None:
    used, own = NAMES[file]
    others = set().union(*(names[1] for name, names in NAMES.items() if name != file))
    assert used - own - SHARED - _own_compat_names(file) == set(), "used here and defined elsewhere"
    assert (own & others) - SHARED == set(), "defined here and in another file"


def _own_compat_names(file: str) -> set[str]:
    """Return the private names that `deepspeed_pipeline.py` may use because `deepspeed_engine.py` defines them."""
    return NAMES["deepspeed_engine.py"][1] if file == "deepspeed_pipeline.py" else set()


def test_every_shared_name_crosses_a_file() -> None:
    crossing = {name for name in SHARED if sum(name in used | own for used, own in NAMES.values()) > 1}
    assert crossing == SHARED
