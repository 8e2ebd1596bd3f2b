"""Where a row of layers is cut into stages: contiguous parts, the heaviest as light as can be."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from windlass.base.compute_device import local_device
from windlass.base.errors import ConfigError
from windlass.base.tensor_tree import iterate_tensors, replace_tensors


def partition_layers(weights: Sequence[float], num_stages: int) -> list[int]:
    """The bounds of contiguous parts: part `i` is `[bounds[i], bounds[i + 1])`.

    The heaviest part is as light as any cut can make it; of all such cuts this is the one with the least sum of
    squares. No part is without weight, if there are enough layers that have some.

    Args:
        weights: of each layer; 0 or more.
        parts: how many.

    Raises:
        ConfigError: there are fewer layers than parts.
    """
    if len(weights) < num_stages or num_stages < 1:
        raise ConfigError(f"{len(weights)} layers can't be cut into {num_stages} parts, of at least one layer each")
    ends = [0.0]
    for weight in weights:
        ends.append(ends[-1] + weight)
    loaded = sum(weight > 0 for weight in weights) >= num_stages

    def of(start: int, stop: int) -> float:
        weight = ends[stop] - ends[start]
        return weight if weight > 0 or not loaded else float("inf")

    heaviest, _ = _cheapest_partition(len(weights), num_stages, of, max)
    slack = heaviest * (1 + 1e-12)  # sums of the same weights in another order
    squares = lambda start, stop: w * w if (w := of(start, stop)) <= slack else float("inf")  # noqa: E731
    return _cheapest_partition(len(weights), num_stages, squares, lambda a, b: a + b)[1]


def _cheapest_partition(
    layers: int, num_stages: int, cost: Callable[[int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cheapest cut, by dynamic programming: `layers^2 parts` steps."""
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
    """What each layer weighs.

    Args:
        method: `"uniform"`: all the same; `"parameters"` (or `"best"`): elements of parameters; `"type:REGEX"`: 1 where
            the expression is found in the name of the layer's class, whatever its case, else 0; or numbers, one a layer
            (`measured`).
        names: of the layers' classes.
        parameters: elements of each layer's parameters; only asked for where they count.

    Raises:
        ConfigError: there is no such method, no layer matches, or there are more or fewer numbers than layers.
    """
    if not isinstance(partition_method, str):
        if len(partition_method) != len(class_names):
            raise ConfigError(
                f"the partition gives {len(partition_method)} weights, and there are {len(class_names)} layers"
            )
        return [float(weight) for weight in partition_method]
    asked = partition_method.lower()
    if asked == "uniform":
        return [1.0] * len(class_names)
    if asked in ("parameters", "best"):
        return [float(count) for count in parameter_counts()]
    if asked.startswith("type:"):
        pattern = re.compile(partition_method[len("type:") :], re.IGNORECASE)
        found = [float(pattern.search(name) is not None) for name in class_names]
        if not any(found):
            raise ConfigError(
                f"partition {partition_method!r} matches none of the layers' classes: {sorted(set(class_names))}"
            )
        return found
    raise ConfigError(
        f'there is no partition {partition_method!r}; write "uniform", "parameters", "type:REGEX", or one number a layer'
    )


def measure_layer_times(layers: Iterable[Callable[[Any], Any]], sample: Any, repeats: int = 3) -> list[float]:
    """Seconds that each layer takes for a forward and a backward: weights for `partition_method`.

    Args:
        layers: called one after the other, each with what the one before returned.
        sample: what the first takes.
        repeats: the shortest of so many counts, after one that does not.
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
    start = _synchronized_time(device)
    made = [tensor for tensor in iterate_tensors(layer(replace_tensors(given, copies))) if tensor.requires_grad]
    if made:
        wanted = [*leaves, *(p for p in _parameters(layer) if p.requires_grad)]
        torch.autograd.grad(made, wanted, [torch.ones_like(tensor) for tensor in made], allow_unused=True)
    return _synchronized_time(device) - start


def _parameters(layer: Any) -> list[torch.Tensor]:
    return list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []


def _synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
