"""Owners of the processes at the other ends of new connections.

[Note: owners of peers] Neither gloo nor torch's store authenticates its connections. Another user of the host can
connect to a rank's port before the expected rank does, or write a foreign address to the store. Both are
dangerous, because ranks unpickle what their peers send. Over loopback Linux lists both ends of a connection with the
users that own them (`/proc/net/tcp`), and no user can change the owner of a socket. So the owners are compared after
the connections of a process group are made and before anything is received over them. The superuser is accepted, since
no check could stop it. Connections with other hosts are not checked: their other ends are not listed here.

A process on a busy machine may take seconds to accept a connection, which then has no owner yet. The check
waits for such a connection, but not for one whose owner has closed it.

Reading the list takes milliseconds, and a run creates many groups. So each connection is looked up by itself first
(`socket_diagnosis`). The list is read only if these look-ups do not show that all connections lead to the same user.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import struct
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from windlass.base.errors import CommunicationError
from windlass.comm.socket_diagnosis import CONNECTED_STATES, SocketDiagnosis, SocketOwner, endpoints

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENING = "0A"
# Prefix of an IPv4 address in the table of IPv6 sockets. The kernel prints memory in words of the host's byte order.
_MAPPED = f"{0:016X}{struct.unpack('=I', bytes(2) + bytes([255, 255]))[0]:08X}"
_SUPERUSER = 0
# The table is read in several parts, so a connection may be missing in one reading.
_ATTEMPTS, _PAUSE_S = 20, 0.01
ACCEPT_S = 60.0  # a rank of a busy machine may not be scheduled for seconds


Connections = dict[tuple[str, str], SocketOwner]
"""Owner of each connected socket, by its own and its peer's address and port as in `/proc/net/tcp`."""


@dataclass(frozen=True)
class ForeignPeer:
    """Connection of this process with a process of another user, or with no process.

    Attributes:
        local, remote: address and port of this end and of the other end.
        uid: the other user; None if no process has the other end open.
        is_queued: True if the other process has not accepted the connection yet.
    """

    local: str
    remote: str
    uid: int | None
    is_queued: bool = False


class ClosedPeerError(CommunicationError):
    """Error for a connection whose other end no process has open: it was closed, or not accepted in time."""


@contextlib.contextmanager
def require_own_peers(purpose: str, accept_s: float = ACCEPT_S) -> Iterator[None]:
    """Check that the connections that are made in the context lead to processes of this user or of other hosts.

    See [Note: owners of peers]. Does nothing where the system does not list owners.

    Args:
        purpose: purpose of the connections, for the message.
        accept_s: seconds in which the other end has to accept a connection.

    Raises:
        CommunicationError: the other end of a connection belongs to another user, or (`ClosedPeerError`) to no process.
    """
    before = open_sockets()
    yield
    opened = {inode: descriptor for inode, descriptor in open_sockets().items() if inode not in before}
    deadline, attempts = time.monotonic() + accept_s, 0
    while True:
        # Compare the time before the sockets are read: this thread may be suspended for seconds afterwards.
        is_late = time.monotonic() > deadline
        found = [] if have_own_peers(opened) else foreign_peers(opened, read_connections())
        known = [peer for peer in found if peer.uid is not None]
        attempts += any(not peer.is_queued for peer in found)
        if known or not found or attempts == _ATTEMPTS or is_late:
            break
        time.sleep(_PAUSE_S)
    if found:
        raise _error((known or found)[0], purpose)


def open_sockets() -> dict[int, int]:
    """Return a descriptor of each of this process's sockets, by inode; empty if the system does not list sockets."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    found[int(target[len("socket:[") : -1])] = int(name)
    return found


def have_own_peers(opened: Mapping[int, int]) -> bool:
    """Return True if the kernel shows that all loopback connections among these sockets lead to the same user.

    The superuser counts as the same user. Return False also if the kernel cannot determine the owners.

    Args:
        opened: descriptors of sockets by inode.
    """
    if not opened:
        return True
    try:
        with SocketDiagnosis() as kernel:
            return all(_has_own_peer(kernel, inode, descriptor) for inode, descriptor in opened.items())
    except OSError:  # no such interface, or a socket that was closed meanwhile
        return False


def _has_own_peer(kernel: SocketDiagnosis, inode: int, descriptor: int) -> bool:
    ends = endpoints(descriptor)
    if os.fstat(descriptor).st_ino != inode:  # the socket was closed, and another file has its descriptor number now
        return False
    if ends is None or not ends[1][0].is_loopback:
        return True
    own, other = kernel.owner(*ends), kernel.owner(*reversed(ends))
    if own is None or own.inode != inode or other is None or not other.inode:
        return False
    return other.uid in (own.uid, _SUPERUSER)


def read_connections(tables: Iterable[str] = _TABLES) -> Connections:
    """Read the owners of all connected TCP sockets of this process's network namespace."""
    found = {}
    for table in tables:
        with contextlib.suppress(OSError), open(table) as file:
            next(file, None)  # the names of the columns
            for line in file:
                fields = line.split()
                if len(fields) > 9 and fields[3] != _LISTENING:
                    ends = fields[1].replace(_MAPPED, ""), fields[2].replace(_MAPPED, "")
                    uid, inode = int(fields[7]), int(fields[9])
                    found[ends] = SocketOwner(uid, inode, not inode and int(fields[3], 16) in CONNECTED_STATES)
    return found


def foreign_peers(inodes: Collection[int], connections: Connections) -> list[ForeignPeer]:
    """Return the loopback connections of the sockets `inodes` whose other end belongs to no process or another user.

    The superuser counts as the same user.
    """
    found = []
    for (local, remote), own in connections.items():
        if own.inode not in inodes or not _is_loopback(remote):
            continue
        other = connections.get((remote, local))
        uid = None if other is None or not other.inode else other.uid
        if uid not in (own.uid, _SUPERUSER):
            found.append(ForeignPeer(_readable(local), _readable(remote), uid, other is not None and other.is_queued))
    return found


def _endpoint(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    digits, _, port = text.partition(":")
    words = struct.unpack(f">{len(digits) // 8}I", bytes.fromhex(digits))
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)), int(port, 16)


def _is_loopback(text: str) -> bool:
    return _endpoint(text)[0].is_loopback


def _readable(text: str) -> str:
    address, port = _endpoint(text)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _error(peer: ForeignPeer, purpose: str) -> CommunicationError:
    ends = f"the other end of this process's connection {peer.local} with {peer.remote}, {purpose},"
    advice = "start the run again where no other user can connect: in a container, or a network namespace"
    if peer.uid is None:
        return ClosedPeerError(f"{ends} is held by no process any more: see the output of the other ranks, or {advice}")
    try:
        owner = f"user {pwd.getpwuid(peer.uid).pw_name} (uid {peer.uid})"
    except KeyError:  # a user without a name here, e.g. of another user namespace
        owner = f"uid {peer.uid}"
    return CommunicationError(
        f"{ends} belongs to {owner}, not to uid {os.getuid()}; nothing was received over it. End that process, or "
        f"{advice}"
    )
