"""Starts ranks on several hosts, each behind a connection of its own, and brings back how they ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from windlass.launch.channel import BEAT, BEAT_S
from windlass.launch.conduct import Events, Received, conduct, signals_taken
from windlass.launch.errors import LaunchError
from windlass.launch.local import check_main_thread
from windlass.launch.outcome import Outcome
from windlass.launch.place import Host
from windlass.launch.plan import Plan
from windlass.launch.ssh import RemoteNode, check_version

CONNECT_S = 60.0
_LOST_GRACE_S = 2.0  # noticing took some of the seconds in which all is to be over


def start_on_hosts(
    plan: Plan, command: Callable[[Host], list[str]], events: Events, *, watched: bool = False
) -> Outcome:
    """Start an agent on each host of the plan by `command(host)`, and ranks through it; look after them to their end.

    Raises:
        LaunchError: a host cannot be reached, or its ranks cannot be started; none is left then.
    """
    check_main_thread()
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(signals_taken(plan.signals))
        selector = stack.enter_context(selectors.DefaultSelector())
        if events.console is not None:
            stack.callback(events.console.close)
        nodes: list[RemoteNode] = []
        stack.callback(_close, nodes)
        for index, host in enumerate(plan.hosts):
            nodes.append(RemoteNode(host.name, command(host), plan.places(index), events, selector))
        stack.enter_context(_beats(nodes))
        nodes[0].channel.send(
            {"meet": {"port": plan.master_port, "keep_store": plan.keep_store, "alone": len(nodes) == 1}}
        )
        if not _all_there(nodes, selector, received):
            return Outcome(128 + received.numbers[0], interrupted_by=received.numbers[0])
        assert nodes[0].meeting is not None
        address, port = nodes[0].meeting
        master = [plan.master_addr or address, port]
        for index, node in enumerate(nodes):
            node.channel.send({"plan": plan.as_json(), "node": index, "master": master, "watched": watched})
        return conduct(
            [_Refusing(node) for node in nodes],
            events,
            selector,
            received,
            grace_s=plan.grace_s,
            lost_grace_s=_LOST_GRACE_S,
            interval_s=plan.interval_s,
        )


def _close(nodes: Sequence[RemoteNode]) -> None:
    for node in nodes:
        node.close(well=False)


class _Refusing:
    """A node whose own errors end the launch."""

    def __init__(self, node: RemoteNode) -> None:
        self._node = node
        self.stop, self.kill, self.close = node.stop, node.kill, node.close

    @property
    def alive(self) -> bool:
        return self._node.alive

    def poll(self) -> None:
        self._node.poll()
        _check_error(self._node)


def _check_error(node: RemoteNode) -> None:
    if node.error is not None:
        raise LaunchError(f"{node.host}: {node.error}")


def _all_there(nodes: Sequence[RemoteNode], selector: selectors.BaseSelector, received: Received) -> bool:
    """Wait until every agent has answered; False if a signal came first."""
    deadline = time.monotonic() + CONNECT_S
    while any(node.version is None for node in nodes) or nodes[0].meeting is None:
        if received.numbers:
            return False
        for key, _ in selector.select(0.1):
            key.data()
        for node in nodes:
            node.poll()
            _check_error(node)
            if not node.alive:
                raise LaunchError(
                    f"{node.host} cannot be reached: {node.why()}; `ssh {node.host} true` must work without a question"
                )
            if node.version is None and time.monotonic() > deadline:
                raise LaunchError(f"{node.host} does not answer for {CONNECT_S:.0f} s; is windlass installed there?")
    for node in nodes:
        check_version(node)
    return True


@contextlib.contextmanager
def _beats(nodes: Sequence[RemoteNode]) -> Iterator[None]:
    """Let nodes hear once a second that this process is there, even while it waits for its own reader; and announce
    it when it is about to be suspended (Ctrl-Z)."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            for node in nodes:
                node.channel.send_bytes(BEAT)

    def suspend(number: int, frame: object) -> None:
        for node in nodes:
            node.channel.send({"pause": True})
        os.kill(os.getpid(), signal.SIGSTOP)
        for node in nodes:
            node.channel.send({"pause": False})

    before = signal.signal(signal.SIGTSTP, suspend)
    thread = threading.Thread(target=beat, name="windlass-beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL if before is None else before)
