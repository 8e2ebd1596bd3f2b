"""malloc thresholds: freed memory returns to the system while a model is built, and stays for reuse in training."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from windlass.base.log import logger

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
# Blocks of at least this many bytes are mapped separately. This is glibc's threshold before its adaptation.
_MMAP_FROM_BYTES = 1 << 17
_KEPT_BLOCK_BYTES = 1 << 30
_ADAPTED_BYTES = 1 << 25  # the largest threshold that glibc's adaptation reaches
_malloc_keeps_memory = False


def keep_freed_memory() -> bool:
    """Make malloc keep freed blocks of up to 1 GiB for reuse in the next step.

    [Note: freed memory on CPU] A fresh page costs several times the copy that fills it (measured: 34 ms against 5 ms
    for 100 MB), and glibc returns large blocks to the system at every free. `WINDLASS_KEEP_FREED_MEMORY=0` leaves
    malloc unchanged.

    Returns:
        True if malloc keeps freed memory. Only glibc supports it.
    """
    global _malloc_keeps_memory
    if _malloc_keeps_memory or os.environ.get("WINDLASS_KEEP_FREED_MEMORY", "1") == "0":
        return _malloc_keeps_memory
    _malloc_keeps_memory = _set_malloc_thresholds(_KEPT_BLOCK_BYTES)
    if _malloc_keeps_memory:
        logger.debug("malloc keeps freed blocks up to 1 GiB (WINDLASS_KEEP_FREED_MEMORY=0 turns this off)")
    return _malloc_keeps_memory


def return_freed_memory() -> None:
    """Make malloc return large blocks to the system at every free, until training begins.

    [Note: freed memory while building] glibc raises its threshold to the largest block that was freed, and from then on
    allocates blocks up to this size from its heap. There, freed blocks (full parameters) cannot be returned while
    long-lived blocks (shards) are behind them. A zeroed block from the heap is also written to, while a mapped one
    costs nothing until it is used.
    """
    _set_malloc_thresholds(_MMAP_FROM_BYTES)


def restore_kept_memory() -> None:
    """Make malloc keep freed memory again if `keep_freed_memory` was called before, e.g. to train another model."""
    if _malloc_keeps_memory:
        _set_malloc_thresholds(_KEPT_BLOCK_BYTES)


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Make malloc return large freed blocks to the system inside the context, and afterwards keep freed memory again if
    `keep_freed_memory` was called before (see [Note: freed memory while building]).
    """
    return_freed_memory()
    try:
        yield
    finally:
        restore_kept_memory()


@contextmanager
def loading_without_gaps() -> Iterator[None]:
    """Make malloc return large freed blocks to the system while a model that will be served is loaded (see
    [Note: freed memory while building]).

    After the context, steps get blocks of up to 32 MiB from malloc's heap, as with glibc's own adaptation.
    """
    return_freed_memory()
    try:
        yield
    finally:
        _set_malloc_thresholds(_KEPT_BLOCK_BYTES if _malloc_keeps_memory else _ADAPTED_BYTES)


def _set_malloc_thresholds(nbytes: int) -> bool:
    """Return free memory to the system, and let malloc map each later block of at least `nbytes` separately.

    Returns False if malloc is not glibc's or refuses the thresholds.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, nbytes)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, nbytes))
