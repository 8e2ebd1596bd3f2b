"""Tests of tensors on huge pages: they are ordinary tensors that keep their memory."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from windlass.comm.anonymous_pages import AnonymousPages
from windlass.kernels.huge_pages import HUGE_PAGE, empty_on_huge_pages, populate_pages
from windlass.storage.staging_memory import aligned_buffer


@pytest.mark.parametrize("shape", [(0,), (7,), (3, HUGE_PAGE // 4 + 5), (5, 2, HUGE_PAGE // 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_memory_is_writable_and_outlives_other_names(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty_on_huge_pages(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
    view = tensor.fill_(3).flatten()[tensor.numel() // 2 :]
    del tensor
    gc.collect()
    others = [empty_on_huge_pages(shape, dtype).fill_(5) for _ in range(3)]
    assert bool((view == 3).all()) and len(others) == 3


def test_large_tensors_begin_at_a_huge_page() -> None:
    assert empty_on_huge_pages((HUGE_PAGE + 1,), torch.uint8).data_ptr() % HUGE_PAGE == 0


def _resident(tensor: torch.Tensor) -> int:
    """Return the resident bytes of the mapping that holds a tensor, from /proc/self/smaps."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(side, 16) for side in head.split("-"))
            found = first <= tensor.data_ptr() < last
        elif found and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping holds the tensor")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mappings are listed by Linux")
def test_pages_are_allocated_in_advance_and_keep_their_contents() -> None:
    tensor = empty_on_huge_pages((4, HUGE_PAGE), torch.uint8)
    before = _resident(tensor)
    tensor[1, 5] = 7
    part = tensor[1:3]
    assert populate_pages(part) is None
    assert _resident(tensor) - before >= part.nbytes - 2 * mmap.PAGESIZE
    assert tensor[1, 5] == 7 and not tensor[1, 6:].any() and not tensor[2].any()
    assert _resident(tensor) - before < tensor.nbytes  # memory outside `part` has no pages so far


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allocate pages at their first use")
def test_a_refusal_of_the_system_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.kernels.huge_pages._MADV_POPULATE_WRITE", 10**6)
    assert populate_pages(empty_on_huge_pages((HUGE_PAGE,), torch.uint8)) == "Invalid argument"


def test_memory_without_huge_pages_is_used_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was built without huge pages refuses the advice with EINVAL."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 10**6)
    assert empty_on_huge_pages((HUGE_PAGE,), torch.uint8).fill_(3).eq(3).all()
    assert AnonymousPages(HUGE_PAGE).bytes.eq(0).all()
    assert aligned_buffer(HUGE_PAGE)[0].fill_(3).eq(3).all()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert empty_on_huge_pages((HUGE_PAGE,), torch.uint8).fill_(3).eq(3).all()
    assert AnonymousPages(HUGE_PAGE).bytes.eq(0).all()
