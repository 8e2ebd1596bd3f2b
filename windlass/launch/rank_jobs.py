"""Commands and environments of the ranks of one host, from a launch plan."""

from __future__ import annotations

import os
from collections.abc import Mapping

from windlass.base.log import logger
from windlass.comm.addresses import gloo_at_loopback
from windlass.launch import core_binding as own_cores
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.rank_placement import RankPlacement
from windlass.launch.rank_processes import RankJob
from windlass.launch.visible_devices import VISIBLE_DEVICES_VARIABLE, available_devices, count_devices, select_devices

RESTARTS = "WINDLASS_RESTARTS"
"""Variable in the ranks' environment: number of restarts of the run so far."""


def make_rank_jobs(plan: LaunchPlan, node: int, master: tuple[str, int]) -> list[RankJob]:
    """Return the jobs of the ranks of host number `node`, which is this machine.

    Args:
        master: rendezvous address and port.

    Raises:
        LaunchError: this machine lacks devices or cores of the plan.
    """
    places = plan.rank_placements(node)
    shared = {**_inherited_environment(), **plan.env, **_run_environment(plan, master)}
    if len(plan.hosts) == 1:
        shared |= gloo_at_loopback(shared)
    devices = _selected_devices(plan, node, shared)
    cores = own_cores.bindable_cores(plan.bind_core_list) if plan.bind_cores_to_rank else None
    if cores is None:
        shared |= _thread_environment(len(places), shared)
    found = []
    for place in places:
        environment = {**shared, **place.environment()}
        if devices is not None:
            environment |= _visible_device_environment(plan, place, devices)
        if plan.virtual_local_rank:
            environment["LOCAL_RANK"] = "0"
        if cores is not None:
            local = own_cores.core_share(cores, len(places), place.local_rank)
            environment |= {own_cores.CORES_VARIABLE: ",".join(map(str, local)), "OMP_NUM_THREADS": str(len(local))}
        found.append(RankJob(place.rank, plan.program.argv_for_rank(place.local_rank), environment))
    return found


def threads_per_rank(nproc: int) -> int:
    """Return an equal share of the cores that this process may use, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // nproc)


def _inherited_environment() -> dict[str, str]:
    """Return this process's environment without TORCHELASTIC_ variables, which describe another launcher's store."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}


def _run_environment(plan: LaunchPlan, master: tuple[str, int]) -> dict[str, str]:
    values = {
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "ROLE_NAME": plan.role,
        RESTARTS: str(plan.restarts),
    }
    if not plan.use_agent_store:
        return values
    return {
        **values,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(plan.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _selected_devices(plan: LaunchPlan, node: int, environ: Mapping[str, str]) -> list[str] | None:
    host = plan.hosts[node]
    if plan.use_devices or plan.virtual_local_rank:
        return select_devices(host.slots, available_devices(environ, count_devices()), host.name)
    if host.slots == tuple(range(len(host.slots))):
        return None
    # Slot numbers have gaps, because slots were lost: hide the devices of lost slots. If there are fewer devices than
    # slots, hide none.
    devices, last = available_devices(environ, count_devices()), int(host.slots[-1])
    if last >= len(devices):
        return None
    return [device for index, device in enumerate(devices) if index in host.slots or index > last]


def _visible_device_environment(plan: LaunchPlan, place: RankPlacement, devices: list[str]) -> dict[str, str]:
    return {VISIBLE_DEVICES_VARIABLE: devices[place.local_rank] if plan.virtual_local_rank else ",".join(devices)}


def _thread_environment(nproc: int, given: Mapping[str, str]) -> dict[str, str]:
    if "OMP_NUM_THREADS" in given:
        return {}
    threads = threads_per_rank(nproc)
    subject = f"for each of {nproc} ranks, their" if nproc > 1 else "for the rank, its"
    logger.info("OMP_NUM_THREADS=%d %s share of the cores (set it to choose)", threads, subject)
    return {"OMP_NUM_THREADS": str(threads)}
