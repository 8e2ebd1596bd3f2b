"""Bytes of a file as tensors, whose pages can be dropped after they were read.

[Note: dropped pages] A packed layer that was loaded from a file does not copy its bytes: its parameters are private
mappings of the file. Once native panels (weights in the layout of the CPU kernels) are built from them, their pages are
dropped, so that a process holds a weight once. A later read of the bytes, as by the backward and by a save, gets them
from the page cache or the disk. Pages that were written to are private copies, which a drop would lose: then nothing is
dropped.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from windlass.base.errors import ModelError

_PAGE = mmap.PAGESIZE
_PAGES = "_windlass_pages"  # attribute of a parameter
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1) << np.uint64(bit) for bit in (63, 62, 61))  # flags in /proc/self/pagemap


class MappedBytes:
    """Memory mapping of a range of a file. It ends when the tensor over it is freed.

    Attributes:
        address: address of the first byte.
    """

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory = weakref.ref(memory)
        self.address, self._pages = address, -(-len(memory) // _PAGE)

    def drop(self, begin: int = 0, end: int | None = None) -> bool:
        """Drop the pages from this process, unless a page was written to or is locked in memory, or the system does not
        report writes. Return True if the pages were dropped.

        Args:
            begin, end: range of the tensor's bytes whose pages are dropped; by default all.
        """
        memory, skipped = self._memory(), self.address % _PAGE
        first = (skipped + begin) // _PAGE
        last = self._pages if end is None else min(-(-(skipped + end) // _PAGE), self._pages)
        if memory is None or last <= first or self._is_written(first, last):
            return False
        try:
            memory.madvise(mmap.MADV_DONTNEED, first * _PAGE, min(last * _PAGE, len(memory)) - first * _PAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # locked, e.g. by mlockall
                raise
            return False
        return True

    def _is_written(self, first: int, last: int) -> bool:
        try:
            file = os.open("/proc/self/pagemap", os.O_RDONLY)
        except OSError:
            return True
        try:
            found = os.pread(file, 8 * (last - first), 8 * (self.address // _PAGE + first))
        except OSError:
            return True
        finally:
            os.close(file)
        flags = np.frombuffer(found, dtype=np.uint64)
        held = (flags & (_PRESENT | _SWAPPED)) != 0
        return len(flags) != last - first or bool((held & ((flags & _OF_FILE) == 0)).any())

    def __reduce__(self) -> tuple[Callable[[], MappedBytes], tuple[()]]:
        return _ended_mapping, ()


def _ended_mapping() -> MappedBytes:
    """Return a mapping that has ended, for a copied or unpickled tensor: such a tensor owns its memory."""
    return MappedBytes(mmap.mmap(-1, _PAGE), 0)


def set_pages(tensor: torch.Tensor, pages: MappedBytes) -> None:
    """Record the mapping of a parameter that is a range of a file."""
    tensor.__dict__[_PAGES] = pages


def find_pages(tensor: torch.Tensor) -> MappedBytes | None:
    """Return the mapping of a parameter, if it is still the range of a file that it was loaded from."""
    pages = tensor.__dict__.get(_PAGES)
    return pages if isinstance(pages, MappedBytes) and pages.address == tensor.data_ptr() else None


def drop_pages(tensor: torch.Tensor) -> None:
    """Drop the pages of a parameter, if it is still the range of a file that it was loaded from."""
    pages = find_pages(tensor)
    if pages is not None:
        pages.drop()


def map_bytes(path: Path, offset: int, nbytes: int) -> tuple[torch.Tensor, MappedBytes]:
    """Return a range of a file as uint8 `[nbytes]`, and its mapping. Writes to the tensor do not reach the file.

    Raises:
        ModelError: the file cannot be mapped.
    """
    begin = offset // _PAGE * _PAGE
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), offset - begin + nbytes, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be mapped: {error}; copy the file again") from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=offset - begin, count=nbytes)
    return tensor, MappedBytes(memory, tensor.data_ptr())
