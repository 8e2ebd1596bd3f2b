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
