"""Slurm environment: hosts of a job or step, number of tasks per host, and a common port derived from the job's and
step's ids."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

from windlass.base.bounded_input import MAX_HOSTS, MAX_RANKS_PER_HOST, parse_int
from windlass.base.errors import CommunicationError

Environment = Mapping[str, str]
# Ports below the range that systems assign automatically (from 32768 on Linux).
_FIRST_PORT, _PORTS = 15000, 16384
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_JOB_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")


def expand_hosts(text: str) -> list[str]:
    """Expand `n[01-03,7]-ib,b1` to [n01-ib, n02-ib, n03-ib, n7-ib, b1]. A name may have several brackets.

    Raises:
        CommunicationError: `text` is not a host list, or has more than `MAX_HOSTS` hosts.
    """
    found: list[str] = []
    for name in re.split(r",(?![^\[]*\])", text.strip()):
        parts = re.split(r"\[([^\[\]]*)\]", name)  # alternately text and the content of brackets
        if not name or not all(re.fullmatch(r"[\w.-]*", part) for part in parts[::2]):
            raise CommunicationError(f"{text!r} is not a Slurm host list, at {name!r}; write one like n[01-03,7],b1")
        choices = [_numbers(part, text) if at % 2 else [part] for at, part in enumerate(parts)]
        if math.prod(map(len, choices)) + len(found) > MAX_HOSTS:
            raise CommunicationError(f"{text!r} names more than {MAX_HOSTS:,} hosts; name fewer")
        found += map("".join, itertools.product(*choices))
    return found


def expand_counts(text: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1], the number of tasks on each host.

    Raises:
        CommunicationError: `text` is not a list of counts, or exceeds `MAX_RANKS_PER_HOST` tasks or `MAX_HOSTS` hosts.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise CommunicationError(f"{text!r} is not a Slurm list of counts, at {part!r}")
        tasks, hosts = parse_int(match[1]), parse_int(match[2] or "1")
        if tasks is None or hosts is None or tasks > MAX_RANKS_PER_HOST or hosts > MAX_HOSTS:
            raise CommunicationError(
                f"{part!r} of Slurm's list of counts {text!r:.80} exceeds {MAX_RANKS_PER_HOST:,} tasks on a host or "
                f"{MAX_HOSTS:,} hosts; start fewer ranks"
            )
        found += [tasks] * hosts
    return found


def is_step(environ: Environment) -> bool:
    """Return True if srun started this process; False for a batch script, which has variables of a task too."""
    return any(environ.get(name) for name in _STEP)


def hosts_of_step(environ: Environment) -> list[str]:
    """Return the hosts of this process's step, or else of its job. Empty if Slurm sets neither host list.

    Raises:
        CommunicationError: the variable is not a host list.
    """
    nodes = next((environ[name] for name in ("SLURM_STEP_NODELIST", *_JOB_LISTS) if environ.get(name)), "")
    return expand_hosts(nodes) if nodes else []


def tasks_here(environ: Environment) -> int | None:
    """Return the number of tasks of the step on this host, or None if it is unknown.

    Raises:
        CommunicationError: the variable is not a list of counts.
    """
    text, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), environ.get("SLURM_NODEID", "0")
    if not text or not node.isdecimal():
        return None
    counts = expand_counts(text)
    return counts[int(node)] if int(node) < len(counts) else None


def allocated_hosts(environ: Environment) -> dict[str, int]:
    """Return the hosts of this process's job, with the number of ranks for each: its tasks, else its GPUs, else 1.

    Returns:
        `{host: number of ranks}`; empty outside of a job.

    Raises:
        CommunicationError: a variable is not a list of hosts or counts.
    """
    names = next((environ[name] for name in _JOB_LISTS if environ.get(name)), "")
    if not names:
        return {}
    hosts = expand_hosts(names)
    for variable in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        # Skip values in any other format than a number or a list like `4(x2)`.
        if environ.get(variable) and re.fullmatch(r"[\d(),x]+", environ[variable]):
            counts = expand_counts(environ[variable])
            return dict(zip(hosts, counts if len(counts) == len(hosts) else counts[:1] * len(hosts), strict=True))
    return dict.fromkeys(hosts, 1)


def port_of(job: int, step: int) -> int:
    """Return a port that is equal for all tasks of a job step, and usually differs between steps."""
    return _FIRST_PORT + (job + 1009 * step) % _PORTS


def _numbers(ranges: str, text: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        begin, end = parse_int(first), parse_int(last or first)
        if begin is None or end is None or (dash and not last) or not 0 <= begin <= end < begin + MAX_HOSTS:
            raise CommunicationError(f"{text!r} is not a Slurm host list, at {part!r}; write one like n[01-03,7],b1")
        found += [str(number).zfill(len(first)) for number in range(begin, end + 1)]
    return found
