"""The ranks of one host, started for a launcher elsewhere, at the end of its connection: `-m windlass.launch.node`.

It takes messages from standard input and answers on standard output. When the connection ends, or is silent for
`channel.SILENCE_S` seconds, its ranks end.
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
from windlass.base.process import refuse_world_writable
from windlass.launch.channel import SILENCE_S, Channel, Lines, text_of
from windlass.launch.conduct import memory_of, signals_taken
from windlass.launch.errors import LaunchError
from windlass.launch.jobs import jobs_of
from windlass.launch.local import check_port, free_port
from windlass.launch.plan import Plan
from windlass.launch.ranks import Ranks
from windlass.launch.reaper import go_on_as_child
from windlass.launch.store import LOOPBACK, Store

_ORPHANED_GRACE_S = 2.0
_MEMORY_S = 1.0
_POLL_S = 0.1


class Agent:
    """What answers the launcher. It is the listener of its ranks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ranks: Ranks | None = None
        self._store: Store | None = None
        self._watched = False
        self._paused = False
        self._done = False

    def started(self, rank: int, pid: int) -> None:
        """A rank is a process now."""
        self._channel.send({"started": rank, "pid": pid})

    def wrote(self, rank: int, stream: str, data: bytes) -> None:
        """A rank wrote something."""
        self._channel.send({"wrote": rank, "stream": stream, "text": text_of(data)})

    def ended(self, rank: int, status: int) -> None:
        """A rank ended."""
        self._channel.send({"ended": rank, "status": status})

    def run(self) -> None:
        """Answer until the ranks have ended."""
        threading.Thread(target=self._guard, name="windlass-guard", daemon=True).start()
        self._channel.send({"hello": windlass.__version__})
        next_memory = 0.0
        with signals_taken(("SIGTERM", "SIGINT", "SIGHUP")) as received:
            obeyed = 0
            while not self._done or (self._ranks is not None and self._ranks.alive):
                self._serve()
                if len(received.numbers) > obeyed or self._channel.closed:
                    obeyed = len(received.numbers)
                    self._stop(signal.SIGTERM, _ORPHANED_GRACE_S)
                if self._watched and self._ranks is not None and time.monotonic() > next_memory:
                    next_memory = time.monotonic() + _MEMORY_S
                    self._channel.send({"memory": {str(r): memory_of(pid) for r, pid in self._ranks.pids.items()}})
        self.close()

    def close(self) -> None:
        """Leave nothing."""
        if self._ranks is not None:
            self._ranks.close(well=False)
        if self._store is not None:
            self._store.close()

    def _serve(self) -> None:
        for key, _ in self._selector.select(_POLL_S if self._ranks is not None else 0):
            key.data()
        if self._ranks is not None:
            self._ranks.poll()
        with contextlib.suppress(queue.Empty):
            self._obey(self._inbox.get(timeout=_POLL_S if self._ranks is None else 0))

    def _obey(self, message: dict[str, Any]) -> None:
        if "meet" in message:
            self._meet(**message["meet"])
        elif "plan" in message:
            self._watched = bool(message["watched"])
            self._start(Plan.from_json(message["plan"]), int(message["node"]), message["master"])
        elif "stop" in message:
            self._stop(int(message["stop"]), float(message["grace_s"]))

    def _meet(self, port: int | None, keep_store: bool, alone: bool) -> None:
        if keep_store:
            self._store = Store(port or 0, everywhere=not alone)
            self._store.serve()
            port = self._store.port
        else:
            port = check_port(port) if port is not None else free_port()
        self._channel.send({"meet": [LOOPBACK if alone else own_address(), port]})

    def _start(self, plan: Plan, node: int, master: list[Any]) -> None:
        if plan.cwd is not None:
            try:
                os.chdir(plan.cwd)
            except OSError as error:
                raise LaunchError(f"{plan.cwd}: {error.strerror}; every host needs this directory") from None
        script = plan.program.words[0]
        if plan.program.kind == "script" and not script.startswith("-") and not os.path.exists(script):
            raise LaunchError(f"no such script: {script} in {plan.cwd}; every host needs it there")
        jobs = jobs_of(plan, node, (str(master[0]), int(master[1])))
        self._ranks = Ranks(jobs, self, self._selector, capture=True)
        self._done = True

    def _stop(self, number: int, grace_s: float) -> None:
        self._done = True
        if self._ranks is not None:
            self._ranks.stop(number, grace_s)

    def _guard(self) -> None:
        """Reads what comes. In a thread of its own: the other one may wait for somebody to read what it writes."""
        lines = Lines()
        reader = selectors.DefaultSelector()
        reader.register(0, selectors.EVENT_READ)
        heard = time.monotonic()
        while True:
            if reader.select(1.0):
                data = os.read(0, 1 << 16)
                if not data:
                    break
                heard = time.monotonic()
                for message in lines.feed(data):
                    if isinstance(message, bytes):
                        continue
                    if "pause" in message:
                        self._paused = bool(message["pause"])
                    else:
                        self._inbox.put(message)
            elif not self._paused and time.monotonic() - heard > SILENCE_S:
                break
        self._inbox.put({"stop": signal.SIGTERM, "grace_s": _ORPHANED_GRACE_S})
        time.sleep(_ORPHANED_GRACE_S + 1)
        if self._ranks is not None:  # the other thread is stuck, or has still to notice
            self._ranks.kill()
        os._exit(128 + signal.SIGKILL)


def own_address() -> str:
    """An address of this host at which other hosts reach it: that at which the launcher did, if that is none of a
    loopback.

    Raises:
        LaunchError: there is none.
    """
    reached = os.environ.get("SSH_CONNECTION", "").split()
    candidates = reached[2:3]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it asks which way is out
        candidates.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        candidates += [str(address[0]) for *_, address in found]
    for address in candidates:
        if not address.startswith("127.") and address not in ("::1", "0.0.0.0", "::"):
            return address
    raise LaunchError("no address of this host is known at which others reach it; give --master_addr")


def main() -> None:
    """Serve the launcher at the other end, from a process whose parent ends what it leaves."""
    refuse_world_writable()
    if sys.platform == "linux":
        go_on_as_child()
    channel = Channel(os.dup(1))
    os.dup2(2, 1)  # what anybody here prints is no message
    agent = Agent(channel)
    try:
        agent.run()
    except WindlassError as error:
        channel.send({"error": str(error)})
        agent.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
