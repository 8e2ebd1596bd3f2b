"""Test that no file of the package touches a private name that another file of the package defines."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import windlass
from tests.paused_collection import paused_collection

ROOT = Path(windlass.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "compat" not in path.relative_to(ROOT).parts]
# Names that torch and transformers define too: their use is not reported.
FOREIGN = {*vars(nn.Module()), *dir(torch.Tensor), "_C", "_apply_gate", "_decode", "_exit"}
FOREIGN |= {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
# A base class may lie in another file; `test_engine_interfaces` checks those of an engine.
OWN = ("self", "cls", "super()")


@dataclass
class PrivateNames:
    """Private names of a file: those that it defines, and its uses on objects and in imports, with their line."""

    defined: set[str] = field(default_factory=set)
    on_objects: list[tuple[int, str, str]] = field(default_factory=list)  # line, name, expression
    imported: list[tuple[int, str]] = field(default_factory=list)


def is_private(name: str) -> bool:
    return name[0] == "_" and name[:2] != "__"


def read_names(tree: ast.Module) -> PrivateNames:
    """Return the private names that a file defines and uses."""
    names = PrivateNames()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not is_private(node.attr):
                continue
            if isinstance(node.ctx, ast.Store):
                names.defined.add(node.attr)
            if ast.unparse(node.value) not in OWN:
                names.on_objects.append((node.lineno, node.attr, ast.unparse(node)))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.defined.add(node.id)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("windlass"):
            names.imported += [(node.lineno, alias.name) for alias in node.names if alias.name[0] == "_"]
    names.defined = {name for name in names.defined if is_private(name)}
    return names


def test_private_names_of_other_files_are_not_used() -> None:
    with paused_collection():
        files = {path: read_names(ast.parse(path.read_text("utf-8"))) for path in FILES}
    defined = set().union(*(names.defined for names in files.values())) - FOREIGN
    results = []
    for path, names in files.items():
        place = path.relative_to(ROOT)
        for line, name, expression in names.on_objects:
            if name in defined and name not in names.defined:
                results.append(f"{place}:{line}: {expression}")
        results += [f"{place}:{line}: {name}" for line, name in names.imported]
    assert results == []


def test_each_form_of_a_definition_is_found() -> None:
    tree = ast.parse("_a = 1\nclass _B:\n    _c: int = 0\n    def _d(self): self._e = self._f = 1\n    __g = 1")
    assert read_names(tree).defined == {"_a", "_B", "_c", "_d", "_e", "_f"}
