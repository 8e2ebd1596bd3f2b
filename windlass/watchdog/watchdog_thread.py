"""Watchdog thread, which publishes its rank's heartbeat, checks the other ranks after a long wait, and ends a hung run.

[Note: watchdog] Once per tick the thread writes the rank's heartbeat to the control store and reads the alarm counter.
A rank in trouble (a long wait, an exception) raises an alarm. Then every rank reads the decision and the heartbeats of
the ranks below it, to find the lowest rank that is alive. Only that rank reads all heartbeats and diagnoses the run, so
that a thousand ranks do not read a thousand heartbeats each. It prints a fatal diagnosis as a table and writes it to
the store, and every rank ends itself. A wait inside C++ can't be interrupted, so the thread ends the process
(`os._exit`). Nothing needs a cleanup: shared memory and the files of the disk tier are unlinked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import TracebackType

from windlass.base.collective_activity import activity
from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.base.processes import WATCHDOG_EXIT_CODE, is_stopped
from windlass.watchdog.control_store import ControlStore, ControlStoreLostError
from windlass.watchdog.hang_diagnosis import HangDiagnosis, diagnose
from windlass.watchdog.hang_report import format_hang_report
from windlass.watchdog.heartbeat import Heartbeat, ProgramEnd
from windlass.watchdog.peer_status import PeerMonitor, PeerState, PeerStatus
from windlass.watchdog.thread_location import ThreadLocation, ThreadObserver, location_of_error
from windlass.watchdog.watchdog_limits import WatchdogLimits

_MAX_DECISION_WAIT_S = 10.0  # time that a rank which failed in a collective waits for the decision
# Longest wait until the other ranks no longer need the store, and until a rank that is exiting ends by itself.
_CHECK_OUT_TIMEOUT_S = 5.0


class WatchdogThread:
    """Watchdog of this process.

    Args:
        control_store: store through which ranks exchange heartbeats.
        rank: number of this rank.
        world_size: number of ranks.
        limits: time limits; `set_limits` changes them.
        store_rank: rank whose process serves the store; None: a process that outlives all ranks.
    """

    def __init__(
        self, control_store: ControlStore, rank: int, world_size: int, limits: WatchdogLimits, store_rank: int | None
    ) -> None:
        self._control_store, self._rank, self._world_size, self._store_rank = (
            control_store,
            rank,
            world_size,
            store_rank,
        )
        self.limits = limits
        self._host, self._pid = _host_identity(), os.getpid()
        self._peers = PeerMonitor(world_size, self._host, limits)
        self._observer = ThreadObserver()
        self._current_wait: object | None = None
        self._wait_start = self._idle_start = time.monotonic()
        self._last_wait: object | None = None
        self._beat = self._alarms_seen = 0
        self._end_record: tuple[ThreadLocation, ProgramEnd, str] | None = None
        self._store_lost = self._checked_out = self._fault_logged = False
        self._next_report = limits.report_after
        self._stopping, self._decision_event = threading.Event(), threading.Event()
        first = rank - int(os.environ.get("LOCAL_RANK", "0"))
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._local_peers = [r for r in range(first, first + size) if 0 <= r < world_size and r != rank]
        self._thread = threading.Thread(target=self._run, name="windlass-watchdog", daemon=True)
        self._beat_start = 0.0
        self._thread.start()
        if store_rank not in (None, rank):
            threading.Thread(target=self._run_guard, name="windlass-watchdog-guard", daemon=True).start()

    def set_limits(self, limits: WatchdogLimits) -> None:
        """Change the time limits."""
        self.limits = self._peers.limits = limits

    @property
    def is_running(self) -> bool:
        """True if the thread runs in this process and its store belongs to torch's present default process group."""
        return self._thread.is_alive() and os.getpid() == self._pid and self._control_store.is_current()

    def stop(self, *, program_ended: bool) -> None:
        """End the thread.

        Args:
            program_ended: True if the program has ended; this is published to the other ranks.
        """
        if os.getpid() != self._pid or self._stopping.is_set() or self._decision_event.is_set():
            return
        self._stopping.set()
        self._thread.join(2.0)
        if self._thread.is_alive() or self._store_lost or not program_ended:
            return
        with contextlib.suppress(ControlStoreLostError):
            if self._end_record is None:
                self._end_record = ThreadLocation(), ProgramEnd.DONE, ""
            self._control_store.write_heartbeat(self._make_heartbeat())
            self._control_store.count_alarms(raise_alarm=True)
            self._check_out()
            if self._store_rank == self._rank:
                self._wait_for_check_outs(2 * self.limits.beat_interval + 0.5)

    def record_failure(self, error: BaseException, trace: TracebackType | None) -> None:
        """Publish that an uncaught exception ends this rank."""
        place, waiting = location_of_error(error, trace)
        is_disconnected = isinstance(error, CommunicationError) or (waiting and isinstance(error, RuntimeError))
        text = "".join(traceback.format_exception(type(error), error, trace))
        self._end_record = place, ProgramEnd.FAILED_IN_WAIT if is_disconnected else ProgramEnd.FAILED, text
        self._current_wait, self._wait_start = None, time.monotonic()
        with contextlib.suppress(ControlStoreLostError):
            self._control_store.write_heartbeat(self._make_heartbeat())
            self._control_store.count_alarms(raise_alarm=True)

    @property
    def program_ended(self) -> bool:
        """True if the end of this rank's program has been published."""
        return self._end_record is not None

    @property
    def failed_in_wait(self) -> bool:
        """True if the exception that ends this rank was raised in a wait for other ranks."""
        return self._end_record is not None and self._end_record[1] is ProgramEnd.FAILED_IN_WAIT

    @property
    def is_decided(self) -> bool:
        """True once the reason to end this rank is known."""
        return self._decision_event.is_set()

    def wait_for_decision(self) -> None:
        """Wait, after `record_failure`, for the decision about the run, or until the other ranks have read that this
        rank ends; at most 10 s.
        """
        if self.failed_in_wait:
            self._decision_event.wait(min(_MAX_DECISION_WAIT_S, self.limits.report_after))
        elif self._store_rank == self._rank:
            with contextlib.suppress(ControlStoreLostError):
                self._wait_for_check_outs(_CHECK_OUT_TIMEOUT_S)

    # Thread

    def _run(self) -> None:
        # The first heartbeat is immediate: a rank that dies before its first heartbeat looks as if it never started.
        pause = 0.0
        while not self._stopping.is_set():
            lost = self._sleep(pause)
            pause = self.limits.beat_interval
            if lost:
                self._peers.ignore_pause(lost)
                self._wait_start, self._idle_start = self._wait_start + lost, self._idle_start + lost
            if self._stopping.is_set():
                return
            if not self._control_store.is_current():
                return
            try:
                self._beat_start = time.monotonic()
                self._check_alone() if self._store_lost else self._beat_once()
            except ControlStoreLostError:
                self._store_lost = True
            except Exception:  # a bug in the watchdog must not end a healthy run
                if not self._fault_logged:
                    logger.exception("error in the watchdog thread, which continues; please report this traceback")
                self._fault_logged = True
            finally:
                self._beat_start = 0.0

    def _sleep(self, seconds: float) -> float:
        """Sleep, and return the seconds in which this process could not run, or 0 if these are at most `silent_after`.

        A process is stopped by Ctrl-Z, a debugger or a scheduler, usually together with all other ranks. So the time of
        a stop does not count as waiting.
        """
        began = time.monotonic()
        self._stopping.wait(seconds)
        lost = time.monotonic() - began - seconds
        return lost if lost > self.limits.silent_after else 0.0

    def _run_guard(self) -> None:
        """Check the ranks while the watchdog thread is blocked in the store, because the store's rank is stopped."""
        while not self._stopping.is_set() and self._thread.is_alive():
            lost = self._sleep(self.limits.beat_interval)
            began = 0.0 if lost or self._decision_event.is_set() else self._beat_start
            if began and time.monotonic() - began > 2 * self.limits.silent_after:
                self._check_alone()

    def _beat_once(self) -> None:
        record = self._make_heartbeat()
        self._control_store.write_heartbeat(record)
        trouble = record.wait_s >= self.limits.check_peers_after or record.program_end is not ProgramEnd.RUNNING
        rung = self._control_store.count_alarms(raise_alarm=trouble)
        if 0 not in self._peers.heartbeats:
            self._peers.update(self._control_store.read_heartbeats([0]))
        if trouble or rung != self._alarms_seen:
            self._check_peers(record)
        self._alarms_seen = rung

    def _check_peers(self, heartbeat: Heartbeat) -> None:
        decision = self._control_store.read_decision()
        if decision:
            logger.error("ended by the watchdog: %s", decision)
            self._end_process()
        self._peers.update(self._control_store.read_heartbeats(self._local_peers))
        for lower in range(self._rank):
            self._peers.update(self._control_store.read_heartbeats([lower]))
            if self._store_rank == lower and self._has_end_of(lower):
                self._check_out()
                self._store_lost = True
                return
            if self._peers.peer_status(lower).state is PeerState.ALIVE:
                return
        self._peers.update({**self._control_store.read_heartbeats(range(self._world_size)), self._rank: heartbeat})
        self._judge_all()

    def _check_alone(self) -> None:
        """Diagnose the run from the heartbeats read so far, because the store is gone or does not answer."""
        record = self._make_heartbeat()
        if record.wait_s < self.limits.check_peers_after and record.program_end is not ProgramEnd.FAILED_IN_WAIT:
            return
        self._peers.update({self._rank: record})
        sights = [one for one in self._peers.peer_statuses() if one.heartbeat is not None]
        diagnosis = diagnose(sights, self.limits)
        if self._store_lost and (diagnosis is None or not diagnosis.fatal):
            keeper = f"rank {self._store_rank}" if self._store_rank is not None else "the launcher"
            diagnosis = HangDiagnosis(f"the process of {keeper}, which served the process group's store, is gone", True)
        if diagnosis is not None and self._log_diagnosis(diagnosis, sights):
            self._end_process()

    def _judge_all(self) -> None:
        sights = self._peers.peer_statuses()
        diagnosis = diagnose(sights, self.limits)
        if diagnosis is None:
            self._next_report = self.limits.report_after
        elif self._log_diagnosis(diagnosis, sights):
            self._control_store.post_decision(
                f"{diagnosis.headline} (the table of all ranks is in the output of rank {self._rank})"
            )
            # give the others time to read the decision; this process may serve the store
            time.sleep(2.5 * self.limits.beat_interval)
            self._end_process()

    def _log_diagnosis(self, diagnosis: HangDiagnosis, statuses: list[PeerStatus]) -> bool:
        """Log a report if it is due. Return True if the run must end."""
        longest = max(one.wait_s for one in statuses)
        if diagnosis.fatal or longest >= self._next_report:
            self._next_report = 2 * longest
            logger.error(format_hang_report(diagnosis, statuses, self._rank))
        if diagnosis.fatal:
            self._decision_event.set()
        return diagnosis.fatal

    def _make_heartbeat(self) -> Heartbeat:
        now = time.monotonic()
        if self._end_record is not None:
            place, end, error = self._end_record
        else:
            place, end, error = self._observer.observe(), ProgramEnd.RUNNING, ""
            if self._observer.current_wait != self._current_wait:
                self._current_wait, self._wait_start = self._observer.current_wait, now
            if activity.last_wait is not self._last_wait or self._current_wait is not None:
                self._last_wait, self._idle_start = activity.last_wait, now
        self._beat += 1
        return Heartbeat(
            self._rank,
            self._host,
            self._pid,
            self._beat,
            place,
            wait_s=max(now - self._wait_start, 0.001) if self._current_wait is not None else 0.0,
            idle_s=now - (self._wait_start if self._end_record is not None else self._idle_start),
            program_end=end,
            error=error,
            caught_error=activity.caught_error,
            dead_local_ranks=self._peers.find_dead_local_ranks(self._local_peers),
        )

    def _has_end_of(self, rank: int) -> bool:
        record = self._peers.heartbeats.get(rank)
        return record is not None and record.program_end in (ProgramEnd.DONE, ProgramEnd.FAILED)

    def _check_out(self) -> None:
        if not self._checked_out:
            self._checked_out = True
            self._control_store.check_out()

    def _wait_for_check_outs(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (
            self._control_store.count_checked_out() < self._world_size - (not self._checked_out)
            and time.monotonic() < until
        ):
            time.sleep(0.02)

    def _end_process(self) -> None:
        """End this process, even if its main thread is blocked."""
        self._decision_event.set()
        if self._end_record is not None:  # the main thread is exiting already: give it time to end the process
            time.sleep(_CHECK_OUT_TIMEOUT_S)
        # flush in a thread, since the main thread may hold a stream's lock
        flushing = threading.Thread(target=_flush_streams, daemon=True)
        flushing.start()
        flushing.join(1.0)
        for child in multiprocessing.active_children():
            child.kill()
        for other in self._peers.heartbeats.values():  # continue stopped ranks, so that they read the decision and end
            if other.host == self._host and other.pid != self._pid and is_stopped(other.pid):
                with contextlib.suppress(OSError):
                    os.kill(other.pid, signal.SIGCONT)
        os._exit(WATCHDOG_EXIT_CODE)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _host_identity() -> str:
    """Return an identity of this machine, its boot and its PID namespace.

    Containers may share a host name without seeing each other's processes.
    """
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        facts.append(file.read().strip())
    return " ".join(facts)
