"""Network interfaces and InfiniBand devices, read from sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def network_interfaces(root: Path = _NET) -> list[dict[str, Any]]:
    """List the interfaces: name, state, rate, MTU, and whether the interface is virtual (no device behind it).

    `megabits_per_second` is None if the kernel does not report it, as for most virtual interfaces and inactive ones.
    """
    found = []
    for place in sorted(root.iterdir()) if root.is_dir() else []:
        if not place.is_dir():  # bonding_masters is a file
            continue
        speed = _read_number(place / "speed")
        found.append(
            {
                "name": place.name,
                "state": _read_text(place / "operstate"),
                "megabits_per_second": speed if speed is not None and speed > 0 else None,
                "mtu": _read_number(place / "mtu"),
                "virtual": not (place / "device").exists(),
            }
        )
    return found


def infiniband_devices(root: Path = _INFINIBAND) -> list[dict[str, Any]]:
    """List the devices and their ports: state, rate, and link layer, InfiniBand or Ethernet (RoCE)."""
    return [
        {
            "name": place.name,
            "ports": [
                {
                    "port": int(port.name),
                    "state": (_read_text(port / "state") or "").partition(": ")[2] or None,  # "4: ACTIVE"
                    "rate": _read_text(port / "rate"),  # "400 Gb/sec (4X NDR)"
                    "link_layer": _read_text(port / "link_layer"),
                }
                for port in sorted((place / "ports").iterdir())
            ],
        }
        for place in (sorted(root.iterdir()) if root.is_dir() else [])
    ]


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:  # an interface that is down has no readable value, and some interfaces lack the file
        return None


def _read_number(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None
