"""Blocks of a preempted sequence are moved or computed again, whichever takes less time by measured rates."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass.base.log import logger
from windlass.inference import preempted_blocks
from windlass.inference.engine_options import EngineOptions
from windlass.inference.preempted_blocks import PreemptedBlocks
from windlass.inference.step_cost import StepCost


class Machine:
    """Clock, and a runner that copies blocks of 16 MB at a given rate."""

    block_size = 16
    block_nbytes = 16 * 10**6

    def __init__(self, rate: float) -> None:
        self.rate, self.now = rate, 0.0

    def perf_counter(self) -> float:
        return self.now

    def save_blocks(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        self.now += len(blocks) * self.block_nbytes / self.rate
        return [torch.zeros(len(blocks), 1)]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(
    ("rate", "step", "is_moved"), [(1e9, 0.33, True), (1e9, 0.31, False), (2e9, 0.31, True), (5e8, 0.33, False)]
)
def test_the_cheaper_way_is_taken_by_measured_rates(
    rate: float, step: float, is_moved: bool, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving 10 blocks out and in takes 0.32 seconds at 1 GB/s, and computing them again takes one step."""
    machine: Any = Machine(rate)
    monkeypatch.setattr(time, "perf_counter", machine.perf_counter)
    options = EngineOptions(swap_bytes=1 << 40) if tier == "host" else EngineOptions(swap_directory=str(tmp_path))
    store = PreemptedBlocks(machine, options)
    decisions = []
    for number, count in enumerate((1, 10)):  # the first sequence is always moved, to measure the rate
        sequence: Any = SimpleNamespace(
            sequence_id=number, blocks=list(range(count)), num_computed=16 * count, saved=None
        )
        store.save(sequence, StepCost(step))
        decisions.append(sequence.saved is not None)
    assert decisions == [True, is_moved]
    assert (store.read(sequence) is not None) == is_moved
    store.close()


def test_one_slow_save_does_not_end_the_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving 10 blocks takes 0.16 seconds at 2 GB/s and 16 seconds at 20 MB/s, and computing them again one second."""
    machine: Any = Machine(2e9)
    monkeypatch.setattr(time, "perf_counter", machine.perf_counter)
    store = PreemptedBlocks(machine, EngineOptions(swap_bytes=1 << 40))

    def is_moved(number: int) -> bool:
        sequence: Any = SimpleNamespace(sequence_id=number, blocks=list(range(10)), num_computed=160, saved=None)
        store.save(sequence, StepCost(1.0))
        return sequence.saved is not None

    machine.rate = 2e7
    assert is_moved(0) and not is_moved(1)
    machine.rate = 2e9
    moved = [is_moved(number) for number in range(2, 400)]
    first = moved.index(True)
    assert 50 < first < 300 and all(moved[first:])


def _sequence(number: int) -> Any:
    return SimpleNamespace(sequence_id=number, blocks=[0], num_computed=16, saved=None)


def test_a_full_disk_is_reported_once_until_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings, fails = list[str](), True
    write = preempted_blocks.write_tensors

    def write_or_fail(path: Path, tensors: Any) -> None:
        path.write_bytes(b"part of a file")
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.unlink()
        write(path, tensors)

    monkeypatch.setattr(preempted_blocks, "write_tensors", write_or_fail)
    monkeypatch.setattr(logger, "warning", lambda text, *values: warnings.append(text % values))
    machine: Any = Machine(1e9)
    store = PreemptedBlocks(machine, EngineOptions(swap_directory=str(tmp_path)))
    for number, fails in enumerate([True, True, False, True]):
        sequence = _sequence(number)
        store.save(sequence, StepCost(1.0))
        assert (sequence.saved is None) == fails
    assert len(warnings) == 2
    assert all(str(tmp_path) in text and "No space left" in text for text in warnings)
    assert len([path for path in tmp_path.rglob("*") if path.is_file() and path.name in "0123"]) == 1
    store.close()


def test_an_error_of_the_runner_is_not_taken_for_one_of_the_disk(tmp_path: Path) -> None:
    class Lost(Machine):
        def save_blocks(self, blocks: Sequence[int]) -> list[torch.Tensor]:
            raise ConnectionError("a rank has ended")

    machine: Any = Lost(1e9)
    store = PreemptedBlocks(machine, EngineOptions(swap_directory=str(tmp_path)))
    with pytest.raises(ConnectionError, match="a rank has ended"):
        store.save(_sequence(0), StepCost(1.0))
    store.close()
