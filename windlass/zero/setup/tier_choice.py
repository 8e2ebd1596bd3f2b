"""Choice of a tier for the parameters, the gradients and the optimizer states of each unit. Pure arithmetic.

[Note: choice of tiers] In model order, the first units are on NVMe, the next ones in host memory and the last ones on
the device. The two units at which the tier changes are a pair of bounds: one pair for parameters, another for master
weights and states. A unit's gradients are on the tier of its states; if that is NVMe, they may be in host memory
instead. All placements of that form, including all uniform ones, are compared. So the result is the fastest one that
fits, and more memory never makes a step slower. A model of many units is divided into at most `_MOST_GROUPS` groups of
neighbours, and all units of a group have the same tiers. A placement with a single bound, such as a `ratio` of the
states, is not restricted to these groups: its bound is tried at every unit.

The time of a placement is computed from the measured rates: the slowest of the transfers during forward and backward,
plus the update on the device, plus the slowest other part of the update. A share of every transfer is added, because no
overlap is perfect. The time of forward and backward is unknown, so no transfer counts as hidden behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.base.errors import ConfigError
from windlass.storage.slot import Tier
from windlass.storage.tier_rates import TierRates
from windlass.zero.setup.zero_settings import UnitTiers

_MOST_GROUPS = 24  # 325 pairs of bounds for parameters, and as many for states
_NOT_HIDDEN = 0.1  # share of every transfer that is added to the slowest ones: assumed, not measured


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit on one rank.

    Attributes:
        parameters: Shard of the parameters.
        gradient: Shard of the reduced gradient; 0 if gradients stay in full buffers on the device.
        masters: Master weights; 0 for a frozen unit.
        states: Optimizer states.
        can_move: The parameters are resharded, so that they can be on any tier; else they count in `FixedBytes`.
        shares_masters: Parameters also serve as master weights if they are on the tier of the states, except on NVMe.
    """

    parameters: int
    gradient: int = 0
    masters: int = 0
    states: int = 0
    can_move: bool = True
    shares_masters: bool = False

    @property
    def is_trained(self) -> bool:
        """True if the unit has master weights."""
        return self.masters > 0


@dataclass(frozen=True)
class FixedBytes:
    """Bytes that do not depend on the tier of single units.

    Attributes:
        device: Units that are never resharded, gradient buffers, and units that are unsharded at the same time, unless
            ranks share the memory of unsharded units.
        device_if_params_offloaded: Units that are unsharded at the same time, if ranks share the memory of unsharded
            units. They share it only for shards on the device: units with shards on other tiers take memory on each
            rank.
        device_if_offloaded: Buffers of gradients and of reduction errors in transfer to or from another tier, once the
            states of a unit are off the device.
        host_if_offloaded: Buffers of an update on the host, once the states of a unit are off the device.
        host_if_on_disk: Staging of NVMe transfers, once anything is on NVMe.
    """

    device: int = 0
    device_if_params_offloaded: int = 0
    device_if_offloaded: int = 0
    host_if_offloaded: int = 0
    host_if_on_disk: int = 0


@dataclass(frozen=True)
class TierMemory:
    """Bytes that one rank may use.

    Attributes:
        device: Device memory; on a CPU, host memory.
        host: Host memory, apart from device memory; None: the device is a CPU, so nothing is offloaded to the host.
        disk: Space on NVMe; None: nothing is offloaded to NVMe.
    """

    device: int
    host: int | None = None
    disk: int | None = None

    def smallest(self, other: TierMemory) -> TierMemory:
        """Return the smaller limit of each tier; None if either limit is None."""
        return TierMemory(min(self.device, other.device), _least(self.host, other.host), _least(self.disk, other.disk))


@dataclass(frozen=True)
class StepTraffic:
    """Numbers of transfers of a unit in a step.

    Attributes:
        gathers: Number of times that a shard of the parameters is read: two for each micro-batch.
        reductions: Number of times that a gradient is reduced.
    """

    gathers: int = 2
    reductions: int = 1


@dataclass(frozen=True)
class TierChoice:
    """Chosen placement.

    Attributes:
        units: Tiers of each unit.
        seconds: Time of the transfers and updates of a step, see [Note: choice of tiers].
        used: Bytes used on each tier.
        memory: Limits of these bytes.
    """

    units: tuple[UnitTiers, ...]
    seconds: float
    used: dict[Tier, int]
    memory: TierMemory

    @property
    def is_on_disk(self) -> bool:
        """True if anything is on NVMe."""
        return any(Tier.NVME in (one.param, one.gradient, one.state) for one in self.units)


