"""Bytes of the units (parameters that are sharded together) of one rank, for the choice of their tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.storage.slot import Tier
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_plan import UnitPlan
from windlass.zero.setup.tier_choice import FixedBytes, TierChoice, UnitBytes
from windlass.zero.setup.zero_settings import ZeroSettings

_LIVE = 2  # blocks that `max_live_numel` allows unsharded: the block in use and the prefetched block
_BEYOND = 2  # more blocks at the peak: a backward unshards the next block before it reshards the one in use


@dataclass(frozen=True)
class TierSizes:
    """Bytes that a rank needs: those of its units, which can move between tiers, and all others.

    Attributes:
        units: Bytes by unit, in model order.
        fixed: All other bytes.
        block: Bytes of the largest block that is resharded.
    """

    units: tuple[UnitBytes, ...]
    fixed: FixedBytes
    block: int

    def max_live_numel(self, choice: TierChoice, itemsize: int) -> int:
        """Return the number of elements that may be unsharded at once, in device memory that `choice` leaves free."""
        left = max(0, choice.memory.device - choice.used[Tier.DEVICE])
        return (_LIVE * self.block + left) // itemsize


def tier_sizes(
    units: Sequence[Unit],
    plans: Sequence[UnitPlan],
    settings: ZeroSettings,
    state_bytes: int,
    *,
    separates_masters: bool = False,
    reduces_itself: bool = False,
    rank_states: int = 0,
    shares_memory: bool = False,
    staging: int = 0,
) -> TierSizes:
    """Return the bytes of `units` under `settings`.

    Args:
        plans: Plans of the units, with the parameters as the script built them.
        state_bytes: Bytes per element of optimizer states.
        separates_masters: Parameters never serve as master weights.
        reduces_itself: The update takes local gradients, which are unsharded on every rank.
        rank_states: Number of states of the update that each rank stores for all elements, see [Note: per-rank
            states]. Above stage 0 they are on the tier of the optimizer states, like errors of quantized reductions.
        shares_memory: Sharded parameters on the device are in memory that all ranks read.
        staging: Bytes of host memory that stage NVMe transfers.
    """
    policy, accumulate = settings.policy, settings.accumulation_dtype.itemsize
    of_units, whole, gradients, kept, blocks = [], 0, 0, 0, dict[int, int]()
    spans, widths, error_widths, rings = [0], [0], [0], dict[int, int]()
    for unit, plan in zip(units, plans, strict=True):
        span, own = unit.state_stop - unit.state_start, sum(piece.numel for piece in unit.pieces())
        shard = unit.nbytes // unit.dp_group.group.size
        if unit.reshards:
            for user in unit.blocks:
                blocks[id(user)] = blocks.get(id(user), 0) + unit.nbytes
        else:
            whole += unit.nbytes
            shard = span * unit.dtype.itemsize
        if not unit.trainable:
            of_units.append(UnitBytes(shard, can_move=unit.reshards))
            continue
        keeps_errors = settings.keeps_quantization_errors and unit.dp_group.group.size > 1
        own_states = sum(unit.layout.numels) * torch.float32.itemsize * (rank_states + keeps_errors)
        master = settings.master_dtype or (torch.float64 if plan.dtype == torch.float64 else torch.float32)
        of_units.append(
            UnitBytes(
                shard,
                gradient=span * accumulate if policy.grad else 0,
                masters=span * master.itemsize,
                states=own * state_bytes + (own_states if policy.state else 0),
                can_move=unit.reshards,
                shares_masters=unit.dtype == master and not separates_masters,
            )
        )
        spans.append(span)
        widths.append(unit.layout.padded)
        error_widths.append(unit.layout.padded * keeps_errors)
        if policy.grad:
            rings[id(unit.dp_group)] = max(rings.get(id(unit.dp_group), 0), unit.layout.padded)
        if reduces_itself or not policy.grad:
            gradients += unit.layout.padded
        kept += 0 if policy.state else own_states
    block = max(blocks.values(), default=0)
    casts = settings.reduce_dtype != settings.accumulation_dtype
    temporary = max(widths) * settings.reduce_dtype.itemsize if casts else 0
    if accumulate < 4:
        temporary += 4 * max(spans)  # the optimizer receives float32 gradients
    # The device holds the errors of three units: one in a reduction, two whose transfers to their tier may run.
    fetched_errors = 3 * max(error_widths) * torch.float32.itemsize
    param_width = max((unit.dtype.itemsize for unit in units), default=4)
    unsharded = (_LIVE + _BEYOND) * block
    fixed = FixedBytes(
        device=whole
        + kept
        + (gradients + 2 * sum(rings.values())) * accumulate
        + temporary
        + (0 if shares_memory else unsharded),
        device_if_params_offloaded=unsharded if shares_memory else 0,
        device_if_offloaded=(2 * max(spans) * accumulate if policy.grad else 0) + fetched_errors,
        host_if_offloaded=max(spans) * (2 * param_width + accumulate),
        host_if_on_disk=staging,
    )
    return TierSizes(tuple(of_units), fixed, block)
