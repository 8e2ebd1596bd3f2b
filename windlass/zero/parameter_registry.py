"""Table that maps each parameter to the sharded model that owns it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from torch import nn

from windlass.base.errors import ModelError

if TYPE_CHECKING:
    from windlass.zero.core.unit import Unit
    from windlass.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class ParameterLocation:
    """Location of a parameter: its sharded model, its unit, and its index in the unit.

    Attributes:
        model_number: Number of models that this process registered before this one.
    """

    model: ShardedModel
    unit: Unit
    index: int
    model_number: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: an order of parameters that is the same on all ranks, whatever order a script passes them in."""
        return self.model_number, self.unit.index, self.index

    @property
    def name(self) -> str:
        return self.unit.names[self.index]


_locations: dict[int, tuple[ReferenceType[nn.Parameter], ReferenceType[ShardedModel], int, int, int]] = {}
_model_numbers = count()


def register(model: ShardedModel) -> None:
    """Register the parameters of `model`."""
    model_number = next(_model_numbers)
    for number, unit in enumerate(model.units):
        for index, parameter in enumerate(unit.parameters):
            _locations[id(parameter)] = ref(parameter), ref(model), number, index, model_number


def unregister(model: ShardedModel) -> None:
    """Remove the parameters of `model` from the registry."""
    for unit in model.units:
        for parameter in unit.parameters:
            _locations.pop(id(parameter), None)


def is_registered(parameter: nn.Parameter) -> bool:
    """Return False if `parameter` is certainly not registered, else True. Cheaper than `find`, which is exact."""
    return id(parameter) in _locations


def find(parameter: nn.Parameter) -> ParameterLocation | None:
    """Return the location of `parameter`, or None if it belongs to no engine."""
    entry = _locations.get(id(parameter))
    # The id may belong to a new object after the registered parameter was garbage-collected.
    if entry is None or entry[0]() is not parameter:
        return None
    model = entry[1]()
    return ParameterLocation(model, model.units[entry[2]], *entry[3:]) if model is not None else None


def require(parameter: nn.Parameter) -> ParameterLocation:
    """Return the location of `parameter`.

    Raises:
        ModelError: the parameter belongs to no engine.
    """
    place = find(parameter)
    if place is None:
        raise ModelError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; pass one of "
            f"engine.module.parameters()"
        )
    return place
