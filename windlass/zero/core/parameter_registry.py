"""Finds the sharded model that a parameter belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from torch import nn

from windlass.base.errors import ModelError

if TYPE_CHECKING:
    from windlass.zero.core.unit import Unit
    from windlass.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class ParameterLocation:
    """Where a parameter lives: whose, in which unit, as which of its parameters."""

    model: ShardedModel
    unit: Unit
    index: int

    @property
    def name(self) -> str:
        return self.unit.names[self.index]


_locations: dict[int, tuple[ReferenceType[nn.Parameter], ReferenceType[ShardedModel], int, int]] = {}


def register(model: ShardedModel) -> None:
    """Remember the parameters of `model`."""
    for number, unit in enumerate(model.units):
        for index, parameter in enumerate(unit.parameters):
            _locations[id(parameter)] = ref(parameter), ref(model), number, index


def unregister(model: ShardedModel) -> None:
    """Forget them."""
    for unit in model.units:
        for parameter in unit.parameters:
            _locations.pop(id(parameter), None)


def is_registered(parameter: nn.Parameter) -> bool:
    """Whether `find` has to look: cheap, and False for parameters of no engine (almost always)."""
    return id(parameter) in _locations


def find(parameter: nn.Parameter) -> ParameterLocation | None:
    """Where `parameter` lives, or None if no engine has it."""
    entry = _locations.get(id(parameter))
    if entry is None or entry[0]() is not parameter:
        return None
    model = entry[1]()
    return ParameterLocation(model, model.units[entry[2]], entry[3]) if model is not None else None


def require(parameter: nn.Parameter) -> ParameterLocation:
    """As `find`.

    Raises:
        ModelError: no engine has it.
    """
    place = find(parameter)
    if place is None:
        raise ModelError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; pass one of "
            f"engine.module.parameters()"
        )
    return place
