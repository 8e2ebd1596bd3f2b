"""The guides: each message that they quote is one that windlass says, links lead somewhere, snippets are code."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from windlass.config.config_loading import validate_config
from windlass.launch import dry_run
from windlass.launch.launch_flags import build_run_parser, parse_flags

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
    """Headings of the pages that explain messages."""
    texts = [(ROOT / "docs" / "guides" / f"{name}.md").read_text() for name in ("troubleshooting", "parallel")]
    return [message for text in texts for message in re.findall(r"^### `(.*)`$", text, re.MULTILINE)]


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
            assert not validate_config(json.loads(code)).problems


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_sessions_answer_as_printed(guide: Path) -> None:
    for number, session in enumerate(re.findall(r"```pycon\n(.*?)```", guide.read_text(), re.DOTALL)):
        test = doctest.DocTestParser().get_doctest(session, {}, f"{guide.stem} {number}", str(guide), 0)
        said: list[str] = []
        assert test.examples
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
        assert not said, "".join(said)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_dry_runs_draw_what_is_printed(guide: Path) -> None:
    for session in re.findall(r"```console\n(\$ windlass run --dry-run.*?)\n```", guide.read_text(), re.DOTALL):
        command, drawing = session.split("\n", 1)
        text = io.StringIO()
        flags = parse_flags(build_run_parser(), command.removeprefix("$ windlass run ").split())
        assert dry_run.show_rank_map(flags, Console(file=text, width=120, soft_wrap=True)) == 0
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        assert [line.rstrip() for line in drawing.splitlines()] == lines


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_links_within_a_page_and_to_headings_lead_to_one(guide: Path) -> None:
    for page, heading in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", guide.read_text()):
        text = ((guide.parent / page) if page else guide).read_text()
        headings = [
            re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text.lower(), re.M)
        ]
        assert heading in headings, f"{page}#{heading}"


def drawer() -> Any:
    """The script that draws the pictures of the guide to parallelism."""
    folder = str(ROOT / "tools")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("draw_parallel_guide")
    finally:
        sys.path.remove(folder)


def test_the_table_of_layouts_is_what_the_formulas_give() -> None:
    text = (ROOT / "docs" / "guides" / "parallel.md").read_text()
    table = drawer().layout_table()
    assert f"<!-- generated: layouts -->\n\n{table}\n\n<!-- end" in text, "run python tools/draw_parallel_guide.py"
    assert drawer().fill_layout_table(text.replace(table, "an older one")) == text
