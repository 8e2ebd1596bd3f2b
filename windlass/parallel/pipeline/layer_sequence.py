"""Execution of layers in sequence, optionally with activation checkpointing of groups of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

LayerFunction = Callable[[Any], Any]


def run_layers(functions: Sequence[LayerFunction], inputs: Any) -> Any:
    """Call each function with the previous function's result. Return the last result."""
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
    """Run layers as `run_layers` does, with every `interval` of them in one checkpointed call.

    Args:
        checkpoint: checkpointing function, called with a function and its arguments. The items of a tuple are passed as
            separate arguments.
        class_names: only groups of `interval` layers whose classes all have one of these names are checkpointed. None:
            groups that have parameters are.
    """
    for start in range(0, len(functions), interval):
        segment = functions[start : start + interval]
        if not is_checkpointed(segment, class_names):
            inputs = run_layers(segment, inputs)
        elif isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
            inputs = checkpoint(partial(_run_layers_on, segment), *inputs)
        else:
            inputs = checkpoint(partial(run_layers, segment), inputs)
    return inputs


def _run_layers_on(functions: Sequence[LayerFunction], *inputs: Any) -> Any:
    return run_layers(functions, inputs)


def is_checkpointed(segment: Sequence[LayerFunction], names: Sequence[str] | None) -> bool:
    """Return True if a group of layers is checkpointed: the classes of all its layers are in `names`, or `names` is
    None and the group has parameters.
    """
    modules = [_unwrap_module(function) for function in segment]
    if names is not None:
        return all(type(module).__name__ in names for module in modules)
    return any(True for module in modules if isinstance(module, nn.Module) for _ in module.parameters())


def _unwrap_module(function: LayerFunction) -> Any:
    """Return the module of a tied layer, whose function is a `partial` with the module; otherwise `function` itself."""
    return function.args[0] if isinstance(function, partial) and function.args else function
