"""What the core is told, and what it tells of a step, in its own words."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch

from windlass.comm.transport import Ways
from windlass.storage.patient import PatientTier
from windlass.storage.slot import Home
from windlass.storage.staging import Staging
from windlass.zero.partition import Rules
from windlass.zero.policy import Policy


@dataclass(frozen=True)
class Homes:
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

    param: Home = Home.DEVICE
    state: Home = Home.DEVICE
    gradient: Home = Home.DEVICE
    ratio: float = 1.0
    pin: bool = True
    disk: PatientTier | None = None
    staging: Staging | None = None
    at_once: int = 1 << 62
    read_ahead: int = 0


@dataclass(frozen=True)
class Settings:
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

    policy: Policy
    rules: Rules
    compute: torch.dtype | None
    accumulate: torch.dtype
    wire: torch.dtype
    before: float
    after: float
    overlap: bool
    ways: Ways
    contiguous: bool
    ignore_unused: bool
    sub_group: int
    ahead: int
    live: int
    reuse: int
    transport: str
    timeout: timedelta
    homes: Homes = field(default_factory=Homes)
    delayed: bool = False
    lowered_wire: torch.dtype | None = None
    master: torch.dtype | None = None
    state: torch.dtype | None = None

    @property
    def widens(self) -> bool:
        """Whether an update widens master weights for the optimizer and rounds what it made."""
        return self.master is not None and self.state is not None and self.master != self.state


@dataclass(frozen=True)
class Outcome:
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
