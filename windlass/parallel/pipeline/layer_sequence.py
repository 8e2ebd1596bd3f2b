"""Runs layers one after the other, and, where that is asked for, so many at a time again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

LayerFunction = Callable[[Any], Any]


def run_layers(functions: Sequence[LayerFunction], inputs: Any) -> Any:
    """The last one's result; each takes what the one before returned."""
    for function in functions:
        inputs = function(inputs)
    return inputs


def run_layers_checkpointed(
    functions: Sequence[LayerFunction],
    inputs: Any,
    interval: int,
    checkpoint: Callable[..., Any],
    *,
    class_names: Sequence[str] | None = None,
) -> Any:
    """As `in_a_row`, with every `interval` of them in one checkpointed call.

    Args:
        checkpoint: called with a function and its arguments; a tuple's items are arguments of their own.
        names: of classes: only segments of these alone are checkpointed. None: those that have parameters.
    """
    for start in range(0, len(functions), interval):
        segment = functions[start : start + interval]
        if not worth_it(segment, class_names):
            inputs = run_layers(segment, inputs)
        elif isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
            inputs = checkpoint(partial(_run_layers_on, segment), *inputs)
        else:
            inputs = checkpoint(partial(run_layers, segment), inputs)
    return inputs


def _run_layers_on(functions: Sequence[LayerFunction], *inputs: Any) -> Any:
    return run_layers(functions, inputs)


def worth_it(segment: Sequence[LayerFunction], names: Sequence[str] | None) -> bool:
    """Return whether a segment is checkpointed: its classes are all among `names`, or it has parameters."""
    modules = [_unwrap_module(function) for function in segment]
    if names is not None:
        return all(type(module).__name__ in names for module in modules)
    return any(True for module in modules if isinstance(module, nn.Module) for _ in module.parameters())


def _unwrap_module(function: LayerFunction) -> Any:
    """The module behind a tied layer's own forward."""
    return function.args[0] if isinstance(function, partial) and function.args else function
