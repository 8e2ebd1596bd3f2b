"""Settings of ZeRO, which `initialize` fills from the configuration: rules for units, tiers of slots, dtypes, sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from windlass.comm.transport import WireOptions
from windlass.storage.deferred_failure_tier import DeferredFailureTier
from windlass.storage.slot import Tier
from windlass.storage.staging_pool import StagingPool
from windlass.zero.core.sharding_policy import ShardingPolicy


@dataclass(frozen=True)
class UnitRules:
    """Rules for the partition of a model into units.

    Args:
        persistence_threshold: Parameters of fewer elements are never resharded (`stage3_param_persistence_threshold`).
        max_persistent_numel: Maximum number of elements of all such parameters together
            (`stage3_model_persistence_threshold`).
        merge_below: Neighbouring units of fewer elements are merged; 0: never.
        split_above: A block of more elements is split into its children, if it has any.
        blocks: Names of the modules, or of their classes, that become blocks; empty: found automatically.
        lowered: ids of parameters whose gradients are sent in `ZeroSettings.lowered_reduce_dtype`.
        unstepped: ids of parameters that are in no group of the optimizer: see [Note: gradients that stay].
    """

    persistence_threshold: int = 0
    max_persistent_numel: int = 1 << 62
    merge_below: int = 0
    split_above: int = 1 << 62
    blocks: tuple[str, ...] = ()
    lowered: frozenset[int] = frozenset()
    unstepped: frozenset[int] = frozenset()


@dataclass(frozen=True)
class UnitTiers:
    """Tiers of one unit."""

    param: Tier = Tier.DEVICE
    gradient: Tier = Tier.DEVICE
    state: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Placements:
    """Tiers of the slots.

    Attributes:
        param: Tier of the shards of sharded parameters.
        state: Tier of master weights and optimizer states.
        gradient: Tier of reduced gradients of units whose states are offloaded.
        ratio: Fraction of trained elements whose states are in tier `state`; the others stay on the device.
        pin: Page-lock host memory.
        disk: Disk tier for NVMe slots.
        staging: Pool of host memory for transfers to and from NVMe.
        max_update_numel: Maximum number of elements in one batch of an update on NVMe.
        read_ahead_numel: Maximum number of elements of this rank's shards to read from NVMe ahead of their gathers.
        of_units: Tiers of each unit, in model order; empty: the tiers above are those of all units. If `of_units` is
            not empty, the tiers above are the slowest that any unit has.
    """

    param: Tier = Tier.DEVICE
    state: Tier = Tier.DEVICE
    gradient: Tier = Tier.DEVICE
    ratio: float = 1.0
    pin: bool = True
    disk: DeferredFailureTier | None = None
    staging: StagingPool | None = None
    max_update_numel: int = 1 << 62
    read_ahead_numel: int = 0
    of_units: tuple[UnitTiers, ...] = ()


@dataclass(frozen=True)
class ZeroSettings:
    """Settings of the ZeRO core. `initialize` fills them from the configuration.

    Attributes:
        param_dtype: Dtype that floating-point parameters are cast to; None: each keeps its dtype.
        accumulation_dtype: Dtype in which gradients are accumulated.
        reduce_dtype: Dtype in which gradients are sent.
        lowered_reduce_dtype: Dtype in which gradients of `UnitRules.lowered` are sent; None: `reduce_dtype`.
        master_dtype: Dtype of master weights; None: float32, or float64 for float64 parameters.
        state_dtype: Dtype in which the optimizer computes and stores its states; None: that of the master weights.
        predivide_factor, postdivide_factor: Factors that multiply a gradient before and after the sum over ranks.
        overlap_comm: Reductions run during the rest of the backward; else the backward waits for each.
        wire_options: Options of wire transports.
        contiguous_gradients: Each gradient is moved from `.grad` to the unit's buffer as it arrives; else all gradients
            of a unit are moved together, once each parameter has one or at the end of the backward.
        ignore_unused_parameters: A parameter without gradient is not updated; else a step raises.
        sub_group_size: Maximum number of elements that are updated at once.
        prefetch_numel, max_live_numel, max_reuse_distance: See `Prefetcher`.
        transport: Name of the transport, or "auto"; see `choose_transport`.
        timeout: Time-out of waits for a peer.
        tiers: Tiers of the slots.
        trained_codec, frozen_codec: Codecs of the all-gathers of trained and frozen parameters; None: exact.
        delayed_update: Updates may run during the next forward and backward; see [Note: delayed update].
    """

    policy: ShardingPolicy
    unit_rules: UnitRules
    param_dtype: torch.dtype | None
    accumulation_dtype: torch.dtype
    reduce_dtype: torch.dtype
    predivide_factor: float
    postdivide_factor: float
    overlap_comm: bool
    wire_options: WireOptions
    contiguous_gradients: bool
    ignore_unused_parameters: bool
    sub_group_size: int
    prefetch_numel: int
    max_live_numel: int
    max_reuse_distance: int
    transport: str
    timeout: timedelta
    tiers: Placements = field(default_factory=Placements)
    delayed_update: bool = False
    trained_codec: str | None = None
    frozen_codec: str | None = None
    lowered_reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None

    @property
    def keeps_quantization_errors(self) -> bool:
        """True if each rank stores the errors of quantized reductions over more than one rank (`zeropp_loco_param`)."""
        gradients = self.wire_options.gradients
        return gradients is not None and gradients.loco is not None

    @property
    def widens_masters(self) -> bool:
        """True if an update widens master weights to `state_dtype` for the optimizer and rounds the result back."""
        return self.master_dtype is not None and self.state_dtype is not None and self.master_dtype != self.state_dtype
