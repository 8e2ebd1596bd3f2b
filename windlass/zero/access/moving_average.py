"""Exponential moving average of the parameters, sharded like the master weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.full_parameters import gather_full_with_grad
from windlass.storage.slot import Slot
from windlass.zero import parameter_registry
from windlass.zero.access.shard_values import assemble, part_param
from windlass.zero.core.unit import Unit

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel


class ExponentialMovingAverage:
    """Exponential moving average of a model's master weights: `average = decay * average + (1 - decay) * parameter`.

    The first `update()` copies the master weights. The values are bit-identical to those of
    `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`. `update`, `applied`,
    `full_param` and `part_param` are collective.

    Each rank stores the average of its span of the master weights, on the same tier: with float32 master weights,
    `4 / ranks` bytes per element (4 bytes at stage 0). The average of a frozen parameter is its value. The average of a
    parameter that is unfrozen or added later starts with the value at that time.

    Checkpoints contain the average. A load restores it if an average of the same name was created before the load.

    Args:
        model: Engine, or its module.
        decay: Number from 0 to 1.
        name: Name in checkpoints, unique among the averages of the model.

    Attributes:
        updates: Number of calls of `update`. A load sets it to the number in the checkpoint.

    Raises:
        ConfigError: `decay` is out of range.
        ModelError: the model belongs to no engine, or has an average of this name already.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, name: str = "average") -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"decay = {decay!r} is out of range: give a number from 0 to 1, such as 0.999")
        parameter = next(iter(model.parameters()), None)
        place = parameter_registry.find(parameter) if parameter is not None else None
        if place is None:
            raise ModelError("the model belongs to no engine: pass the engine that initialize returned, or its module")
        if name in place.model.averages:
            raise ModelError(f"this model has an average {name!r} already: pass another name")
        self.decay, self.updates, self.name = decay, 0, name
        self._model: ShardedModel = place.model
        self._slots: dict[int, Slot] = {}
        self._begun: set[int] = set()  # indices of the units that have an average
        self._applied = False
        place.model.averages[name] = self

    def update(self) -> None:
        """Add the current master weights to the average. Call after each `engine.step()` that updated parameters.

        Raises:
            ModelError: the call is inside `applied()`, or the engine was destroyed.
        """
        self.refuse_applied("update()")
        model = self._model
        model.finish_update()
        model.recapture_parameters()
        for unit, _ in self._units():
            model.require_weights_on_device(unit, unit.names[0])
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
        """Return a context in which the parameters have their average values, e.g. to evaluate or save the model.

        At its end the parameters have their previous values again.

        Raises:
            ModelError: there is no average yet, the averages are applied already, or the engine was destroyed.
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

    @property
    def is_applied(self) -> bool:
        """True inside `applied()`."""
        return self._applied

    def full_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the full average of a parameter as a new tensor. For a frozen parameter, return its value.

        Collective.

        Raises:
            ModelError: the parameter has no average yet or belongs to no engine, the call is inside `applied()`, or the
                engine was destroyed.
        """
        place = parameter_registry.require(parameter)
        return gather_full_with_grad(
            self.part_param(parameter), place.unit.placements[place.index], place.model.mesh.axes
        )

    def part_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the average of the part of the parameter that this rank computes with.

        Collective.

        Raises:
            ModelError: see `full_param`.
        """
        self.refuse_applied("full_param()")
        place = parameter_registry.require(parameter)
        if not self.updates:
            raise ModelError(f"{place.name!r} has no average yet: call update() after a step")
        if place.unit.index not in self._begun:
            return part_param(parameter).detach()
        return assemble(place, self._slots[place.unit.index].read())

    def add_units(self, units: list[Unit]) -> None:
        """Start the averages of newly trainable `units` from their current values, if `update` was called before."""
        if not self.updates:
            return
        requested = {unit.index for unit in units}
        for unit, _ in self._units():
            if unit.index in requested:
                self.take(unit, self._model.masters.read_span(unit))

    def rebind(self, model: ShardedModel) -> None:
        """Move this average to `model`, which replaces the previous model, and restart it from current values."""
        self._model, self._slots = model, {}
        self.forget()
        model.averages[self.name] = self
        self.add_units(model.units)

    def set_part_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the average of a trainable parameter that has one.

        Args:
            value: Average of the part of the parameter that this rank computes with.
        """
        unit, index = (place := parameter_registry.require(parameter)).unit, place.index
        slot, flat = self._slots[unit.index], value.reshape(-1)
        average = slot.read()
        for piece in unit.pieces():
            if piece.index == index:
                average.narrow(0, piece.offset, piece.numel).copy_(flat[piece.start : piece.stop])
        slot.write(average)

    def forget(self) -> None:
        """Discard the averages of all parameters. The next `update` starts new ones."""
        self._begun = set()

    def refuse_applied(self, what: str) -> None:
        """Raise ModelError inside `applied()`, or if the engine was destroyed.

        Args:
            what: Call that is refused, for the message.
        """
        if self._applied:
            raise ModelError(f"{what} is refused while the averages are applied; leave the context of applied() first")
        if not self._model.units:
            raise ModelError(
                f"{what}: the engine of the average {self.name!r} was destroyed; create an average of the new engine"
            )

    def pieces(self, *, every: bool = False) -> Iterator[tuple[Unit, Slot]]:
        """Yield each unit to save, and the slot (memory) that holds this rank's span of its average.

        Args:
            every: Include trainable units without an average, for a load that sets all averages.
        """
        self.refuse_applied("a checkpoint")
        for unit, slot in self._units():
            if every or unit.index in self._begun:
                yield unit, slot

    def take(self, unit: Unit, values: torch.Tensor) -> None:
        """Set this rank's span of a unit's average to `values`."""
        slot = self._slots[unit.index]
        slot.discard()
        slot.write(values)
        self._begun.add(unit.index)

    def _exchange(self) -> None:
        """Swap the master weights and their averages, without rounding. A second call restores both. Collective."""
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
        """Return each trainable unit with the slot (memory) of this rank's span of its average. Create missing ones."""
        averages = []
        for unit in self._model.units:
            chunks = self._model.masters.chunks_of(unit)
            if not chunks:
                continue
            if unit.index not in self._slots:
                numel, name = chunks[-1].stop, f"average of {unit.names[0]}"
                self._slots[unit.index] = self._model.make_slot(name, numel, chunks[0].dtype, chunks[0].tier)
            averages.append((unit, self._slots[unit.index]))
        return averages
