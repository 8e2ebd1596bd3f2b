"""A collective under way, in the manner of `torch.distributed.Work`, with something to do here at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch


class Work:
    """Several of torch's works as one, and `finish`, which runs here once when they are over.

    The result is in place after `wait`, or once `is_completed` said True. On CUDA both mean what they mean for
    torch's own: the current stream goes on after the result.

    Args:
        works: of torch, possibly none.
        finish: brings the result to where it belongs.
        fills: the tensors that hold the result.
    """

    def __init__(
        self, works: Sequence[Any] = (), finish: Callable[[], None] | None = None, fills: Sequence[torch.Tensor] = ()
    ) -> None:
        self.works = [work for work in works if work is not None]
        self.finish = finish
        self.fills = list(fills)
        self._lock = threading.RLock()  # a future's thread and the caller's may both come to the end
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in place; with `timeout`, raise as torch does when that takes longer."""
        with self._lock:
            if not self._over:
                for work in self.works:
                    if timeout is None:
                        work.wait()
                    else:
                        work.wait(timeout)
                self._end()
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place; brings it there if only that was left."""
        with self._lock:
            if not self._over and all(work.is_completed() for work in self.works):
                self.wait()
            return self._over

    def is_success(self) -> bool:
        """Whether it is over; what failed raises in `wait`."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills."""
        self.wait()
        return self.fills

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result`; what runs `then` is torch's thread, or one of its own where the back end has none."""
        try:
            inner = [work.get_future() for work in self.works]
        except (RuntimeError, NotImplementedError):  # gloo's send and receive have none
            return self._future_of_a_thread()
        if not inner:
            self.wait()
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(self.fills)
            return done
        return torch.futures.collect_all(inner).then(self._after)

    def _after(self, inner: torch.futures.Future[Any]) -> list[torch.Tensor]:
        for each in inner.value():
            each.value()  # raises what went wrong
        with self._lock:
            if not self._over:
                self._end()
        return self.fills

    def _future_of_a_thread(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def watch() -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # told to whoever asks the future
                future.set_exception(error)  # type: ignore[arg-type]

        threading.Thread(target=watch, name="windlass-future", daemon=True).start()
        return future

    def _end(self) -> None:
        self._over = True  # before `finish`: what fails must not run a second time
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        self.works = []


def settle(work: Work | None, async_op: bool) -> Any:
    """What a collective returns: the work where it is asynchronous, else None after waiting for it."""
    if work is None:  # this rank is not in the group
        return None
    if not async_op:
        work.wait()
        return None
    if work.finish is None and len(work.works) == 1:
        return work.works[0]
    return work
