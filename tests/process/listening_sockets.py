"""Listening sockets of a process, for scripts that do not import pytest."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path


def listening(pid: int) -> list[str]:
    """Return the addresses of a process's listening TCP sockets, from /proc."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(entry.path))
        except FileNotFoundError:  # the descriptor was closed meanwhile
            continue
    results = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                results.append(f"{ipaddress.ip_address(b''.join(words))} {int(port, 16)}")
    return results
