"""Cluster files: TOML with a device, a host and a network.

A file may name known parts and replace any of their values, e.g. by measured ones. Rates are `400Gbps`, `25GB/s` or
`989TFLOP/s`, times `5us`, sizes `80GB`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.base.byte_counts import parse_bytes
from windlass.base.errors import ConfigError
from windlass.base.regular_file import read_regular
from windlass.simulate.cluster import TOPOLOGIES, Cluster, ExplicitLink, Network
from windlass.simulate.hardware_parts import (
    CLUSTERS,
    DEVICES,
    HOSTS,
    DevicePart,
    HostPart,
    LinkPart,
    parse_rate,
    parse_seconds,
)

_MESHES = ("switch", "mesh", "ring")
_LINK_KEYS = {"rate", "latency", "efficiency"}
_TOP = {"name", "cluster", "hosts", "device", "host", "network", "switches", "links", "device_mtbf_hours", "overlaps"}
_DEVICE = {"part", "flops", "memory", "memory_rate", "matmul_efficiency", "attention_efficiency", "memory_efficiency",
           "launch"}  # fmt: skip
_HOST = {"part", "devices", "device_link", "nic", "nics", "mesh", "host_link", "memory_rate", "disk_read", "disk_write",
         "axis_links"}  # fmt: skip
_DTYPES = ("fp8", "bf16", "fp16", "fp32", "fp64")
_LEAST_OVERSUBSCRIPTION = 1e-6
_NETWORK = {"topology", "hosts_per_leaf", "oversubscription", "shape", "switch_latency"}
_LINKED_AXES = {"tp", "sp", "ep", "pp"}
_EXPLICIT = {"from", "to", *_LINK_KEYS}
MAX_HOSTS = 1 << 20
_HOUR = 3600.0


def load_cluster(source: str, world_size: int) -> Cluster:
    """Return a known cluster by name, or the cluster of a file, with enough hosts for `world_size` ranks.

    A file that sets `hosts` has exactly this number of hosts.

    Raises:
        ConfigError: there is no such cluster or file, or the file has a mistake. The message names the key, its value
            and the fix.
    """
    if source in CLUSTERS:
        return known_cluster(source).with_devices(world_size)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"--cluster {source!r} is neither a known cluster nor a file; write one of {', '.join(CLUSTERS)}, or the "
            "path of a cluster file"
        )
    try:
        data = tomllib.loads(read_regular(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not TOML: {error}; correct the file") from None
    return parse_cluster(data, source, world_size)


def known_cluster(name: str, hosts: int = 1) -> Cluster:
    """Return the cluster of this name in `CLUSTERS`, with `hosts` hosts."""
    known = CLUSTERS[name]
    host = HOSTS[known.host]
    return Cluster(
        DEVICES[known.device], host, hosts, Network(known.topology), overlaps=host.host_link is not None, name=name
    )


def parse_cluster(data: Mapping[str, Any], source: str, world_size: int = 1) -> Cluster:
    """Return the cluster of a file's content.

    Raises:
        ConfigError: see `load_cluster`.
    """
    reader = _Reader(source)
    reader.check_keys(data, _TOP, "")
    base = CLUSTERS.get(reader.text(data, "cluster", "", choices=tuple(CLUSTERS))) if "cluster" in data else None
    device = reader.device(reader.table(data, "device"), base.device if base else None)
    table = reader.table(data, "host")
    host = reader.host(table, base.host if base else None)
    if host.host_link is None and "memory_rate" not in table:
        # Devices without memory of their own use the host's, whose rate the file gives as that of device memory.
        host = replace(host, memory_rate=device.memory_rate * device.memory_efficiency * host.devices)
    needed = -(-world_size // host.devices)
    hosts = reader.integer(data, "hosts", needed, most=MAX_HOSTS)
    if hosts > 1 and "nic" not in table and "part" not in table and base is None:
        raise reader.missing_link("nic")
    links = reader.links(data, hosts, host.devices)
    network = reader.network(reader.table(data, "network"), base.topology if base else "switch", links)
    cluster = Cluster(
        device,
        host,
        hosts,
        network,
        device_mtbf=reader.number(data, "device_mtbf_hours", 0.0) * _HOUR,
        overlaps=reader.flag(data, "overlaps", host.host_link is not None),
        name=reader.text(data, "name", source),
    )
    reader.check_connected(cluster)
    return cluster if "hosts" in data else cluster.with_devices(world_size)


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source

    def fail(self, key: str, value: object, problem: str) -> ConfigError:
        """Return an error that names the file, the key and its value."""
        return ConfigError(f"{self._source}: {key} = {value!r} {problem}")

    def check_keys(self, table: Mapping[str, Any], known: set[str], where: str) -> None:
        """Raise ConfigError for a key that does not exist."""
        for key, value in table.items():
            if key not in known:
                raise self.fail(f"{where}{key}", value, f"is not a key; the keys are {', '.join(sorted(known))}")

    def table(self, data: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Return the table under a key; an empty one if the key is absent."""
        found = data.get(key, {})
        if not isinstance(found, dict):
            raise self.fail(key, found, f"is not a table; write [{key}]")
        return found

    def text(self, table: Mapping[str, Any], key: str, default: str, *, choices: tuple[str, ...] = ()) -> str:
        """Return the string under a key, checked to be one of `choices`; without choices, any string."""
        found = table.get(key, default)
        if not isinstance(found, str) or (choices and found not in choices):
            raise self.fail(
                key,
                found,
                f"does not exist; write one of {', '.join(choices)}"
                if choices
                else "is not a string; write it in quotes",
            )
        return found

    def number(
        self, table: Mapping[str, Any], key: str, default: float, *, where: str = "", most: float = 1e18
    ) -> float:
        """Return the number under a key, checked to be between 0 and `most`."""
        found = table.get(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= most:
            raise self.fail(f"{where}{key}", found, f"is not a number from 0 to {most:g}")
        return float(found)

    def integer(self, table: Mapping[str, Any], key: str, default: int, *, where: str = "", most: int = 1 << 20) -> int:
        """Return the integer under a key, checked to be between 1 and `most`."""
        found = table.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
            raise self.fail(f"{where}{key}", found, f"is not a whole number from 1 to {most}")
        return found

    def flag(self, table: Mapping[str, Any], key: str, default: bool) -> bool:
        """Return the boolean under a key."""
        found = table.get(key, default)
        if not isinstance(found, bool):
            raise self.fail(key, found, "is not a boolean; write true or false")
        return found

    def rate(self, table: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
        """Return the rate under a key. The key is required if `default` is None."""
        if key not in table and default is not None:
            return default
        if key not in table:
            raise ConfigError(f'{self._source}: {where}{key} is missing; write e.g. {key} = "25GB/s"')
        return parse_rate(table[key], f"{self._source}: {where}{key}")

    def link(
        self, table: Mapping[str, Any], key: str, default: LinkPart | None, inside: str = "host."
    ) -> LinkPart | None:
        """Return the link under a key: a rate, or a table of rate, latency and efficiency."""
        if key not in table:
            return default
        found, where = table[key], f"{inside}{key}."
        if not isinstance(found, dict):
            rate = parse_rate(found, f"{self._source}: {inside}{key}")
            return replace(default, rate=rate) if default is not None else LinkPart(rate)
        self.check_keys(found, _LINK_KEYS, where)
        return self.link_part(found, default, where)

    def link_part(self, table: Mapping[str, Any], default: LinkPart | None, where: str) -> LinkPart:
        """Return the link that a table describes by rate, latency and efficiency."""
        base = default or LinkPart(0.0)
        latency = table.get("latency", base.latency)
        return LinkPart(
            self.rate(table, "rate", default.rate if default else None, where),
            parse_seconds(latency, f"{self._source}: {where}latency"),
            self.share(table, "efficiency", base.efficiency, where),
        )

    def share(self, table: Mapping[str, Any], key: str, default: float, where: str, *, least: float = 1e-6) -> float:
        """Return the fraction under a key, checked to be at least `least` and at most 1."""
        found = self.number(table, key, default, where=where, most=1.0)
        if found < least:
            raise self.fail(f"{where}{key}", found, "must be above 0")
        return found

    def device(self, table: dict[str, Any], base: str | None) -> DevicePart:
        """Return the device that a table describes by its differences from a known device."""
        self.check_keys(table, _DEVICE, "device.")
        name = table.get("part", base)
        if name is not None and name not in tuple(DEVICES):  # tuple: `name` may be a list, which a dict cannot look up
            raise self.fail("device.part", name, f"is not a known device; write one of {', '.join(DEVICES)}")
        if name is None:
            missing = [key for key in ("flops", "memory", "memory_rate") if key not in table]
            if missing:
                raise ConfigError(
                    f"{self._source}: device.{missing[0]} is missing; write it (`windlass bench device` measures it), "
                    f"or device.part = one of {', '.join(DEVICES)}"
                )
        part = DEVICES[name] if name is not None else DevicePart("device", {}, 1, 1.0)
        flops = table.get("flops", part.flops)
        if not isinstance(flops, dict) or not flops:
            raise self.fail("device.flops", flops, 'is not a table of rates by dtype; write e.g. {bf16 = "989TFLOP/s"}')
        for key in flops:
            if key not in _DTYPES:
                raise ConfigError(
                    f"{self._source}: device.flops.{key} is not a dtype; write one of {', '.join(_DTYPES)}"
                )
        memory = part.memory
        if "memory" in table:
            memory = parse_bytes(str(table["memory"]), f"{self._source}: device.memory")
            if memory <= 0:
                raise self.fail("device.memory", table["memory"], "must be above 0")
        return replace(
            part,
            flops={str(key): parse_rate(value, f"{self._source}: device.flops.{key}") for key, value in flops.items()},
            memory=memory,
            memory_rate=self.rate(table, "memory_rate", part.memory_rate, "device."),
            matmul_efficiency=self.share(table, "matmul_efficiency", part.matmul_efficiency, "device."),
            attention_efficiency=self.share(
                table, "attention_efficiency", part.attention_efficiency, "device.", least=0.0
            ),
            memory_efficiency=self.share(table, "memory_efficiency", part.memory_efficiency, "device."),
            launch_seconds=parse_seconds(table.get("launch", part.launch_seconds), f"{self._source}: device.launch"),
        )

    def host(self, table: dict[str, Any], base: str | None) -> HostPart:
        """Return the host that a table describes by its differences from a known host."""
        self.check_keys(table, _HOST, "host.")
        name = table.get("part", base)
        if name is not None and name not in tuple(HOSTS):
            raise self.fail("host.part", name, f"is not a known host; write one of {', '.join(HOSTS)}")
        part = HOSTS[name] if name is not None else None
        device_link = self.link(table, "device_link", part.device_link if part else None)
        nic = self.link(table, "nic", part.nic if part else None)
        if device_link is None:
            raise self.missing_link("device_link", " (`windlass bench transport --collectives all` measures it)")
        nic = nic or device_link  # without a part, `parse_cluster` refuses a second host
        part = part or HostPart("host", 1, device_link, nic)
        mesh = table.get("mesh", part.mesh)
        if mesh not in _MESHES:
            raise self.fail("host.mesh", mesh, f"does not exist; write one of {', '.join(_MESHES)}")
        return replace(
            part,
            devices=self.integer(table, "devices", part.devices, where="host.", most=1 << 12),
            device_link=device_link,
            nic=nic,
            nics=self.integer(table, "nics", part.nics, where="host.", most=1 << 12),
            mesh=mesh,
            host_link=self.link(table, "host_link", part.host_link),
            memory_rate=self.rate(table, "memory_rate", part.memory_rate, "host."),
            disk_read=self.rate(table, "disk_read", part.disk_read, "host."),
            disk_write=self.rate(table, "disk_write", part.disk_write, "host."),
            axis_links=self.axis_links(table, device_link),
        )

    def missing_link(self, key: str, hint: str = "") -> ConfigError:
        """Return an error for a host without the link that `key` names."""
        return ConfigError(
            f'{self._source}: host.{key} is missing; write e.g. {key} = "25GB/s"{hint}, or host.part = one of '
            f"{', '.join(HOSTS)}"
        )

    def axis_links(self, table: dict[str, Any], device_link: LinkPart) -> dict[str, LinkPart]:
        """Return the links of single mesh axes. Values that an entry leaves out are those of `device_link`."""
        found = table.get("axis_links", {})
        if not isinstance(found, dict):
            raise self.fail("host.axis_links", found, "is not a table; write [host.axis_links]")
        self.check_keys(found, _LINKED_AXES, "host.axis_links.")
        return {axis: self.link(found, axis, device_link, "host.axis_links.") or device_link for axis in found}

    def network(self, table: dict[str, Any], base: str, links: tuple[ExplicitLink, ...]) -> Network:
        """Return the network that a table describes."""
        self.check_keys(table, _NETWORK, "network.")
        topology = table.get("topology", "links" if links else base)
        if topology not in TOPOLOGIES:
            raise self.fail("network.topology", topology, f"does not exist; write one of {', '.join(TOPOLOGIES)}")
        if (topology == "links") != bool(links):
            raise self.fail(
                "network.topology",
                topology,
                "needs [[links]]; add them, or write another topology"
                if not links
                else 'ignores [[links]]; write "links", or remove them',
            )
        shape = table.get("shape", [])
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise self.fail("network.shape", shape, "is not a list of sides; write e.g. [4, 4, 8]")
        plain = Network()
        oversubscription = self.number(table, "oversubscription", plain.oversubscription, where="network.", most=1e6)
        if oversubscription < _LEAST_OVERSUBSCRIPTION:
            raise self.fail("network.oversubscription", oversubscription, "must be above 0")
        return Network(
            topology,
            self.integer(table, "hosts_per_leaf", plain.hosts_per_leaf, where="network."),
            oversubscription,
            tuple(shape),
            links,
            parse_seconds(table.get("switch_latency", plain.switch_latency), f"{self._source}: network.switch_latency"),
        )

    def links(self, data: Mapping[str, Any], hosts: int, devices: int) -> tuple[ExplicitLink, ...]:
        """Return the explicit links, checked to begin and end at hosts or switches that exist."""
        switches = data.get("switches", [])
        if not isinstance(switches, list) or not all(isinstance(name, str) for name in switches):
            raise self.fail("switches", switches, 'is not a list of names; write e.g. switches = ["leaf 0"]')
        found, rows, pairs = [], data.get("links", []), set[frozenset[str]]()
        if not isinstance(rows, list):
            raise self.fail("links", rows, "is not a list of tables; write [[links]]")
        for number, row in enumerate(rows):
            where = f"links[{number}]."
            if not isinstance(row, dict):
                raise self.fail(where[:-1], row, "is not a table; write [[links]]")
            self.check_keys(row, _EXPLICIT, where)
            ends = [self._end(row, key, where, hosts, switches) for key in ("from", "to")]
            if ends[0] == ends[1]:
                raise self.fail(f"{where}to", ends[1], "is the same as from; write another host or switch")
            if frozenset(ends) in pairs:
                raise self.fail(
                    f"{where}to",
                    ends[1],
                    f"is linked with {ends[0]!r} already; write one link with the sum of the rates",
                )
            pairs.add(frozenset(ends))
            found.append(ExplicitLink(ends[0], ends[1], self.link_part(row, None, where)))
        return tuple(found)

    def _end(self, row: Mapping[str, Any], key: str, where: str, hosts: int, switches: list[str]) -> str:
        name = row.get(key)
        is_host = isinstance(name, str) and re.fullmatch(r"host [0-9]{1,7}", name, re.ASCII) is not None
        if is_host and int(str(name).split()[1]) < hosts:
            return str(name)
        if name in switches:
            return str(name)
        listed = f" or one of the switches {', '.join(switches)}" if switches else ""
        raise self.fail(
            f"{where}{key}",
            name,
            f"is neither a host nor a switch; write a host from 'host 0' to 'host {hosts - 1}'{listed}, or add it to "
            "switches",
        )

    def check_connected(self, cluster: Cluster) -> None:
        """Raise ConfigError if explicit links leave a host without a route to the others."""
        if cluster.network.topology != "links":
            return
        import networkx as nx

        reached = nx.descendants(cluster.graph, "host 0") | {"host 0"}
        for number in range(cluster.hosts):
            if f"host {number}" not in reached:
                raise ConfigError(
                    f"{self._source}: no links lead from 'host 0' to 'host {number}'; add a [[links]] entry"
                )
