"""Agent of one host for a launcher on another: `python -m windlass.launch.node_agent` at the end of an ssh connection.

The agent reads messages from standard input and answers on standard output. It ends its ranks when the connection
ends, or is silent for `agent_channel.KEEPALIVE_TIMEOUT_S` seconds.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any

import windlass
from windlass.base.errors import WindlassError
from windlass.base.processes import forbid_world_writable_files
from windlass.launch.agent_channel import KEEPALIVE_TIMEOUT_S, AgentChannel, MessageReader, bytes_to_text
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.local_launch import check_port, free_port
from windlass.launch.rank_jobs import make_rank_jobs
from windlass.launch.rank_processes import RankProcesses
from windlass.launch.reaper import continue_in_child
from windlass.launch.rendezvous_store import LOOPBACK, RendezvousStore
from windlass.launch.supervisor import capture_signals, resident_bytes_of

_ORPHANED_GRACE_S = 2.0
_MEMORY_INTERVAL_S = 1.0
_POLL_S = 0.1


class NodeAgent:
    """Agent that starts the ranks of this host and sends their events to the launcher."""

    def __init__(self, channel: AgentChannel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ranks: RankProcesses | None = None
        self._store: RendezvousStore | None = None
        self._reports_memory = False
        self._paused = False
        self._is_finishing = False

    def on_started(self, rank: int, pid: int) -> None:
        """Report that the process of a rank has started."""
        self._channel.send({"started": rank, "pid": pid})

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Send output of a rank."""
        self._channel.send({"wrote": rank, "stream": stream, "text": bytes_to_text(data)})

    def on_ended(self, rank: int, status: int) -> None:
        """Report that a rank has ended."""
        self._channel.send({"ended": rank, "status": status})

    def run(self) -> None:
        """Handle messages and events until the ranks have ended."""
        threading.Thread(target=self._read_messages, name="windlass-guard", daemon=True).start()
        self._channel.send({"hello": windlass.__version__})
        next_memory = 0.0
        with capture_signals(("SIGTERM", "SIGINT", "SIGHUP")) as received:
            obeyed = 0
            while not self._is_finishing or (self._ranks is not None and self._ranks.alive):
                self._poll_once()
                if len(received.numbers) > obeyed or self._channel.closed:
                    obeyed = len(received.numbers)
                    self._stop_ranks(signal.SIGTERM, _ORPHANED_GRACE_S)
                if self._reports_memory and self._ranks is not None and time.monotonic() > next_memory:
                    next_memory = time.monotonic() + _MEMORY_INTERVAL_S
                    self._channel.send(
                        {"memory": {str(r): resident_bytes_of(pid) for r, pid in self._ranks.pid_of_rank.items()}}
                    )
        self.close()

    def close(self) -> None:
        """End the ranks and the rendezvous store."""
        if self._ranks is not None:
            self._ranks.close(succeeded=False)
        if self._store is not None:
            self._store.close()

    def _poll_once(self) -> None:
        for key, _ in self._selector.select(_POLL_S if self._ranks is not None else 0):
            key.data()
        if self._ranks is not None:
            self._ranks.poll()
        with contextlib.suppress(queue.Empty):
            self._handle_message(self._inbox.get(timeout=_POLL_S if self._ranks is None else 0))

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "meet" in message:
            self._open_rendezvous(**message["meet"])
        elif "plan" in message:
            self._reports_memory = bool(message["watched"])
            self._start_ranks(LaunchPlan.from_json(message["plan"]), int(message["node"]), message["master"])
        elif "stop" in message:
            self._stop_ranks(int(message["stop"]), float(message["grace_s"]))

    def _open_rendezvous(self, port: int | None, keep_store: bool, alone: bool) -> None:
        if keep_store:
            self._store = RendezvousStore(port or 0, all_interfaces=not alone)
            self._store.serve()
            port = self._store.port
        else:
            port = check_port(port) if port is not None else free_port()
        self._channel.send({"meet": [LOOPBACK if alone else own_address(), port]})

    def _start_ranks(self, plan: LaunchPlan, node: int, master: list[Any]) -> None:
        if plan.cwd is not None:
            try:
                os.chdir(plan.cwd)
            except OSError as error:
                raise LaunchError(f"{plan.cwd}: {error.strerror}; every host needs this directory") from None
        script = plan.program.argv[0]
        if plan.program.kind == "script" and not script.startswith("-") and not os.path.exists(script):
            raise LaunchError(f"no such script: {script} in {plan.cwd}; every host needs it there")
        jobs = make_rank_jobs(plan, node, (str(master[0]), int(master[1])))
        self._ranks = RankProcesses(jobs, self, self._selector, capture=True, servers=plan.servers)
        self._is_finishing = True

    def _stop_ranks(self, signal_number: int, grace_s: float) -> None:
        self._is_finishing = True
        if self._ranks is not None:
            self._ranks.stop(signal_number, grace_s)

    def _read_messages(self) -> None:
        """Read messages from standard input, in a separate thread because the main one may block on a full pipe."""
        lines = MessageReader()
        reader = selectors.DefaultSelector()
        reader.register(0, selectors.EVENT_READ)
        last_message_time = time.monotonic()
        while True:
            if reader.select(1.0):
                data = os.read(0, 1 << 16)
                if not data:
                    break
                last_message_time = time.monotonic()
                for message in lines.feed(data):
                    if isinstance(message, bytes):
                        continue
                    if "pause" in message:
                        self._paused = bool(message["pause"])
                    else:
                        self._inbox.put(message)
            elif not self._paused and time.monotonic() - last_message_time > KEEPALIVE_TIMEOUT_S:
                break
        self._inbox.put({"stop": signal.SIGTERM, "grace_s": _ORPHANED_GRACE_S})
        time.sleep(_ORPHANED_GRACE_S + 1)
        if self._ranks is not None:  # the main thread is stuck, or has not handled the message yet
            self._ranks.kill()
        os._exit(128 + signal.SIGKILL)


def own_address() -> str:
    """Return an address of this host that other hosts can reach, preferably the one that the launcher connected to.

    Loopback addresses are skipped.

    Raises:
        LaunchError: the host has no such address.
    """
    reached = os.environ.get("SSH_CONNECTION", "").split()
    candidates = reached[2:3]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # connecting a datagram socket sends nothing; it selects the outgoing address
        candidates.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        candidates += [str(address[0]) for *_, address in found]
    for address in candidates:
        if not address.startswith("127.") and address not in ("::1", "0.0.0.0", "::"):
            return address
    raise LaunchError("no address of this host is known that other hosts can reach; give --master_addr")


def main() -> None:
    """Run the agent. On Linux a parent process kills the processes that the agent leaves behind after a signal."""
    forbid_world_writable_files()
    if sys.platform == "linux":
        continue_in_child()
    channel = AgentChannel(os.dup(1))
    os.dup2(2, 1)  # standard output is the channel, so prints of any library must go elsewhere
    agent = NodeAgent(channel)
    try:
        agent.run()
    except WindlassError as error:
        channel.send({"error": str(error)})
        agent.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
