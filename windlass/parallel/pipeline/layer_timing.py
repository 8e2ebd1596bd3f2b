"""Measurement of the layer times of a model that is about to be split."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.compute_device import synchronized_time
from windlass.base.errors import ConfigError
from windlass.parallel.pipeline.forward_tracing import ForwardTrace, trace_forward, trial_mode

_TOKENS = 128


def measure_model_layer_times(model: nn.Module, *, repeats: int = 3) -> list[float]:
    """Measure the forward seconds of each layer, as weights for `split_into_stages`.

    The time of the backward is assumed to be proportional.

    All ranks must use the result of one rank, since measurements differ between ranks. The time before the layers
    counts for the first layer, the time after them for the last.

    Args:
        model: a full model that can be split, with values (not on the meta device).
        repeats: number of measurements after one warm-up run; the shortest is used.

    Raises:
        ConfigError: the model is on the meta device.
        ModelError: the model can't be split.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            'pipeline.partition "time" measures layers, and this model is on the meta device; write "parameters", '
            '"uniform" or "type:REGEX"'
        )
    plan = trace_forward(model)
    rounds = [_time_layers(model, plan) for _ in range(repeats + 1)][1:]
    return [min(each) for each in zip(*rounds, strict=True)]


def _time_layers(model: nn.Module, trace: ForwardTrace) -> list[float]:
    layers = trace.layers_of(model)
    device = next(model.parameters()).device
    marks: list[float] = []

    def mark(*_: Any) -> None:
        marks.append(synchronized_time(device))

    def mark_start(*_: Any) -> None:
        if not marks:  # the first layer may occur a second time in the list
            mark()

    handles = [layer.register_forward_hook(mark) for layer in dict.fromkeys(layers)]
    handles.append(layers[0].register_forward_pre_hook(mark_start))
    try:
        with trial_mode(model, []), torch.no_grad():
            start = synchronized_time(device)
            model(**_lengthen_input_ids(trace.example_kwargs))
            end = synchronized_time(device)
    finally:
        for handle in handles:
            handle.remove()
    found = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    found[0] += marks[0] - start
    found[-1] += end - marks[-1]
    return found


def _lengthen_input_ids(arguments: dict[str, Any]) -> dict[str, Any]:
    """Lengthen `input_ids`, if it is the only tensor, so that the layers' relative times are those of training."""
    ids = arguments.get("input_ids")
    if not isinstance(ids, torch.Tensor) or any(
        isinstance(v, torch.Tensor) and v is not ids for v in arguments.values()
    ):
        return arguments
    return {**arguments, "input_ids": ids[:1, :1].repeat(1, _TOKENS)}
