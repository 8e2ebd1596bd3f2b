"""Error feedback of quantized reductions (LoCo) as per-rank states, for checkpoints and offload.

See [Note: per-rank states] and [Note: quantized messages]. A checkpoint holds the errors of each parameter, and the
number of its reductions, which decides when the errors are set to zero. Parameters of a unit may have different numbers
of reductions if the saved run had other units. If the number of ranks has changed, each rank gets an equal share of the
sum of the saved errors. Errors are multiplied by the loss scale, as gradients are.

Errors are on the tier of the unit's optimizer states ([Note: offloaded per-rank states]): a reduction fetches the
errors of its unit when it starts, and stores them when its last message is encoded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from windlass.comm.quantized_options import LaneErrors
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.update.rank_state import RankNumber, RankState, StoredRankState, largest_of_ranks, share_of_sum
from windlass.zero.update.rank_state_memory import MakeSlot, RankStateMemory

ERROR, REDUCTIONS = "loco_error", "loco_reductions"


class QuantizationErrors:
    """Errors of all quantized reductions of a model. Without LoCo there are none.

    Args:
        slots: gradient slots of the model's trainable units.
    """

    def __init__(self, reducer: GradientReducer, make_slot: MakeSlot, slots: Iterable[GradientSlot]) -> None:
        self._reducer = reducer
        self._memory = RankStateMemory(make_slot)
        self._lanes: list[tuple[Unit, LaneErrors]] = []
        self.add(slots)

    def add(self, slots: Iterable[GradientSlot]) -> None:
        """Add the errors of units, e.g. of unfrozen ones. A lack of disk space is recorded by the disk tier."""
        for slot in slots:
            unit, number = slot.unit, self._reducer.number_of(slot.unit)
            errors = unit.transport.error_feedback(number) if number is not None else None
            if errors is None:
                continue
            stops = [*unit.layout.offsets[1:], unit.layout.padded]
            errors.divide([slice(start, stop) for start, stop in zip(unit.layout.offsets, stops, strict=True)])
            if self._memory.is_offloaded(unit):
                self._memory.open(ERROR, unit, unit.layout.padded)
                errors.storage = _UnitErrors(self._memory, unit)
            self._lanes.append((unit, errors))

    def rank_states(self, *, reduced_only: bool = False) -> Iterator[RankState]:
        """Yield the states of all units, zeros for units that were not reduced yet; nothing before the first reduction.

        A load needs the states of all parameters, since the saved run may have had other units.

        Args:
            reduced_only: leave out units that were not reduced yet and whose zeros take no memory until then.
        """
        if not any(errors.is_open for _, errors in self._lanes):
            return
        for unit, errors in self._lanes:
            if reduced_only and errors.storage is None and not errors.is_open:
                continue
            for index in range(len(unit.parameters)):
                if unit.layout.numels[index]:
                    yield RankNumber(unit, index, REDUCTIONS, errors.reductions[index : index + 1], largest_of_ranks)
                    yield self._error_state(unit, index, errors)

    def open(self, saved: Collection[str]) -> frozenset[str]:
        """Prepare for the load of a checkpoint that has the per-rank states `saved`: set all errors to zero.

        Return the names in `saved` that belong to quantization errors, if this model has none.
        """
        found = frozenset(saved) & {ERROR, REDUCTIONS}
        self.forget()
        for _, errors in self._lanes if found else ():
            errors.open()
        return frozenset() if self._lanes else found

    def wait(self) -> None:
        """Wait until the errors of all reductions so far are stored. A failed write is recorded by the disk tier."""
        self._memory.wait()

    def forget(self) -> None:
        """Discard all errors, as before the first reduction."""
        self._memory.drop()
        for _, errors in self._lanes:
            errors.forget()

    def rescale(self, factor: float) -> None:
        """Multiply all errors by `factor`, the new loss scale divided by the loss scale of the errors."""
        for _, errors in self._lanes:
            errors.rescale(factor)

    def _error_state(self, unit: Unit, index: int, errors: LaneErrors) -> RankState:
        if errors.storage is not None:
            values = torch.empty(unit.layout.numels[index], dtype=torch.float32, device="meta")
            start = unit.layout.offsets[index]
            return StoredRankState(
                unit, index, ERROR, values, share_of_sum, tier=unit.state_tier, memory=self._memory, start=start
            )
        flat = errors.flat(unit.layout.padded, unit.full.device)
        values = unit.parameter_view(flat, index).view(-1)
        return RankState(unit, index, ERROR, values, share_of_sum, tier=unit.state_tier)


class _UnitErrors:
    """Errors of one unit on the tier of its optimizer states."""

    def __init__(self, memory: RankStateMemory, unit: Unit) -> None:
        self._memory, self._unit = memory, unit

    def fetch(self) -> torch.Tensor:
        return self._memory.fetch(ERROR, self._unit, self._unit.layout.padded)

    def put(self, errors: torch.Tensor) -> None:
        self._memory.put(ERROR, self._unit, errors)

    def rescale(self, factor: float) -> None:
        self._memory.rescale(ERROR, self._unit, factor)
