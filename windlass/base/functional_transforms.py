"""Access to the transforms of torch.func around the running code, through private names of torch, in one place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_OUTSIDE: AbstractContextManager[Any] = nullcontext()


def in_transform() -> bool:
    """Return True inside a function that `torch.func.grad`, `vmap`, `jvp` or another transform calls."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context without transforms of torch.func.

    A transform wraps every tensor that is created inside it, and wrapped tensors have no memory to gather into.
    """
    if not in_transform():
        return _OUTSIDE
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
