"""Remote host at the end of an ssh connection, where `node_agent` starts its ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import windlass
from windlass.launch import exec_rank as before_rank
from windlass.launch.agent_channel import AgentChannel, MessageReader, text_to_bytes
from windlass.launch.exit_status import signal_name
from windlass.launch.launch_errors import LaunchError
from windlass.launch.rank_placement import RankPlacement
from windlass.launch.rank_processes import ERR, OUT
from windlass.launch.shell_quoting import check_host_name, shell_command
from windlass.launch.source_path import source_pythonpath
from windlass.launch.supervisor import RankEvents

# A lost connection is detected after 6 seconds. `--launcher_args` come first, because ssh uses the first value given.
_SSH_OPTIONS = {
    "BatchMode": "yes",  # no interactive questions: they would come from every host at once
    "ConnectTimeout": "15",
    "ServerAliveInterval": "1",
    "ServerAliveCountMax": "5",
    "ControlMaster": "no",  # a shared connection would have another keepalive
    "ControlPath": "none",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
}
_KILL_AFTER_S = 2.0  # time from the end of the grace period, when the agent kills its ranks, until ssh is killed


@dataclass(frozen=True)
class SshConnectionOptions:
    """Options of the ssh connections.

    Args:
        launcher_args: further options of ssh, which override those of windlass.
        venv_script: shell script that is sourced first on each host.
    """

    ssh_port: int | None = None
    launcher_args: tuple[str, ...] = ()
    venv_script: str | None = None

    def ssh_argv(self, host: str, shell_text: str) -> list[str]:
        """Return the command that runs `shell_text` on `host`.

        Raises:
            LaunchError: ssh or a shell could misinterpret the host's name.
        """
        options = [word for name, value in _SSH_OPTIONS.items() for word in ("-o", f"{name}={value}")]
        port = ["-p", str(self.ssh_port)] if self.ssh_port is not None else []
        return ["ssh", *self.launcher_args, *port, "-T", *options, "--", check_host_name(host), shell_text]

    def agent_shell_command(self, environ: Mapping[str, str], cwd: str) -> str:
        """Return the shell text that starts the agent of a host.

        It sets only PYTHONPATH: other variables may be secret, and are sent over the connection, not in the command.
        """
        path = {"PYTHONPATH": source_pythonpath(environ.get("PYTHONPATH", ""))}
        agent = shell_command([sys.executable, "-u", "-m", "windlass.launch.node_agent"], env=path)
        if self.venv_script is not None:
            script = self.venv_script if os.path.isabs(self.venv_script) else os.path.join(cwd, self.venv_script)
            agent = f"{shell_command(['.', script]).removeprefix('exec ')} && {agent}"
        # run the command by sh, because the user's login shell there may be any shell
        return shell_command(["sh", "-c", agent])


class RemoteNode:
    """Launcher's end of the connection to one node agent."""

    def __init__(
        self, host: str, command: Sequence[str], placements: Sequence[RankPlacement], events: RankEvents, selector: Any
    ) -> None:
        self.host, self._placements, self._events, self._selector = host, placements, events, selector
        self.version: str | None = None
        self.master_endpoint: tuple[str, int] | None = None
        self.error: str | None = None
        self._unfinished_ranks = {place.rank for place in placements}
        self._kill_at: float | None = None
        self._was_killed = False
        self._last_lines: deque[str] = deque(maxlen=5)
        words = list(command)
        if sys.platform == "linux":
            words = [sys.executable, "-I", "-S", before_rank.__file__, str(os.getpid()), *words]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0)
        assert self._process.stdin is not None
        self.channel = AgentChannel(os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._pipes: dict[int, tuple[str, MessageReader]] = {}
        for stream, name in ((self._process.stdout, OUT), (self._process.stderr, ERR)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._pipes[stream.fileno()] = (name, MessageReader())
            selector.register(
                stream.fileno(), selectors.EVENT_READ, functools.partial(self._read_pipe, stream.fileno())
            )

    @property
    def alive(self) -> bool:
        """True while the ssh process runs."""
        return self._process.returncode is None

    def poll(self) -> None:
        """Detect the end of the connection, and kill the connection if the grace period is over."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()
        if self._process.returncode is None and self._process.poll() is not None:
            for descriptor in list(self._pipes):
                self._read_pipe(descriptor)
                self._close_pipe(descriptor)
            self.channel.close()
            self._report_lost()

    def stop(self, signal_number: int, grace_s: float) -> None:
        """Send the agent a signal for its ranks; the agent kills ranks that are left after `grace_s` seconds."""
        self.channel.send({"stop": signal_number, "grace_s": grace_s})
        self._kill_at = time.monotonic() + grace_s + _KILL_AFTER_S

    def kill(self) -> None:
        """End the connection; the ranks end with it."""
        self._was_killed = True
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self, *, succeeded: bool) -> None:
        """Release the connection, and kill the ssh process if it still runs."""
        if self._process.returncode is None:
            self.kill()
            self._process.wait()
        for descriptor in list(self._pipes):
            self._close_pipe(descriptor)
        self.channel.close()

    def describe_end(self) -> str:
        """Describe the end of the connection by the last lines of its output, or by the exit status of ssh."""
        status = self._process.returncode
        ended = f"ended by {signal_name(-status)}" if status and status < 0 else f"exit code {status}"
        return f"its connection ended ({'; '.join(self._last_lines) or ended})"

    def _report_lost(self) -> None:
        if self._unfinished_ranks and self.version is not None and not self._was_killed:
            first = min(place.rank for place in self._placements)
            self._events.on_host_lost(self.host, first, len(self._placements), self.describe_end())

    def _read_pipe(self, descriptor: int) -> None:
        if descriptor not in self._pipes:
            return
        name, lines = self._pipes[descriptor]
        while True:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            for one in lines.feed(data) if data else [rest + b"\n"] if (rest := lines.take_rest()) else []:
                if isinstance(one, bytes):
                    self._forward_line(name, one)
                else:
                    self._handle_message(one)
            if not data:
                self._close_pipe(descriptor)
                return

    def _forward_line(self, stream: str, line: bytes) -> None:
        self._last_lines.append(line.decode(errors="replace").strip())
        if self.version is not None:  # before the version arrives, lines belong to the error message
            self._events.on_host_output(self.host, stream, line)

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "wrote" in message:
            self._events.on_output(int(message["wrote"]), str(message["stream"]), text_to_bytes(message["text"]))
        elif "started" in message:
            self._events.on_started(int(message["started"]), int(message["pid"]))
        elif "ended" in message:
            self._unfinished_ranks.discard(int(message["ended"]))
            self._events.on_ended(int(message["ended"]), int(message["status"]))
        elif "memory" in message:
            self._events.memory_of_rank |= {int(rank): int(size) for rank, size in message["memory"].items()}
        elif "meet" in message:
            self.master_endpoint = (str(message["meet"][0]), int(message["meet"][1]))
        elif "hello" in message:
            self.version = str(message["hello"])
            self._last_lines.clear()
        elif "error" in message:
            self.error = str(message["error"])

    def _close_pipe(self, descriptor: int) -> None:
        if self._pipes.pop(descriptor, None) is not None:
            self._selector.unregister(descriptor)
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None and not stream.closed and stream.fileno() == descriptor:
                    stream.close()


def check_agent_version(node: RemoteNode) -> None:
    """Require the same version of windlass on the node as here.

    Raises:
        LaunchError: the versions differ.
    """
    if node.version != windlass.__version__:
        raise LaunchError(
            f"{node.host} has windlass {node.version}, this machine {windlass.__version__}; install the same everywhere"
        )
