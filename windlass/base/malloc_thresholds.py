"""While a model is being built, what is freed goes back to the system at once."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from windlass.base import compute_device

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_MMAP_FROM_BYTES = 1 << 17  # bytes: from here on a block is mapped by itself, as malloc does before it adapts


def return_freed_memory() -> None:
    """[Note: freed memory while building] Let malloc give large blocks back at every free, until training begins.

    glibc raises its threshold to the largest block that was freed, and from then on takes such blocks from its heap,
    where those that live on (pieces of parameters) keep the ones before them (whole parameters) from going back. A
    zeroed block from there is also written to, where one that is mapped costs nothing until it is used.
    """
    _set_malloc_thresholds(_MMAP_FROM_BYTES, _MMAP_FROM_BYTES)


def restore_kept_memory() -> None:
    """Undo that where training has begun already, with another model: see `keep_freed_memory`."""
    if compute_device._malloc_keeps_memory:
        _set_malloc_thresholds(compute_device._KEPT_BLOCK_BYTES, compute_device._KEPT_BLOCK_BYTES)


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """While it is open, [Note: freed memory while building]."""
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
