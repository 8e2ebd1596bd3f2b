"""Private memory whose pages can be freed and allocated again at the same address."""

from __future__ import annotations

import mmap
import resource

import torch

_HUGE = 2 << 20  # size of a huge page in bytes, on machines that have them


class AnonymousPages:
    """`nbytes` of zeros whose pages can be discarded. The next access allocates the pages again, as zeros.

    Huge pages are used if the kernel provides them: to allocate 64 MiB again then takes 1 ms, in small pages 30 ms and
    in a shared file 50 ms. `ulimit -d` counts the whole address range of a private mapping, also of pages that were
    discarded, so all buffers would count even while only a few are in use. Under such a limit the mapping is formally
    shared, although no other process maps it.

    Attributes:
        bytes: `[nbytes]` uint8.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
        kind = mmap.MAP_SHARED if limited else mmap.MAP_PRIVATE
        self._advice = mmap.MADV_REMOVE if limited else mmap.MADV_DONTNEED
        # Map one huge page more than needed, to align the start to a huge page.
        self._map = mmap.mmap(-1, nbytes + _HUGE, flags=kind | mmap.MAP_ANONYMOUS)
        full = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start, self._nbytes = -full.data_ptr() % _HUGE, nbytes
        self.bytes = full.narrow(0, self._start, nbytes)
        # Only full huge pages: one at the end would take memory beyond `nbytes`.
        if not limited and nbytes >= _HUGE:
            self._map.madvise(mmap.MADV_HUGEPAGE, self._start, nbytes // _HUGE * _HUGE)

    def discard(self) -> None:
        """Free the memory; the content is lost."""
        self._map.madvise(self._advice, self._start, self._nbytes)
