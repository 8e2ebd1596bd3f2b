"""Connection of two processes over gloo that does not depend on any other process.

A process group fails for all of its ranks when one rank ends. A link is a group of two processes, so a process that
ends breaks only its own links. Messages are tensors; nothing is pickled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from windlass.base.errors import CommunicationError
from windlass.comm.peer_owners import ACCEPT_S, ClosedPeerError, require_own_peers
from windlass.comm.point_to_point import as_bytes

HEADER = 8
"""Number of integers at the head of a message."""
_RETRIED_ACCEPT_S = 2.0
_TICK = 0.001  # seconds by which a wait may end early: gloo waits for whole milliseconds
_CHUNK = 1 << 24  # bytes of a chunk: `idle` limits the time of one chunk, so that a large tensor may take longer


class LinkClosedError(CommunicationError):
    """Error for a link that has ended: this side closed it, or the other process has ended or cannot be reached."""


class LinkSilentError(LinkClosedError):
    """Error for a link whose other side sent or received nothing for `PairLink.idle`. The process may still run."""


class PairLink:
    """Link between two processes.

    Each side receives on one thread at a time, and may send on several threads. `idle` may be changed later.

    Args:
        store: rendezvous store in which a wait does not block calls of other threads (`PollingStore`).
        name: name of the link, equal on both sides and used once.
        first: True on one side, False on the other.
        peer: description of the other side, for messages.
        connect: longest wait for the other side to connect.
        is_retried: True if the caller makes another link when this one fails. This link then fails soon if the other
            side does not accept it.
        idle: longest wait for a message, or for the other side to receive one.

    Raises:
        LinkClosedError: the other side does not connect or accept the connection in time.
        CommunicationError: a process of another user connected ([Note: owners of peers]).
    """

    def __init__(
        self,
        store: Any,
        name: str,
        *,
        first: bool,
        peer: str,
        connect: timedelta,
        is_retried: bool = True,
        idle: timedelta = timedelta(days=7),
    ) -> None:
        self.peer, self.bytes_sent, self.bytes_received = peer, 0, 0
        self._other, self._sending, self._closed = int(first), threading.Lock(), threading.Event()
        try:
            accept_s = _RETRIED_ACCEPT_S if is_retried else ACCEPT_S
            with require_own_peers(f"made for a link with {peer}", accept_s=accept_s):
                self._group: Any = dist.ProcessGroupGloo(
                    PrefixStore(f"windlass link {name}", store), 0 if first else 1, 2, connect
                )
        except ClosedPeerError as error:
            self._group = None
            raise LinkClosedError(str(error)) from error
        except CommunicationError:
            self._group = None
            raise
        except RuntimeError as error:  # torch's error for every failure to connect
            raise LinkClosedError(
                f"{peer} did not connect within {connect.total_seconds():.0f} s: {_line(error)}"
            ) from error
        self.idle = idle

    def send(self, header: Sequence[int], *tensors: torch.Tensor) -> None:
        """Send at most `HEADER` integers, then contiguous CPU tensors.

        The other side derives the sizes of the tensors from the integers.

        Raises:
            LinkClosedError: the link is closed, or the other side has ended.
            LinkSilentError: the other side received nothing for `idle`.
        """
        with self._sending:
            for tensor in (_head(header), *tensors):
                self.send_tensor(tensor)

    def send_heartbeat(self, header: Sequence[int]) -> None:
        """Send integers as `send` does, unless another thread is sending a message.

        This method returns when the other side has received the integers; other threads can send meanwhile. If the
        write fails because the other side has just closed, gloo reports no error, so that this method waits for all of
        `idle`. Later sends raise.

        Raises:
            LinkClosedError: the link is closed, or the other side has ended.
            LinkSilentError: the other side received nothing for `idle`.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            operation = self._start("send", _head(header).view(torch.uint8))
            self.bytes_sent += HEADER * torch.int64.itemsize
        finally:
            self._sending.release()
        self._wait(operation)

    def send_tensor(self, tensor: torch.Tensor) -> None:
        """Send a contiguous CPU tensor without a header. No other thread may send meanwhile. Raises like `send`."""
        self._transfer("send", tensor)
        self.bytes_sent += tensor.numel() * tensor.element_size()

    def receive_header(self) -> list[int]:
        """Receive the integers of the next message.

        Raises:
            LinkClosedError: the link is closed, or the other side has ended.
            LinkSilentError: the other side sent nothing for `idle`.
        """
        head = torch.empty(HEADER, dtype=torch.int64)
        self.receive(head)
        return head.tolist()

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Receive into a contiguous CPU tensor, and return it. Raises the errors of `receive_header`."""
        self._transfer("recv", tensor)
        self.bytes_received += tensor.numel() * tensor.element_size()
        return tensor

    def close(self) -> None:
        """Close the sockets."""
        self._group = None
        self._closed.set()

    def wait_closed(self, seconds: float) -> bool:
        """Wait until this side closes the link, and return True; False after `seconds`."""
        return self._closed.wait(seconds)

    def _transfer(self, operation: str, tensor: torch.Tensor) -> None:
        for chunk in as_bytes(tensor).split(_CHUNK) if tensor.numel() else ():
            self._wait(self._start(operation, chunk))

    def _wait(self, operation: Any) -> None:
        """Wait for an operation, for `idle` at most. If it fails, close the link."""
        began = time.monotonic()
        try:
            operation.wait(self.idle)
        except RuntimeError as error:
            self.close()
            if time.monotonic() - began + _TICK >= self.idle.total_seconds():
                raise LinkSilentError(
                    f"{self.peer} sent or received nothing for {self.idle.total_seconds():.0f} s"
                ) from error
            raise self._ended(error) from error

    def _ended(self, error: RuntimeError) -> LinkClosedError:
        return LinkClosedError(f"the connection with {self.peer} ended: {_line(error)}")

    def _start(self, operation: str, chunk: torch.Tensor) -> Any:
        group = self._group  # local, so dropped before the wait: `close` on another thread then frees the group
        if group is None:
            raise LinkClosedError(f"the connection with {self.peer} is closed")
        try:
            return getattr(group, operation)([chunk], self._other, 0)
        except RuntimeError as error:
            self.close()
            raise self._ended(error) from error


def _head(header: Sequence[int]) -> torch.Tensor:
    head = torch.zeros(HEADER, dtype=torch.int64)
    head[: len(header)] = torch.tensor(list(header), dtype=torch.int64)
    return head


def _line(error: BaseException) -> str:
    """Return the first line of gloo's message, without its source file and its advice."""
    text = str(error).strip().splitlines()[0]
    return text.rpartition(".cc:")[2].partition("] ")[2].partition(". This is")[0] or text
