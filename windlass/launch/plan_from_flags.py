"""Conversion of command line flags to a launch plan: hosts, devices, and rejected flags."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Mapping

from windlass.base.bounded_input import MAX_HOSTS, MAX_RANKS, MAX_RANKS_PER_HOST, parse_int
from windlass.base.log import logger
from windlass.base.text import one_line, plural
from windlass.comm.slurm import allocated_hosts
from windlass.launch.hostfile import (
    HostError,
    fetch_hostfile,
    limit_hosts,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import FORWARDED_SIGNALS, LaunchPlan
from windlass.launch.program import Program
from windlass.launch.rank_placement import Host
from windlass.launch.visible_devices import (
    VISIBLE_DEVICES_VARIABLE,
    available_devices,
    count_devices,
    slurm_device_environment,
)

DEFAULT_MASTER_PORT = 29500
"""Default rendezvous port if each host, or another launcher, starts the ranks."""

_UNHANDLED_SIGNALS = ("SIGKILL", "SIGSTOP")
_RENDEZVOUS_FLAGS = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
_RENDEZVOUS_ONLY_FLAGS = (
    "local_addr",
    "logs_specs",
    "numa_binding",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
)
_PLACEMENT_FLAGS = (
    *("nproc", "nnodes", "hostfile", "launcher", "master_addr", "master_port", "include", "exclude"),
    *("servers", "replicas", "workers"),
    *("standalone", *_RENDEZVOUS_FLAGS),
)


def has_placement_flags(args: argparse.Namespace) -> bool:
    """Return True if a flag gives the placement of ranks. Ranks are then started even inside another launcher.

    A command's own defaults (`args.assumed`) do not count.
    """
    assumed = getattr(args, "assumed", {})
    given = [name for name in _PLACEMENT_FLAGS if getattr(args, name) and getattr(args, name) != assumed.get(name)]
    return bool(given) or max(args.num_gpus, args.num_nodes, args.node_rank) >= 0


def needs_rendezvous(args: argparse.Namespace) -> bool:
    """Return True if hosts find each other by torch's elastic agent.

    Raises:
        LaunchError: `--standalone` is given with a rendezvous flag.
    """
    given = [name for name in _RENDEZVOUS_FLAGS if getattr(args, name)]
    if args.standalone:
        if given:
            raise LaunchError(f"--standalone with --{given[0]}; one machine needs no rendezvous: leave one of them out")
        return False
    return (
        ":" in (args.nnodes or "")
        and len(set(args.nnodes.split(":"))) > 1
        or (bool(given) and args.rdzv_backend not in (None, "static"))
    )


def reject_unsupported_flags(args: argparse.Namespace) -> None:
    """Reject known flags that are not supported, or that need another flag, which is missing.

    Raises:
        LaunchError: such a flag is given, or KMP_AFFINITY contradicts `--bind_cores_to_rank`.
    """
    if args.start_method != "spawn":
        raise LaunchError(
            f"--start_method {args.start_method} is not supported, because ranks are separate programs; leave it at "
            "spawn"
        )
    if args.elastic_training or args.min_elastic_nodes is not None:
        raise LaunchError(
            "--elastic_training, --min_elastic_nodes, --max_elastic_nodes are not supported; use --max-restarts K"
        )
    for name in _RENDEZVOUS_ONLY_FLAGS:
        if getattr(args, name):
            raise LaunchError(f"--{name} only applies to torch's rendezvous (--rdzv_backend c10d); leave it out")
    if args.event_log_handler != "null":
        raise LaunchError("--event_log_handler only applies to torch's rendezvous; leave it out")
    for name in ("rdzv_id", "rdzv_conf"):
        if getattr(args, name):
            raise LaunchError(f"--{name} needs --rdzv_backend c10d or another that is not static")
    if args.bind_core_list is not None and not args.bind_cores_to_rank:
        raise LaunchError("--bind_core_list needs --bind_cores_to_rank")
    if args.bind_cores_to_rank and "KMP_AFFINITY" in os.environ:
        raise LaunchError("--bind_cores_to_rank: KMP_AFFINITY is set, which binds threads differently; unset it")


def program_from_args(args: argparse.Namespace) -> Program:
    """Return the program that each rank runs.

    Raises:
        LaunchError: flags contradict each other, or a path is not absolute.
    """
    chosen = [name for name in ("module", "no_python", "run_path") if getattr(args, name)]
    if len(chosen) > 1:
        raise LaunchError(f"--{chosen[0]} and --{chosen[1]} together; give one of them")
    kinds = {"module": "module", "no_python": "command", "run_path": "run_path"}
    if args.run_path and not os.path.isabs(args.words[0]):
        raise LaunchError(f"--run_path {args.words[0]}: give an absolute path")
    kind = kinds[chosen[0]] if chosen else "script"
    return Program(tuple(args.words), kind, passes_local_rank=getattr(args, "give_local_rank", False))


def plan_from_args(args: argparse.Namespace, env: Mapping[str, str]) -> LaunchPlan:
    """Build the launch plan from the flags, without the exported variables and directory that other hosts need.

    Raises:
        LaunchError: flags contradict each other, a hostfile or filter is invalid, or devices are not available.
    """
    if args.rdzv_endpoint:  # a static endpoint; other rendezvous backends are handled by the torch agent
        address, colon, port = args.rdzv_endpoint.rpartition(":")
        args.master_addr = args.master_addr or (address if colon else port)
        args.master_port = args.master_port or (parse_int(port) if colon else None)
    if args.master_port is not None and not 0 <= args.master_port < 65536:
        raise LaunchError(f"--master-port {args.master_port} is not a port; give one from 1 to 65535, or none")
    servers = _count_servers(args)
    hosts, use_devices = hosts_from_args(args)
    if servers:
        ranks = sum(len(host.slots) for host in hosts)
        if ranks != servers + args.workers:
            raise LaunchError(
                f"--servers {args.servers} --replicas {args.replicas} --workers {args.workers} are "
                f"{servers + args.workers} ranks, and the hosts have {plural(ranks, 'slot')}; make both equal"
            )
        env = {**env, "WINDLASS_SERVERS": str(args.servers), "WINDLASS_REPLICAS": str(args.replicas)}
    env = {**slurm_device_environment(os.environ), **env}
    return LaunchPlan(
        program_from_args(args),
        hosts,
        env=env,
        master_addr=args.master_addr or None,
        master_port=args.master_port or None,
        use_agent_store=getattr(args, "keep_store", True),
        use_devices=use_devices,
        virtual_local_rank=args.virtual_local_rank,
        bind_cores_to_rank=args.bind_cores_to_rank,
        bind_core_list=args.bind_core_list,
        role=args.role,
        servers=servers,
        max_restarts=args.max_restarts,
        monitor_interval_s=args.monitor_interval,
        grace_s=args.grace,
        signals=forwarded_signals(args),
    )


def forwarded_signals(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the signals that are forwarded to ranks.

    Raises:
        LaunchError: `--signals_to_handle` names a signal that does not exist, or that no process can handle.
    """
    names = tuple((args.signals_to_handle or ",".join(FORWARDED_SIGNALS)).split(","))
    for name in names:
        if name not in signal.Signals.__members__:
            raise LaunchError(f"--signals_to_handle {args.signals_to_handle}: {name!r} is not a signal of this system")
        if name in _UNHANDLED_SIGNALS:
            raise LaunchError(
                f"--signals_to_handle {args.signals_to_handle}: no process can handle {name}; leave it out"
            )
    return names


