"""Conversion of parameters constructed under `zero.Init` to units, in `initialize`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from windlass.base.log import logger
from windlass.comm.point_to_point import exchange_tensors
from windlass.comm.rank_group import RankGroup
from windlass.zero.core.unit_layout import UnitLayout
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.initial_shard import ShardedInit


def mark_full_parameters(model: nn.Module, stage: int) -> None:
    """Log that this ZeRO stage unshards the parameters that were constructed under `zero.Init`, if there are any."""
    sharded = sum(initial_shard.find(parameter) is not None for parameter in model.parameters())
    if sharded:
        logger.info(
            f"zero.Init sharded {sharded} parameters, and stage {stage} gathers them: every rank keeps the full model; "
            "use stage 3 to keep it sharded"
        )


def broadcast_full_parameters(parameters: list[nn.Parameter], places: list[torch.Tensor]) -> None:
    """Gather parameters constructed under `zero.Init` into `places`, one at a time, and free their shards. Collective.

    Other parameters are skipped.

    Args:
        places: One tensor for each parameter, in the parameter's shape. It becomes the parameter's data.
    """
    for parameter, place in zip(parameters, places, strict=True):
        init_shard = initial_shard.find(parameter)
        if init_shard is not None:
            place.copy_(init_shard.full_value())
            initial_shard.finish_parameter(parameter)
            parameter.data = place


def local_shard_values(
    parameters: list[nn.Parameter], layout: UnitLayout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return this rank's shard of the unit of `parameters`, and free the shards of `zero.Init`. Collective.

    In one exchange, each rank sends the fragments of its parameter shards that belong to other ranks' unit shards.

    Returns:
        `[layout.padded / ranks]`, with zeros as padding. None if the fragments cannot be exchanged, because a parameter
        was not constructed under `zero.Init` or is not in memory in the order of its indices. Nothing is changed then.
    """
    init_shards = [init_shard for parameter in parameters if (init_shard := initial_shard.find(parameter)) is not None]
    if len(init_shards) < len(parameters) or not all(init_shard.row_major for init_shard in init_shards):
        return None
    group = init_shards[0].group
    start, stop = layout.shard_range(group.index, group.size)
    own = torch.zeros(stop - start, dtype=dtype, device=device)
    shards = [init_shard.shard for init_shard in init_shards]
    sends, receives, arrived = [], [], []
    for peer in range(group.size):
        outgoing = list(_overlaps(layout, init_shards, owner=peer, holder=group.index, group=group))
        parts = [shards[index][first - begin : last - begin] for index, begin, first, last, _ in outgoing]
        if peer == group.index:
            for (_, _, first, last, offset), part in zip(outgoing, parts, strict=True):
                own[offset : offset + last - first].copy_(part)
            continue
        if parts:
            sends.append((peer, torch.cat(parts).to(device)))
        incoming = list(_overlaps(layout, init_shards, owner=group.index, holder=peer, group=group))
        if incoming:
            numel = sum(last - first for _, _, first, last, _ in incoming)
            receives.append((peer, torch.empty(numel, dtype=dtype, device=device)))
            arrived.append(incoming)
    exchange_tensors(group, sends, receives)
    for incoming, (_, flat) in zip(arrived, receives, strict=True):
        position = 0
        for _, _, first, last, offset in incoming:
            own[offset : offset + last - first].copy_(flat[position : position + last - first])
            position += last - first
    for parameter in parameters:
        initial_shard.finish_parameter(parameter)
    return own


def _overlaps(
    layout: UnitLayout, init_shards: list[ShardedInit], *, owner: int, holder: int, group: RankGroup
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fragments that rank `holder` has of the unit shard of rank `owner`.

    Yields:
        `(parameter, begin, first, last, offset)`: the index of the parameter, the start of the holder's shard of it,
        the elements `[first, last)` of the parameter, and their offset in the owner's shard of the unit.
    """
    for piece in layout.pieces(*layout.shard_range(owner, group.size)):
        begin, end = init_shards[piece.index].span(holder)
        first, last = max(piece.start, begin), min(piece.stop, end)
        if first < last:
            yield piece.index, begin, first, last, piece.offset + first - piece.start
