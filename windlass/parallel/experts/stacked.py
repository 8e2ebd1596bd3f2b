"""A module that holds experts as tensors is left its own, and its forward sends tokens to where their experts are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.axis import Axis
from windlass.parallel.experts.copied import copied_along
from windlass.parallel.experts.dispatch import dispatch, spans_of
from windlass.parallel.experts.families import Family, Routing
from windlass.parallel.experts.grouped import Groups
from windlass.parallel.narrowing import narrowed
from windlass.parallel.placement import along, place, placement_of


class SpreadForward:
    """The forward of one module of experts of which a rank has some: it stands in for the class's own.

    Args:
        module: of whose tensors only this rank's experts are left.
        family: how it holds them.
        experts: how many there are on all ranks together.
        axis: along which they are spread.
    """

    def __init__(self, module: nn.Module, family: Family, experts: int, axis: Axis) -> None:
        self.module, self.family, self.experts, self.axis = module, family, experts, axis
        self._own: Callable[..., torch.Tensor] = module.forward
        self._signature = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, index, weights = self._routing(args, kwargs)
        flat = hidden.reshape(-1, hidden.shape[-1])
        found = dispatch(flat, index, weights, experts=self.experts, axis=self.axis, local=self._run, dropless=False)
        return found.view(*hidden.shape[:-1], found.shape[-1])

    def _routing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routing:
        if self.family.routing is not None:
            return self.family.routing(self.experts, *args, **kwargs)
        given = self._signature.bind(*args, **kwargs).args if kwargs else args
        hidden, index, weights = given[:3]
        return hidden, index, weights

    def _run(self, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
        if self.family.rows is not None:
            return self.family.rows(self.module, rows, groups)
        expert = groups.expert_of(rows)[:, None]
        found = self._own(rows, expert, rows.new_ones(expert.shape)).view_as(rows) if len(rows) else rows
        return found + _touch(rows, self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadForward:
        """A copy of the module runs its own tensors, over the same axis."""
        return copied_along(self, self.axis, memo)


def cut_stacked(module: nn.Module, name: str, family: Family, axis: Axis) -> tuple[int, int]:
    """Keep this rank's experts of a module alone; returns `[first, end)`.

    Args:
        name: of the module, for errors.

    Raises:
        ModelError: a tensor that can't be cut into as many equal parts as there are experts.
    """
    experts = int(getattr(module, family.number))
    first, end = spans_of(experts, axis)[axis.index]
    for parameter, grain in checked(module, name, family):
        before = placement_of(parameter)
        ranges = along(before.shape, 0, [(first * grain, end * grain)])[:1] + before.ranges[1:]
        parameter.grad = None
        parameter.data = narrowed(parameter.detach(), 0, [(first * grain, end * grain)])
        place(parameter, replace(before, ranges=ranges, cut=before.cut | {axis.name}, expert=True))
    forward = SpreadForward(module, family, experts, axis)
    setattr(module, family.number, end - first)
    module.forward = forward
    return first, end


def checked(module: nn.Module, name: str, family: Family) -> list[tuple[nn.Parameter, int]]:
    """The parameters that are cut, and how many rows of each belong to one expert.

    Raises:
        ModelError: as `cut_stacked`.
    """
    experts = int(getattr(module, family.number))
    found = []
    for tensor in family.names(module):
        parameter = module.get_parameter(tensor)
        grain, rest = divmod(parameter.shape[0], experts)
        before = placement_of(parameter)
        if rest or not grain or before.ranges[0] != ((0, before.shape[0]),):
            raise ModelError(
                f"{name}.{tensor} of shape {tuple(before.shape)}, of which {parameter.shape[0]} rows are here, can't "
                f"be cut into {experts} experts ({family.number}); register_experts({type(module).__name__!r}, "
                "tensors=...) names those that can"
            )
        found.append((parameter, grain))
    return found


def _touch(rows: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """A zero that rows and parameters have a part in. Where no expert has a row, nothing else would take this rank into
    the exchanges of the backward, or give its parameters a gradient."""
    zero = rows[:, :0].sum()
    for parameter in module.parameters():
        if parameter.requires_grad:
            zero = zero + parameter.reshape(-1)[:0].sum().to(zero.dtype)
    return zero
