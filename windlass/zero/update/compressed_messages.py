"""Compressed messages of an update: local values to the owners of elements, and the answers of the owners.

[Note: owners of elements] Every rank owns one shard of each unit (`UnitLayout.shard_range`), also at stage 0, where it
steps all elements. A rank sends each owner the owner's part of the local values (gradients or changes), as one message
for a batch of units ([Note: error feedback]); each parameter in the message has separate scales. The owner's answer is
compressed too, and every rank, the owner included, uses the decoded answer, so that all ranks have the same bits.

[Note: messages in flight] Units are divided into small batches. While the message of one batch travels, the next
message is encoded and the previous one is decoded. All ranks start the transfers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from windlass.comm.choose_channel import choose_channel
from windlass.comm.compressed_lists import CompressedLists
from windlass.comm.rank_group import RankGroup
from windlass.comm.traffic import Traffic
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_layout import LayoutPiece

_BATCH_NUMEL = 1 << 22  # maximum elements of a batch of several units, so that transfers and codecs of batches overlap


@dataclass(frozen=True)
class UnitMessage:
    """Values of one unit in an exchange.

    Attributes:
        flat: `[unit.layout.padded]` in float32: the values to send. The exchange overwrites them with its result.
        chosen: for each parameter of the unit, True if it takes part; equal on all ranks.
    """

    unit: Unit
    flat: torch.Tensor
    chosen: Sequence[bool]

    def pieces(self, rank: int, ranks: int) -> Iterator[tuple[LayoutPiece, int]]:
        """Yield the fragments of chosen parameters that a rank owns, with their offset in the unit."""
        start, stop = self.unit.layout.shard_range(rank, ranks)
        for piece in self.unit.layout.pieces(start, stop):
            if self.chosen[piece.index]:
                yield piece, start + piece.offset

    def own_views(self, span: torch.Tensor, rank: int, ranks: int) -> list[torch.Tensor]:
        """Return the views of a rank's fragments in `span`, a tensor of only the elements that the rank owns."""
        start, _ = self.unit.layout.shard_range(rank, ranks)
        return [span.narrow(0, offset - start, piece.numel) for piece, offset in self.pieces(rank, ranks)]

    def views(self, flat: torch.Tensor, rank: int, ranks: int) -> list[torch.Tensor]:
        """Return the views of a rank's fragments in a flat tensor `[padded]`."""
        return [flat.narrow(0, offset, piece.numel) for piece, offset in self.pieces(rank, ranks)]


