"""Two hosts on one machine: network namespaces, connected by a pair of virtual interfaces with a limited rate."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

INTERFACE = "wl0"
_CLONE_NEWNET = 0x40000000
_BURST = 64 << 10  # minimum burst of the rate limit in bytes; at high rates, the bytes of 0.01 s


def why_no_hosts() -> str | None:
    """Return the reason why this process cannot make network namespaces, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    try:
        with TwoHosts() as hosts:
            hosts.limit(1 << 20)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.strip()}"
    return None


class TwoHosts:
    """Context in which the two namespaces exist.

    Attributes:
        names: names of the namespaces.
    """

    def __init__(self) -> None:
        self.names = tuple(f"wl{os.getpid()}h{host}" for host in range(2))

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host."""
        return f"10.78.0.{host + 1}"

    def limit(self, rate: int) -> None:
        """Let each host send at most `rate` bytes per second to the other one; 0: unlimited."""
        for name in self.names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", INTERFACE, "root"], capture_output=True)
            if rate:
                burst = max(_BURST, rate // 100)
                _run(f"tc -n {name} qdisc add dev {INTERFACE} root tbf rate {8 * rate}bit burst {burst} latency 200ms")

    def __enter__(self) -> TwoHosts:
        one, other = self.names
        try:
            for name in self.names:
                _run(f"ip netns add {name}")
                _run(f"ip -n {name} link set lo up")
            _run(f"ip link add {INTERFACE} netns {one} type veth peer name {INTERFACE} netns {other}")
            for host, name in enumerate(self.names):
                _run(f"ip -n {name} addr add {self.address(host)}/24 dev {INTERFACE}")
                _run(f"ip -n {name} link set {INTERFACE} up")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter_host(name: str) -> None:
    """Move the calling thread, and the threads that it starts, into a namespace.

    Raises:
        OSError: the namespace does not exist, or this process is not root.
    """
    descriptor = os.open(Path("/run/netns", name), os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    finally:
        os.close(descriptor)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
