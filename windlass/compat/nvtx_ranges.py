"""Decorator instrument_w_nvtx: shows a function as a profiler range."""

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
    """Wrap `func` in a profiler range of its name.

    Calls under torch.compile, or while `enable_nvtx` is False, have no range.
    """

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
