"""Where a row of layers is cut into stages: contiguous parts, the heaviest as light as can be."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from windlass.base.device import local_device
from windlass.base.errors import ConfigError
from windlass.base.tree import replace, tensors


def cut(weights: Sequence[float], parts: int) -> list[int]:
    """The bounds of contiguous parts: part `i` is `[bounds[i], bounds[i + 1])`.

    The heaviest part is as light as any cut can make it; of all such cuts this is the one with the least sum of
    squares. No part is without weight, if there are enough layers that have some.

    Args:
        weights: of each layer; 0 or more.
        parts: how many.

    Raises:
        ConfigError: there are fewer layers than parts.
    """
    if len(weights) < parts or parts < 1:
        raise ConfigError(f"{len(weights)} layers can't be cut into {parts} parts, of at least one layer each")
    ends = [0.0]
    for weight in weights:
        ends.append(ends[-1] + weight)
    loaded = sum(weight > 0 for weight in weights) >= parts

    def of(start: int, stop: int) -> float:
        weight = ends[stop] - ends[start]
        return weight if weight > 0 or not loaded else float("inf")

    heaviest, _ = _best(len(weights), parts, of, max)
    slack = heaviest * (1 + 1e-12)  # sums of the same weights in another order
    squares = lambda start, stop: w * w if (w := of(start, stop)) <= slack else float("inf")  # noqa: E731
    return _best(len(weights), parts, squares, lambda a, b: a + b)[1]


def _best(
    layers: int, parts: int, price: Callable[[int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cheapest cut, by dynamic programming: `layers^2 parts` steps."""
    best = [0.0] + [float("inf")] * layers
    chosen: list[list[int]] = []
    for part in range(parts):
        now, source = [float("inf")] * (layers + 1), [part] * (layers + 1)
        for stop in range(part + 1, layers + 1 - (parts - 1 - part)):
            for start in range(part, stop):
                found = joined(best[start], price(start, stop))
                if found < now[stop]:
                    now[stop], source[stop] = found, start
        best = now
        chosen.append(source)
    bounds = [layers]
    for source in reversed(chosen):
        bounds.append(source[bounds[-1]])
    return best[layers], bounds[::-1]


def weights_of(method: str | Sequence[float], names: Sequence[str], parameters: Callable[[], list[int]]) -> list[float]:
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
    if not isinstance(method, str):
        if len(method) != len(names):
            raise ConfigError(f"the partition gives {len(method)} weights, and there are {len(names)} layers")
        return [float(weight) for weight in method]
    asked = method.lower()
    if asked == "uniform":
        return [1.0] * len(names)
    if asked in ("parameters", "best"):
        return [float(count) for count in parameters()]
    if asked.startswith("type:"):
        pattern = re.compile(method[len("type:") :], re.IGNORECASE)
        found = [float(pattern.search(name) is not None) for name in names]
        if not any(found):
            raise ConfigError(f"partition {method!r} matches none of the layers' classes: {sorted(set(names))}")
        return found
    raise ConfigError(
        f'there is no partition {method!r}; write "uniform", "parameters", "type:REGEX", or one number a layer'
    )


def measured(layers: Iterable[Callable[[Any], Any]], sample: Any, repeats: int = 3) -> list[float]:
    """Seconds that each layer takes for a forward and a backward: weights for `partition_method`.

    Args:
        layers: called one after the other, each with what the one before returned.
        sample: what the first takes.
        repeats: the shortest of so many counts, after one that does not.
    """
    found = []
    for layer in layers:
        found.append(min(_seconds(layer, sample) for _ in range(repeats + 1)))
        with torch.no_grad():
            sample = layer(sample)
    return found


def _seconds(layer: Callable[[Any], Any], given: Any) -> float:
    device = local_device()
    copies = {id(tensor): tensor.detach() for tensor in tensors(given)}
    leaves = [copy.requires_grad_(True) for copy in copies.values() if copy.is_floating_point()]
    start = _now(device)
    made = [tensor for tensor in tensors(layer(replace(given, copies))) if tensor.requires_grad]
    if made:
        wanted = [*leaves, *(p for p in _parameters(layer) if p.requires_grad)]
        torch.autograd.grad(made, wanted, [torch.ones_like(tensor) for tensor in made], allow_unused=True)
    return _now(device) - start


def _parameters(layer: Any) -> list[torch.Tensor]:
    return list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
