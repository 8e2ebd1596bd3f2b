"""Owners of single TCP sockets, through the socket diagnosis interface of Linux (sock_diag(7)).

The kernel finds one socket in its hash table by the socket's two ends. `/proc/net/tcp` lists the same owners, but the
kernel reads the full table for that file, which takes milliseconds even without any connection.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Self

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20  # type of a request, and of its answer
_ERROR = 2  # type of an answer without a socket
_REQUEST = 1  # flag of a request
_LISTENING = 10  # state of a listener, which the kernel returns if no connected socket has these ends
CONNECTED_STATES = (1, 3)  # TCP_ESTABLISHED and TCP_SYN_RECV
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, sender
_ENDS = "HH16s16sIII"  # ports and addresses of both ends in network order, interface, cookie
_QUERY = struct.Struct("=BBBxI")  # family, protocol, extensions, states
# family, state, timer, retransmissions, both ends, expiry, two queues, user, inode
_ANSWER = struct.Struct(f"=BBBB{struct.calcsize('=' + _ENDS)}sIIIII")
_ANY_COOKIE = 0xFFFFFFFF


@dataclass(frozen=True)
class SocketOwner:
    """Owner of one end of a connection.

    Attributes:
        uid: user that owns the socket.
        inode: inode of the socket; 0 if no process has the socket open.
        is_queued: True if the connection waits in the queue of a listener, which has not accepted it yet.
    """

    uid: int
    inode: int
    is_queued: bool = False


Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
"""Address and port of one end of a connection. An IPv4-mapped IPv6 address is given as an IPv4 address."""


def endpoints(descriptor: int) -> tuple[Endpoint, Endpoint] | None:
    """Return the local and the remote end of a TCP connection; None for a listener and for other kinds of sockets.

    Raises:
        OSError: `descriptor` is not an open socket, or the socket is not connected.
    """
    with socket.socket(fileno=os.dup(descriptor)) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return None
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        return _endpoint(own.getsockname()), _endpoint(own.getpeername())


def _endpoint(name: tuple[object, ...]) -> Endpoint:
    address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address, int(str(name[1]))


class SocketDiagnosis:
    """Connection with the kernel that looks up TCP sockets of this network namespace.

    Raises:
        OSError: the system has no such interface.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, "socket diagnosis is an interface of Linux")
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
        self._kernel.setblocking(False)  # the kernel answers within `send`, so `recv` need not wait

    def owner(self, local: Endpoint, remote: Endpoint) -> SocketOwner | None:
        """Return the owner of the socket with these ends, or None if no socket has them.

        Raises:
            OSError: the kernel refuses the request, or answers with a message of another type.
        """
        family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
        ends = struct.pack(
            "=" + _ENDS,
            *(socket.htons(port) for _, port in (local, remote)),
            *(address.packed for address, _ in (local, remote)),
            *(0, _ANY_COOKIE, _ANY_COOKIE),
        )
        query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ends
        self._kernel.send(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST, 0, 0) + query)
        answer = self._kernel.recv(8192)
        kind = _HEADER.unpack_from(answer)[1]
        if kind == _ERROR:
            code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
            if code == errno.ENOENT:
                return None
            raise OSError(code, f"socket diagnosis: {os.strerror(code)}")
        if kind != _BY_FAMILY:
            raise OSError(errno.EPROTO, f"socket diagnosis answered with a message of type {kind}")
        _, state, _, _, _, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
        return None if state == _LISTENING else SocketOwner(uid, inode, not inode and state in CONNECTED_STATES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kernel.close()
