"""Partition of a sequence of layers into contiguous stages that minimizes the weight of the heaviest stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from windlass.base.compute_device import local_device, synchronized_time
from windlass.base.errors import ConfigError
from windlass.base.tensor_tree import iterate_tensors, replace_tensors


def partition_layers(weights: Sequence[float], num_stages: int) -> list[int]:
    """Return the bounds of contiguous stages: stage `i` has the layers `[bounds[i], bounds[i + 1])`.

    The result minimizes the weight of the heaviest stage and, among all partitions that do so, the sum of the squared
    weights of the stages. No stage has weight 0 if at least `num_stages` layers have a positive weight.

    Args:
        weights: weight of each layer, at least 0.
        num_stages: number of stages.

    Raises:
        ConfigError: there are fewer layers than stages, or `num_stages` is below 1.
    """
    if len(weights) < num_stages or num_stages < 1:
        raise ConfigError(
            f"{len(weights)} layers can't be split into {num_stages} parts of at least one layer each; use fewer stages"
        )
    ends = [0.0]
    for weight in weights:
        ends.append(ends[-1] + weight)
    loaded = sum(weight > 0 for weight in weights) >= num_stages

    def of(start: int, stop: int) -> float:
        weight = ends[stop] - ends[start]
        return weight if weight > 0 or not loaded else float("inf")

    heaviest, _ = _cheapest_partition(len(weights), num_stages, of, max)
    slack = heaviest * (1 + 1e-12)  # tolerance: the same weights may be summed in another order
    squares = lambda start, stop: w * w if (w := of(start, stop)) <= slack else float("inf")  # noqa: E731
    return _cheapest_partition(len(weights), num_stages, squares, lambda a, b: a + b)[1]


def _cheapest_partition(
    layers: int, num_stages: int, cost: Callable[[int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return cost and bounds of the cheapest partition, by dynamic programming in `layers^2 num_stages` steps."""
    best = [0.0] + [float("inf")] * layers
    chosen: list[list[int]] = []
    for part in range(num_stages):
        now, source = [float("inf")] * (layers + 1), [part] * (layers + 1)
        for stop in range(part + 1, layers + 1 - (num_stages - 1 - part)):
            for start in range(part, stop):
                found = combine(best[start], cost(start, stop))
                if found < now[stop]:
                    now[stop], source[stop] = found, start
        best = now
        chosen.append(source)
    bounds = [layers]
    for source in reversed(chosen):
        bounds.append(source[bounds[-1]])
    return best[layers], bounds[::-1]


def compute_layer_weights(
    partition_method: str | Sequence[float], class_names: Sequence[str], parameter_counts: Callable[[], list[int]]
) -> list[float]:
    """Return the weight of each layer.

    Args:
        partition_method: `"uniform"`: all weights are equal; `"parameters"` (or `"best"`): the number of parameter
            elements; `"type:REGEX"`: 1 if the expression matches in the layer's class name, case-insensitively, else 0;
            or a sequence of numbers, one for each layer (`measure_layer_times`).
        class_names: class name of each layer.
        parameter_counts: returns the number of parameter elements of each layer. Called only if the method needs them.

    Raises:
        ConfigError: the method is unknown, REGEX is invalid, no layer matches, or the number of weights differs
            from the number of layers.
    """
    if not isinstance(partition_method, str):
        if len(partition_method) != len(class_names):
            raise ConfigError(
                f"the partition gives {len(partition_method)} weights, and there are {len(class_names)} layers; "
                "give one weight for each"
            )
        return [float(weight) for weight in partition_method]
    requested = partition_method.lower()
    if requested == "uniform":
        return [1.0] * len(class_names)
    if requested in ("parameters", "best"):
        return [float(count) for count in parameter_counts()]
    if requested.startswith("type:"):
        try:
            pattern = re.compile(partition_method[len("type:") :], re.IGNORECASE)
        except re.error as error:
            raise ConfigError(
                f"partition_method {partition_method!r} has an invalid regular expression: {error}; write one that "
                "matches class names of layers"
            ) from error
        found = [float(pattern.search(name) is not None) for name in class_names]
        if not any(found):
            raise ConfigError(
                f"partition {partition_method!r} matches none of the layers' classes: {sorted(set(class_names))}; "
                "write an expression that matches one of them"
            )
        return found
    raise ConfigError(
        f'partition_method {partition_method!r} does not exist; write "uniform", "parameters" (or "best"), '
        '"type:REGEX", or one number per layer'
    )


def measure_layer_times(layers: Iterable[Callable[[Any], Any]], sample: Any, repeats: int = 3) -> list[float]:
    """Measure the seconds of a forward and a backward of each layer, as weights for `partition_method`.

    Args:
        layers: functions or modules, each called with the previous layer's output.
        sample: input of the first layer.
        repeats: number of measurements of a layer in addition to the first; the shortest of them all is used.
    """
    found = []
    for layer in layers:
        found.append(min(_time_layer(layer, sample) for _ in range(repeats + 1)))
        with torch.no_grad():
            sample = layer(sample)
    return found


def _time_layer(layer: Callable[[Any], Any], given: Any) -> float:
    device = local_device()
    copies = {id(tensor): tensor.detach() for tensor in iterate_tensors(given)}
    leaves = [copy.requires_grad_(True) for copy in copies.values() if copy.is_floating_point()]
    start = synchronized_time(device)
    made = [tensor for tensor in iterate_tensors(layer(replace_tensors(given, copies))) if tensor.requires_grad]
    if made:
        requested = [*leaves, *(p for p in _parameters(layer) if p.requires_grad)]
        torch.autograd.grad(made, requested, [torch.ones_like(tensor) for tensor in made], allow_unused=True)
    return synchronized_time(device) - start


def _parameters(layer: Any) -> list[torch.Tensor]:
    return list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
