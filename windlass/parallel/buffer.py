"""One buffer for all kept activations, so that they do not cut the memory of the device to pieces."""

from __future__ import annotations

import torch

from windlass.base.log import logger

ALIGNMENT = 512  # bytes; as the CUDA allocator aligns its blocks


class Region:
    """A part of a buffer, given back with this object. `memory` is `[nbytes]` uint8."""

    def __init__(self, buffer: Buffer, start: int, memory: torch.Tensor) -> None:
        self.memory = memory
        self._buffer, self._start = buffer, start

    def __del__(self) -> None:
        self._buffer.give_back(self._start)


class Buffer:
    """Memory for what `checkpoints` checkpointed calls keep.

    Activations go in the opposite order of their coming, so the buffer is a stack: what is given back below its top
    waits for what lies above. It is made, or made larger, only while it is empty.

    Args:
        device: where the buffer lies; the CPU for one in host memory.
        checkpoints: how many checkpointed calls are kept at a time.
        pinned: host memory that a CUDA device copies from and to without a detour.
    """

    def __init__(self, device: torch.device, checkpoints: int, *, pinned: bool = False) -> None:
        self.checkpoints = checkpoints
        self._device, self._pinned = device, pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._wanted = 0  # bytes that the buffer should have
        self._asked = 0  # bytes asked for since it was empty
        self._calls = 0  # since it was empty
        self._taken: list[tuple[int, int]] = []  # start and stop of regions, from the bottom
        self._free: set[int] = set()  # starts of regions that were given back below the top
        self._complained = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer; 0 before anything was kept."""
        return self._memory.numel()

    @property
    def regions(self) -> int:
        """Regions that are in use."""
        return len(self._taken) - len(self._free)

    def expect(self, own: int, shared: int) -> None:
        """A checkpointed call is about to keep `own` bytes, and `shared` ones that other calls keep too."""
        if not self._taken:
            if self._calls <= self.checkpoints:
                self._wanted = max(self._wanted, self._asked)  # `shared` was a guess
            self._asked = self._calls = 0
        self._calls += 1
        self._wanted = max(self._wanted, self.checkpoints * _aligned(own) + (_aligned(shared) if shared else 0))

    def take(self, nbytes: int) -> Region | None:
        """A region of `nbytes` bytes; None where the buffer is full, so that memory of its own is needed."""
        if not self._taken and self.nbytes < self._wanted:
            self._memory = torch.empty(self._wanted, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        size = _aligned(nbytes)
        self._asked += size
        start = self._taken[-1][1] if self._taken else 0
        if start + size > self.nbytes:
            self._complain()
            return None
        self._taken.append((start, start + size))
        return Region(self, start, self._memory[start : start + nbytes])

    def give_back(self, start: int) -> None:
        """The region that begins at `start` is no longer used."""
        self._free.add(start)
        while self._taken and self._taken[-1][0] in self._free:
            self._free.discard(self._taken.pop()[0])

    def _complain(self) -> None:
        if self._complained or self._calls <= self.checkpoints:
            return
        self._complained = True
        logger.warning(
            "the buffer for %d checkpoints (%d bytes) is full at checkpoint %d; further ones get memory of their own. "
            "Set activation_checkpointing.number_checkpoints to the number of checkpoints in a forward",
            self.checkpoints,
            self.nbytes,
            self._calls,
        )


def _aligned(nbytes: int) -> int:
    nbytes = max(nbytes, 1)  # an empty region too needs a start of its own
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
