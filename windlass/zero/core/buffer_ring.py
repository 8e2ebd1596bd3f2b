"""Ring of buffers that hold units' gradients until they are reduced."""

from __future__ import annotations

from collections import deque

import torch

from windlass.comm.transport import BufferRequest, Transport, TransportBuffer


class BufferRing:
    """Buffers of the size of the largest unit of a data-parallel group, each lent to one unit at a time.

    Args:
        count: Number of buffers.
        numel: Elements of each buffer.
        dtype: Dtype in which gradients are accumulated.
    """

    def __init__(self, count: int, numel: int, dtype: torch.dtype) -> None:
        self._count, self.numel, self._dtype = count, numel, dtype
        self._buffers: list[TransportBuffer] = []
        self._free: deque[int] = deque()

    def needs(self) -> list[BufferRequest]:
        return [BufferRequest(self.numel, self._dtype) for _ in range(self._count)]

    def bind(self, buffers: list[TransportBuffer], transport: Transport) -> None:
        self._buffers, self._transport = buffers, transport
        for place, buffer in enumerate(buffers):
            buffer.ring_index, buffer.ring = place, [other.parts for other in buffers] if buffer.parts else []
        self._free = deque(range(len(buffers)))

    def borrow(self, numel: int) -> tuple[int, TransportBuffer] | None:
        """Borrow the buffer that was returned longest ago, and wait until peers have finished reading it.

        Return its index in the ring and its first `numel` elements, or None if all buffers are lent. The elements still
        have the values of the previous borrower.
        """
        if not self._free:
            return None
        # The oldest returned buffer is the one that peers have most likely finished reading.
        place = self._free.popleft()
        full = self._buffers[place]
        # Peers may still be reading the buffer for the reduction of its previous borrower.
        self._transport.wait_until_read(full)
        return place, full.first(numel)

    def give_back(self, place: int) -> None:
        self._free.append(place)