def choose_tiers(
    units: Sequence[UnitBytes],
    rates: TierRates,
    memory: TierMemory,
    fixed: FixedBytes = FixedBytes(),
    traffic: StepTraffic = StepTraffic(),
) -> TierChoice:
    """Return the placement whose step is the shortest of those that fit, see [Note: choice of tiers].

    Raises:
        ConfigError: no placement fits. The message shows the placement that lacks the fewest bytes, and how many it
            lacks on each tier.
    """
    groups = _Groups(units)
    compared = [_Compared(groups, groups.all_bounds(memory), rates, memory, fixed, traffic)]
    if len(units) > _MOST_GROUPS:
        alone = _Groups(units, most=len(units))
        compared.append(_Compared(alone, alone.single_bounds(memory), rates, memory, fixed, traffic))
    best = min(compared, key=lambda one: one.key)
    if best.key[0]:
        raise ConfigError(best.explain())
    return best.choice()


def step_seconds(
    units: Sequence[UnitBytes], tiers: Sequence[UnitTiers], rates: TierRates, traffic: StepTraffic = StepTraffic()
) -> float:
    """Return the predicted seconds of a step whose units have these tiers, by the formula of `choose_tiers`."""
    groups = _Groups(units, most=len(units))

    def bound(which: str, *of: Tier) -> int:
        # Units that cannot move have the tier DEVICE, even between offloaded units.
        return max((number + 1 for number, one in enumerate(tiers) if getattr(one, which) in of), default=0)

    on_disk = all(one.gradient is Tier.NVME for one in tiers if one.state is Tier.NVME) and bound("state", Tier.NVME)
    far = (Tier.NVME, Tier.HOST)
    ends = [bound("param", Tier.NVME), bound("param", *far), bound("state", Tier.NVME), bound("state", *far)]
    return float(groups.seconds(_Bounds(torch.tensor([[*ends, int(bool(on_disk))]])), rates, traffic)[0])


class _Compared:
    """Placements with their bytes and times.

    Attributes:
        row: Row of the fastest placement that fits; if none fits, of the placement that lacks the fewest bytes.
        key: Bytes that the placement of `row` lacks, and the seconds of its step.
    """

    def __init__(
        self,
        groups: _Groups,
        bounds: _Bounds,
        rates: TierRates,
        memory: TierMemory,
        fixed: FixedBytes,
        traffic: StepTraffic,
    ) -> None:
        self._groups, self._bounds, self._memory = groups, bounds, memory
        self._used = groups.bytes_used(bounds, fixed, memory)
        over = torch.zeros(len(bounds), dtype=torch.int64)
        for tier, limit in _limits(memory):
            over += (self._used[tier] - limit).clamp(min=0)
        seconds = groups.seconds(bounds, rates, traffic)
        least = int(over.min())
        nearest = int(over.argmin())
        fastest = int(torch.where(over == 0, seconds, torch.inf).argmin())
        self.row = nearest if over[fastest] else fastest  # `nearest` if no placement that fits takes a finite time
        self.key = least, float(seconds[self.row])

    def choice(self) -> TierChoice:
        """Return the placement."""
        tiers = self._groups.tiers(self._bounds, self.row)
        return TierChoice(tiers, self.key[1], _row(self._used, self.row), self._memory)

    def explain(self) -> str:
        """Return the error message for the placement of `row`, which does not fit."""
        return _explain(self._groups, self._bounds, self._used, self._memory, self.row)


