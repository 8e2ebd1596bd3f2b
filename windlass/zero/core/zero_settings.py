"""What the core is told, and what it tells of a step, in its own words."""

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
    """Where slots rest.

    Attributes:
        param: cuts of released parameters.
        state: master weights and optimizer states.
        gradient: reduced gradients of units whose states rest away from the device.
        ratio: the share of elements whose states rest at `state`; the rest stays on the device.
        pin: page-lock host memory.
        disk: for NVMe homes.
        staging: lends the host memory through which what is on disk comes and goes.
        read_ahead: elements of parameters to read from disk ahead of their gathers.
        at_once: elements that one batch of an update on disk may have.
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
    """Everything the core needs to know; `initialize` fills it from the configuration.

    Attributes:
        compute: dtype that floating-point parameters are cast to; None: each keeps its own.
        master: dtype of master weights; None: float32, or float64 where the parameters have it.
        state: dtype in which the optimizer steps and keeps its states; None: that of the master weights.
        accumulate, wire: dtypes of kept gradients and of their travel.
        lowered_wire: that of gradients of `Rules.lowered`; None: `wire`.
        before, after: factors of a gradient before and after the ranks' parts are added.
        ways: how transports send.
        contiguous: gradients leave `.grad` as they arrive; else when their unit is complete.
        ignore_unused: a parameter without gradient is left alone; else it is an error.
        sub_group: elements that are updated at once.
        ahead, live, reuse: see `Foresight`.
        homes: where slots rest.
        delayed: updates may go on while the next forward and backward run; see [Note: delayed update].
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
        """Whether an update widens master weights for the optimizer and rounds what it made."""
        return self.master_dtype is not None and self.state_dtype is not None and self.master_dtype != self.state_dtype


@dataclass(frozen=True)
class StepOutcome:
    """What a step did.

    Attributes:
        norm: of the whole unclipped gradient, loss scale removed.
        applied: the parameters were updated. If not, the gradient was not finite and is dropped.
        clip: the factor that clipping came to.
        flags: sums over ranks of the caller's numbers.
        bad: the first parameter whose gradient is not finite, where that was looked for.
    """

    norm: float
    applied: bool
    clip: float
    flags: list[float]
    bad: str = ""
