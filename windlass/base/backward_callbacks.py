"""The few things about a running backward that torch tells only through private names, in one place."""

from __future__ import annotations

from collections.abc import Callable

import torch


def current_backward_id() -> int:
    """The number of the backward that runs in this thread, -1 if none does; a nested one has its own."""
    return int(torch._C._current_graph_task_id())


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward of this thread ends; only valid inside one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
