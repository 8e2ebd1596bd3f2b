"""The guides: each message that they quote is one that windlass says, links lead somewhere, snippets are code."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from windlass.config.loading import examine

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
HOLE = "\0"


def _text(node: ast.expr) -> str:
    """A string of the source, a hole where something is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-\w.]+", HOLE, node.value)  # of the logger
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return HOLE


@cache
def said() -> list[str]:
    found = []
    for path in (ROOT / "windlass").rglob("*.py"):
        tree = list(ast.walk(ast.parse(path.read_text())))
        described = {id(node.value) for node in tree if isinstance(node, ast.Expr)}  # docstrings
        for node in tree:
            if id(node) not in described and isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                found.append(_text(node))
    return [text for text in found if text.strip(HOLE)]


def messages() -> list[str]:
    text = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    return re.findall(r"^### `(.*)`$", text, re.MULTILINE)


def is_said(message: str) -> bool:
    parts = [part.strip() for part in message.split("...") if part.strip()]
    wanted = re.compile(".*".join(re.escape(part) for part in parts), re.DOTALL)
    return any(wanted.search(text) for text in said())


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_still_in_the_source(message: str) -> None:
    assert len(message.replace("...", "").strip()) > 10, "too short to prove anything"
    assert is_said(message)


def test_messages_that_nobody_says_are_noticed() -> None:
    assert len(messages()) > 30
    assert not is_said("the batch sizes do not fit together at all: ...")
    assert not is_said("... bytes are free: it needs ... no room for the checkpoint")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_links_lead_to_files_and_snippets_are_what_they_say(guide: Path) -> None:
    text = guide.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (guide.parent / target).exists() or target == "../compat.md", target  # that one is generated
    for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language == "python":
            ast.parse(code)
        if language == "json":
            assert not examine(json.loads(code)).problems
