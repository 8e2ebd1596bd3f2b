"""Tests of the record of a script's failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.launch.script_session import record_script_failure


def test_a_failure_that_quotes_a_name_in_another_encoding_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    name = os.fsdecode(b"caf\xe9")
    record_script_failure(tmp_path / "failure", ValueError(f"{name} → bad"))
    record_script_failure(tmp_path / "failure", ValueError("a consequence"))
    assert (tmp_path / "failure").read_text(encoding="utf-8") == "rank 1: ValueError: caf\\udce9 → bad"
