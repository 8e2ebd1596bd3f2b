"""Tests of text helpers: printable terminal output, plurals of counts, and a nearest-name search of bounded time."""

from __future__ import annotations

import io
import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.bounded_input import parse_finite_float, parse_int
from windlass.base.bounded_json import JsonError, exceeds_depth, parse_json
from windlass.base.errors import CheckpointError, WindlassError
from windlass.base.log import logger
from windlass.base.printable_console import PrintableConsole
from windlass.base.text import escape_unprintable, join_abridged, nearest_name, one_line, plural, print_escaped

HOSTILE = "\x1b]0;owned\x07 \x9b31m \r\x08 \u202e \u2028 \ud800 \x7f"


def is_harmless(text: str) -> bool:
    text.encode()
    return not any(
        ord(item) < 32 or 127 <= ord(item) < 160 or item in "\u202e\u2028" for item in text if item not in "\n\t"
    )


@given(st.text(st.characters()))
def test_printable_text_is_idempotent(text: str) -> None:
    once = escape_unprintable(text)
    assert is_harmless(once) and escape_unprintable(once) == once
    assert "\n" not in one_line(text) and len(one_line(text, 10)) <= 10
    assert one_line(text, 10)[:7] == one_line(text)[:7]
    if text.isprintable():
        assert once == text


def test_a_process_without_output_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as of `command >&-`
    print_escaped("text")


def test_every_output_path_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    error = CheckpointError(f"no checkpoint {HOSTILE}")
    assert is_harmless(str(error)) and "\\x1b]0;owned" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(WindlassError()) == "" and error.args == (f"no checkpoint {HOSTILE}",)

    print_escaped(HOSTILE)
    print_escaped(HOSTILE, to_stderr=True)
    printed = capsys.readouterr()
    assert is_harmless(printed.out) and is_harmless(printed.err) and "\\x1b" in printed.out

    stream = io.StringIO()
    console = PrintableConsole(file=stream, width=200)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    console.print(HOSTILE, table, markup=False)
    assert is_harmless(stream.getvalue()) and stream.getvalue().count("\\x1b") == 3

    handler = logger.handlers[0]
    record = logging.LogRecord("windlass", logging.INFO, "", 0, "tag %s", (HOSTILE,), None)
    assert is_harmless(handler.format(record))


@pytest.mark.parametrize(("count", "words"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1200, "1,200 ranks")])
def test_plurals(count: int, words: str) -> None:
    assert plural(count, "rank") == words
    assert plural(1, "batch", "batches") == "1 batch" and plural(2, "batch", "batches") == "2 batches"
    assert join_abridged(list("abc"), 2) == "a, b and 1 more" and join_abridged(["a"]) == "a"


def test_the_nearest_name() -> None:
    assert nearest_name("WEIGHT_DEKAY", ["lr", "weight_decay"]) == "weight_decay"
    assert nearest_name("nothing", ["lr"]) is None
    assert nearest_name("l" * 10**6, ["l" * 10**6]) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 10**5, "nested more than 100"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested more than 100"),
        ("9" * 5000, "too many digits"),
        ('{"a": 1\n"b"}', "line 2, column 1"),
        (b"\xff\xfe\x00", "no|not"),
    ],
)
def test_json_over_the_limits_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(JsonError, match=reason):
        parse_json(text)
    for number in ("1e999", "-" + "9" * 309, "1" + "0" * 400):
        with pytest.raises(JsonError, match="beyond the range of float64"):
            parse_json(number, finite_numbers=True)
    assert parse_json("1" + "0" * 308, finite_numbers=True) == 10**308
    assert parse_json("[" * 100 + "]" * 100) and not exceeds_depth({"a": [1]}, 2)


@given(st.text(max_size=8))
def test_parsed_integers_equal_python_and_floats_are_finite(text: str) -> None:
    full, real = parse_int(text), parse_finite_float(text)
    assert full is None or full == int(text)
    assert real is None or abs(real) < float("inf")


def test_absurd_numbers_are_refused() -> None:
    assert [parse_int(text) for text in ("9" * 5000, "", "-", "1.5", "٣", "1_0")] == [None] * 6
    assert [parse_finite_float(text) for text in ("nan", "inf", "1e999", "x")] == [None] * 4
