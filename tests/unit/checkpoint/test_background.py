"""A save beside training: what it takes, and what it leaves alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.base.activity import During, activity
from windlass.checkpoint import SavedState
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.background import Background
from windlass.checkpoint.save import Begun

STATE = SavedState(tensors={"x": torch.ones(3)})


def test_waits_of_the_thread_that_writes_are_not_taken_for_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meets, goes_on = threading.Event(), threading.Event()
    gather = Ranks._gather

    def late(ranks: Ranks, item: Any) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            meets.set()
            assert goes_on.wait(10)
        return gather(ranks, item)

    monkeypatch.setattr(Ranks, "_gather", late)
    ranks = Ranks.of(None)
    background = Background((0,))
    with During("gather"):
        background.start(Begun(tmp_path, "t", STATE, ranks, True), ranks, pin=False)
        assert meets.wait(10) and activity.now is not None and activity.now.operation == "gather"
    goes_on.set()
    background.finish()
    assert activity.now is None


@pytest.mark.parametrize(("ranks", "blocks"), [("1", False), ("4", True)])
def test_the_memory_for_copies_is_that_of_all_ranks_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: str, blocks: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("windlass.checkpoint.background.free_memory", lambda: 4 << 20)
    state, alone = SavedState(tensors={"x": torch.zeros(2 << 20, dtype=torch.uint8)}), Ranks.of(None)
    background = Background((0,))
    with caplog.at_level("WARNING", logger="windlass"):
        background.start(Begun(tmp_path, "t", state, alone, True), alone, pin=False)
    background.finish()
    assert (f"on each of the {ranks} ranks of this host" in caplog.text) == blocks
