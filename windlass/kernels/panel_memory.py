"""Memory of packed weights: private on huge pages, or shared by the processes that serve one model.

[Note: joined panels] Many panels are smaller than a huge page, and would be on small pages if each had memory of its
own. The panels of one model follow one another in chunks instead, in the order of packing, in which a step reads them.

[Note: shared weights] Replicas pack the same weights in the same order. The process that starts them creates a file
without a name and passes its descriptor to them; the first replica packs into the file, and the others map the same
pages. The file begins with the number of bytes that are filled. Regions follow one another in the order of packing, so
each process computes their offsets itself. The pages are freed when the last process ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

from windlass.kernels.huge_pages import HUGE_PAGE, empty_on_huge_pages

_PAGE = 4096
_LINE = 64  # bytes of a cache line, to which panels are aligned
_CHUNK_BYTES = 64 << 20
_MAPPED_BYTES = 1 << 30  # least size of a mapping of shared weights, because each of them holds a file descriptor


class SharedWeights:
    """Weights in a file that several processes map.

    Args:
        file: descriptor from `windlass.base.shared_weights_file`.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        # locks belong to an open file description, which inherited descriptors share, so open the file again
        self._lock = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        self._end = _PAGE  # end of the regions that this process has taken
        self._memory: mmap.mmap | None = None
        self._mapped = (0, 0)  # begin and end in the file of `_memory`

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside the `with` block, take memory for weights from the file. One process at a time can enter the block."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def take(self, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Return the next region; `fill` is called if no other process has filled it."""
        begin, end = self._end, self._end + -(-nbytes // _PAGE) * _PAGE
        filled = int.from_bytes(os.pread(self._file, 8, 0), "little")
        self._end = end
        if end > self._mapped[1]:
            self._map(begin, max(end, begin + _MAPPED_BYTES))
        if filled < end:
            target = mmap.mmap(self._file, nbytes, access=mmap.ACCESS_WRITE, offset=begin)
            fill(torch.frombuffer(target, dtype=torch.uint8))
            os.pwrite(self._file, end.to_bytes(8, "little"), 0)
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=begin - self._mapped[0])

    def _map(self, begin: int, end: int) -> None:
        """Map these bytes of the file for this and the next regions."""
        if os.fstat(self._file).st_size < end:
            os.ftruncate(self._file, end)  # pages that were never written take no memory
        # A private mapping: its pages are those of the file, also if these are filled later, and a write to it would
        # not reach the other processes.
        self._memory = mmap.mmap(self._file, end - begin, access=mmap.ACCESS_COPY, offset=begin)
        self._mapped = (begin, end)


class PanelChunks:
    """Private memory for the panels of one model, see [Note: joined panels].

    A chunk is freed when no panel in it is referenced any more.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # free end of the current chunk

    def take(self, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Return the next `nbytes` bytes, filled by `fill`."""
        size = -(-nbytes // _LINE) * _LINE
        if size > self._rest.numel():  # pages of the rest that were never written take no memory
            chunk = max(_CHUNK_BYTES, -(-size // HUGE_PAGE) * HUGE_PAGE)
            self._rest = empty_on_huge_pages((chunk,), torch.uint8)
        panels, self._rest = self._rest[:nbytes], self._rest[size:]
        fill(panels)
        return panels


_active: contextvars.ContextVar[SharedWeights | PanelChunks | None] = contextvars.ContextVar(
    "panel_memory", default=None
)


@contextlib.contextmanager
def joined_panels() -> Iterator[None]:
    """Inside the `with` block, let packed weights follow one another in memory, see [Note: joined panels].

    They do so already where processes share the weights.
    """
    if _active.get() is not None:
        yield
        return
    token = _active.set(PanelChunks())
    try:
        yield
    finally:
        _active.reset(token)


def take_panels(nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return uint8 `[nbytes]` for a packed weight, filled by `fill` unless another process has filled it."""
    memory = _active.get()
    if memory is not None and nbytes:
        return memory.take(nbytes, fill)
    panels = empty_on_huge_pages((nbytes,), torch.uint8)
    fill(panels)
    return panels


def place_panels(values: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous tensor that belongs to a packed weight, such as its scales, to the memory of panels."""
    content = values.view(-1).view(torch.uint8)
    return take_panels(content.numel(), partial(_copy, content)).view(values.dtype).view(values.shape)


def share_parameters(parameters: Iterator[torch.nn.Parameter], at_least: int = 1 << 20) -> None:
    """Move contiguous CPU parameters of at least `at_least` bytes into the shared file, if one is active.

    The model must be used for inference only: parameters that share memory with other tensors are separate
    afterwards, and a write copies the pages that it changes. `requires_grad` does not matter, since `from_pretrained`
    leaves it True.
    """
    shared = _active.get()
    if not isinstance(shared, SharedWeights):
        return
    for parameter in parameters:
        if parameter.device.type == "cpu" and parameter.nbytes >= at_least and parameter.is_contiguous():
            content = parameter.detach().view(-1).view(torch.uint8)
            region = shared.take(content.numel(), partial(_copy, content))
            parameter.data = region.view(parameter.dtype).view(parameter.shape)


def _copy(content: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(content)
