"""Non-blocking MPI operation as a `torch.distributed.Work`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.comm.mpi_library import MPI_LOCK

_SPINS = 20  # polls without sleep: a small message between ranks of a host takes some microseconds
_LONGEST_PAUSE = 5e-4
_abandoned: list[tuple[list[Any], list[Any]]] = []
"""Requests, and the memory that MPI still uses for them, of works that were dropped before their end."""


def release_abandoned(mpi: Any) -> None:
    """Free the memory of dropped works whose operations have ended. The caller holds `MPI_LOCK`."""
    _abandoned[:] = [entry for entry in _abandoned if not _has_ended(mpi, entry[0])]


def _has_ended(mpi: Any, requests: list[Any]) -> bool:
    try:
        return bool(mpi.Request.Testall(requests))
    except mpi.Exception:  # no caller waits for this operation
        return True


class MpiWork(dist.Work):
    """Requests in flight, with a callback that copies the received data to the caller's tensors.

    The operation progresses when any thread of this process polls any operation, since MPI may have no progress thread.

    Args:
        mpi: the module `mpi4py.MPI`.
        what: operation, group and rank, for messages.
        requests: MPI's requests.
        outputs: tensors that hold the result.
        finish: function that is called once, when all requests have completed.
        keeps: objects whose memory MPI reads or writes until then.
        timeout: longest wait for the other ranks.
        parts: other works; this work completes when all of them have completed.
    """

    def __init__(
        self,
        mpi: Any,
        what: str,
        requests: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        finish: Callable[[], None] | None,
        keeps: Sequence[Any],
        timeout: timedelta,
        parts: Sequence[MpiWork] = (),
    ) -> None:
        super().__init__()
        self._mpi, self._what, self._requests, self.outputs = mpi, what, list(requests), list(outputs)
        self._finish, self._keeps, self._timeout, self._parts = finish, list(keeps), timeout, list(parts)
        self._lock = threading.RLock()  # the caller and the thread of a future may poll at the same time
        self._done, self._source = False, -1
        self._error: CommunicationError | None = None

    def __del__(self) -> None:
        # A script may drop the work of a send, and a wait may time out. MPI then still uses the memory, so keep it.
        if self._requests:
            _abandoned.append((self._requests, self._keeps))

    def is_completed(self) -> bool:
        """Return True if the result is in the outputs. Lets all operations of this process progress.

        Raises:
            CommunicationError: MPI reported an error.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._done and self._test():
                if self._finish is not None:
                    self._finish()
                    self._finish = None
                self._keeps, self._done = [], True
            return self._done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the outputs.

        Raises:
            CommunicationError: MPI reported an error, or the other ranks did not join in time.
        """
        limit = timeout if timeout is not None and timeout > timedelta(0) else self._timeout
        begin, polls, pause = time.monotonic(), 0, 1e-5
        while not self.is_completed():
            polls += 1
            if polls < _SPINS:
                time.sleep(0)  # another rank may need this core
                continue
            if time.monotonic() - begin > limit.total_seconds():
                raise CommunicationError(
                    f"{self._what} over MPI waited {limit.total_seconds():.0f} s for the other ranks; check that every "
                    "rank of the group makes this call, or pass init_distributed a longer timeout"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return True

    def is_success(self) -> bool:
        """Return True if a poll or wait has found the operation completed without an error."""
        return self._done and self._error is None

    def exception(self) -> Any:
        """Return the error that MPI has reported to a poll, or None."""
        return self._error

    def synchronize(self) -> None:
        """Wait until the result is in the outputs. The same method of an NCCL work blocks only the current stream."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the output tensors."""
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """Return the group rank of the sender, once a receive has completed."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of `result`. Unless the operation is complete, a new thread waits for its end."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        if self.is_completed():
            future.set_result(self.outputs)
            return future

        def watch() -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # passed on to the future's reader
                future.set_exception(error)  # type: ignore[arg-type]

        threading.Thread(target=watch, name="windlass-mpi-future", daemon=True).start()
        return future

    def _test(self) -> bool:
        try:
            if not all(part.is_completed() for part in self._parts):
                return False
        except CommunicationError as error:
            self._error = error
            raise
        with MPI_LOCK:
            statuses = [self._mpi.Status() for _ in self._requests]
            try:
                if not self._mpi.Request.Testall(self._requests, statuses):
                    return False
            except self._mpi.Exception as error:
                codes = [status.Get_error() for status in statuses] + [error.Get_error_code()]
                text = self._mpi.Get_error_string(next(code for code in codes if code != self._mpi.SUCCESS))
                self._error = CommunicationError(
                    f"{self._what} over MPI failed: {text.strip().splitlines()[0]}; see the output of the other ranks"
                )
                raise self._error from error
            if len(statuses) == 1:
                self._source = statuses[0].Get_source()
            self._requests = []
            return True
