"""A model that was born sharded is cut without any rank ever having it whole."""

from __future__ import annotations

import math
from types import TracebackType

import torch
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ModelError
from windlass.parallel.full_parameters import select_local_shard
from windlass.parallel.placement import get_placement
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.initial_shard import ShardedInit


class ShardedInitPartitioner:
    """While this context is open the parameters that `zero.Init` cut have shapes and no memory, so that a model can be
    cut along its axes; when it closes each is gathered, one after the other, and every rank keeps its part. Collective.

    What a rank holds at any time: its even piece of the whole model, its part of it, and one whole parameter.

    Args:
        model: whose parameters keep their identity while it is cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        found = {id(p): (p, birth) for p in model.parameters() if (birth := initial_shard.find(p)) is not None}
        self._sharded_parameters = _interleave(
            sorted(found.values(), key=lambda pair: pair[1].number)
        )  # the same on every rank

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(parameter is tensor for parameter, _ in self._sharded_parameters)

    def __enter__(self) -> ShardedInitPartitioner:
        for parameter, birth in self._sharded_parameters:
            initial_shard.finish_parameter(parameter)
            parameter.data = _placeholder(birth)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._gather_local_parts()
            return
        for parameter, birth in self._sharded_parameters:  # nothing was lost
            parameter.data = _placeholder(birth)
            initial_shard.shard_parameter(parameter, birth)

    def _gather_local_parts(self) -> None:
        kept = {id(parameter) for parameter in self._model.parameters()}
        with WaitScope("the gathering of parameters, of which each rank keeps its part"), torch.no_grad():
            while self._sharded_parameters:
                parameter, birth = self._sharded_parameters.pop(0)
                whole = birth.full_value()
                if id(parameter) in kept:
                    _keep_local_part(parameter, whole)


def _interleave(parameters: list[tuple[nn.Parameter, ShardedInit]]) -> list[tuple[nn.Parameter, ShardedInit]]:
    """From all over the model by turns: a stage of a pipeline would else get its part while most pieces are there."""
    steps = max(1, math.isqrt(len(parameters)))
    return [pair for first in range(steps) for pair in parameters[first::steps]]


def _placeholder(birth: ShardedInit) -> torch.Tensor:
    """A shape without memory (see `narrowed`); of its own storage, so that nobody takes two parameters for one."""
    return torch.zeros((), dtype=birth.dtype, device=birth.device).expand(birth.shape)


def _keep_local_part(parameter: nn.Parameter, full: torch.Tensor) -> None:
    placement = get_placement(parameter)
    if placement.global_shape != tuple(full.shape) or tuple(parameter.shape) != placement.local_shape:
        raise ModelError(
            f"a parameter that was born with shape {tuple(full.shape)} was cut as one of {placement.global_shape}, to "
            f"{tuple(parameter.shape)}; build the model without zero.Init"
        )
    parameter.data = select_local_shard(full, placement)
