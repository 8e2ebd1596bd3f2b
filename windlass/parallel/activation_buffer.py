"""One buffer for all kept activations, so that they do not cut the memory of the device to pieces."""

from __future__ import annotations

import torch

from windlass.base.log import logger

ALIGNMENT = 512  # bytes; as the CUDA allocator aligns its blocks


class BufferRegion:
    """A part of a buffer, given back with this object. `memory` is `[nbytes]` uint8."""

    def __init__(self, buffer: ActivationBuffer, start: int, memory: torch.Tensor) -> None:
        self.memory = memory
        self._buffer, self._start = buffer, start

    def __del__(self) -> None:
        self._buffer.free(self._start)


class ActivationBuffer:
    """Memory for what `checkpoints` checkpointed calls keep.

    Activations go in the opposite order of their coming, so the buffer is a stack: what is given back below its top
    waits for what lies above. It is made, or made larger, only while it is empty.

    Args:
        device: where the buffer lies; the CPU for one in host memory.
        checkpoints: how many checkpointed calls are kept at a time.
        pinned: host memory that a CUDA device copies from and to without a detour.
    """

    def __init__(self, device: torch.device, num_checkpoints: int, *, pinned: bool = False) -> None:
        self.num_checkpoints = num_checkpoints
        self._device, self._pinned = device, pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._target_bytes = 0  # bytes that the buffer should have
        self._requested_bytes = 0  # bytes asked for since it was empty
        self._calls = 0  # since it was empty
        self._allocated: list[tuple[int, int]] = []  # start and stop of regions, from the bottom
        self._freed_starts: set[int] = set()  # starts of regions that were given back below the top
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer; 0 before anything was kept."""
        return self._memory.numel()

    @property
    def num_regions(self) -> int:
        """Regions that are in use."""
        return len(self._allocated) - len(self._freed_starts)

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        """A checkpointed call is about to keep `own` bytes, and `shared` ones that other calls keep too."""
        if not self._allocated:
            if self._calls <= self.num_checkpoints:
                self._target_bytes = max(self._target_bytes, self._requested_bytes)  # `shared` was a guess
            self._requested_bytes = self._calls = 0
        self._calls += 1
        self._target_bytes = max(
            self._target_bytes,
            self.num_checkpoints * _aligned(unique_bytes) + (_aligned(shared_bytes) if shared_bytes else 0),
        )

    def allocate(self, nbytes: int) -> BufferRegion | None:
        """A region of `nbytes` bytes; None where the buffer is full, so that memory of its own is needed."""
        if not self._allocated and self.nbytes < self._target_bytes:
            self._memory = torch.empty(
                self._target_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
            )
        size = _aligned(nbytes)
        self._requested_bytes += size
        start = self._allocated[-1][1] if self._allocated else 0
        if start + size > self.nbytes:
            self._warn_full()
            return None
        self._allocated.append((start, start + size))
        return BufferRegion(self, start, self._memory[start : start + nbytes])

    def free(self, start: int) -> None:
        """The region that begins at `start` is no longer used."""
        self._freed_starts.add(start)
        while self._allocated and self._allocated[-1][0] in self._freed_starts:
            self._freed_starts.discard(self._allocated.pop()[0])

    def _warn_full(self) -> None:
        if self._has_warned or self._calls <= self.num_checkpoints:
            return
        self._has_warned = True
        logger.warning(
            "the buffer for %d checkpoints (%d bytes) is full at checkpoint %d; further ones get memory of their own. "
            "Set activation_checkpointing.number_checkpoints to the number of checkpoints in a forward",
            self.num_checkpoints,
            self.nbytes,
            self._calls,
        )


def _aligned(nbytes: int) -> int:
    nbytes = max(nbytes, 1)  # an empty region too needs a start of its own
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
