"""Several hosts on one machine: network namespaces with their own addresses, each with an SSH server.

The machine's own network is not changed. The launcher has a namespace too, which forwards between the others.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PORT = 22
_count = itertools.count()


def why_not() -> str | None:
    """Return the reason why such hosts can't be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    for program in ("ip", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"wlprobe{os.getpid()}"
    try:
        sh(f"ip netns add {name} && ip netns exec {name} ip link add wl0 type veth peer name wl1")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if _sshd() is None and importlib.util.find_spec("asyncssh") is None:
        return "there is neither sshd nor asyncssh"
    return None


def sh(text: str) -> str:
    """Run shell commands and return their output."""
    return subprocess.run(["sh", "-ec", text], check=True, capture_output=True, text=True).stdout


def _sshd() -> str | None:
    return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


class Machines:
    """Hosts `node-0`, `node-1`, ...; `folder` gets their keys, ssh's configuration and a hostfile."""

    def __init__(self, folder: Path, count: int, slots: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count = folder, count
        self.prefix = f"wl{os.getpid()}n{next(_count)}"
        self._servers: list[subprocess.Popen[bytes]] = []
        self.hostfile, self.config = folder / "hostfile", folder / "ssh_config"
        self.hostfile.write_text("".join(f"node-{node} slots={slots}\n" for node in range(count)))
        try:
            self._build()
            self._serve()
        except BaseException:
            self.close()
            raise

    def address(self, node: int) -> str:
        """Return the address of a host."""
        return f"10.77.{node}.2"

    def inside(self, where: int | str) -> list[str]:
        """Return the prefix of a command that runs on a host, or in the launcher's namespace (`"hub"`)."""
        return ["ip", "netns", "exec", f"{self.prefix}{where}"]

    def cut(self, node: int) -> None:
        """Disconnect a host from the network, as a power loss would."""
        sh(f"ip -n {self.prefix}hub link set v{node} down")

    def close(self) -> None:
        """Stop the servers and remove the namespaces."""
        for server in self._servers:
            server.kill()
            server.wait()
        for where in (*range(self.count), "hub"):
            subprocess.run(["ip", "netns", "del", f"{self.prefix}{where}"], capture_output=True)

    def _build(self) -> None:
        hub = f"{self.prefix}hub"
        sh(f"ip netns add {hub}; ip -n {hub} link set lo up")
        sh(
            f"""ip -n {hub} link add br0 type bridge; ip -n {hub} addr add 10.77.255.1/16 dev br0
                ip -n {hub} link set br0 up"""
        )
        for node in range(self.count):
            name = f"{self.prefix}{node}"
            sh(f"""ip netns add {name}; ip -n {name} link set lo up
                ip -n {hub} link add v{node} type veth peer name wl0 netns {name}
                ip -n {hub} link set v{node} master br0 up
                ip -n {name} addr add {self.address(node)}/16 dev wl0; ip -n {name} link set wl0 up""")

    def _serve(self) -> None:
        for key in ("host_key", "client_key"):
            sh(f"ssh-keygen -q -t ed25519 -N '' -f '{self.folder / key}'")
        lines = [f"Host node-{node}\n  HostName {self.address(node)}\n" for node in range(self.count)]
        self.config.write_text(
            "".join(lines)
            + f"Host *\n  IdentityFile {self.folder}/client_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        for node in range(self.count):
            self._servers.append(subprocess.Popen([*self.inside(node), *self._server(node)]))
        deadline = time.monotonic() + 30
        for node in range(self.count):
            while not self._answers(node):
                assert time.monotonic() < deadline, f"the SSH server of node-{node} does not answer"
                time.sleep(0.1)

    def _answers(self, node: int) -> bool:
        if _sshd() is None:
            return (self.folder / f"listens.{self.address(node)}").exists()
        probe = [*self.inside("hub"), "ssh", "-F", str(self.config), f"node-{node}", "true"]
        return subprocess.run(probe, capture_output=True).returncode == 0

    def _server(self, node: int) -> list[str]:
        sshd = _sshd()
        if sshd is None:
            server = Path(__file__).with_name("ssh_server.py")
            return [sys.executable, str(server), self.address(node), str(PORT), str(self.folder)]
        os.makedirs("/run/sshd", exist_ok=True)  # directory for sshd's privilege separation
        settings = {
            "ListenAddress": f"{self.address(node)}:{PORT}",
            "HostKey": f"{self.folder}/host_key",
            "AuthorizedKeysFile": f"{self.folder}/client_key.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
        }
        return [sshd, "-D", "-e", "-f", "/dev/null", *(f"-o{name}={value}" for name, value in settings.items())]