class CompressedMessages:
    """Compressed exchanges over the data-parallel ranks. The first exchange creates the channel.

    Args:
        dp_group: ranks of the exchanges. The channel is of the same kind as its transport.
        codec: registered name of the codec.
        timeout: maximum wait for a peer in shared memory.
    """

    def __init__(self, dp_group: DataParallelGroup, codec: str, timeout: timedelta) -> None:
        self.group: RankGroup = dp_group.mesh.data
        self.traffic: Traffic = dp_group.transport.traffic
        self._transport, self._codec, self._timeout = dp_group.transport.name, codec, timeout
        self._lists: CompressedLists | None = None

    def lists(self, device: torch.device) -> CompressedLists:
        """Return the collectives for tensors on `device`. The first call for a group creates them and is collective."""
        if self._lists is None:
            requested = "auto" if self.group.size == 1 else self._transport
            channel = choose_channel(
                requested, self.group, device, timeout=self._timeout, what="the ranks of a compressed update"
            )
            self._lists = CompressedLists(channel, self._codec, self.traffic)
        return self._lists

    def use_group(self, group: RankGroup) -> None:
        """Send later messages over another group of the same ranks. The next exchange creates a channel for it.

        All ranks must call it between the same exchanges.
        """
        if group is not self.group:
            self.group, self._lists = group, None

    def use_codec(self, codec: str) -> None:
        """Encode later messages with this codec. Collective if the codec changes after the first exchange."""
        if codec != self._codec:
            self._codec = codec
            if self._lists is not None:
                self._lists = CompressedLists(self._lists.channel, codec, self.traffic)

    def start_average(self, messages: Sequence[UnitMessage], errors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start to replace this rank's own fragments of each message by their mean over ranks. Collective.

        A single rank sends nothing, so it makes no compression errors. It only adds errors that a checkpoint from
        several ranks contains, and sets them to zero.

        Args:
            errors: for each message the error feedback of this rank, `[padded]` in float32; updated in place.

        Returns:
            A function that waits for the result.
        """
        if self.group.size == 1 or not messages:
            add_errors(messages, errors)
            return _done
        size = self.group.size
        parts = [[view for one in messages for view in one.views(one.flat, rank, size)] for rank in range(size)]
        owed = [
            [view for one, error in zip(messages, errors, strict=True) for view in one.views(error, rank, size)]
            for rank in range(size)
        ]
        wait = self.lists(messages[0].flat.device).start_reduce_scatter(parts, owed, factor=1.0 / size)
        return lambda: _ignore(wait())  # no result: the means have replaced this rank's parts in place

    def start_send(
        self, messages: Sequence[UnitMessage], errors: Sequence[torch.Tensor] | None = None
    ) -> Callable[[], None]:
        """Start to replace all fragments of each message by the values that their owners send. Collective.

        Args:
            errors: for each message the error feedback of this rank as an owner, `[span]` in float32, updated in place;
                None: no error feedback.

        Returns:
            A function that waits for the result.
        """
        if self.group.size == 1 or not messages:
            if errors is not None:
                add_errors(messages, errors)
            return _done
        size, index = self.group.size, self.group.index
        outs = [[view for one in messages for view in one.views(one.flat, rank, size)] for rank in range(size)]
        owed = None
        if errors is not None:
            pairs = zip(messages, errors, strict=True)
            owed = [view for one, error in pairs for view in one.own_views(error, index, size)]
        return self.lists(messages[0].flat.device).start_all_gather(outs[index], outs, owed)


Batch = list[UnitMessage]


def in_flight(started: Iterable[tuple[Batch, Callable[[], None]]]) -> Iterator[Batch]:
    """Yield each batch once its transfer has ended. The transfer of the next batch starts before the wait for this one.

    Args:
        started: iterator whose every step starts the transfer of a batch, and yields the batch and a function that
            waits for the transfer.
    """
    previous: tuple[Batch, Callable[[], None]] | None = None
    for item in started:
        if previous is not None:
            previous[1]()
            yield previous[0]
        previous = item
    if previous is not None:
        previous[1]()
        yield previous[0]


def add_errors(messages: Sequence[UnitMessage], errors: Sequence[torch.Tensor]) -> None:
    """Add the errors of the chosen parameters to messages, and set these errors to zero."""
    for message, error in zip(messages, errors, strict=True):
        for values, owed in zip(message.views(message.flat, 0, 1), message.views(error, 0, 1), strict=True):
            values.add_(owed)
            owed.zero_()


def _done() -> None:
    """Wait for nothing."""


def _ignore(result: object) -> None:
    """Drop a result."""


def in_kinds(units: Sequence[Unit]) -> list[Unit]:
    """Return units grouped by `kind`. Replicas of units on ranks along tp or pp are then sent in equal messages, and
    keep equal bits.
    """
    kinds = list(dict.fromkeys(unit.kind for unit in units))
    return sorted(units, key=lambda unit: kinds.index(unit.kind))


def batches_of(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Divide units into batches, one message each. All units of a batch have the same `kind`. A batch has at most
    `_BATCH_NUMEL` elements, or one unit. The batches are equal on all ranks.
    """
    batch: list[Unit] = []
    for unit in units:
        numel = sum(one.layout.padded for one in batch) + unit.layout.padded
        if batch and (numel > _BATCH_NUMEL or unit.kind != batch[0].kind):
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch


def owner_rows(unit: Unit, index: int, rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Distribute the errors of owners over another number of ranks: each element's error goes to its new owner.

    Args:
        index: index of the parameter in the unit.
        rows: `[saved ranks, n]` for the n elements of the parameter, zeros where a rank is not the owner.
        ranks: new number of ranks.

    Returns:
        `[ranks, n]`.
    """
    total = rows.sum(0)
    result = torch.zeros(ranks, total.numel(), dtype=rows.dtype)
    for rank in range(ranks):
        start, stop = unit.layout.shard_range(rank, ranks)
        for piece in unit.layout.pieces(start, stop):
            if piece.index == index:
                result[rank, piece.start : piece.stop] = total[piece.start : piece.stop]
    return result
