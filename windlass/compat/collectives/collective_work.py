"""A collective under way, in the manner of `torch.distributed.Work`, with something to do here at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch


class CollectiveWork:
    """Several of torch's works as one, and `finish`, which runs here once when they are over.

    The result is in place after `wait`, or once `is_completed` said True. On CUDA both mean what they mean for
    torch's own: the current stream goes on after the result.

    Args:
        works: of torch, possibly none.
        finish: brings the result to where it belongs.
        fills: the tensors that hold the result.
    """

    def __init__(
        self,
        works: Sequence[Any] = (),
        on_finished: Callable[[], None] | None = None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        self.works = [work for work in works if work is not None]
        self.on_finished = on_finished
        self.outputs = list(outputs)
        self._lock = threading.RLock()  # a future's thread and the caller's may both come to the end
        self._is_finished = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in place; with `timeout`, raise as torch does when that takes longer."""
        with self._lock:
            if not self._is_finished:
                for work in self.works:
                    if timeout is None:
                        work.wait()
                    else:
                        work.wait(timeout)
                self._run_finish()
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place; brings it there if only that was left."""
        with self._lock:
            if not self._is_finished and all(work.is_completed() for work in self.works):
                self.wait()
            return self._is_finished

    def is_success(self) -> bool:
        """Whether it is over; what failed raises in `wait`."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills."""
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result`; what runs `then` is torch's thread, or one of its own where the back end has none."""
        try:
            inner = [work.get_future() for work in self.works]
        except (RuntimeError, NotImplementedError):  # gloo's send and receive have none
            return self._future_from_thread()
        if not inner:
            self.wait()
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(self.outputs)
            return done
        return torch.futures.collect_all(inner).then(self._finish_after)

    def _finish_after(self, inner: torch.futures.Future[Any]) -> list[torch.Tensor]:
        for each in inner.value():
            each.value()  # raises what went wrong
        with self._lock:
            if not self._is_finished:
                self._run_finish()
        return self.outputs

    def _future_from_thread(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def watch() -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # told to whoever asks the future
                future.set_exception(error)  # type: ignore[arg-type]

        threading.Thread(target=watch, name="windlass-future", daemon=True).start()
        return future

    def _run_finish(self) -> None:
        self._is_finished = True  # before `finish`: what fails must not run a second time
        finish, self.on_finished = self.on_finished, None
        if finish is not None:
            finish()
        self.works = []


def wait_or_return(work: CollectiveWork | None, async_op: bool) -> Any:
    """What a collective returns: the work where it is asynchronous, else None after waiting for it."""
    if work is None:  # this rank is not in the group
        return None
    if not async_op:
        work.wait()
        return None
    if work.on_finished is None and len(work.works) == 1:
        return work.works[0]
    return work
