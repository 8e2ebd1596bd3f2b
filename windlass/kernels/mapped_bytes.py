"""Bytes of a file as tensors, whose pages can be dropped after they were read.

[Note: dropped pages] A packed layer that was loaded from a file does not copy its bytes: its parameters are private
mappings of the file. The parameters of a model that transformers loads in the dtype of its files are views of one
mapping, which exists as long as one of them. Once native panels (weights in the layout of the CPU kernels) are built
from a weight, its pages are dropped, so that a process holds a weight once. A later read of the bytes, as by the
backward and by a save, gets them from the page cache or the disk. Pages that were written to are private copies, which
a drop would lose: then nothing is dropped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from windlass.base.errors import ModelError

_PAGE = mmap.PAGESIZE
_PAGES = "_windlass_pages"  # attribute of a parameter
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1) << np.uint64(bit) for bit in (63, 62, 61))  # flags in /proc/self/pagemap


class MappedBytes:
    """Memory mapping of a range of a file.

    Args:
        owner: object that keeps the mapping: the mapping itself, or a tensor over it. With it the mapping ends.
        address: address of the first byte.
        nbytes: bytes of the range.

    Attributes:
        address: see above.
    """

    def __init__(self, owner: mmap.mmap | torch.Tensor, address: int, nbytes: int) -> None:
        self._owner = weakref.ref(owner)
        self.address, self._nbytes = address, nbytes

    def drop(self, begin: int = 0, end: int | None = None) -> bool:
        """Drop the pages from this process, unless a page was written to or is locked in memory, or the system does not
        report writes. Return True if the pages were dropped.

        Args:
            begin, end: range of the bytes whose pages are dropped; by default all.
        """
        end = self._nbytes if end is None else min(end, self._nbytes)
        first, last = (self.address + begin) // _PAGE, -(-(self.address + end) // _PAGE)
        if self._owner() is None or end <= begin or _is_written(first, last):
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        size = (last - first) * _PAGE
        if libc.madvise(ctypes.c_void_p(first * _PAGE), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED)):
            code = ctypes.get_errno()
            if code != errno.EINVAL:  # EINVAL: locked, e.g. by mlockall
                raise OSError(code, os.strerror(code))
            return False
        return True

    def __reduce__(self) -> tuple[Callable[[], MappedBytes], tuple[()]]:
        return _ended_mapping, ()


def _ended_mapping() -> MappedBytes:
    """Return a mapping that has ended, for a copied or unpickled tensor: such a tensor owns its memory."""
    return MappedBytes(mmap.mmap(-1, _PAGE), 0, 0)


def _is_written(first: int, last: int) -> bool:
    """Return True if a page of this process was written to, or if the system does not report it.

    Args:
        first, last: numbers of the first page and of the page after the last.
    """
    try:
        file = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return True
    try:
        found = os.pread(file, 8 * (last - first), 8 * first)
    except OSError:
        return True
    finally:
        os.close(file)
    flags = np.frombuffer(found, dtype=np.uint64)
    held = (flags & (_PRESENT | _SWAPPED)) != 0
    return len(flags) != last - first or bool((held & ((flags & _OF_FILE) == 0)).any())


def record_mapped_parameters(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Record the mappings of contiguous CPU parameters that another library mapped from files, for `find_pages`."""
    views = [
        one
        for one in parameters
        if one.device.type == "cpu" and one.is_contiguous() and one.nbytes and not one.untyped_storage().resizable()
        if find_pages(one) is None
    ]
    files = _file_mappings() if views else []
    begins = [begin for begin, _ in files]
    for view in views:
        address = view.data_ptr()
        place = bisect_right(begins, address) - 1
        if place >= 0 and address + view.nbytes <= files[place][1]:
            set_pages(view, MappedBytes(view, address, view.nbytes))


def _file_mappings() -> list[tuple[int, int]]:
    """Return the addresses of the mapped files of this process, in order; none without Linux's /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=5) for line in lines]
    ranges = [one[0].split("-") for one in fields if int(one[4]) and len(one) > 5]  # anonymous memory has inode 0
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


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
    return tensor, MappedBytes(memory, tensor.data_ptr(), nbytes)
