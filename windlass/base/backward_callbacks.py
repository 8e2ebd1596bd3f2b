"""Access to the running backward through private names of torch, in one place."""

from __future__ import annotations

from collections.abc import Callable

import torch


def current_backward_id() -> int:
    """Return the number of the backward that runs in this thread; -1: none. A nested backward has its own number."""
    return int(torch._C._current_graph_task_id())


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward of this thread ends. Only valid inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
