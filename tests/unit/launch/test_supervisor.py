"""Tests of the supervisor: signals, kills by the launcher, restarts, and workers of parameter servers."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.process.wait_until import is_alive, until
from windlass.launch.elastic_restart import run_with_restarts
from windlass.launch.exit_status import LaunchExitStatus, RankFailure
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.local_launch import start_local_ranks
from windlass.launch.program import Program
from windlass.launch.rank_placement import Host
from windlass.launch.rank_processes import RankJob, RankProcesses
from windlass.launch.start_ranks import start_ranks
from windlass.launch.supervisor import RankEvents, ReceivedSignals, capture_signals, supervise


class _Node:
    """Node whose ranks end when they are killed. `act` is called at each poll with the actions so far."""

    def __init__(self, act: Callable[[list[object]], None]) -> None:
        self.alive, self.actions, self._act = True, [], act

    def poll(self) -> None:
        self._act(self.actions)

    def stop(self, signal_number: int, grace_s: float) -> None:
        self.actions.append(signal_number)

    def kill(self) -> None:
        self.actions.append("kill")
        self.alive = False

    def close(self, *, succeeded: bool) -> None: ...


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_signals_of_one_request_are_forwarded_once_and_a_second_request_kills(second: signal.Signals) -> None:
    received, times = ReceivedSignals(), [time.monotonic()]

    def send(actions: list[object]) -> None:
        if not received.numbers:
            received(signal.SIGINT, None)
            received(second, None)
        elif len(received.numbers) == 2:
            assert actions == [signal.SIGINT], "not forwarded"
            received(second, None)  # a copy of the first request that arrives after the forwarding
        elif len(received.numbers) == 3 and time.monotonic() - times[0] > 0.3:
            assert actions == [signal.SIGINT], "killed without grace"
            received(signal.SIGINT, None)

    node = _Node(send)
    with selectors.DefaultSelector() as selector:
        outcome = supervise([node], RankEvents(None), selector, received, grace_s=7, monitor_interval_s=0.01)
    assert node.actions == [signal.SIGINT, "kill"]
    assert outcome == LaunchExitStatus(130, interrupted_by=signal.SIGINT)


def _plan(*hosts: Host, **options: object) -> LaunchPlan:
    return replace(LaunchPlan(Program(("script.py",)), hosts), **options)


def _failing(failures: tuple[RankFailure, ...], started: list[LaunchPlan], then: Callable[[], None]) -> object:
    def start(plan: LaunchPlan) -> LaunchExitStatus:
        started.append(plan)
        if len(started) > 1:
            return LaunchExitStatus(0)
        then()
        return LaunchExitStatus(3, failures)

    return start


def test_a_signal_between_two_attempts_forbids_the_restart() -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        plan, started = _plan(Host("localhost", (0, 1)), signals=("SIGUSR1",), max_restarts=1), []
        start = _failing((RankFailure(0, 3, 1.0),), started, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        outcome = run_with_restarts(plan, start)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(started) == 1 and (outcome.exit_code, outcome.interrupted_by) == (3, signal.SIGUSR1)


def test_nested_capture_continues_the_outer_one() -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with capture_signals(("SIGUSR1",)) as outer:
            os.kill(os.getpid(), signal.SIGUSR1)
            with capture_signals(("SIGUSR1", "SIGUSR2")) as inner:
                os.kill(os.getpid(), signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        assert inner.numbers == outer.numbers == [signal.SIGUSR1, signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR1, before)


# Rank 0 fails. Rank 1 ignores the SIGTERM that follows, or passes a signal to the launcher.
FAILS = """
import os, signal, sys, time
from pathlib import Path
rank, ready = int(os.environ["RANK"]), Path(__file__).with_name("ready")
Path(__file__).with_name(f"start{os.environ['WINDLASS_RESTARTS']}").touch()
def on_stop(number, frame):
    if sys.argv[1] == "signals":
        os.kill(os.getppid(), signal.SIGTERM)
