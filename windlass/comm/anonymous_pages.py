"""Private memory whose pages can be freed and allocated again at the same address."""

from __future__ import annotations

import mmap
import resource

import torch

from windlass.kernels.huge_pages import HUGE_PAGE, advise_huge_pages


class AnonymousPages:
    """Memory of `nbytes` zeros whose pages can be discarded. The next access allocates the pages again, as zeros.

    From 2 MiB, huge pages are used if the kernel provides them: to allocate 64 MiB again then takes 1 ms, in small
    pages 30 ms and in a shared file 50 ms. `ulimit -d` counts the full address range of a private mapping, including
    discarded pages, so all buffers would count even while only a few are in use. Under this limit the mapping is
    formally shared, although no other process maps it, and has no huge pages.

    Attributes:
        bytes: `[nbytes]` uint8, with `nbytes` rounded up to full pages.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
        kind = mmap.MAP_SHARED if limited else mmap.MAP_PRIVATE
        self._advice = mmap.MADV_REMOVE if limited else mmap.MADV_DONTNEED
        # Map one huge page more than needed, to align the start to a huge page.
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=kind | mmap.MAP_ANONYMOUS)
        full = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start, self._nbytes = -full.data_ptr() % HUGE_PAGE, nbytes
        self.bytes = full.narrow(0, self._start, nbytes)
        # Full huge pages only: a huge page for the remainder would take memory beyond `nbytes`.
        if not limited and nbytes >= HUGE_PAGE:
            advise_huge_pages(self._map, self._start, nbytes // HUGE_PAGE * HUGE_PAGE)

    def discard(self) -> None:
        """Free the memory; the content is lost."""
        self._map.madvise(self._advice, self._start, self._nbytes)
