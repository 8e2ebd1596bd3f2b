"""Preallocated buffer for saved activations, which avoids memory fragmentation."""

from __future__ import annotations

import torch

from windlass.base.log import logger

ALIGNMENT = 512  # bytes; block alignment of the CUDA caching allocator


class BufferRegion:
    """Region of a buffer, freed when this object is deleted. `memory` is `[nbytes]` uint8."""

    def __init__(self, buffer: ActivationBuffer, start: int, memory: torch.Tensor) -> None:
        self.memory = memory
        self._buffer, self._start = buffer, start

    def __del__(self) -> None:
        self._buffer.free(self._start)


class ActivationBuffer:
    """Buffer for the saved inputs of `num_checkpoints` checkpointed calls.

    Activations are usually freed in the reverse order of their allocation, so the buffer is a stack: a region freed
    below the top stays reserved until everything above it is freed. The buffer is allocated, or enlarged, only while it
    is empty.

    Args:
        device: device of the buffer; the CPU for a buffer in host memory.
        num_checkpoints: number of checkpointed calls whose inputs are saved at the same time.
        pinned: pin the host memory, so that copies to and from a CUDA device are asynchronous.
    """

    def __init__(self, device: torch.device, num_checkpoints: int, *, pinned: bool = False) -> None:
        self.num_checkpoints = num_checkpoints
        self._device, self._pinned = device, pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._target_bytes = 0  # size in bytes of the buffer's next allocation
        self._requested_bytes = 0  # bytes requested since the buffer was last empty
        self._calls = 0  # checkpointed calls since the buffer was last empty
        self._allocated: list[tuple[int, int]] = []  # start and stop of each region, from the bottom
        self._freed_starts: set[int] = set()  # starts of freed regions below the top
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes; 0 before the first allocation."""
        return self._memory.numel()

    @property
    def num_regions(self) -> int:
        """Number of regions in use."""
        return len(self._allocated) - len(self._freed_starts)

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        """Announce that a checkpointed call is about to save inputs.

        Args:
            unique_bytes: bytes that only this call saves.
            shared_bytes: bytes that other calls save too, such as an attention mask.
        """
        if not self._allocated:
            if self._calls <= self.num_checkpoints:
                # `shared_bytes` is an estimate: earlier calls may have requested more than they announced.
                self._target_bytes = max(self._target_bytes, self._requested_bytes)
            self._requested_bytes = self._calls = 0
        self._calls += 1
        self._target_bytes = max(
            self._target_bytes,
            self.num_checkpoints * _aligned(unique_bytes) + (_aligned(shared_bytes) if shared_bytes else 0),
        )

    def allocate(self, nbytes: int) -> BufferRegion | None:
        """Return a region of `nbytes` bytes, or None if the buffer is full. The caller then allocates separate
        memory."""
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
        """Free the region that begins at `start`."""
        self._freed_starts.add(start)
        while self._allocated and self._allocated[-1][0] in self._freed_starts:
            self._freed_starts.discard(self._allocated.pop()[0])

    def _warn_full(self) -> None:
        if self._has_warned or self._calls <= self.num_checkpoints:
            return
        self._has_warned = True
        logger.warning(
            "the buffer for %d checkpoints (%d bytes) is full at checkpoint %d; further checkpoints use separate "
            "memory. "
            "Set activation_checkpointing.number_checkpoints to the number of checkpoints in a forward",
            self.num_checkpoints,
            self.nbytes,
            self._calls,
        )


def _aligned(nbytes: int) -> int:
    nbytes = max(nbytes, 1)  # regions are identified by their start, so an empty region needs a distinct start
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
