"""Start and supervision of the ranks of this machine."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading

from windlass.comm.addresses import is_loopback
from windlass.launch.exit_status import LaunchExitStatus
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.rank_jobs import make_rank_jobs
from windlass.launch.rank_processes import RankProcesses
from windlass.launch.rendezvous_store import LOOPBACK, RendezvousStore, is_port_free
from windlass.launch.supervisor import RankEvents, capture_signals, supervise

_LISTEN_PORTS = range(20_000, 32_000)
_PORT_TRIALS = 20


def start_local_ranks(plan: LaunchPlan, events: RankEvents) -> LaunchExitStatus:
    """Start the ranks of host `plan.node_rank`, which is this machine, and supervise them to their end.

    Ranks die with this process, even if it is killed (Linux). Signals are forwarded to them. The call must be in the
    main thread, the only thread that receives signals.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    check_main_thread()
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(capture_signals(plan.signals))
        selector = stack.enter_context(selectors.DefaultSelector())
        master = _master_endpoint(plan, stack)
        jobs = make_rank_jobs(plan, plan.node_rank, master)
        ranks = RankProcesses(jobs, events, selector, capture=events.console is not None, servers=plan.servers)
        if events.console is not None:
            stack.callback(events.console.close)
        return supervise(
            [ranks], events, selector, received, grace_s=plan.grace_s, monitor_interval_s=plan.monitor_interval_s
        )


def check_main_thread() -> None:
    """Require that the caller is the main thread.

    Raises:
        LaunchError: the caller is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("ranks can only be started from the main thread: they end with the thread that started them")


def _master_endpoint(plan: LaunchPlan, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Return the address and port of the rendezvous store. On the first host, start it, unless rank 0 runs it."""
    alone = len(plan.hosts) == 1
    address = plan.master_addr or LOOPBACK
    if plan.node_rank > 0:
        if plan.master_addr is None or plan.master_port is None:
            raise LaunchError(
                f"--node_rank {plan.node_rank} needs --master_addr and --master_port: those of the first node"
            )
        return address, plan.master_port
    if not plan.use_agent_store:
        return address, check_port(plan.master_port) if plan.master_port is not None else free_port()
    store = RendezvousStore(plan.master_port or 0, all_interfaces=not alone or not is_loopback(address))
    stack.callback(store.close)
    store.serve()
    return address, store.port


def check_port(port: int) -> int:
    """Return `port` if a process of this host can listen at it.

    Raises:
        LaunchError: `port` is not a port, or is in use.
    """
    if not 0 < port < 65536:
        raise LaunchError(f"--master-port {port} is not a port; give one from 1 to 65535, or none")
    if not is_port_free(port):
        raise LaunchError(f"port {port} is in use; give another --master-port, or none to use a free one")
    return port


def free_port() -> int:
    """Return a port at which no process of this host listens at present.

    Ports below the kernel's usual range of ephemeral ports are tried first: the kernel may give an ephemeral port to
    any connection before a rank listens at it.
    """
    for port in random.SystemRandom().sample(_LISTEN_PORTS, _PORT_TRIALS):
        if is_port_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
