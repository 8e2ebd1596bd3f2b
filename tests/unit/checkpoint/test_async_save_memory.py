"""Tests of async saves: the waits of the writer thread, and the memory of the copies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.base.collective_activity import WaitScope, activity
from windlass.checkpoint import SavedState
from windlass.checkpoint.async_save import AsyncSave
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_save import CheckpointSave

STATE = SavedState(tensors={"x": torch.ones(3)})


def test_waits_of_the_writer_thread_are_not_waits_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meets, goes_on = threading.Event(), threading.Event()
    gather = CheckpointRanks._all_gather_object

    def late(ranks: CheckpointRanks, item: Any) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            meets.set()
            assert goes_on.wait(60)
        return gather(ranks, item)

    monkeypatch.setattr(CheckpointRanks, "_all_gather_object", late)
    ranks = CheckpointRanks.of_group(None)
    background = AsyncSave((0,))
    with WaitScope("gather"):
        background.start(CheckpointSave(tmp_path, "t", STATE, ranks, True), ranks, pin=False)
        assert meets.wait(60) and activity.current_wait is not None and activity.current_wait.operation == "gather"
    goes_on.set()
    background.finish()
    assert activity.current_wait is None


@pytest.mark.parametrize(("ranks", "blocks"), [("1", False), ("4", True)])
def test_copy_memory_is_counted_for_all_ranks_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: str, blocks: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("windlass.checkpoint.async_save.free_memory", lambda: 4 << 20)
    state, alone = SavedState(tensors={"x": torch.zeros(2 << 20, dtype=torch.uint8)}), CheckpointRanks.of_group(None)
    background = AsyncSave((0,))
    with caplog.at_level("WARNING", logger="windlass"):
        background.start(CheckpointSave(tmp_path, "t", state, alone, True), alone, pin=False)
    background.finish()
    assert (f"on each of the {ranks} ranks of this host" in caplog.text) == blocks
