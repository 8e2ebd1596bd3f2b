"""Counting of the FLOPs of matrix products in native code, which torch's dispatch modes cannot observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_counters: list[Callable[[int], AbstractContextManager[None]]] = []
_NOTHING = nullcontext()


def native_product(flops: int) -> AbstractContextManager[None]:
    """Return a context for code that computes one product of `flops` FLOPs. Operations inside are not counted again."""
    return _counters[-1](flops) if _counters else _NOTHING


@contextmanager
def counting_native_products(counter: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Pass the FLOPs of each native product to `counter`, and run the product in the context that `counter` returns.

    Of nested counters only the innermost is called.
    """
    _counters.append(counter)
    try:
        yield
    finally:
        _counters.remove(counter)