class _Bounds:
    """Placements, one per row: `[n, 5]`.

    The columns are the ends of the groups on NVMe and in host memory, for parameters and then for states, and 1 if
    gradients of states on NVMe are on NVMe too.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.param_disk, self.param_host, self.state_disk, self.state_host, self.gradient_disk = rows.unbind(1)

    def __len__(self) -> int:
        return len(self.param_disk)


class _Groups:
    """Prefix sums of the bytes of groups of units: `[groups + 1]` each."""

    def __init__(self, units: Sequence[UnitBytes], *, most: int = _MOST_GROUPS) -> None:
        self._units = units
        self._ends = _group_ends([one.parameters + one.masters + one.states for one in units], most)
        moving = [one if one.can_move else UnitBytes(0, can_move=False) for one in units]
        self.param = self._sums([one.parameters for one in moving])
        self.gradient = self._sums([one.gradient for one in units])
        self.state = self._sums([one.states for one in units])
        self.masters = self._sums([one.masters for one in units])
        # `new`: parameters that an update writes; `shared`: master weights that parameters on the same tier replace.
        self.moving_new = self._sums([one.parameters if one.is_trained else 0 for one in moving])
        self.fixed_new = self._sums([one.parameters if one.is_trained and not one.can_move else 0 for one in units])
        self.moving_shared = self._sums([one.masters if one.shares_masters else 0 for one in moving])
        self.fixed_shared = self._sums([one.masters if one.shares_masters and not one.can_move else 0 for one in units])

    def _sums(self, values: list[int]) -> torch.Tensor:
        summed = torch.tensor([0, *values], dtype=torch.int64).cumsum(0)
        return summed[torch.tensor([0, *self._ends])]

    def all_bounds(self, memory: TierMemory) -> _Bounds:
        """Return all placements on the available tiers."""
        count = len(self._ends)
        of_states = _pairs(count if int(self.masters[-1]) else 0, memory)
        of_params = _pairs(count if int(self.param[-1]) else 0, memory)
        pairs = torch.cat([of_params.repeat_interleave(len(of_states), 0), of_states.repeat(len(of_params), 1)], 1)
        rows = torch.cat([pairs, torch.zeros(len(pairs), 1, dtype=torch.int64)], 1)
        moves_gradients = rows[rows[:, 2] > 0]
        moves_gradients[:, 4] = 1
        return _Bounds(torch.cat([rows, moves_gradients]))

    def single_bounds(self, memory: TierMemory) -> _Bounds:
        """Return the placements with all parameters on one tier, and states on at most two tiers with one bound."""
        count = len(self._ends)
        whole = [(0, 0)]
        whole += [(0, count)] if memory.host is not None else []
        whole += [(count, count)] if memory.disk is not None else []
        cut: dict[tuple[int, int], None] = {}
        for end in range(count + 1):
            cut |= {(0, end): None} if memory.host is not None else {}
            cut |= {(end, end): None} if memory.disk is not None else {}
            cut |= {(end, count): None} if memory.host is not None and memory.disk is not None else {}
        of_states = list(cut) or whole
        if not int(self.masters[-1]):
            of_states = [(0, 0)]
        of_params = whole if int(self.param[-1]) else [(0, 0)]
        rows = [(*param, *state, on_disk) for param in of_params for state in of_states for on_disk in (0, 1)
                if state[0] or not on_disk]  # fmt: skip
        return _Bounds(torch.tensor(rows, dtype=torch.int64))

    def bytes_used(self, at: _Bounds, fixed: FixedBytes, memory: TierMemory) -> dict[Tier, torch.Tensor]:
        """Return, by tier, the bytes of each of the `n` placements, `[n]`."""
        end = len(self._ends)
        both = torch.maximum(at.param_host, at.state_host)
        near, far = torch.minimum(at.param_host, at.state_host), torch.maximum(at.param_disk, at.state_disk)
        shared_host = (self.moving_shared[near] - self.moving_shared[far]).clamp(min=0)
        shared_device = self.moving_shared[end] - self.moving_shared[both]
        shared_device += self.fixed_shared[end] - self.fixed_shared[at.state_host]
        kept = self.masters + self.state
        device = self.param[end] - self.param[at.param_host] + kept[end] - kept[at.state_host] - shared_device
        host = self.param[at.param_host] - self.param[at.param_disk] + kept[at.state_host] - kept[at.state_disk]
        host -= shared_host
        disk = self.param[at.param_disk] + kept[at.state_disk]
        device += self.gradient[end] - self.gradient[at.state_host]
        on_disk = self.gradient[at.state_disk] * at.gradient_disk
        host += self.gradient[at.state_host] - on_disk
        disk += on_disk
        offloads, uses_disk = (at.state_host > 0).to(torch.int64), ((at.param_disk + at.state_disk) > 0).to(torch.int64)
        device += fixed.device + fixed.device_if_offloaded * offloads
        device += fixed.device_if_params_offloaded * (self.param[at.param_host] > 0).to(torch.int64)
        host += fixed.host_if_offloaded * offloads + fixed.host_if_on_disk * uses_disk
        if memory.host is None:
            device, host = device + host, torch.zeros_like(host)
        return {Tier.DEVICE: device, Tier.HOST: host, Tier.NVME: disk}

    def seconds(self, at: _Bounds, rates: TierRates, traffic: StepTraffic) -> torch.Tensor:
        """Return the time of each placement, `[n]`."""
        end, repeats = len(self._ends), traffic.reductions - 1
        param, gradient, stored = self.param.double(), self.gradient.double(), (self.masters + self.state).double()
        touched = gradient + 2 * stored + self.moving_new + self.fixed_new
        on_disk, reduced = gradient[at.state_disk] * at.gradient_disk, gradient[at.state_host]
        read = traffic.gathers * param[at.param_disk] + repeats * on_disk
        passes = [
            traffic.gathers * param[at.param_host] / rates.to_device,
            traffic.reductions * reduced / rates.to_host,
            repeats * 3 * reduced / rates.host,  # gradients of later micro-batches are added in host memory
            _disk(read, traffic.reductions * on_disk, rates),
        ]
        # Updated parameters are transferred if the parameters or the states are on the device, but not both.
        down = self.moving_new[at.state_host] - self.moving_new[torch.minimum(at.param_host, at.state_host)]
        down = down + self.fixed_new[at.state_host]
        up = self.moving_new[at.param_host] - self.moving_new[torch.minimum(at.param_host, at.state_host)]
        written = stored[at.state_disk] + self.moving_new[at.param_disk]
        updates = [
            touched[at.state_host] / rates.host,
            _disk(stored[at.state_disk] + on_disk, written, rates),
            down.double() / rates.to_device,
            up.double() / rates.to_host,
        ]
        on_device = (touched[end] - touched[at.state_host]) / rates.device
        longest = torch.stack(passes).amax(0) + torch.stack(updates).amax(0)
        return on_device + longest + _NOT_HIDDEN * torch.stack([*passes, *updates]).sum(0)

    def tiers(self, at: _Bounds, row: int) -> tuple[UnitTiers, ...]:
        """Return the tiers of each unit under one placement."""
        ends = [0, *self._ends]
        params = [ends[int(at.param_disk[row])], ends[int(at.param_host[row])]]
        states = [ends[int(at.state_disk[row])], ends[int(at.state_host[row])]]
        keeps_gradients = not int(at.gradient_disk[row])
        found = []
        for number, unit in enumerate(self._units):
            param = _tier(number, params) if unit.can_move else Tier.DEVICE
            state = _tier(number, states) if unit.is_trained else Tier.DEVICE
            gradient = Tier.HOST if state is Tier.NVME and keeps_gradients else state
            found.append(UnitTiers(param, gradient, state))
        return tuple(found)


def _tier(number: int, ends: list[int]) -> Tier:
    return Tier.NVME if number < ends[0] else Tier.HOST if number < ends[1] else Tier.DEVICE


def _pairs(count: int, memory: TierMemory) -> torch.Tensor:
    """Return `[n, 2]`: the end of the groups on NVMe, and the end of all groups that are not on the device."""
    found = [
        (disk, host)
        for host in range(count + 1)
        for disk in range(host + 1)
        if (memory.disk is not None or disk == 0) and (memory.host is not None or disk == host)
    ]
    return torch.tensor(found, dtype=torch.int64)


def _disk(read: torch.Tensor, written: torch.Tensor, rates: TierRates) -> torch.Tensor:
    if not rates.disk_read or not rates.disk_write:
        return torch.where(read + written > 0, torch.inf, 0.0)
    return read / rates.disk_read + written / rates.disk_write


def _group_ends(sizes: list[int], most: int) -> list[int]:
    """Return the ends of groups of neighbouring units: each unit alone, or at most `most` groups of similar bytes."""
    if len(sizes) <= most:
        return list(range(1, len(sizes) + 1))
    total, so_far, ends = sum(sizes), 0, list[int]()
    for number, size in enumerate(sizes):
        so_far += size
        if so_far * most >= total * (len(ends) + 1) and len(ends) < most - 1:
            ends.append(number + 1)
    return [*ends, len(sizes)] if not ends or ends[-1] < len(sizes) else ends


def _limits(memory: TierMemory) -> list[tuple[Tier, int]]:
    found = [(Tier.DEVICE, memory.device), (Tier.HOST, memory.host), (Tier.NVME, memory.disk)]
    return [(tier, limit) for tier, limit in found if limit is not None]


def _row(used: dict[Tier, torch.Tensor], row: int) -> dict[Tier, int]:
    return {tier: int(values[row]) for tier, values in used.items()}


def _least(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else min(first, second)


def _explain(groups: _Groups, bounds: _Bounds, used: dict[Tier, torch.Tensor], memory: TierMemory, row: int) -> str:
    needs, keys = _row(used, row), dict(_KEYS)
    if memory.host is None:
        keys[Tier.DEVICE] = keys[Tier.HOST]
    lacking = [
        f"{needs[tier] - limit:,} bytes of {keys[tier]} ({needs[tier]:,} of {limit:,})"
        for tier, limit in _limits(memory)
        if needs[tier] > limit
    ]
    tiers = groups.tiers(bounds, row)
    counted = ", ".join(
        f"{sum(getattr(one, kind) is tier for one in tiers)} of {len(tiers)} units' {name} on {tier.value}"
        for kind, name in (("param", "parameters"), ("state", "states"))
        for tier in (Tier.HOST, Tier.NVME)
        if any(getattr(one, kind) is tier for one in tiers)
    )
    more = "" if memory.disk is not None else ", name a folder of a disk in offload.nvme_path"
    return (
        f'"offload": "auto": no placement fits; the nearest ({counted or "everything on the device"}) lacks '
        f"{' and '.join(lacking)}; use more ranks, raise these limits{more}, or make units smaller with "
        "zero_optimization.stage3_max_live_parameters"
    )


_KEYS = {Tier.DEVICE: "offload.device_memory", Tier.HOST: "offload.host_memory", Tier.NVME: "offload.disk_space"}
