"""Test that no file of the package touches a private name that another file of the package defines."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch import nn

import windlass

ROOT = Path(windlass.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "compat" not in path.relative_to(ROOT).parts]
# Names that torch and transformers have too; here they are theirs.
FOREIGN = {*vars(nn.Module()), *dir(torch.Tensor), "_C", "_apply_gate", "_exit"}
FOREIGN |= {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
# A base class may lie in another file; `test_engine_interfaces` checks those of an engine.
OWN = ("self", "cls", "super()")


def defined_names(tree: ast.Module) -> set[str]:
    """Return the private names that a file defines or assigns, on modules, classes and objects."""
    results: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            results.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            results.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in results if name[0] == "_" and name[:2] != "__"}


TREES = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
DEFINED = {path: defined_names(tree) for path, tree in TREES.items()}


def uses(path: Path) -> list[str]:
    """Return the private names of other files that a file uses on an object, or imports."""
    others = set().union(*(names for item, names in DEFINED.items() if item != path)) - DEFINED[path] - FOREIGN
    results = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and node.attr in others and ast.unparse(node.value) not in OWN:
            results.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("windlass"):
            names = [alias.name for alias in node.names if alias.name[0] == "_"]
            results += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in names]
    return results


def test_private_names_of_other_files_are_not_used() -> None:
    assert [line for path in FILES for line in uses(path)] == []


def test_each_form_of_a_definition_is_found() -> None:
    tree = ast.parse("_a = 1\nclass _B:\n    _c: int = 0\n    def _d(self): self._e = self._f = 1\n    __g = 1")
    assert defined_names(tree) == {"_a", "_B", "_c", "_d", "_e", "_f"}
