"""Tests that each name that DeepSpeed's clients import exists with its kind, or raises one sentence when it is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.compat.stand_in_entry import NameStatus
from windlass.compat.stand_in_names import STAND_IN_NAMES
from windlass.compat.stand_in_path import STAND_IN_FOLDER

ROOT = Path(__file__).resolve().parents[2]
SYMBOLS: dict[str, str] = dict(
    line.split()  # type: ignore[misc]
    for line in (ROOT / "tests/data/deepspeed_symbols.txt").read_text().splitlines()
    if not line.startswith("#")
)


@pytest.fixture(scope="module")
def resolved() -> list[Any]:
    """Run `resolve_names.py` in its own process, so that no other test imports `deepspeed`."""
    text = "\n".join([*SYMBOLS, *STAND_IN_NAMES])
    paths = os.pathsep.join([str(STAND_IN_FOLDER), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("resolve_names.py"))],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


@pytest.fixture(scope="module")
def walked(resolved: list[Any]) -> dict[str, dict[str, Any]]:
    """Result of `resolve` for each name."""
    names: dict[str, dict[str, Any]] = resolved[1]
    return names


def is_sentence(name: str, text: str) -> bool:
    """Return True if the text has the form `deepspeed.x: why; what to do`, on one line."""
    return text.startswith("deepspeed") and ": " in text and "\n" not in text and len(text.split()) >= 6


def test_common_uses_of_modules(resolved: list[Any]) -> None:
    assert [habit for habit, holds in resolved[0].items() if not holds] == []


def test_every_imported_name_exists_or_is_refused(walked: dict[str, dict[str, Any]]) -> None:
    absent = {name: walked[name]["sentence"] for name in SYMBOLS if walked[name]["state"] == "absent"}
    assert absent == {}


def test_names_have_the_kind_of_deepspeed(walked: dict[str, dict[str, Any]]) -> None:
    there = {name: walked[name]["kinds"] for name in SYMBOLS if walked[name]["state"] == "there"}
    assert {
        name: (kinds, SYMBOLS[name]) for name, kinds in there.items() if SYMBOLS[name] not in ("missing", "any", *kinds)
    } == {}


def test_unsupported_names_raise_one_sentence(walked: dict[str, dict[str, Any]]) -> None:
    refused = {name: seen["sentence"] for name, seen in walked.items() if seen["state"] == "refused"}
    assert "deepspeed.DeepSpeedTransformerLayer" in refused and "deepspeed.moe.sharded_moe.MOELayer" in refused
    assert {name: text for name, text in refused.items() if not is_sentence(name, text)} == {}


def test_table_rows_resolve_as_declared(walked: dict[str, dict[str, Any]]) -> None:
    expected = {
        name: "refused" if entry.status is NameStatus.REFUSED else "there" for name, entry in STAND_IN_NAMES.items()
    }
    wrong = {name: walked[name] for name, state in expected.items() if walked[name]["state"] != state}
    assert wrong == {}
