"""Simulated messages of an optimizer that averages gradients itself, in place of the engine, on one representative
rank.

[Note: bytes of messages] A message has separate scales for each parameter, so its bytes follow from the layout of its
unit (parameters that are sharded together) and the codec's own size function. Each owner rank has different fragments
of parameters, so messages differ by some bytes: the traffic counts the messages of one data-parallel rank, and the time
is that of the longest message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

from windlass.comm.codec import get_codec
from windlass.comm.compressed_lists import message_bytes
from windlass.optim.power_sgd import thin_columns
from windlass.simulate.collective_cost import RankPattern
from windlass.simulate.rank_units import SimulatedUnit
from windlass.simulate.step_lanes import RankLanes
from windlass.simulate.step_workload import StepWork
from windlass.zero.core.unit_layout import UnitLayout
from windlass.zero.update.compressed_messages import batches_of, in_kinds

_NUMBERS = (
    3 * 8,
    4 * 8,
)  # bytes per parameter: 2 (stage 0) or 3 (stages 1 and 2) float64 sums of squares, and a maximum
_FLOAT = 4  # bytes of an unencoded element of a message
# Memory traffic of an element in bytes: encoding reads and writes value and error, decoding reads and writes a sum.
_ENCODE, _DECODE = 4 * _FLOAT, 2 * _FLOAT


class MessageLanes:
    """Addition of the optimizer's messages, as compute and communication times, to the simulated step of one rank.

    Args:
        pattern: The data-parallel ranks.
        rate: Bandwidth of the memory that holds the gradients, in bytes per second.
        algorithm: Algorithm of all-gathers.
        stream: Stream of the collectives.
    """

    def __init__(
        self, work: StepWork, lanes: RankLanes, pattern: RankPattern, rate: float, algorithm: str, stream: str
    ) -> None:
        self._work, self._lanes, self._pattern, self._rate = work, lanes, pattern, rate
        self._algorithm, self._stream = algorithm, stream
        self._ranks = lanes.costs.size(pattern)

    def exchange(self, units: Sequence[SimulatedUnit]) -> None:
        """Send local values to the owners of elements, and at stage 0 the means from the owners to all ranks; for
        PowerSGD, sum thin matrices instead.
        """
        messages = self._work.messages
        if self._ranks == 1:
            return
        if messages.thin is not None:
            for batch in _batches(units):
                self._sum_thin(batch)
            return
        for batch in _batches([unit for unit in units if self._is_in(unit, messages.averaged)]):
            self._send(batch, averages=True)
        for batch in _batches([unit for unit in units if self._is_in(unit, messages.answered)]):
            self._send(batch, averages=False)

    def combine_parts(self, units: Sequence[SimulatedUnit]) -> None:
        """Exchange the sums and maxima for 1-bit LAMB's trust ratios of parameters that are sharded along tp."""
        parts = sum(len(unit.shapes) for unit in units if "tp" in unit.kind.sharded_axes)
        if self._work.reduces_itself == "OneBitLamb":
            self._sum_over_tp(parts * _NUMBERS[self._work.sharding_stage > 0], "trust ratios")

    def gather_whole(self, units: Sequence[SimulatedUnit]) -> None:
        """Gather parameters that are sharded along tp, with gradients and states, if the update needs full ones."""
        states = self._work.whole_states
        parts = [shape for unit in units if "tp" in unit.kind.sharded_axes for shape in unit.shapes]
        if states is not None:
            self._sum_over_tp(len(parts) * _FLOAT, "used parameters")
            whole = sum(shape.numel() for shape in parts) * self._work.grid.tp
            self._sum_over_tp((2 + states) * whole * _FLOAT, "whole parameters")

    def _sum_over_tp(self, nbytes: int, label: str) -> None:
        tp = self._work.grid.tp
        if nbytes and tp > 1:
            self._lanes.blocking(
                "tp", "all_reduce", nbytes, RankPattern(("tp",)), label=label,
                counted={"all_reduce": 2 * nbytes * (tp - 1) // tp},
            )  # fmt: skip

    def publish(self, units: Sequence[SimulatedUnit]) -> None:
        """Send the changes of parameters from their owners to all ranks."""
        if self._work.messages.publishes and self._ranks > 1:
            for batch in _batches(units):
                self._send(batch, averages=False)

    def _is_in(self, unit: SimulatedUnit, parts: frozenset[int]) -> bool:
        # A unit that several pipeline stages share has another index on each, so index 0 is used; see `outer_step_due`.
        return (0 if unit.is_on_both_ends else unit.index) % self._work.messages.parts in parts

    def _send(self, batch: list[SimulatedUnit], *, averages: bool) -> None:
        """Encode the values of a batch of units, and send them.

        Args:
            averages: True: all ranks send to the owners of elements; False: owners send to all ranks.
        """
        lanes, rank, ranks = self._lanes, self._work.data_rank, self._ranks
        sizes = [0] * ranks
        for unit in batch:
            for owner, nbytes in enumerate(message_sizes(unit.layout, self._work.messages.codec, ranks)):
                sizes[owner] += nbytes
        numel = sum(unit.padded for unit in batch)
        overlaps = self._work.messages.overlaps
        encoded = numel if averages else numel / ranks
        lanes.spend(f"messages of {batch[0].name}", (encoded * _ENCODE + numel * _DECODE) / self._rate)
        encoded_here = lanes.flush()
        # A message that overlaps with the step was sent in an earlier step.
        before, stream = (None, f"{self._stream} in flight") if overlaps else (encoded_here, self._stream)
        if averages:
            operation, counted = "all_to_all", {"compressed_reduce_scatter": (ranks - 1) * sizes[rank]}
        else:
            operation, counted = "all_gather", {"compressed_all_gather": sum(sizes) - sizes[rank]}
        task = lanes.collective(
            "data", operation, ranks * max(sizes), self._pattern, label=f"messages of {batch[0].name}", after=[before],
            counted=counted, algorithm="auto" if averages else self._algorithm, stream=stream,
        )  # fmt: skip
        if not overlaps:
            lanes.block_on(task)

    def _sum_thin(self, batch: list[SimulatedUnit]) -> None:
        """Sum the two thin matrices of PowerSGD. Parameters that are sent in full are summed with the first matrix."""
        assert self._work.messages.thin is not None
        rank, rate = self._work.messages.thin
        options: dict[str, Any] = {"rank": rank, "min_compression_rate": rate}
        first = second = 0
        for unit in batch:
            for shape in unit.shapes:
                columns = thin_columns(shape, options)
                first += shape[0] * columns if columns else shape.numel()
                second += shape.numel() // shape[0] * columns if columns else 0
        label, numel = f"messages of {batch[0].name}", sum(unit.padded for unit in batch)
        # Each of the three products with a thin matrix takes as long as reading or writing the full matrix once.
        self._lanes.spend(label, numel * (_ENCODE + 3 * _FLOAT) / self._rate)
        for elements in (first, second):
            nbytes = elements * _FLOAT
            if nbytes:
                received = 2 * (self._ranks - 1) * nbytes // self._ranks
                self._lanes.block_on(
                    self._lanes.collective(
                        "data",
                        "all_reduce",
                        nbytes,
                        self._pattern,
                        label=label,
                        after=[self._lanes.flush()],
                        counted={"compressed_all_reduce": received},
                        stream=self._stream,
                    )  # fmt: skip
                )


@cache
def message_sizes(layout: UnitLayout, codec: str, ranks: int) -> tuple[int, ...]:
    """Return, for each owner of elements of a unit, the bytes that these elements take in a message."""
    spans = [layout.shard_range(rank, ranks) for rank in range(ranks)]
    return tuple(message_bytes(get_codec(codec), [one.numel for one in layout.pieces(*span)]) for span in spans)


def _batches(units: Sequence[SimulatedUnit]) -> Iterator[list[SimulatedUnit]]:
    """Divide units into the batches of the engine's messages, from the last unit to the first."""
    divide = cast(Callable[[list[SimulatedUnit]], Iterator[list[SimulatedUnit]]], batches_of)
    order = cast(Callable[[list[SimulatedUnit]], list[SimulatedUnit]], in_kinds)
    return divide(order(list(reversed(units))))
