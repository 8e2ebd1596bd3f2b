"""Channel of CPU ranks on one host: messages pass through windows of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch

from windlass.comm.mesh_axis import run_pending_checks
from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory import Counters, SharedMemory

WINDOW_BYTES = 1 << 22  # default bytes of a window; its pages are allocated at the first write


class SharedMemoryChannel:
    """Channel through one window for each ordered pair of ranks, and one window of each rank that all its peers read.

    A message is split into chunks of the size of a window. The writer of a window waits until its readers have taken
    the previous chunk, then copies the next chunk and raises its `written` counter; a reader copies the chunk out and
    raises `taken`. A sender waits for the receiver only while the window holds a chunk that was not taken: a message
    that fits in a free window is sent without waiting. Construction is collective.

    Args:
        group: CPU ranks of one host.
        timeout: maximum wait for a peer.
        window: bytes of a window.

    Raises:
        CommunicationError: on every rank, if the ranks cannot share memory; from a transfer, if a peer died or did not
            join within `timeout`.
    """

    name = "shm"

    def __init__(self, group: RankGroup, timeout: timedelta, *, window: int = WINDOW_BYTES) -> None:
        self.group, self._window = group, window
        size = group.size
        memory = SharedMemory(group, (size + 1) * window)
        self._blocks = memory.blocks
        # Counters of each rank, in chunks: written for each peer, read from each peer, written for all peers, and read
        # from each peer's window for all.
        self._taken, self._public, self._public_taken = size, 2 * size, 2 * size + 1
        self._counters = Counters(group, 3 * size + 1, timeout)
        self._sent, self._received = [0] * size, [0] * size  # chunks so far, by peer
        self._public_sent, self._public_received = 0, [0] * size
        self._what = "a compressed collective in shared memory"

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        run_pending_checks()
        outgoing = {peer: list(tensor.split(self._window)) for peer, tensor in sends.items() if tensor.numel()}
        incoming = {peer: list(tensor.split(self._window)) for peer, tensor in receives.items() if tensor.numel()}
        # Chunk by chunk in both directions, so that two ranks that send each other long messages do not deadlock.
        for number in range(_rounds(outgoing, incoming)):
            for peer, chunks in outgoing.items():
                if number < len(chunks):
                    self._write(peer, chunks[number])
            for peer, chunks in incoming.items():
                if number < len(chunks):
                    self._read(peer, chunks[number])

    def all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> None:
        run_pending_checks()
        outgoing = {self.group.index: list(own.split(self._window))} if own.numel() else {}
        incoming = {peer: list(tensor.split(self._window)) for peer, tensor in receives.items() if tensor.numel()}
        for number in range(_rounds(outgoing, incoming)):
            for chunks in outgoing.values():
                if number < len(chunks):
                    self._write_public(chunks[number])
            for peer, chunks in incoming.items():
                if number < len(chunks):
                    self._read_public(peer, chunks[number])

    def start_exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        self.exchange(sends, receives)  # this rank has copied everything, so no transfer is left to wait for
        return _nothing

    def start_all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> Callable[[], None]:
        self.all_gather(own, receives)
        return _nothing

    def broadcast(self, message: torch.Tensor, source: int) -> None:
        if source == self.group.index:
            self.all_gather(message, {})
        else:
            self.all_gather(message[:0], {source: message})

    def _write(self, peer: int, chunk: torch.Tensor) -> None:
        local = self.group.index
        self._counters.wait_for_rank(peer, self._taken + local, self._sent[peer], self._what)
        self._slot(local, peer, chunk.numel()).copy_(chunk)
        self._sent[peer] += 1
        self._counters.raise_to(peer, self._sent[peer])

    def _read(self, peer: int, chunk: torch.Tensor) -> None:
        local = self.group.index
        self._counters.wait_for_rank(peer, local, self._received[peer] + 1, self._what)
        chunk.copy_(self._slot(peer, local, chunk.numel()))
        self._received[peer] += 1
        self._counters.raise_to(self._taken + peer, self._received[peer])

    def _write_public(self, chunk: torch.Tensor) -> None:
        local = self.group.index
        self._counters.wait(self._public_taken + local, self._public_sent, self._what)
        self._slot(local, self.group.size, chunk.numel()).copy_(chunk)
        self._public_sent += 1
        self._counters.raise_to(self._public, self._public_sent)

    def _read_public(self, peer: int, chunk: torch.Tensor) -> None:
        chunk_number = self._public_received[peer] + 1
        self._counters.wait_for_rank(peer, self._public, chunk_number, self._what)
        chunk.copy_(self._slot(peer, self.group.size, chunk.numel()))
        self._public_received[peer] = chunk_number
        self._counters.raise_to(self._public_taken + peer, chunk_number)

    def _slot(self, owner: int, reader: int, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` of the window that `owner` writes for `reader`; `reader` = size means all peers."""
        return self._blocks[owner][reader * self._window :][:nbytes]


def _nothing() -> None:
    """Do nothing: the wait for a transfer that has ended."""


def _rounds(*messages: Mapping[int, list[torch.Tensor]]) -> int:
    return max((len(chunks) for of_peers in messages for chunks in of_peers.values()), default=0)
