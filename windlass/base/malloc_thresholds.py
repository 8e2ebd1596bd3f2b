"""malloc thresholds with which freed memory returns to the system at once while a model is built."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from windlass.base import compute_device

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
# bytes: malloc maps blocks from this size on separately, as it does before it adapts the threshold
_MMAP_FROM_BYTES = 1 << 17


def return_freed_memory() -> None:
    """Make malloc return large blocks to the system at every free, until training begins.

    [Note: freed memory while building] glibc raises its threshold to the largest block that was freed, and from then on
    allocates such blocks from its heap. There long-lived blocks (shards of parameters) keep earlier ones (full
    parameters) from being returned. A zeroed block from the heap is also written to, while a mapped one costs nothing
    until it is used.
    """
    _set_malloc_thresholds(_MMAP_FROM_BYTES, _MMAP_FROM_BYTES)


def restore_kept_memory() -> None:
    """Restore `keep_freed_memory` if training has already begun with another model."""
    if compute_device._malloc_keeps_memory:
        _set_malloc_thresholds(compute_device._KEPT_BLOCK_BYTES, compute_device._KEPT_BLOCK_BYTES)


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Apply [Note: freed memory while building] inside the context."""
    return_freed_memory()
    try:
        yield
    finally:
        restore_kept_memory()


def _set_malloc_thresholds(mapped_from: int, trimmed_from: int) -> None:
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
    libc.mallopt(_M_TRIM_THRESHOLD, trimmed_from)
