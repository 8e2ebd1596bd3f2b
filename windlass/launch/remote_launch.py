"""Launch of ranks on several hosts, each over a connection of its own."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from windlass.launch.agent_channel import KEEPALIVE, KEEPALIVE_INTERVAL_S
from windlass.launch.exit_status import LaunchExitStatus
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.local_launch import check_main_thread
from windlass.launch.rank_placement import Host
from windlass.launch.ssh_connection import RemoteNode, check_agent_version
from windlass.launch.supervisor import RankEvents, ReceivedSignals, capture_signals, supervise

CONNECT_TIMEOUT_S = 60.0
_LOST_GRACE_S = 2.0  # shorter than `LaunchPlan.grace_s`, because the loss of a host is detected only after seconds


def start_on_hosts(
    plan: LaunchPlan, command: Callable[[Host], list[str]], events: RankEvents, *, reports_memory: bool = False
) -> LaunchExitStatus:
    """Start an agent on each host by `command(host)`, and the ranks through the agents; supervise the ranks.

    Raises:
        LaunchError: a host cannot be reached, or its ranks cannot be started; all started ranks are ended.
    """
    check_main_thread()
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(capture_signals(plan.signals))
        selector = stack.enter_context(selectors.DefaultSelector())
        if events.console is not None:
            stack.callback(events.console.close)
        nodes: list[RemoteNode] = []
        stack.callback(_close_all, nodes)
        for index, host in enumerate(plan.hosts):
            nodes.append(RemoteNode(host.name, command(host), plan.rank_placements(index), events, selector))
        stack.enter_context(_sending_keepalives(nodes))
        nodes[0].channel.send(
            {"meet": {"port": plan.master_port, "keep_store": plan.use_agent_store, "alone": len(nodes) == 1}}
        )
        if not _wait_for_agents(nodes, selector, received):
            return LaunchExitStatus(128 + received.numbers[0], interrupted_by=received.numbers[0])
        assert nodes[0].master_endpoint is not None
        address, port = nodes[0].master_endpoint
        master = [plan.master_addr or address, port]
        for index, node in enumerate(nodes):
            node.channel.send({"plan": plan.to_json(), "node": index, "master": master, "watched": reports_memory})
        return supervise(
            [_ErrorCheckedNode(node) for node in nodes],
            events,
            selector,
            received,
            grace_s=plan.grace_s,
            lost_grace_s=_LOST_GRACE_S,
            monitor_interval_s=plan.monitor_interval_s,
        )


def _close_all(nodes: Sequence[RemoteNode]) -> None:
    for node in nodes:
        node.close(succeeded=False)


class _ErrorCheckedNode:
    """Remote node whose `poll` raises LaunchError if the node has sent an error."""

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


def _wait_for_agents(nodes: Sequence[RemoteNode], selector: selectors.BaseSelector, received: ReceivedSignals) -> bool:
    """Wait until every agent has answered. Return False if a signal came first."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while any(node.version is None for node in nodes) or nodes[0].master_endpoint is None:
        if received.numbers:
            return False
        for key, _ in selector.select(0.1):
            key.data()
        for node in nodes:
            node.poll()
            _check_error(node)
            if not node.alive:
                raise LaunchError(
                    f"{node.host} cannot be reached: {node.describe_end()}; `ssh {node.host} true` must work without "
                    "a prompt"
                )
            if node.version is None and time.monotonic() > deadline:
                raise LaunchError(
                    f"{node.host} did not answer within {CONNECT_TIMEOUT_S:.0f} s; is windlass installed there?"
                )
    for node in nodes:
        check_agent_version(node)
    return True


@contextlib.contextmanager
def _sending_keepalives(nodes: Sequence[RemoteNode]) -> Iterator[None]:
    """Send keepalives to nodes once a second from a thread, even while the main thread blocks. Before a suspension
    (Ctrl-Z), send a message that pauses the agents' timeout."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(KEEPALIVE_INTERVAL_S):
            for node in nodes:
                node.channel.send_bytes(KEEPALIVE)

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