def _count_servers(args: argparse.Namespace) -> int:
    """Return the number of parameter servers and their replicas. Without a hostfile, set `args.nproc` to that number
    plus the number of workers."""
    servers: int = getattr(args, "servers", 0)
    workers: int = getattr(args, "workers", 0)
    replicas: int = getattr(args, "replicas", 0)
    if not servers and not workers:
        if replicas:
            raise LaunchError(f"--replicas {replicas} without --servers and --workers: there is nothing to copy")
        return 0
    if not servers or not workers:
        raise LaunchError(f"--servers {servers} --workers {workers}: a parameter server job needs both; give each")
    if args.max_restarts:
        raise LaunchError(
            "--max-restarts with --servers: a lost server is started again by itself, and lost workers leave; "
            "leave --max-restarts out"
        )
    servers *= 1 + replicas
    if not args.hostfile:
        if args.nproc or args.num_gpus >= 0:
            raise LaunchError("--nproc or --num_gpus with --servers and --workers, which give the number; leave it out")
        args.nproc = str(servers + workers)
    return servers


def hosts_from_args(args: argparse.Namespace) -> tuple[tuple[Host, ...], bool]:
    """Return the hosts, and True if their slots select devices.

    Raises:
        LaunchError: flags contradict each other, a hostfile or filter is invalid, devices are not available, or there
            are too many ranks.
    """
    hosts, use_devices = _choose_hosts(args)
    ranks = sum(len(host.slots) for host in hosts)
    if ranks > MAX_RANKS:
        raise LaunchError(
            f"{plural(ranks, 'rank')} on {plural(len(hosts), 'host')}; at most {MAX_RANKS:,} are supported"
        )
    return hosts, use_devices


