"""Addresses that only this host reaches, and the variables that make gloo listen there. No torch is imported."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_NAMES = ("lo", "lo0")  # of Linux, of macOS and BSD


def is_loopback(address: str | None) -> bool:
    """Tell whether `address` is reached from its own host alone."""
    if address == "localhost":
        return True
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host's name
        return False


def gloo_at_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make gloo listen at the loopback interface; none where `environ` names an interface."""
    if environ.get(GLOO_INTERFACE):
        return {}
    name = next((name for _, name in socket.if_nameindex() if name in _NAMES), None)
    return {} if name is None else {GLOO_INTERFACE: name}
