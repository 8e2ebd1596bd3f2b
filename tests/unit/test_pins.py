"""Tests that the tools and packages of CI are pinned by hash."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_actions_are_pinned_by_commit_and_can_only_read() -> None:
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert files
    for file in files:
        text = file.read_text()
        used = re.findall(r"uses: *(\S+)( .*)?$", text, re.M)
        assert used and all(re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", name) for name, _ in used), file
        assert all(re.fullmatch(r" +# v[\d.]+", version) for _, version in used), file
        assert re.search(r"^permissions:\n  contents: read\n\n", text, re.M), file
        assert text.count("actions/checkout@") == text.count("persist-credentials: false"), file


def test_every_constraint_is_locked_with_hashes() -> None:
    """requirements.lock holds every pin of constraints.txt, each with a hash: `make lock` ran after the last change."""
    lock = (ROOT / "requirements.lock").read_text()
    assert "file:" not in lock and " @ " not in lock
    entries = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)[^\n]* \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.M)
    locked = dict(entries)
    assert len(entries) == len(re.findall(r"^[A-Za-z0-9_.-]+==", lock, re.M))
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(pins) > 40
    wrong = {name: locked.get(plain(name)) for name, version in pins if locked.get(plain(name)) != version}
    assert not wrong


def plain(name: str) -> str:
    """Normalize a package name as the package index does."""
    return re.sub(r"[-_.]+", "-", name).lower()
