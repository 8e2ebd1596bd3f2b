"""Settings of the ZeRO core, and the outcome of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from windlass.comm.transport import WireOptions
from windlass.storage.deferred_failure_tier import DeferredFailureTier
from windlass.storage.slot import Tier
from windlass.storage.staging_pool import StagingPool
from windlass.zero.core.sharding_policy import ShardingPolicy
from windlass.zero.core.unit_partition import UnitRules


@dataclass(frozen=True)
class Placements:
    """Tiers of a model's slots, and the resources for offload.

    Attributes:
        param: tier of sharded parameters.
        state: tier of master weights and optimizer states.
        gradient: tier of reduced gradients of units whose states are offloaded.
        ratio: fraction of elements whose states are on tier `state`; the others stay on the device.
        pin: page-lock host memory.
        disk: disk of NVMe tiers.
        staging: pool of host buffers for transfers from and to disk.
        max_update_numel: maximum elements of one batch of an update on disk.
        read_ahead_numel: elements of parameters to read from disk ahead of their all-gathers.
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


@dataclass(frozen=True)
class ZeroSettings:
    """Settings of the ZeRO core; `initialize` fills them from the configuration.

    Attributes:
        param_dtype: dtype to which floating-point parameters are cast; None: each keeps its own.
        accumulation_dtype, reduce_dtype: dtypes in which gradients are accumulated and reduced.
        predivide_factor, postdivide_factor: factors of a gradient before and after the sum over ranks.
        wire_options: options of network transports.
        contiguous_gradients: move gradients out of `.grad` as they arrive; otherwise when their unit is
            complete.
        ignore_unused_parameters: skip parameters without gradient; otherwise they raise.
        sub_group_size: maximum elements of one update chunk.
        prefetch_numel, max_live_numel, max_reuse_distance: see `Prefetcher`.
        tiers: tiers of slots.
        delayed_update: updates may run during the next forward and backward; see [Note: delayed update].
        lowered_reduce_dtype: reduce dtype of `UnitRules.lowered`; None: `reduce_dtype`.
        master_dtype: dtype of master weights; None: float32, or float64 for float64 parameters.
        state_dtype: dtype of the update and of optimizer states; None: that of the master weights.
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
    lowered_reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None

    @property
    def widens_masters(self) -> bool:
        """True if an update widens master weights for the optimizer and rounds the result."""
        return self.master_dtype is not None and self.state_dtype is not None and self.master_dtype != self.state_dtype


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step.

    Attributes:
        norm: norm of the whole unclipped gradient, loss scale removed.
        applied: the parameters were updated. False: the gradient was not finite and was dropped.
        clip: the applied clip factor.
        flags: sums over ranks of the caller's numbers.
        bad: the first parameter with a non-finite gradient, if requested.
    """

    norm: float
    applied: bool
    clip: float
    flags: list[float]
    bad: str = ""
