"""Work object of an asynchronous collective, like `torch.distributed.Work`, with a callback on completion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch


class CollectiveWork:
    """Several torch works combined into one, with a callback that runs once when all are complete.

    The result is in the outputs after `wait`, or once `is_completed` has returned True. On CUDA, as with torch's
    works, this means that the current stream waits for the result.

    Args:
        works: torch's works, possibly none.
        on_finished: callback that moves the result into the outputs.
        outputs: tensors that hold the result.
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
        self._lock = threading.RLock()  # a future's thread and the caller's thread may both complete the work
        self._is_finished = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the outputs. With `timeout`, raise as torch does if a work takes longer."""
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
        """Return True if the result is in the outputs. Run the callback first if torch's works are complete."""
        with self._lock:
            if not self._is_finished and all(work.is_completed() for work in self.works):
                self.wait()
            return self._is_finished

    def is_success(self) -> bool:
        """Return True if the work is complete. A failure raises in `wait`."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the output tensors."""
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of `result`.

        Its `then` runs in torch's thread, or in a new thread if the backend has no futures.
        """
        try:
            inner = [work.get_future() for work in self.works]
        except (RuntimeError, NotImplementedError):  # gloo's send and receive have no futures
            return self._future_from_thread()
        if not inner:
            self.wait()
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(self.outputs)
            return done
        return torch.futures.collect_all(inner).then(self._finish_after)

    def _finish_after(self, inner: torch.futures.Future[Any]) -> list[torch.Tensor]:
        for each in inner.value():
            each.value()  # raises if this work failed
        with self._lock:
            if not self._is_finished:
                self._run_finish()
        return self.outputs

    def _future_from_thread(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def watch() -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # passed on to the future's reader
                future.set_exception(error)  # type: ignore[arg-type]

        threading.Thread(target=watch, name="windlass-future", daemon=True).start()
        return future

    def _run_finish(self) -> None:
        self._is_finished = True  # set before the callback runs: a failing callback must not run a second time
        finish, self.on_finished = self.on_finished, None
        if finish is not None:
            finish()
        self.works = []


def wait_or_return(work: CollectiveWork | None, async_op: bool) -> Any:
    """Return the work if the call is asynchronous; otherwise wait for it and return None."""
    if work is None:  # this rank is not in the group
        return None
    if not async_op:
        work.wait()
        return None
    # Without a callback, torch's own work does the same and has all of torch's methods.
    if work.on_finished is None and len(work.works) == 1:
        return work.works[0]
    return work
