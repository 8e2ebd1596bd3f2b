"""A model that was born sharded is cut without any rank ever having it whole."""

from __future__ import annotations

import math
from types import TracebackType

import torch
from torch import nn

from windlass.base.activity import During
from windlass.base.errors import ModelError
from windlass.parallel.joining import select
from windlass.parallel.placement import placement_of
from windlass.zero import born
from windlass.zero.born import Birth


class BornParts:
    """While this context is open the parameters that `zero.Init` cut have shapes and no memory, so that a model can be
    cut along its axes; when it closes each is gathered, one after the other, and every rank keeps its part. Collective.

    What a rank holds at any time: its even piece of the whole model, its part of it, and one whole parameter.

    Args:
        model: whose parameters keep their identity while it is cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        found = {id(p): (p, birth) for p in model.parameters() if (birth := born.find(p)) is not None}
        self._born = _interleaved(sorted(found.values(), key=lambda pair: pair[1].number))  # the same on every rank

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(parameter is tensor for parameter, _ in self._born)

    def __enter__(self) -> BornParts:
        for parameter, birth in self._born:
            born.settle(parameter)
            parameter.data = _nothing(birth)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._fill()
            return
        for parameter, birth in self._born:  # nothing was lost
            parameter.data = _nothing(birth)
            born.release(parameter, birth)

    def _fill(self) -> None:
        kept = {id(parameter) for parameter in self._model.parameters()}
        with During("the gathering of parameters, of which each rank keeps its part"), torch.no_grad():
            while self._born:
                parameter, birth = self._born.pop(0)
                whole = birth.whole()
                if id(parameter) in kept:
                    _keep_part(parameter, whole)


def _interleaved(born: list[tuple[nn.Parameter, Birth]]) -> list[tuple[nn.Parameter, Birth]]:
    """From all over the model by turns: a stage of a pipeline would else get its part while most pieces are there."""
    steps = max(1, math.isqrt(len(born)))
    return [pair for first in range(steps) for pair in born[first::steps]]


def _nothing(birth: Birth) -> torch.Tensor:
    """A shape without memory (see `narrowed`); of its own storage, so that nobody takes two parameters for one."""
    return torch.zeros((), dtype=birth.dtype, device=birth.device).expand(birth.shape)


def _keep_part(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    placement = placement_of(parameter)
    if placement.shape != tuple(whole.shape) or tuple(parameter.shape) != placement.local_shape:
        raise ModelError(
            f"a parameter that was born with shape {tuple(whole.shape)} was cut as one of {placement.shape}, to "
            f"{tuple(parameter.shape)}; build the model without zero.Init"
        )
    parameter.data = select(whole, placement)
