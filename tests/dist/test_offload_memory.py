"""Tests that states on NVMe are saved, loaded and exported one chunk (or unit) at a time, by counting allocations."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.dist.test_offload import LATE, offload_to
from tests.models import Place
from tests.oracle import Recipe

SUB_GROUP = 8000
GRAIN = 64 << 10  # staging buffers are multiples of this many bytes
MARGIN = 64 << 10  # bytes of counts, random states and messages between ranks


class Live(TorchDispatchMode):
    """Dispatch mode that counts live memory allocated inside it: tensors and staging buffers, in bytes.

    Attributes:
        peak: most bytes at any time.
        chunks: most chunks in memory at any time.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model, self._tensors = model, {}
        self._buffers = 0
        self.peak = self.chunks = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before = {entry.untyped_storage()._cdata for entry in args if isinstance(entry, torch.Tensor)}
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.Tensor) and item.device.type == "cpu":
                storage = item.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._tensors:
                    self._tensors[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._look()
        return result

    def _look(self) -> None:
        self._tensors = {key: item for key, item in self._tensors.items() if not item[0].expired()}
        self.peak = max(self.peak, self._buffers + sum(nbytes for _, nbytes in self._tensors.values()))
        self.chunks = max(self.chunks, sum(chunk.master is not None for chunk in self._model.masters.chunks))

    def _gone(self, nbytes: int) -> None:
        self._buffers -= nbytes

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the allocations inside."""
        from windlass.storage import disk_tier

        real = disk_tier.aligned_buffer

        def counted(nbytes: int) -> tuple[torch.Tensor, object]:
            tensor, owner = real(nbytes)
            self._buffers += nbytes
            weakref.finalize(owner, self._gone, nbytes).atexit = False
            self._look()
            return tensor, owner

        with mock.patch.object(disk_tier, "aligned_buffer", counted), self:
            yield


def engine_on_disk(folder: str) -> Any:
    zero = (
        *offload_to("nvme", "nvme", folder, gradient_device="nvme"),
        ("sub_group_size", SUB_GROUP),
        ("stage3_gather_16bit_weights_on_model_save", True),
    )
    recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW)
    return start(specimen("four_blocks"), ds_config(recipe, Setting(stage=3, zero=zero)))


def forget_buffers(model: Any) -> None:
    """Free the staging buffers that are kept for reuse."""
    staging = model.tiers.staging
    staging.wait_all()
    staging._total -= sum(buffer.numel() for buffer in staging._free)
    staging._free.clear()


def counted(folder: str) -> dict[str, Any]:
    """Return the peak bytes of each operation on this rank, and the most chunks in memory."""
    subject = specimen("four_blocks")
    results: dict[str, Any] = {}
    engine = engine_on_disk(folder)
    for step in range(2):
        subject.train(engine, subject.batch(Place(step, 0, dist.get_rank())), engine.backward)
        engine.step()
    model = engine._sharded
    for what, call in {
        "save": lambda: engine.save_checkpoint(folder),
        "export": lambda: engine.save_16bit_model(folder),
        "load": lambda: engine.load_checkpoint(folder),
    }.items():
        forget_buffers(model)  # buffers kept by the steps would hide the memory of a save
        live = Live(model)
        with live.counting():
            call()
        results[what] = (live.peak, live.chunks)
    engine.destroy()
    fresh = engine_on_disk(folder)
    forget_buffers(fresh._sharded)
    live = Live(fresh._sharded)
    with live.counting():
        fresh.load_checkpoint(folder)
    results["load into a fresh engine"] = (live.peak, live.chunks)
    results["unit"] = max(unit["elements"] for unit in fresh.report()["units"]) * 4
    results["all"] = sum(unit["elements"] for unit in fresh.report()["units"]) * 12 // dist.get_world_size()
    fresh.destroy()
    return results


def test_one_chunk_is_in_memory_at_a_time(tmp_path: Any) -> None:
    for result in run_ranks(counted, 2, str(tmp_path), env=LATE, transport="gloo"):
        chunk, unit = SUB_GROUP * (4 + 8), result.pop("unit")
        hashing = (1 << 19) + MARGIN  # memory of a fingerprint, for any size of the model
        assert result.pop("all") > 2 * (chunk + unit + MARGIN)
        for what, (peak, chunks) in result.items():
            assert chunks <= 1, what
            assert peak <= (unit if what == "export" else chunk + unit + hashing) + MARGIN, what
        assert result["save"][1] == result["load"][1] == 1


def staged_bytes(folder: str) -> tuple[int, int, int]:
    """Train two steps with states on NVMe. Return bytes: of staging buffers, of all records, of the largest record."""
    zero = offload_to("nvme", "none", folder)
    subject = specimen("four_blocks")
    engine = start(subject, ds_config(Recipe(optimizer="AdamW", optimizer_params=ADAMW), Setting(stage=2, zero=zero)))
    for micro in range(2):
        subject.train(engine, subject.batch(Place(micro, 0, dist.get_rank())), engine.backward)
        engine.step()
    records = [-(-record.nbytes // GRAIN) * GRAIN for record in engine._sharded.masters.state_offload._records.values()]
    result = engine._sharded.tiers.staging._total, sum(records), max(records)
    engine.destroy()
    return result


def test_buffers_of_records_without_states_are_freed(tmp_path: Any) -> None:
    """The first step creates the states, so that later steps need larger buffers than the first."""
    for held, records, largest in run_ranks(staged_bytes, 1, str(tmp_path), env=LATE):
        assert 0 < held <= records + largest
