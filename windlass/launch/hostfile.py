"""Selection of hosts and slots: the hostfile, and the filters of `--include` and `--exclude`.

A slot is a place for one rank, usually a GPU.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from windlass.base.bounded_input import MAX_RANKS_PER_HOST, parse_int, read_bounded
from windlass.base.bounded_json import parse_json
from windlass.base.errors import WindlassError
from windlass.base.log import logger
from windlass.base.text import one_line
from windlass.launch.launch_errors import LaunchError
from windlass.launch.shell_quoting import check_host_name

DEFAULT_HOSTFILE = "/job/hostfile"
"""Default path of the hostfile for the `deepspeed` command."""

_MAX_BYTES = 16 * 2**20
_LINE = re.compile(r"^(\S+)\s+slots=(\d+)")


class HostError(LaunchError, ValueError):
    """Error for an invalid hostfile or filter. Also a ValueError, which scripts that parse hostfiles expect."""


def fetch_hostfile(hostfile_path: str | Path) -> dict[str, int] | None:
    """Read hosts and their numbers of slots, in the order of the file. Warn and return None if there is no file.

    A line is `HOST slots=N`. The rest of a line is ignored, and so are empty lines and those that begin with `#`.

    Raises:
        HostError: the file cannot be read, is larger than 16 MiB or is not text; a line has another form or too many
            slots, a host is named twice, or there is no host.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("no hostfile at %s: only this machine is used", path)
        return None
    try:
        data = read_bounded(path, _MAX_BYTES)
        text = (data or b"").decode("utf-8-sig")  # utf-8-sig, because some Windows editors write a byte order mark
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror or error}; give a file that you may read") from None
    except UnicodeDecodeError as error:
        raise HostError(f"{path} is not a text file: {error}; write a line HOST slots=N for each host") from None
    if data is None:
        raise HostError(f"{path} has more than {_MAX_BYTES // 2**20} MiB; a hostfile has a line for each host")
    return parse_hostfile(text.splitlines(), source=str(path))


def parse_hostfile(lines: Iterable[str], source: str = "the hostfile") -> dict[str, int]:
    """Parse the lines of a hostfile, and raise the same errors as `fetch_hostfile`. `source` is its name in errors."""
    pool: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise HostError(f"{source}, line {number}: {one_line(line, 200)!r} is a bad entry; write HOST slots=N")
        name, slots = match[1], parse_int(match[2])
        if slots is None or slots > MAX_RANKS_PER_HOST:
            raise HostError(
                f"{source}, line {number}: {name} has slots={one_line(match[2], 40)}; a host has at most "
                f"{MAX_RANKS_PER_HOST:,}"
            )
        try:
            check_host_name(name)
        except WindlassError as error:
            raise HostError(f"{source}, line {number}: {error}") from None
        if name in pool:
            raise HostError(f"{source}, line {number}: {name} is listed already; write one entry for each host")
        pool[name] = slots
    if not pool:
        raise HostError(f"{source} is empty; write a line HOST slots=N for each host")
    return pool


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the hosts and slots that a filter leaves, in the order of `host_info`.

    A filter is `NODE[@NODE...]`, where NODE is `NAME[:SLOT[,SLOT...]]`; NAME alone means all slots of that host.
    `include_str` lists slots to use, `exclude_str` slots to drop. A host without slots is left out.

    Raises:
        HostError: both filters are given, a host or slot is unknown, or a slot is not a number.
    """
    if include_str and exclude_str:
        raise HostError("--include and --exclude together; give one of them")
    if not include_str and not exclude_str:
        return {name: list(slots) for name, slots in host_info.items()}
    named, whole = _parse_filter(include_str or exclude_str, host_info)
    for name, numbers in named.items():
        if name not in host_info:
            raise HostError(f"host {name!r} is not in the hostfile; there are {', '.join(host_info)}")
        unknown = [slot for slot in numbers if slot not in host_info[name]]
        if unknown:
            there = ",".join(map(str, host_info[name])) or "none"
            raise HostError(f"host {name!r} has no slot {unknown[0]}; there are {there}")
    left: dict[str, list[int]] = {}
    for name, slots in host_info.items():
        chosen = slots if name in whole else named.get(name, [])
        kept = list(chosen) if include_str else [slot for slot in slots if slot not in chosen]
        if kept:
            left[name] = list(dict.fromkeys(kept))
    return left


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Filter hosts as `parse_resource_filter` does, with a number of slots per host in place of a list."""
    return parse_resource_filter({name: list(range(n)) for name, n in resource_pool.items()}, inclusion, exclusion)


