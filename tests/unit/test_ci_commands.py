"""Tests that the Python code in the commands of CI and of the wheel builds runs with the present names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class _WithoutAsserts(ast.NodeTransformer):
    """Transformer that replaces each assertion by its condition, because the condition holds only on machines of CI."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Expr(node.test), node)


def snippets() -> list[str]:
    """Return the code of every `python -c "..."` that names windlass."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = [settings["tool"]["cibuildwheel"]["test-command"]]
    texts += [file.read_text() for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    found = [code for text in texts for code in re.findall(r'python -c "([^"]+)"', text)]
    return [code for code in found if "windlass" in code]


@pytest.mark.parametrize("code", snippets())
def test_code_in_commands_runs(code: str) -> None:
    tree = ast.fix_missing_locations(_WithoutAsserts().visit(ast.parse(code)))
    exec(compile(tree, "<command>", "exec"), {})


def test_wheels_and_an_installation_without_compiler_check_their_kernels() -> None:
    assert sum("is_native" in code for code in snippets()) == 2
