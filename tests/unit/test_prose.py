"""Tests of the rules of `tools/prose.py`, each on a file that breaks it once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose import examine

CASES = {
    "first word of a docstring": ('"""What the module does."""\n', 1, "begins with 'What'"),
    "function without a verb": ('def size() -> int:\n    """The size."""\n', 1, "begin with a verb"),
    "two arguments on a line": (
        'def f(a: int, b: int) -> None:\n    """Add.\n\n    Args:\n        a: first. b: second.\n    """\n',
        1,
        "describes 'b' within another argument's entry",
    ),
    "argument without a noun": (
        'def f(a: int) -> None:\n    """Add.\n\n    Args:\n        a: of it.\n    """\n',
        1,
        "'a'",
    ),
    "error without a subject": (
        'def f(a: int) -> None:\n    """Add.\n\n    Raises:\n        OSError: it is full.\n    """\n',
        1,
        "'OSError' begins with 'it'",
    ),
    "retired word in a comment": ("SIZE = 1\n# the rank has heard\n", 2, "has received"),
    "retired word in a message": ('raise ValueError("nobody has the key")\n', 1, "name the noun"),
    "retired name": ("def f() -> None:\n    foresight = 1\n", 2, "prefetcher"),
    "retired value": ('class State(Enum):\n    SHARDED = "released"\n', 2, "'released': sharded"),
    "is no": ("# the value is no tensor\n", 1, "is not a"),
    "inline comment without a noun": ("LIMIT = 3  # of each server\n", 1, "begin with the noun"),
    "comment line without a noun": ("# which peers read\nLIMIT = 3\n", 1, "begin with the noun"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_found_where_it_is(name: str) -> None:
    source, line, reason = CASES[name]
    ((found, text),) = examine(Path("windlass/example.py"), source).problems
    assert found == line and reason in text


def test_plain_text_has_no_findings() -> None:
    source = (
        '"""Sizes of buffers."""\n\n# The limit holds for the sum\n# of all buffers.\nLIMIT = "# of all"\n'
        "COUNT = 1  # buffers of each rank\nSUM = 2  # if there is no rank, or the rank is no longer here\n"
    )
    assert examine(Path("windlass/example.py"), source).problems == []


def test_retired_words_of_a_page_are_found_outside_code_and_quotations() -> None:
    page = '# Page\n\n```\nsomebody\n```\nA rank `nobody` named "nobody",\nand somebody else.\n'
    assert examine(Path("docs/page.md"), page).problems == [(7, "'somebody': name the noun")]