def count_ranks(args: argparse.Namespace) -> int:
    """Return the number of ranks that the flags request. Raises like `hosts_from_args`."""
    return sum(len(host.slots) for host in hosts_from_args(args)[0])


def _choose_hosts(args: argparse.Namespace) -> tuple[tuple[Host, ...], bool]:
    pool = fetch_hostfile(args.hostfile) if args.hostfile else None
    filtered = bool(args.include or args.exclude)
    if filtered and (args.num_nodes >= 0 or args.num_gpus >= 0 or args.nproc or args.nnodes):
        raise HostError("--include or --exclude with a number of nodes, GPUs or ranks; give filters or numbers")
    if args.num_gpus >= 0 and args.nproc:
        raise LaunchError("--num_gpus and --nproc together; give one of them")
    if args.num_nodes >= 0 and args.nnodes:
        raise LaunchError("--num_nodes and --nnodes together; give one of them")
    nodes = _parse_count(args.nnodes.partition(":")[0], "--nnodes", MAX_HOSTS) if args.nnodes else args.num_nodes
    if pool is None and args.launcher == "slurm":
        pool = _slurm_pool()
    if pool is not None:
        return _hosts_from_pool(args, pool, nodes), True
    if args.num_nodes > 1:
        raise HostError(f"--num_nodes {args.num_nodes} and no hostfile names other hosts; give --hostfile FILE")
    slots, use_devices = _local_slots(args)
    if nodes > 1:
        if args.standalone:
            raise LaunchError(f"--standalone is one machine, --nnodes is {nodes}; leave one of them out")
        return tuple(Host(f"node {node}", slots) for node in range(nodes)), use_devices
    return (Host("localhost", slots),), use_devices


def _slurm_pool() -> dict[str, int]:
    pool = allocated_hosts(os.environ)
    if not pool:
        raise LaunchError("--launcher slurm outside of a job: start it by sbatch or salloc, or give --hostfile")
    return pool


def _hosts_from_pool(args: argparse.Namespace, pool: Mapping[str, int], nodes: int) -> tuple[Host, ...]:
    active = parse_inclusion_exclusion(pool, args.include, args.exclude)
    each = args.num_gpus
    if args.nproc:
        if not str(args.nproc).isdecimal():
            raise LaunchError(
                f"--nproc {one_line(str(args.nproc), 60)} with a hostfile, whose slots set the number; give a number, "
                "or none"
            )
        each = _parse_count(args.nproc, "--nproc")
    if VISIBLE_DEVICES_VARIABLE in os.environ:
        logger.warning(
            "%s=%s is for this machine and is not exported to the hosts of the hostfile; choose with --include",
            VISIBLE_DEVICES_VARIABLE,
            os.environ[VISIBLE_DEVICES_VARIABLE],
        )
    active = {name: slots for name, slots in limit_hosts(active, nodes, each).items() if slots}
    if not active:
        raise LaunchError("the hostfile and its filters leave no slot; nothing would run")
    return tuple(Host(name, tuple(slots)) for name, slots in active.items())


