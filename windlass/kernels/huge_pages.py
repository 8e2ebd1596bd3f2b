"""Host memory on huge pages for weights and caches that every step reads.

Memory that an allocator reuses is already on small pages, and no request moves it to huge pages; so new memory is
mapped. On huge pages, reads need fewer address translations, and the hardware prefetches across 4 KiB boundaries.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys

import torch

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on Arm with base pages of 4 KiB

_MADV_POPULATE_WRITE = 23  # Linux 5.14


def empty_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous CPU tensor, on huge pages where it fills a huge page and the system grants one."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    # Private: a separate system setting controls huge pages of shared memory. Untouched pages take no memory.
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -flat.data_ptr() % HUGE_PAGE
    advise_huge_pages(memory, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return flat[start : start + nbytes].view(dtype).view(shape)


def advise_huge_pages(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Request huge pages for a range of a mapping. Where the system grants none, the pages stay small."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    with contextlib.suppress(OSError):  # a kernel without them, or a sandbox that refuses the advice
        memory.madvise(advice, start, nbytes)


def populate_pages(tensor: torch.Tensor) -> str | None:
    """Allocate the pages of a contiguous tensor of `empty_on_huge_pages`, without a change of its contents.

    Other threads of Python run meanwhile.

    Returns:
        None if the pages are allocated; else the system's reason, and pages are allocated at their first use.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no MADV_POPULATE_WRITE"
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE))
    return os.strerror(ctypes.get_errno()) if code else None
