"""An exponential moving average of the parameters, cut as the master weights are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.full_parameters import gather_full_with_grad
from windlass.storage.slot import Slot
from windlass.zero.access.shard_values import assemble, part_param
from windlass.zero.core import parameter_registry
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel


class ExponentialMovingAverage:
    """`average = decay * average + (1 - decay) * parameter` after each `update()`, which begins with a copy.

    What `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))` computes, to the bit.
    Each rank has the average of its own piece of the master weights, where these rest: `4 / ranks` bytes a parameter.
    What is not trained is its own average; what begins to be trained later (unfrozen, or added) begins with the values
    that it has then. Checkpoints hold it, and a load gives it its values where one of the same name was made before.
    Methods are collective.

    Args:
        model: the engine, or its module.
        decay: in [0, 1].
        name: in checkpoints; each average of a model has its own.

    Attributes:
        updates: how many there were.

    Raises:
        ConfigError: decay is out of its range.
        ModelError: the model belongs to no engine, or the name is taken.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, name: str = "average") -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"decay = {decay!r} is out of range: give a number from 0 to 1, such as 0.999")
        parameter = next(iter(model.parameters()), None)
        place = parameter_registry.find(parameter) if parameter is not None else None
        if place is None:
            raise ModelError("the model belongs to no engine: give what initialize returned, or its module")
        if name in place.model.averages:
            raise ModelError(f"this model has an average {name!r} already: give another name")
        self.decay, self.updates, self.name = decay, 0, name
        self._model: ShardedModel = place.model
        self._slots: dict[int, Slot] = {}
        self._begun: set[int] = set()  # units whose slots have something
        self._applied = False
        place.model.averages[name] = self

    def update(self) -> None:
        """Take the parameters as they are now into the average; after each `engine.step()` that was applied."""
        self.refuse_applied("update()")
        model = self._model
        model.finish_update()
        model.recapture_parameters()
        for unit, slot in self._units():
            masters = model.masters.read_span(unit)
            if unit.index not in self._begun:
                self.take(unit, masters)
                continue
            average = slot.read()
            average.lerp_(masters, 1.0 - self.decay)
            slot.write(average)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the parameters are their averages, to evaluate or to save; afterwards they are what they were.

        Raises:
            ModelError: there is no average yet, or this is inside another such context.
        """
        self.refuse_applied("applied()")
        if not self.updates:
            raise ModelError("there is no average yet: call update() after a step")
        self._exchange()
        self._applied = True
        try:
            yield
        finally:
            self._applied = False
            self._exchange()

    def full_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole average of a parameter, as a new tensor; of one that is not trained, its value. Collective."""
        place = parameter_registry.require(parameter)
        return gather_full_with_grad(
            self.part_param(parameter), place.unit.placements[place.index], place.model.mesh.axes
        )

    def part_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """As `full_param`, of the part that this rank computes with."""
        self.refuse_applied("full_param()")
        place = parameter_registry.require(parameter)
        if not self.updates:
            raise ModelError(f"{place.name!r} has no average yet: call update() after a step")
        if place.unit.index not in self._begun:
            return part_param(parameter).detach()
        return assemble(place, self._slots[place.unit.index].read())

    def add_units(self, units: list[Unit]) -> None:
        """These units begin to be trained: where others have averages, theirs are the values that they have now."""
        if not self.updates:
            return
        wanted = {unit.index for unit in units}
        for unit, _ in self._units():
            if unit.index in wanted:
                self.take(unit, self._model.masters.read_span(unit))

    def rebind(self, model: ShardedModel) -> None:
        """Be an average of another layout of the model: as yet of the values that it has now."""
        self._model, self._slots = model, {}
        self.forget()
        model.averages[self.name] = self
        self.add_units(model.units)

    def set_part_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the average of the part that this rank computes with of a parameter that is trained and has one."""
        unit, index = (place := parameter_registry.require(parameter)).unit, place.index
        slot, flat = self._slots[unit.index], value.reshape(-1)
        average = slot.read()
        for piece in unit.pieces():
            if piece.index == index:
                average.narrow(0, piece.offset, piece.numel).copy_(flat[piece.start : piece.stop])
        slot.write(average)

    def forget(self) -> None:
        """No parameter has an average now."""
        self._begun = set()

    def refuse_applied(self, what: str) -> None:
        """Raises ModelError inside `applied()`, or where the engine is gone."""
        if self._applied:
            raise ModelError(f"{what} while the averages are applied; leave that context first")
        if not self._model.units:
            raise ModelError(f"{what}: the engine of the average {self.name!r} was destroyed; make another one")

    def pieces(self, *, every: bool = False) -> Iterator[tuple[Unit, Slot]]:
        """Yield the units to save, with the slot of this rank's span of their averages.

        Args:
            every: include all trained units, even those without an average, because a load will set them.
        """
        self.refuse_applied("a checkpoint")
        for unit, slot in self._units():
            if every or unit.index in self._begun:
                yield unit, slot

    def take(self, unit: Unit, values: torch.Tensor) -> None:
        """This rank's span of a unit's average is `values` from now on."""
        slot = self._slots[unit.index]
        slot.discard()
        slot.write(values)
        self._begun.add(unit.index)

    def _exchange(self) -> None:
        """Parameters and averages change places, bit by bit."""
        model = self._model
        for unit, slot in [(unit, slot) for unit, slot in self._units() if unit.index in self._begun]:
            with model.editing_parameters([unit]):
                average = slot.read()
                for chunk in model.masters.chunks_of(unit):
                    part = average[chunk.start : chunk.stop]
                    before = chunk.values().clone()
                    chunk.values().copy_(part)
                    part.copy_(before)
                slot.write(average)

    def _units(self) -> list[tuple[Unit, Slot]]:
        """The units that are trained, and where the averages of this rank's pieces rest."""
        found = []
        for unit in self._model.units:
            chunks = self._model.masters.chunks_of(unit)
            if not chunks:
                continue
            if unit.index not in self._slots:
                numel, name = chunks[-1].stop, f"average of {unit.names[0]}"
                self._slots[unit.index] = self._model.make_slot(name, numel, chunks[0].dtype, chunks[0].tier)
            found.append((unit, self._slots[unit.index]))
        return found
