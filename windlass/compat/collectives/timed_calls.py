"""Decorator that times collectives and measures their messages for the `comms_logger`."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from windlass.comm.comms_logger import comms_logger

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Arguments that may hold a call's message; the first one present counts.
_MESSAGE_ARGUMENTS = (
    "tensor",
    "tensors",
    "input_tensors",
    "input_list",
    "input_tensor_list",
    "input_tensor",
    "p2p_op_list",
)


def timed_op(function: _Function) -> _Function:
    """Record calls of `function` in the `comms_logger`, under its `log_name`.

    A blocking call is timed until it returns and, on CUDA, until the device has finished it. An asynchronous call is
    timed until `wait` or another method of its work reports the end. A disabled logger costs one comparison.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not comms_logger.enabled:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        name = given.get("log_name") or function.__name__
        if not comms_logger.should_record(name, bool(given.get("prof"))):
            return function(*args, **kwargs)
        if comms_logger.debug:
            name = f"{name} | [Caller Func: {sys._getframe(1).f_code.co_name}]"
        tensors = message_tensors(given)
        cuda = any(tensor.is_cuda for tensor in tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        clock = _CallTimer(function.__name__, name, size, given.get("group"), cuda)
        result = function(*args, **kwargs)
        if hasattr(result, "wait"):
            return TimedWork(result, clock)
        if isinstance(result, list) and result and hasattr(result[0], "wait"):
            # The last work of a batch stops the timer.
            return [*result[:-1], TimedWork(result[-1], clock)]
        clock.stop()
        return result

    return cast(_Function, call)


def message_tensors(given: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call with these arguments sends or receives; none for a barrier."""
    held = next((given[name] for name in _MESSAGE_ARGUMENTS if given.get(name) is not None), ())
    items = held if isinstance(held, (list, tuple)) else (held,)
    found: list[torch.Tensor] = []
    for item in items:
        for one in item if isinstance(item, (list, tuple)) else (item,):
            tensor = getattr(one, "tensor", one)
            if isinstance(tensor, torch.Tensor):
                found.append(tensor)
    return found


class _CallTimer:
    """Timer of one call."""

    def __init__(self, operation: str, name: str, size: int, group: Any, cuda: bool) -> None:
        self._operation, self._name, self._size, self._cuda = operation, name, size, cuda
        self._ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        if cuda:
            torch.cuda.synchronize()  # exclude the time of work queued before the call
        self._start = time.perf_counter()
        self._running = True

    def stop(self) -> None:
        if not self._running:
            return
        self._running = False
        if self._cuda:
            torch.cuda.synchronize()
        latency = (time.perf_counter() - self._start) * 1e3
        if self._ranks > 0:  # this rank is in the group
            comms_logger.append(self._operation, self._name, latency, self._size, self._ranks)


class TimedWork:
    """Wrapper of a `torch.distributed.Work`: stops the timer when the work completes, and forwards other attributes."""

    def __init__(self, work: Any, timer: _CallTimer) -> None:
        self._work, self._timer = work, timer

    def wait(self, timeout: timedelta | None = None) -> Any:
        result = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._timer.stop()
        return result

    def is_completed(self) -> bool:
        over = bool(self._work.is_completed())
        if over:
            self._timer.stop()
        return over

    def result(self) -> Any:
        found = self._work.result()
        self._timer.stop()
        return found

    def get_future(self) -> Any:
        return self._work.get_future().then(self._stop_timer)  # the returned future completes once the call is recorded

    def _stop_timer(self, future: torch.futures.Future[Any]) -> Any:
        self._timer.stop()
        return future.value()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