if rank:
    signal.signal(signal.SIGTERM, on_stop)
    ready.touch()
    if sys.argv[1] == "together":
        os.kill(os.getppid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    while os.getppid() > 1:
        time.sleep(0.02)
while not ready.exists() or sys.argv[1] == "together":
    time.sleep(0.02)
sys.exit(3)
"""


def _script(folder: Path, source: str, *words: str) -> Program:
    path = folder / "script.py"
    path.write_text(source)
    return Program((str(path), *words))


@pytest.mark.parametrize("how", ["signals", "together"])
def test_a_signal_during_a_failure_forbids_a_restart(how: str, tmp_path: Path) -> None:
    plan = replace(_plan(Host("localhost", (0, 1)), max_restarts=1, grace_s=0.5), program=_script(tmp_path, FAILS, how))
    outcome = run_with_restarts(plan, lambda plan: start_local_ranks(plan, RankEvents(None)))
    assert outcome.interrupted_by == signal.SIGTERM
    assert outcome.exit_code == (3 if how == "signals" else 128 + signal.SIGTERM)
    assert [path.name for path in tmp_path.glob("start*")] == ["start0"]


def test_ranks_killed_by_the_launcher_are_no_failures(tmp_path: Path) -> None:
    program = _script(tmp_path, FAILS, "ignores")
    outcome = start_ranks(list(program.argv), 2, grace_s=0.2)
    assert outcome.exit_code == 3 and [failure.rank for failure in outcome.failures] == [0]


def test_a_run_ends_with_the_last_of_its_workers() -> None:
    events = RankEvents(None, ["a", "b", "c"], workers=range(1, 3))
    events.on_ended(1, -signal.SIGKILL)
    assert not events.failures
    events.on_ended(2, -signal.SIGKILL)
    assert [failure.rank for failure in events.failures] == [2]
    events = RankEvents(None, workers=range(1, 3))
    events.on_ended(2, 1)
    assert [failure.rank for failure in events.failures] == [2], "an exception ends the run"


def test_a_host_continues_without_its_only_worker(tmp_path: Path) -> None:
    program = _script(tmp_path, "import os; os.kill(os.getpid(), 9)")
    plan = _plan(Host("a", (0, 1)), Host("b", (0,)), node_rank=1, servers=1, master_addr="127.0.0.1", master_port=1)
    plan = replace(plan, program=program)
    assert start_local_ranks(plan, RankEvents(None, workers=plan.workers)).exit_code == 0


def test_the_master_address_leaves_with_the_first_host() -> None:
    hosts = Host("a", (0,)), Host("b", (0, 1)), Host("c", (0,))
    plan = _plan(*hosts, master_addr="10.0.0.1", master_port=7)
    assert plan.with_hosts(hosts[:2], 1).master_addr == "10.0.0.1"
    assert plan.with_hosts(hosts[1:], 1).master_addr is None
    assert plan.with_hosts(hosts[1:], 1).master_port == 7


LEAVES_ITS_GROUP = """
import os, signal, sys, time
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, lambda number, frame: os.setsid())
    open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_that_leaves_the_group_of_its_rank_while_it_is_stopped_is_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    job = RankJob(0, [sys.executable, "-I", "-S", "-c", LEAVES_ITS_GROUP, str(child)], dict(os.environ))
    with selectors.DefaultSelector() as selector:
        ranks = RankProcesses([job], RankEvents(None), selector, capture=False)
        try:
            until(child.exists, "the child is ready")
            ranks.stop(signal.SIGTERM, 60.0)
            until(lambda: os.getsid(int(child.read_text())) == int(child.read_text()), "the child leaves the group")

            def has_ended() -> bool:
                ranks.poll()
                return not ranks.alive

            until(has_ended, "the rank ends")
        finally:
            ranks.close(succeeded=False)
    until(lambda: not is_alive(int(child.read_text())), "the child ends")
