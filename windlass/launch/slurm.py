"""What Slurm says about a job: its hosts, and how many ranks each is meant for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from windlass.launch.errors import LaunchError
from windlass.launch.quoting import check_host

_PART = re.compile(r"([^\[,]+)(?:\[([^\]]*)\])?([^\[,]*)(?:,|$)")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """`n[01-03,7]-ib,b1` as [n01-ib, n02-ib, n03-ib, n7-ib, b1].

    Raises:
        LaunchError: it is no such list.
    """
    found, at = [], 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise LaunchError(f"{text!r} is no list of hosts as Slurm writes them, at {text[at:]!r}")
        before, ranges, after = match.groups()
        found += [f"{before}{middle}{after}" for middle in (_numbers(ranges, text) if ranges is not None else [""])]
        at = match.end()
    return [check_host(name) for name in found]


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` as [2, 2, 2, 1]: tasks of each host.

    Raises:
        LaunchError: it is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise LaunchError(f"{text!r} is no list of counts as Slurm writes them, at {part!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def allocated_hosts(environ: Mapping[str, str]) -> dict[str, int]:
    """The hosts of the job that this process is in, and how many ranks each is meant for: tasks, else GPUs, else 1.

    Raises:
        LaunchError: it is in none.
    """
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not names:
        raise LaunchError("--launcher slurm outside of a job: start it by sbatch or salloc, or give --hostfile")
    hosts = expand_hosts(names)
    for variable in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if environ.get(variable) and re.fullmatch(r"[\d(),x]+", environ[variable]):
            counts = expand_counts(environ[variable])
            return dict(zip(hosts, counts if len(counts) == len(hosts) else counts[:1] * len(hosts), strict=True))
    return dict.fromkeys(hosts, 1)


def _numbers(ranges: str, text: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LaunchError(f"{text!r} is no list of hosts as Slurm writes them, at {part!r}")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found
