"""Runs layers one after the other, and, where that is asked for, so many at a time again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

Function = Callable[[Any], Any]


def in_a_row(functions: Sequence[Function], inputs: Any) -> Any:
    """The last one's result; each takes what the one before returned."""
    for function in functions:
        inputs = function(inputs)
    return inputs


def in_segments(
    functions: Sequence[Function],
    inputs: Any,
    interval: int,
    checkpoint: Callable[..., Any],
    *,
    names: Sequence[str] | None = None,
) -> Any:
    """As `in_a_row`, with every `interval` of them in one checkpointed call.

    Args:
        checkpoint: called with a function and its arguments; a tuple's items are arguments of their own.
        names: of classes: only segments of these alone are checkpointed. None: those that have parameters.
    """
    for start in range(0, len(functions), interval):
        segment = functions[start : start + interval]
        if not worth_it(segment, names):
            inputs = in_a_row(segment, inputs)
        elif isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
            inputs = checkpoint(partial(_of_many, segment), *inputs)
        else:
            inputs = checkpoint(partial(in_a_row, segment), inputs)
    return inputs


def _of_many(functions: Sequence[Function], *inputs: Any) -> Any:
    return in_a_row(functions, inputs)


def worth_it(segment: Sequence[Function], names: Sequence[str] | None) -> bool:
    """Return whether a segment is checkpointed: its classes are all among `names`, or it has parameters."""
    modules = [_module(function) for function in segment]
    if names is not None:
        return all(type(module).__name__ in names for module in modules)
    return any(True for module in modules if isinstance(module, nn.Module) for _ in module.parameters())


def _module(function: Function) -> Any:
    """The module behind a tied layer's own forward."""
    return function.args[0] if isinstance(function, partial) and function.args else function
