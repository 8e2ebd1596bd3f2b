"""Partitioning of a model constructed under `zero.Init`, without any rank holding the full model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ModelError
from windlass.parallel.full_parameters import select_local_shard
from windlass.parallel.placement import get_placement
from windlass.zero.sharded_init import initial_shard

T = TypeVar("T")


class ShardedInitPartitioner:
    """Context in which parameters constructed under `zero.Init` have shapes but no memory. Collective.

    Inside the context, the model can be partitioned, e.g. for pipeline parallelism. On exit, the parameters are
    gathered one at a time, and every rank keeps its part of each. Peak memory of a rank: its shard of the full
    model, its part of the model, and one full parameter.

    Args:
        model: the model. Its parameter objects stay the same while it is partitioned.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        sharded = {
            id(p): (p, init_shard) for p in model.parameters() if (init_shard := initial_shard.find(p)) is not None
        }
        self._sharded_parameters = interleave(
            sorted(sharded.values(), key=lambda pair: pair[1].number)
        )  # the same order on every rank

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(parameter is tensor for parameter, _ in self._sharded_parameters)

    def __enter__(self) -> ShardedInitPartitioner:
        for parameter, init_shard in self._sharded_parameters:
            initial_shard.finish_parameter(parameter)
            parameter.data = init_shard.placeholder()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._gather_local_parts()
            return
        for parameter, init_shard in self._sharded_parameters:  # restore the shards, which still have their values
            parameter.data = init_shard.placeholder()
            initial_shard.shard_parameter(parameter, init_shard)

    def _gather_local_parts(self) -> None:
        kept = {id(parameter) for parameter in self._model.parameters()}
        with WaitScope("the gathering of parameters at the end of partitioning"), torch.no_grad():
            while self._sharded_parameters:
                parameter, init_shard = self._sharded_parameters.pop(0)
                if id(parameter) in kept:
                    _keep_local_part(parameter, init_shard.full_value())
                else:
                    init_shard.full_value()  # collective: other ranks keep a part of it
                del init_shard  # its shard would stay allocated while the next parameter is gathered


def interleave(parameters: Sequence[T]) -> list[T]:
    """Interleave parameters from all over the model, so that memory use of each pipeline stage grows evenly.

    In model order, the first stage would receive its full part while most of the shards are still allocated.
    """
    steps = max(1, math.isqrt(len(parameters)))
    return [pair for first in range(steps) for pair in parameters[first::steps]]


def _keep_local_part(parameter: nn.Parameter, full: torch.Tensor) -> None:
    placement = get_placement(parameter)
    if placement.global_shape != tuple(full.shape) or tuple(parameter.shape) != placement.local_shape:
        raise ModelError(
            f"a parameter constructed with shape {tuple(full.shape)} was partitioned as one of shape "
            f"{placement.global_shape}, to the local shape {tuple(parameter.shape)}; build the model without zero.Init"
        )
    parameter.data = select_local_shard(full, placement)
