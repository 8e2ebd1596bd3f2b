"""Error feedback of quantized reductions (LoCo) as per-rank states, so that checkpoints hold it.

See [Note: per-rank states] and [Note: quantized messages]. A checkpoint holds the errors of each parameter, and the
number of reductions of its unit, which decides when errors return to zero. On another number of ranks each rank gets an
equal share of the sum of the saved errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from windlass.comm.quantized_options import LaneErrors
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.rank_state import RankNumber, RankState, largest_of_ranks, share_of_sum

ERROR, REDUCTIONS = "loco_error", "loco_reductions"


def error_feedback_states(model: ShardedModel) -> Iterator[RankState]:
    """Yield the states of all units that have been reduced."""
    for unit, errors in _lanes(model):
        if errors.flat is None:
            continue
        yield RankNumber(unit, 0, REDUCTIONS, errors.reductions, largest_of_ranks)
        for index in range(len(unit.parameters)):
            if unit.layout.numels[index]:
                yield RankState(unit, index, ERROR, unit.parameter_view(errors.flat, index).view(-1), share_of_sum)


def open_error_feedback(model: ShardedModel, saved: Collection[str]) -> frozenset[str]:
    """Prepare for the load of a checkpoint that has the per-rank states `saved`.

    Return the names of those that this model does not need.
    """
    found = frozenset(saved) & {ERROR, REDUCTIONS}
    lanes = list(_lanes(model))
    for unit, errors in lanes:
        errors.forget()
        if found:
            errors.open(unit.layout.padded, unit.full.device)
    return frozenset() if lanes else found


def _lanes(model: ShardedModel) -> Iterator[tuple[Unit, LaneErrors]]:
    for slot in model.slots:
        number = model.reducer.number_of(slot.unit)
        errors = slot.unit.transport.error_feedback(number) if number is not None else None
        if errors is not None:
            yield slot.unit, errors
