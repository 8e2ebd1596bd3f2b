"""Saving and loading of averages of the parameters, stored in a checkpoint as `average/NAME/PARAMETER`."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from windlass.base.log import logger
from windlass.checkpoint import FlatShard
from windlass.zero.access.moving_average import ExponentialMovingAverage
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel

AVERAGE_PREFIX = "average/"


def average_metadata(model: ShardedModel) -> dict[str, Any]:
    """Return the decay and the number of updates of each average, as plain data."""
    return {name: {"decay": one.decay, "updates": one.updates} for name, one in model.averages.items()}


def average_shards(model: ShardedModel) -> list[FlatShard]:
    """Return this rank's fragments of all averages, in memory."""
    return [
        shard
        for name, average in model.averages.items()
        for unit, slot in average.pieces()
        for shard in _flat_shards(name, unit, slot.read())
    ]


class AverageLoader:
    """Loader of the averages that both the checkpoint and this model have.

    Args:
        metadata: result of `average_metadata` at the save; None: load no averages.
        saved_names: names of the tensors in the checkpoint. A trained parameter without a saved average, because its
            layer was frozen or is new, starts its average as a copy of its weight.
    """

    def __init__(self, model: ShardedModel, metadata: dict[str, Any] | None, saved_names: Container[str]) -> None:
        self._model, self._saved_names = model, saved_names
        for average in model.averages.values():
            average.refuse_applied("load_checkpoint")
        own = model.averages if metadata is not None else {}
        metadata = metadata or {}
        self._matched = [(one, metadata[name]) for name, one in own.items() if name in metadata]
        for name in sorted(set(metadata) ^ set(own)):
            where = (
                "in the checkpoint, but not in this run, and is not loaded: create it before load_checkpoint"
                if name in metadata
                else "in this run, but not in the checkpoint, and keeps its present values"
            )
            logger.warning(f"the average {name!r} of the parameters is {where}")
        self._loaded: list[tuple[ExponentialMovingAverage, Unit, torch.Tensor]] = []
        self.shards: list[FlatShard] = []
        for average, before in self._matched:
            if before["updates"]:
                for unit, slot in average.pieces(every=True):
                    values = (
                        torch.empty(slot.numel, dtype=slot.dtype, device="cpu") if slot.tensor is None else slot.tensor
                    )
                    self._loaded.append((average, unit, values))
                    self.shards += [one for one in _flat_shards(average.name, unit, values) if one.name in saved_names]

    def store(self) -> None:
        """Write the loaded values to the averages. Collective, after the weights were loaded."""
        for average, unit, values in self._loaded:
            begins = {
                n for n, of in enumerate(unit.names) if f"{AVERAGE_PREFIX}{average.name}/{of}" not in self._saved_names
            }
            weights = self._model.masters.read_span(unit) if begins else values
            for piece in unit.pieces():
                if piece.index in begins:
                    place = slice(piece.offset, piece.offset + piece.numel)
                    values[place] = weights[place]
            average.take(unit, values)
        for average, before in self._matched:
            average.updates = before["updates"]
            if not average.updates:
                average.forget()
            if average.decay != before["decay"]:
                change = f"was saved with decay {before['decay']} and continues with {average.decay}"
                logger.warning(f"the average {average.name!r} {change}")


def _flat_shards(name: str, unit: Unit, values: torch.Tensor) -> list[FlatShard]:
    return [
        FlatShard(
            f"{AVERAGE_PREFIX}{name}/{unit.names[piece.index]}",
            tuple(unit.shapes[piece.index]),
            piece.start,
            values.narrow(0, piece.offset, piece.numel),
            unit.placements[piece.index],
        )
        for piece in unit.pieces()
    ]
