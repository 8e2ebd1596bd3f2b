"""Directories of other processes come and go while a folder is looked through."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.storage import claim


def test_a_directory_that_goes_away_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = claim.Claim(tmp_path, "peer")
    entries = list(os.scandir(tmp_path))
    assert len(entries) == 1
    there.release()
    monkeypatch.setattr(os, "scandir", lambda folder: entries)
    claim.remove_dead(tmp_path)
