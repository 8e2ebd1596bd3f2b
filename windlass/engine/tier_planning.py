"""Choice of tiers by windlass (section `offload`): measured rates, free memory, and one placement on all ranks.

See [Note: choice of tiers].
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn

from windlass.base.device_memory import device_has_own_memory, emulated_device_memory
from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.comm.choose_transport import choose_transport_name
from windlass.comm.mesh import Mesh
from windlass.comm.mesh_shape import AXES
from windlass.comm.rank_group import RankGroup
from windlass.config.offload_section import AutoOffload
from windlass.optim.elementwise_optimizers import measure_state_bytes
from windlass.storage.slot import Tier
from windlass.storage.staging_memory import available_memory
from windlass.storage.tier_rates import TierRates, measure_tier_rates
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.unit import Unit
from windlass.zero.setup.tier_choice import (
    StepTraffic,
    TierChoice,
    TierMemory,
    choose_tiers,
)
from windlass.zero.setup.tier_sizes import TierSizes, tier_sizes
from windlass.zero.setup.unit_builder import make_units
from windlass.zero.setup.unit_partition import plan_units
from windlass.zero.setup.zero_settings import UnitTiers, ZeroSettings
from windlass.zero.update.update_class import update_class

_DEVICE_SHARE, _HOST_SHARE = 0.7, 0.8  # fractions of the free memory to use, without limits in the configuration
_ASSUMED_STATE_BYTES = 8  # per element: two float32 moments, for optimizers of full parameters, which are not probed
_NO_CALLBACKS: Any = None  # units that are made only for their sizes call no callbacks
_ORDER = (Tier.DEVICE, Tier.HOST, Tier.NVME)


@dataclass(frozen=True)
class _NoTransport:
    """Placeholder for a transport; only its ranks are read."""

    group: RankGroup


@dataclass(frozen=True)
class _Proposal:
    """Tier placement chosen by one rank, which the other ranks of its pipeline stage adopt."""

    units: tuple[UnitTiers, ...]
    max_live_numel: int


def plan_tiers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    section: AutoOffload,
    settings: ZeroSettings,
    mesh: Mesh,
    device: torch.device,
    accumulation: int,
) -> ZeroSettings:
    """Return `settings` with the tiers of each unit. Collective.

    Args:
        settings: Settings with an open disk, if the section `offload` names one.
        accumulation: Micro-batches of a step.

    Raises:
        ConfigError: no placement fits. Raised on all ranks.
        StorageError: the disk cannot be measured.
    """
    disk, staging = settings.tiers.disk, settings.tiers.staging
    rates = measure_tier_rates(device, disk)
    memory = free_memory_of_rank(section, device)
    if mesh.world.index == 0:
        _warn_of_ineffective_limits(section, memory)
    found: list[tuple[TierRates, TierMemory]] = mesh.world.all_gather_object((rates, memory))
    rates = reduce(TierRates.slowest, (one for one, _ in found))
    memory = reduce(TierMemory.smallest, (one for _, one in found))
    state_bytes, separates, reduces, rank_states = 0, False, False, 0
    if optimizer is not None:
        kind = update_class(optimizer, settings.policy.state)
        separates, reduces = kind.separates_masters(settings.policy.state), kind.reduces_itself
        rank_states = len(kind.rank_state_keys(optimizer, settings.policy.state))
        state_bytes = (
            _ASSUMED_STATE_BYTES
            if kind.steps_whole_units
            else measure_state_bytes(optimizer, settings.state_dtype or torch.float32)
        )
    group = mesh.dense.shard if settings.policy.state else mesh.dense.data
    transport, _ = choose_transport_name(settings.transport, group, device)
    units, sizes = sizes_of_units(
        model,
        settings,
        mesh,
        state_bytes,
        trains=optimizer is not None,
        separates_masters=separates,
        reduces_itself=reduces,
        rank_states=rank_states,
        shares_memory=transport == "shm" and not settings.wire_options.quantizes,
        staging=staging.limit if staging is not None else 0,
    )
    traffic = step_traffic(accumulation, settings)
    choice: TierChoice | None = None
    problem = ""
    try:
        choice = choose_tiers(sizes.units, rates, memory, sizes.fixed, traffic)
    except ConfigError as error:
        problem = str(error)
    problems = [text for text in mesh.world.all_gather_object(problem) if text]
    if problems or choice is None:
        raise ConfigError(problems[0])
    itemsize = max((unit.dtype.itemsize for unit in units), default=4)
    live = sizes.max_live_numel(choice, itemsize)
    # All ranks of a stage need the same tiers, but different machines may order equally fast placements differently.
    stage = mesh.world if mesh.pp.size == 1 else mesh.over(*(axis for axis in AXES if axis != "pp"))
    agreed = stage.broadcast_object(_Proposal(choice.units, live))
    for line in placement_table(units, replace(choice, units=agreed.units), rates):
        logger.info(line)
    return with_placement(settings, agreed.units, agreed.max_live_numel)


def planned_dp_groups(mesh: Mesh, *, sharded: bool) -> list[DataParallelGroup]:
    """Return the data-parallel groups without transports, the dense one first, as `build_dp_groups` orders them."""
    found = []
    for data in [mesh.dense] if mesh.experts is mesh.dense else [mesh.dense, mesh.experts]:
        group = data.shard if sharded else data.data
        found.append(DataParallelGroup(data, group, cast(Any, _NoTransport(group)), "planned"))
    return found


def sizes_of_units(
    model: nn.Module,
    settings: ZeroSettings,
    mesh: Mesh,
    state_bytes: int,
    *,
    trains: bool,
    separates_masters: bool = False,
    reduces_itself: bool = False,
    rank_states: int = 0,
    shares_memory: bool = False,
    staging: int = 0,
) -> tuple[list[Unit], TierSizes]:
    """Return the units of `model`, without memory, and their bytes on this rank. Arguments: see `tier_sizes`."""
    groups = planned_dp_groups(mesh, sharded=settings.policy.state)
    _, plans = plan_units(model, settings.unit_rules)
    units = make_units(plans, settings, settings.tiers, mesh, groups, _NO_CALLBACKS, trains=trains)
    sizes = tier_sizes(
        units,
        plans,
        settings,
        state_bytes,
        separates_masters=separates_masters,
        reduces_itself=reduces_itself,
        rank_states=rank_states,
        shares_memory=shares_memory,
        staging=staging,
    )
    return units, sizes


def step_traffic(accumulation: int, settings: ZeroSettings) -> StepTraffic:
    """Return the numbers of transfers in a step of `accumulation` micro-batches."""
    return StepTraffic(2 * accumulation, accumulation if settings.policy.grad else 1)


def with_placement(settings: ZeroSettings, units: tuple[UnitTiers, ...], max_live_numel: int) -> ZeroSettings:
    """Return `settings` with the tiers `units`, and at most `max_live_numel` as its limit of unsharded elements."""
    tiers = replace(
        settings.tiers,
        param=farthest(one.param for one in units),
        state=farthest(one.state for one in units),
        gradient=farthest(one.gradient for one in units),
        of_units=units,
    )
    return replace(settings, tiers=tiers, max_live_numel=min(settings.max_live_numel, max_live_numel))


def farthest(tiers: Iterable[Tier]) -> Tier:
    """Return the one of `tiers` that is farthest from the device; the device tier if there are none."""
    return max(tiers, key=_ORDER.index, default=Tier.DEVICE)


def _warn_of_ineffective_limits(section: AutoOffload, memory: TierMemory) -> None:
    if section.device_memory is not None and memory.host is None:
        logger.warning(
            f"offload.device_memory = {section.device_memory:,} bytes has no effect: the device is a CPU, whose memory "
            "is host memory; limit offload.host_memory"
        )


def free_memory_of_rank(section: AutoOffload, device: torch.device) -> TierMemory:
    """Return the bytes that this rank may use on each tier: the configured limits, or shares of the free memory."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = section.host_memory or int(_HOST_SHARE * available_memory(ranks=ranks))
    space = None
    if section.nvme_path:
        free = sum(shutil.disk_usage(path).free for path in section.nvme_path)
        space = section.disk_space or free // ranks
    if not device_has_own_memory(device):
        return TierMemory(host, None, space)
    emulated = emulated_device_memory()
    if section.device_memory is not None:
        on_device = section.device_memory
    elif emulated is not None:
        on_device = emulated.budget - emulated.used
    else:
        on_device = int(_DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
    return TierMemory(on_device, host, space)


def placement_table(units: Sequence[Unit], choice: TierChoice, rates: TierRates) -> list[str]:
    """Return the lines of a table of the tiers, with one line for neighbouring units on equal tiers."""
    head = ("units", "first parameter", "elements", "parameters", "gradients", "states")
    rows: list[tuple[str, ...]] = [head]
    pairs = list(zip(units, choice.units, strict=True))
    for tiers, group in groupby(pairs, key=lambda pair: pair[1]):
        alike = [unit for unit, _ in group]
        rows.append(
            (
                str(len(alike)),
                alike[0].names[0],
                f"{sum(unit.numel for unit in alike):,}",
                tiers.param.value,
                tiers.gradient.value,
                tiers.state.value,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    head_line = f"tiers of {plural(len(units), 'unit')}, chosen for the shortest step:"
    return [head_line, *lines, _used_line(choice), _rates_line(choice, rates)]


def _used_line(choice: TierChoice) -> str:
    limits = {Tier.DEVICE: choice.memory.device, Tier.HOST: choice.memory.host, Tier.NVME: choice.memory.disk}
    words = [
        f"{tier.value} {choice.used[tier] / 2**20:,.1f} of {limit / 2**20:,.1f} MiB"
        for tier, limit in limits.items()
        if limit is not None
    ]
    return "used by a rank: " + ", ".join(words)


def _rates_line(choice: TierChoice, rates: TierRates) -> str:
    named = {"device memory": rates.device, "host memory": rates.host, "to the device": rates.to_device,
             "to the host": rates.to_host, "disk read": rates.disk_read, "disk write": rates.disk_write}  # fmt: skip
    measured = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in named.items() if 0 < rate < math.inf)
    return f"updates and transfers of a step: {choice.seconds:.3g} s by the measured rates ({measured} GB/s)"