def _local_slots(args: argparse.Namespace) -> tuple[tuple[int | str, ...], bool]:
    """Return the slots of this machine, and True if they select devices."""
    if args.nproc and str(args.nproc).lstrip("-").isdecimal():
        number = _parse_count(args.nproc, "--nproc")
        return tuple(range(number)), False
    given = available_devices(os.environ, count_devices())
    if args.nproc:
        return tuple(range(_count_of_kind(str(args.nproc), len(given)))), False
    if args.include or args.exclude:
        return _filter_slots(args, given), True
    local_size = 1 if given else _default_local_size()
    if args.num_gpus > 0:
        if given and args.num_gpus > len(given):
            raise LaunchError(
                f"--num_gpus {args.num_gpus}, and this machine has {len(given)} ({','.join(given)}); request fewer, "
                f"or set {VISIBLE_DEVICES_VARIABLE}"
            )
        return tuple(range(args.num_gpus)), True
    if args.num_gpus == 0:
        raise LaunchError("--num_gpus 0 leaves no rank; leave it out, and set CUDA_VISIBLE_DEVICES= for CPU ranks")
    return tuple(range(len(given) or local_size)), False


def _default_local_size() -> int:
    """Return the variable `LOCAL_SIZE`, the number of ranks on a host without devices; 1 if it is not valid."""
    number = parse_int(os.environ.get("LOCAL_SIZE", ""))
    return number if number is not None and 1 <= number <= MAX_RANKS_PER_HOST else 1


def _filter_slots(args: argparse.Namespace, given: list[str]) -> tuple[int | str, ...]:
    if given and not all(name.isdecimal() for name in given):
        raise LaunchError(
            f"{VISIBLE_DEVICES_VARIABLE}={','.join(given)} contains names, and --include and --exclude take numbers; "
            "leave them out"
        )
    numbers = [int(name) for name in given]
    if not numbers:  # CPU ranks: slots do not select devices, only their number counts
        named = [parse_int(slot) for slot in re.findall(r"(?<=[:,])\d+", args.include)]
        highest = max((slot for slot in named if slot is not None), default=0)
        numbers = list(range(max(_default_local_size(), min(highest, MAX_RANKS_PER_HOST) + 1)))
    left = parse_resource_filter({"localhost": numbers}, args.include, args.exclude)
    if not left:
        raise LaunchError(f"--exclude {args.exclude} leaves no slot; nothing would run")
    return tuple(str(slot) for slot in left["localhost"])


def _count_of_kind(kind: str, devices: int) -> int:
    cores = os.cpu_count() or 1
    if kind == "gpu" and devices == 0:
        raise LaunchError("--nproc gpu, and this machine has no GPU; give a number")
    known = {"gpu": devices, "cpu": cores, "auto": devices or cores}
    if kind not in known:
        raise LaunchError(f"--nproc {one_line(kind, 60)} is neither a number nor gpu, cpu or auto")
    return known[kind]


def _parse_count(text: str, flag: str, maximum: int = MAX_RANKS_PER_HOST) -> int:
    number = parse_int(text)
    shown = one_line(text, 60)
    if number is None and not text.lstrip("-").isdecimal():
        raise LaunchError(f"{flag} {shown} is not a number")
    if number is None or number > maximum:
        raise LaunchError(f"{flag} is {shown}; at most {maximum:,} are supported")
    if number < 1:
        raise LaunchError(f"{flag} is {shown}; at least one is needed")
    return number
