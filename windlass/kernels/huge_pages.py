"""Host memory on huge pages for weights and caches that every step reads.

Memory that an allocator hands out again already has small pages, which no request changes; so this memory is mapped
anew. Reading it needs fewer translations of addresses, and hardware prefetches beyond 4 KiB.
"""

from __future__ import annotations

import mmap

import torch

HUGE_PAGE = 2 << 20


def empty_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous CPU tensor, on huge pages as far as it fills them and the system grants them."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # Private: huge pages of shared memory are another setting of the system. Untouched pages take no memory.
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
    start = -flat.data_ptr() % HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return flat[start : start + nbytes].view(dtype).view(shape)
