"""Partition of a model's parameters into one range of elements for each server. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PartitionedParameter:
    """Properties of a parameter that determine its partition.

    Args:
        name: name in the model.
        numel: number of elements.
        row: number of elements of a row, such as an embedding vector, which stays on one server; 1 if the gradient is
            dense.
        is_sparse: True if the gradient is a sparse tensor of rows.
    """

    name: str
    numel: int
    row: int = 1
    is_sparse: bool = False


@dataclass(frozen=True)
class Fragment:
    """Elements `[begin, end)` of parameter number `parameter`, owned by one server."""

    parameter: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def partition_parameters(parameters: Sequence[PartitionedParameter], servers: int) -> list[list[Fragment]]:
    """Return each server's fragments, in the order of the parameters: equal ranges of their concatenation.

    A boundary inside a row moves to the start of the row.
    """
    total = sum(parameter.numel for parameter in parameters)
    bounds = [total * server // servers for server in range(servers + 1)]
    starts = []
    start = 0
    for parameter in parameters:
        starts.append(start)
        bounds = [
            bound - (bound - start) % parameter.row if start <= bound < start + parameter.numel else bound
            for bound in bounds
        ]
        start += parameter.numel
    found: list[list[Fragment]] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        own = []
        for index, (parameter, first) in enumerate(zip(parameters, starts, strict=True)):
            low, high = max(begin, first), min(end, first + parameter.numel)
            if low < high:
                own.append(Fragment(index, low - first, high - first))
        found.append(own)
    return found
