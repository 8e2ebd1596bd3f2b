"""Memory of this process alone that is given back and taken again, at one address."""

from __future__ import annotations

import mmap
import resource

import torch

_HUGE = 2 << 20  # bytes of a huge page, where the machine has them


class AnonymousPages:
    """`nbytes` of zeros whose pages can be discarded; they come back, as zeros, when they are touched.

    In huge pages where the kernel gives them: to take 64 MiB again then costs 1 ms, in small ones 30 and in a shared
    file 50. A limit on a process's data (`ulimit -d`) counts the addresses of private memory whether it has pages or
    not, so that all units would count at once; under one the memory is formally shared, with nobody.

    Attributes:
        bytes: `[nbytes]` uint8.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
        kind = mmap.MAP_SHARED if limited else mmap.MAP_PRIVATE
        self._advice = mmap.MADV_REMOVE if limited else mmap.MADV_DONTNEED
        self._map = mmap.mmap(-1, nbytes + _HUGE, flags=kind | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start, self._nbytes = -whole.data_ptr() % _HUGE, nbytes
        self.bytes = whole.narrow(0, self._start, nbytes)
        # only whole huge pages: at the end one would take memory that nobody asked for
        if not limited and nbytes >= _HUGE:
            self._map.madvise(mmap.MADV_HUGEPAGE, self._start, nbytes // _HUGE * _HUGE)

    def discard(self) -> None:
        """Give the memory back; the content is lost."""
        self._map.madvise(self._advice, self._start, self._nbytes)
