"""instrument_w_nvtx: a function that a profiler shows as a range of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from windlass.compat.accelerator.real_accelerator import get_accelerator

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
enable_nvtx = True


def instrument_w_nvtx(func: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """`func`, between the two ends of a range named after it; while torch compiles, `func` alone."""

    @functools.wraps(func)
    def named(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        device = get_accelerator()
        device.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            device.range_pop()

    return named