def limit_hosts(active: Mapping[str, Sequence[int]], num_nodes: int = -1, num_slots: int = -1) -> dict[str, list[int]]:
    """Return the first `num_nodes` hosts, each with slots 0 to `num_slots` - 1, even if the host has fewer.

    A host without slots keeps none. A number below 1 leaves the hosts or the slots unchanged.

    Raises:
        HostError: there are fewer hosts.
    """
    if num_nodes > len(active):
        raise HostError(f"{num_nodes} nodes are requested, and the hostfile has {len(active)}; request fewer")
    kept = list(active.items())[: num_nodes if num_nodes > 0 else None]
    return {name: list(range(num_slots)) if num_slots > 0 and slots else list(slots) for name, slots in kept}


def encode_world_info(world_info: Mapping[str, Sequence[int | str] | int]) -> str:
    """Encode `{host: [slot, ...]}` or `{host: number of slots}` as URL-safe base64 of JSON.

    The result needs no quotes in a shell.
    """
    text = json.dumps({name: slots if isinstance(slots, int) else list(slots) for name, slots in world_info.items()})
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_world_info(text: str) -> dict[str, list[int | str]]:
    """Decode a result of `encode_world_info` that lists slots.

    Raises:
        HostError: the text is not base64 of `{host: [slot, ...]}`.
    """
    try:
        found = parse_json(base64.urlsafe_b64decode(text.encode()))
        if wrong := [name for name, slots in found.items() if not isinstance(slots, list)]:
            raise ValueError(f"{wrong[0]!r} has no list of slots")
        return dict(found)
    except (ValueError, AttributeError) as error:
        raise HostError(f"{one_line(text, 200)!r} is not base64 of {{host: [slot, ...]}}: {error}") from None


def _parse_filter(text: str, known: Container[str]) -> tuple[dict[str, list[int]], set[str]]:
    """Return the named slots by host, and the hosts that are named without slots. Entries of one host are merged.

    Args:
        known: host names, which may contain separators themselves: `user@host`, IPv6 addresses.
    """
    found: dict[str, list[int]] = {}
    whole: set[str] = set()
    for node in _split_filter(text, known):
        name, colon, slots = node.rpartition(":") if ":" in node and node not in known else (node, "", "")
        try:
            numbers = [_parse_slot(slot) for slot in slots.split(",")] if colon else []
        except ValueError:
            raise HostError(
                f"{node!r} in {text!r} is not NAME[:SLOT[,SLOT...]]; slots are numbers below {MAX_RANKS_PER_HOST:,}"
            ) from None
        if not name:
            raise HostError(f"{text!r} names no host before {node!r}; write NAME[:SLOT[,SLOT...]][@...]")
        found[name] = sorted({*found.get(name, []), *numbers})
        if not colon:
            whole.add(name)
    return found, whole


def _parse_slot(text: str) -> int:
    number = parse_int(text)
    if number is None or not 0 <= number < MAX_RANKS_PER_HOST:
        raise ValueError(text)
    return number


def _split_filter(text: str, known: Container[str]) -> list[str]:
    """Split a filter at `@`, except inside the name of a known host."""
    found: list[str] = []
    for part in text.split("@"):
        joined = f"{found[-1]}@{part}" if found else part
        host, _, slots = joined.rpartition(":")
        if any("@" in name and name in known for name in (joined, "" if "@" in slots else host)):
            found[-1] = joined
        else:
            found.append(part)
    return found
