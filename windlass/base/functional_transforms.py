"""Detection and suspension of the torch.func transforms that call the running code. Uses private names of torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_OUTSIDE: AbstractContextManager[Any] = nullcontext()


def in_transform() -> bool:
    """Return True inside a function that `torch.func.grad`, `vmap`, `jvp` or another transform calls."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context inside which no transform of torch.func is active.

    A transform wraps every tensor that is created inside it. Values cannot be gathered into a wrapped tensor, as it has
    no memory of its own.
    """
    if not in_transform():
        return _OUTSIDE
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
