"""Tests that records in the control store stay within one run."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from windlass.watchdog import control_store
from windlass.watchdog.control_store import ControlStore


def test_ranks_restarted_by_torchrun_find_an_empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks restarted by torchrun find an empty control store.

    The underlying store may still hold the dead ranks and the end decision of the previous attempt.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setattr(control_store, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setattr(control_store, "_store_count", 0)
        result = ControlStore.open()
        assert result is not None
        assert result.read_decision() == ""
        result.post_decision(f"attempt {attempt} is over")
        assert result.read_decision() == f"attempt {attempt} is over"
