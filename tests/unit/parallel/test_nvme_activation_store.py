"""Tests of activations on NVMe: equal bits, reuse of space and buffers, and disk errors raised at the use."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.parallel.checkpointed_models import NETS, differences, plainly, trained
from windlass import checkpointing
from windlass.base.errors import StorageError
from windlass.parallel import activation_checkpoint_api
from windlass.parallel.nvme_activation_store import NvmeStore, open_nvme_store
from windlass.parallel.saved_tensor_offload import SavedTensorOffloader

pytestmark = pytest.mark.filterwarnings("ignore:.*tmpfs.*")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpoint_api, "_options", None)
    monkeypatch.setattr(activation_checkpoint_api, "_configured", False)
    monkeypatch.setattr(activation_checkpoint_api, "_settings", None)
    monkeypatch.setattr(activation_checkpoint_api, "_offloaders", {})


@pytest.mark.parametrize("name", NETS)
def test_checkpointing_to_files_keeps_results(name: str, tmp_path: Path) -> None:
    checkpointing.configure(nvme_path=str(tmp_path), min_offload_bytes=0)
    assert not differences(trained(name, checkpointing.checkpoint), trained(name, plainly))
    counts = checkpointing.get_offload_counters()
    assert counts is not None and counts.offloaded_bytes > 0 and not any(counts.stored_bytes.values())


def test_region_in_files_keeps_results(tmp_path: Path) -> None:
    def through(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        with checkpointing.offload_saved_tensors("nvme", nvme_path=[str(tmp_path)], min_offload_bytes=0):
            return function(*args, **kwargs)

    assert not differences(trained("Tied", through), trained("Tied", plainly))


def test_steps_reuse_the_same_space(tmp_path: Path) -> None:
    place = open_nvme_store([str(tmp_path)])
    keeper = SavedTensorOffloader(place, min_offload_bytes=0)
    allocated: list[int] = []
    allocate = place.storage.allocate
    place.storage.allocate = lambda nbytes, what: allocated.append(nbytes) or allocate(nbytes, what)  # type: ignore
    x = torch.randn(5000, requires_grad=True)
    for step in range(3):
        with saved_tensors_hooks(keeper.pack, keeper.unpack):
            y = x
            refs = []
            for _ in range(8):
                y = y.sin()
                refs.append(StorageWeakRef(y.untyped_storage()))
            loss = y.sum()
        del y
        assert all(ref.expired() for ref in refs), "only files and their buffers keep it"
        want = x.detach().clone().requires_grad_()
        z = want
        for _ in range(8):
            z = z.sin()
        z.sum().backward()
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, want.grad), step  # type: ignore[arg-type]
    assert allocated == [20_000] * 8


def test_space_is_bounded_over_changing_batch_lengths(tmp_path: Path) -> None:
    place = open_nvme_store([str(tmp_path)])
    keeper = SavedTensorOffloader(place, min_offload_bytes=0)
    for length in range(1, 61):
        x = torch.randn(1024 * length, requires_grad=True)
        with saved_tensors_hooks(keeper.pack, keeper.unpack):
            loss = x.sin().exp().tanh().sum()
        loss.backward()
        del loss
    three_of_the_largest = 3 * 60 * 4096
    files = sum(file.size for file in place.storage._stripes._files)  # type: ignore[attr-defined]
    assert files <= 3 * three_of_the_largest
    assert len(place._buffers) <= 16


def test_fetch_before_write_is_not_overwritten(tmp_path: Path) -> None:
    place = open_nvme_store([str(tmp_path)])
    first, second = torch.randn(5000), torch.randn(5000)
    stay = place.put(first)
    copy = stay.fetch()
    copy.wait()
    stay.wait()
    place.put(second).wait()
    assert torch.equal(copy.value, first)
    again = stay.fetch()
    again.wait()
    assert torch.equal(again.value, first), "from the file"


def test_folder_is_empty_after_close(tmp_path: Path) -> None:
    checkpointing.configure(nvme_path=str(tmp_path), min_offload_bytes=0)
    trained("Net", checkpointing.checkpoint, steps=1)
    checkpointing.configure()
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        checkpointing.configure(nvme_path=str(tmp_path / "file"))
    assert not checkpointing.is_configured()


class Broken:
    """Tier with one operation that fails."""

    def __init__(self, tier: Any, what: str) -> None:
        self._tier, self._what = tier, what

    def __getattr__(self, name: str) -> Any:
        if name == self._what:

            def fail(*args: Any) -> Any:
                raise StorageError(f"no {name}: the disk is gone")

            return fail
        return getattr(self._tier, name)


@pytest.mark.parametrize("what", ["allocate", "write", "read"])
def test_disk_errors_are_raised_at_the_read(what: str, tmp_path: Path) -> None:
    keeper = SavedTensorOffloader(
        NvmeStore(Broken(open_nvme_store([str(tmp_path)]).storage, what)), min_offload_bytes=0
    )
    x = torch.randn(5000, requires_grad=True)

    def forward() -> torch.Tensor:
        with saved_tensors_hooks(keeper.pack, keeper.unpack):
            return x.sin().exp().sum()

    if what == "read":
        loss = forward()
        for ref in keeper._in_flight:
            kept = ref()
            if kept is not None:
                kept.finish_transfer(wait=True)
        gc.collect()
        with pytest.raises(StorageError, match="no read"):
            loss.backward()
    else:
        with pytest.raises(StorageError, match=f"no {what}"):
            forward()
