"""Rendezvous store of the ranks, in a process of its own, so that it survives the end of any rank.

The socket listens before any rank starts, so that early ranks wait in its queue while the store process imports torch.
torch in the ranks finds the store by TORCHELASTIC_USE_AGENT_STORE, as under torchrun.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from windlass.launch import exec_rank
from windlass.launch.launch_errors import LaunchError

LOOPBACK = "127.0.0.1"
_LISTEN_BACKLOG = 2048  # ranks that may connect while the store process imports torch
_SERVER_PROGRAM = """
import signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
from torch.distributed import TCPStore
host, port, listening = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = TCPStore(host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listening)
signal.pause()
"""


class RendezvousStore:
    """Listening socket, and the process that serves it from `serve` to `close`."""

    def __init__(self, port: int, *, all_interfaces: bool) -> None:
        """Listen at `port`; 0 chooses a free one.

        Args:
            all_interfaces: listen on every address of this host, not only on loopback.

        Raises:
            LaunchError: this process cannot listen at the port.
        """
        try:
            self._socket = _listen(port, all_interfaces)
        except OSError as error:
            text = f"cannot listen at port {port}: {error.strerror}; give another, or none to use a free one"
            raise LaunchError(text) from None
        self.port: int = self._socket.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start the store process."""
        number = self._socket.fileno()
        command = [sys.executable, "-P", "-c", _SERVER_PROGRAM, LOOPBACK, str(self.port), str(number)]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", exec_rank.__file__, str(os.getpid()), *command]
        self._process = subprocess.Popen(
            command,
            pass_fds=(number,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if "LOGLEVEL" not in os.environ else None,
        )
        self._socket.close()  # an open copy here would keep ranks waiting after the store process is gone

    def close(self) -> None:
        """End the store process. The contents of the store are lost."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def is_port_free(port: int) -> bool:
    """Return True if a process of this host could listen at the port of the IPv4 loopback address."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, port))
        return True
    return False


def _listen(port: int, all_interfaces: bool) -> socket.socket:
    if not all_interfaces:
        return socket.create_server((LOOPBACK, port), backlog=_LISTEN_BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be disabled
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=_LISTEN_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_LISTEN_BACKLOG)
