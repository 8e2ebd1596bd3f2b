"""Loopback addresses, and the environment variable that makes gloo listen there. Does not import torch."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_NAMES = ("lo", "lo0")  # loopback interface of Linux, and that of macOS and BSD


def is_loopback(address: str | None) -> bool:
    """Return True for `localhost` or a loopback address, which only processes of the same host can reach."""
    if address == "localhost":
        return True
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name
        return False


def gloo_at_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes gloo listen at the loopback interface, with its value.

    Empty if `environ` names an interface, or if the host has no loopback interface.
    """
    if environ.get(GLOO_INTERFACE):
        return {}
    name = next((name for _, name in socket.if_nameindex() if name in _NAMES), None)
    return {} if name is None else {GLOO_INTERFACE: name}
