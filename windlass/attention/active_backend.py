"""Stack of the attention backends that are active in the running context.

[Note: active backends] The stack is a context variable: each thread and each asyncio task has its own, and an exception
unwinds it. Modules hold no reference to a backend, so two engines can use the same modules. A `BoundMask` has the
backend that made it, so a layer that is recomputed in the backward, after the context has ended and perhaps in a thread
of autograd, uses the backend of its forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from windlass.attention.attention_backend import AttentionBackend, require_backend
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.backend_registry import get_backend

BackendStack = tuple[AttentionBackend | None, ...]

_stack: ContextVar[BackendStack] = ContextVar("windlass_attention_backends", default=())


@contextmanager
def use_backend(backend: AttentionBackend | str | None) -> Iterator[AttentionBackend | None]:
    """Make a backend active inside the `with` block. Blocks nest; the innermost backend computes.

    A backend may delegate to the backend of the next outer block, as Ulysses sequence parallelism does for its local
    heads.

    Args:
        backend: a backend, the name of one that needs no options, or None for plain attention.

    Raises:
        ConfigError: no backend of this name is registered, or the backend is incomplete.
    """
    found = get_backend(backend) if isinstance(backend, str) else None if backend is None else require_backend(backend)
    with restore_backends((*_stack.get(), found)):
        yield found


def get_active_backend() -> AttentionBackend | None:
    """Return the innermost active backend; None if attention is plain."""
    stack = _stack.get()
    return stack[-1] if stack else None


def get_backend_stack() -> BackendStack:
    """Return all active backends, the innermost last, for `restore_backends`."""
    return _stack.get()


@contextmanager
def restore_backends(stack: BackendStack) -> Iterator[None]:
    """Replace the full stack inside the `with` block, e.g. to recompute a forward with its backends."""
    token = _stack.set(stack)
    try:
        yield
    finally:
        _stack.reset(token)


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts for `torch.utils.checkpoint.checkpoint(..., context_fn=checkpoint_context_fn)`.

    Code that calls `windlass.attention.attention` inside torch's own checkpointing needs these contexts, because the
    recomputation runs outside of `use_backend`. With masks that transformers' models or `bind_mask` made, the contexts
    are not needed.
    """
    return nullcontext(), restore_backends(_stack.get())


class BoundMask:
    """Mask of a forward together with the backend that made it.

    Layers receive it as an argument. It has no `__dict__` and is not a dataclass, so that searches for tensors in
    arguments (`base/tensor_tree`) do not descend into it.
    """

    __slots__ = ("backend", "mask")

    def __init__(self, backend: AttentionBackend, mask: Any) -> None:
        self.backend, self.mask = backend, mask

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__ or name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the model reads {name!r} of its attention mask, which is not a tensor while the attention backend "
            f"{self.backend.name!r} is active: the model computes attention itself. Use a model class whose attention "
            "is called through transformers' AttentionInterface or windlass.attention"
        )


def make_bound_mask(backend: AttentionBackend, mask: AttentionMask) -> BoundMask:
    """Make the mask of the active `backend`. While `make_mask` runs, the backend of the next outer block is active."""
    with restore_backends(_stack.get()[:-1]):
        return BoundMask(backend, backend.make_mask(mask))
