"""Starts the ranks of this machine, and brings back how they ended."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

from windlass.comm.addresses import is_loopback
from windlass.launch.conduct import Events, conduct, signals_taken
from windlass.launch.errors import LaunchError
from windlass.launch.jobs import jobs_of
from windlass.launch.outcome import Outcome
from windlass.launch.plan import Plan
from windlass.launch.ranks import Ranks
from windlass.launch.store import LOOPBACK, Store, port_is_free


def start_here(plan: Plan, events: Events) -> Outcome:
    """Start the ranks of the host `plan.node`, which is this machine, and look after them to their end.

    Ranks die with this process, even if it is killed (Linux). Signals are passed on to them. Only in the main thread,
    whose signals these are.

    Raises:
        LaunchError: they cannot be started.
    """
    check_main_thread()
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(signals_taken(plan.signals))
        selector = stack.enter_context(selectors.DefaultSelector())
        master = _meeting_point(plan, stack)
        jobs = jobs_of(plan, plan.node, master)
        ranks = Ranks(jobs, events, selector, capture=events.console is not None)
        if events.console is not None:
            stack.callback(events.console.close)
        return conduct([ranks], events, selector, received, grace_s=plan.grace_s, interval_s=plan.interval_s)


def check_main_thread() -> None:
    """Raises:
    LaunchError: this is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("ranks can only be started from the main thread: they end with the thread that started them")


def _meeting_point(plan: Plan, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Address and port at which ranks meet; on the first host their store is kept from here on."""
    alone = len(plan.hosts) == 1
    address = plan.master_addr or LOOPBACK
    if plan.node > 0:
        if plan.master_addr is None or plan.master_port is None:
            raise LaunchError(f"--node_rank {plan.node} needs --master_addr and --master_port: those of the first node")
        return address, plan.master_port
    if not plan.keep_store:
        return address, check_port(plan.master_port) if plan.master_port is not None else free_port()
    store = Store(plan.master_port or 0, everywhere=not alone or not is_loopback(address))
    stack.callback(store.close)
    store.serve()
    return address, store.port


def check_port(port: int) -> int:
    """The port, if a process of this host can listen there.

    Raises:
        LaunchError: it is no port, or in use.
    """
    if not 0 < port < 65536:
        raise LaunchError(f"--master-port {port} is no port; give one from 1 to 65535, or none")
    if not port_is_free(port):
        raise LaunchError(f"port {port} is in use; give another --master-port, or none and a free one is taken")
    return port


def free_port() -> int:
    """A port that nobody of this host listens at now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
