"""Error feedback of quantized reductions (LoCo) as per-rank states, so that checkpoints hold it.

See [Note: per-rank states] and [Note: quantized messages]. A checkpoint holds the errors of each parameter, and the
number of its reductions, which decides when the errors return to zero. Parameters of a unit may have different numbers
if the saved run had other units. On another number of ranks each rank gets an equal share of the sum of the saved
errors. Errors are in units of the scaled gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from windlass.comm.quantized_options import LaneErrors
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.rank_state import RankNumber, RankState, largest_of_ranks, share_of_sum

ERROR, REDUCTIONS = "loco_error", "loco_reductions"


def error_feedback_states(model: ShardedModel) -> Iterator[RankState]:
    """Yield the states of all units, zeros for units that were not reduced yet; nothing before the first reduction.

    A load needs the states of all parameters, since the saved run may have had other units.
    """
    lanes = list(_lanes(model))
    if all(errors.flat is None for _, errors in lanes):
        return
    for unit, errors in lanes:
        flat = errors.open(unit.layout.padded, unit.full.device)
        for index in range(len(unit.parameters)):
            if unit.layout.numels[index]:
                yield RankNumber(unit, index, REDUCTIONS, errors.reductions[index : index + 1], largest_of_ranks)
                yield RankState(unit, index, ERROR, unit.parameter_view(flat, index).view(-1), share_of_sum)


def open_error_feedback(model: ShardedModel, saved: Collection[str]) -> frozenset[str]:
    """Prepare for the load of a checkpoint that has the per-rank states `saved`.

    Return the names of the saved states that this model does not need.
    """
    found = frozenset(saved) & {ERROR, REDUCTIONS}
    lanes = list(_lanes(model))
    for unit, errors in lanes:
        errors.forget()
        if found:
            errors.open(unit.layout.padded, unit.full.device)
    return frozenset() if lanes else found


def rescale_error_feedback(model: ShardedModel, factor: float) -> None:
    """Multiply all errors by `factor`, the new loss scale divided by the loss scale of the errors."""
    for _, errors in _lanes(model):
        if errors.flat is not None:
            errors.flat.mul_(factor)


def _lanes(model: ShardedModel) -> Iterator[tuple[Unit, LaneErrors]]:
    for slot in model.slots:
        number = model.reducer.number_of(slot.unit)
        errors = slot.unit.transport.error_feedback(number) if number is not None else None
        if errors is not None:
            layout = slot.unit.layout
            stops = [*layout.offsets[1:], layout.padded]
            errors.divide([slice(start, stop) for start, stop in zip(layout.offsets, stops, strict=True)])
            yield slot.unit, errors
