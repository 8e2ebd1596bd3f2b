"""The watchdog: a thread that beats for its rank, looks at the others when somebody waits long, and ends what is lost.

[Note: watchdog] Once a tick the thread leaves the rank's record on the board and reads one counter, the bell. A rank in
trouble (a long wait, an exception) rings it, and then every rank looks: at what was decided, and at the ranks below
itself, to find the lowest one that lives. That one reads all records and judges, so that a thousand ranks do not read a
thousand records each. What it decides it prints, as a table, and leaves on the board; every rank ends itself. A wait
inside C++ cannot be left, so the thread ends the process (`os._exit`). Nothing needs to be undone then: shared memory
and files of the disk tier have no names.
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

from windlass.base.activity import activity
from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.base.process import ENDED_BY_WATCHDOG, is_stopped
from windlass.watchdog.board import Board, BoardLost
from windlass.watchdog.place import Place, Watcher, place_of_error
from windlass.watchdog.record import End, Record
from windlass.watchdog.report import report
from windlass.watchdog.settings import Limits
from windlass.watchdog.sight import Lookout, Sight, State
from windlass.watchdog.verdict import Verdict, judge

_LINGER_SECONDS = 10.0  # how long a rank that was cut off waits to hear why
_FAREWELL_SECONDS = 5.0  # how long a rank that was told to end may take to do so by itself


class Watch:
    """Of this process.

    Args:
        board: where the ranks read each other.
        limits: see there; `use` sets others.
        keeper: the rank whose process keeps the board, or None: one that outlives them all.
    """

    def __init__(self, board: Board, rank: int, world: int, limits: Limits, keeper: int | None) -> None:
        self._board, self._rank, self._world, self._keeper = board, rank, world, keeper
        self.limits = limits
        self._host, self._pid = _host(), os.getpid()
        self._lookout = Lookout(world, self._host, limits)
        self._watcher = Watcher()
        self._held: object | None = None
        self._since = self._busy_since = time.monotonic()
        self._last: object | None = None
        self._beat = self._rung = 0
        self._through: tuple[Place, End, str] | None = None
        self._lost = self._left = self._complained = False
        self._next_report = limits.report_after
        self._stopping, self._decided = threading.Event(), threading.Event()
        first = rank - int(os.environ.get("LOCAL_RANK", "0"))
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._near = [r for r in range(first, first + size) if 0 <= r < world and r != rank]
        self._thread = threading.Thread(target=self._run, name="windlass-watchdog", daemon=True)
        self._tick_began = 0.0
        self._thread.start()
        if keeper not in (None, rank):
            threading.Thread(target=self._guard, name="windlass-watchdog-guard", daemon=True).start()

    def use(self, limits: Limits) -> None:
        """Go on with other limits."""
        self.limits = self._lookout.limits = limits

    @property
    def watches(self) -> bool:
        """Whether the thread runs, in this process, for the group that there is now."""
        return self._thread.is_alive() and os.getpid() == self._pid and self._board.stands()

    def stop(self, *, through: bool) -> None:
        """End the thread.

        Args:
            through: the program is, and the others shall know.
        """
        if os.getpid() != self._pid or self._stopping.is_set() or self._decided.is_set():
            return
        self._stopping.set()
        self._thread.join(2.0)
        if self._thread.is_alive() or self._lost or not through:
            return
        with contextlib.suppress(BoardLost):
            if self._through is None:
                self._through = Place(), End.DONE, ""
            self._board.write(self._record())
            self._board.bell(ring=True)
            self._leave()
            if self._keeper == self._rank:
                self._await_farewells(2 * self.limits.tick + 0.5)

    def failed(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception that nobody caught ends this rank: tell the others."""
        place, waiting = place_of_error(error, trace)
        cut_off = isinstance(error, CommunicationError) or (waiting and isinstance(error, RuntimeError))
        text = "".join(traceback.format_exception(type(error), error, trace))
        self._through = place, End.CUT_OFF if cut_off else End.FAILED, text
        self._held, self._since = None, time.monotonic()
        with contextlib.suppress(BoardLost):
            self._board.write(self._record())
            self._board.bell(ring=True)

    @property
    def through(self) -> bool:
        """Whether it was said how this rank's program ended."""
        return self._through is not None

    @property
    def was_cut_off(self) -> bool:
        """Whether the exception that ends this rank came out of a wait for others."""
        return self._through is not None and self._through[1] is End.CUT_OFF

    @property
    def decided(self) -> bool:
        """Whether it was said why this rank is ended."""
        return self._decided.is_set()

    def await_decision(self) -> None:
        """After `failed`: wait until it is known what became of the others, or until they know of this rank."""
        if self.was_cut_off:
            self._decided.wait(min(_LINGER_SECONDS, self.limits.report_after))
        elif self._keeper == self._rank:
            with contextlib.suppress(BoardLost):
                self._await_farewells(_FAREWELL_SECONDS)

    # the thread

    def _run(self) -> None:
        pause = 0.0  # a rank that dies before its first beat would pass for one that never came
        while not self._stopping.is_set():
            lost = self._sleep(pause)
            pause = self.limits.tick
            if lost:
                self._lookout.skip(lost)
                self._since, self._busy_since = self._since + lost, self._busy_since + lost
            if self._stopping.is_set():
                return
            if not self._board.stands():
                return
            try:
                self._tick_began = time.monotonic()
                self._tick_alone() if self._lost else self._tick()
            except BoardLost:
                self._lost = True
            except Exception:  # a fault of the watchdog's own must not end a run that is well
                if not self._complained:
                    logger.exception("a fault of the watchdog, which goes on")
                self._complained = True
            finally:
                self._tick_began = 0.0

    def _sleep(self, seconds: float) -> float:
        """Sleep until there is something to do; returns for how long this process could not run, where that was long:
        it was stopped (Ctrl-Z, a debugger, a scheduler), as a rule with all ranks, and nobody waited in that time."""
        began = time.monotonic()
        self._stopping.wait(seconds)
        lost = time.monotonic() - began - seconds
        return lost if lost > self.limits.silent_after else 0.0

    def _guard(self) -> None:
        """Where a rank keeps the board and is stopped, the thread never comes back from it: then this one looks."""
        while not self._stopping.is_set() and self._thread.is_alive():
            lost = self._sleep(self.limits.tick)
            began = 0.0 if lost or self._decided.is_set() else self._tick_began
            if began and time.monotonic() - began > 2 * self.limits.silent_after:
                self._tick_alone()

    def _tick(self) -> None:
        record = self._record()
        self._board.write(record)
        trouble = record.waits_s >= self.limits.look_after or record.end is not End.NO
        rung = self._board.bell(ring=trouble)
        if 0 not in self._lookout.known:
            self._lookout.update(self._board.read([0]))
        if trouble or rung != self._rung:
            self._look(record)
        self._rung = rung

    def _look(self, record: Record) -> None:
        decision = self._board.decision()
        if decision:
            logger.error("ended by the watchdog: %s", decision)
            self._end()
        self._lookout.update(self._board.read(self._near))
        for lower in range(self._rank):
            self._lookout.update(self._board.read([lower]))
            if self._keeper == lower and self._knows_end_of(lower):
                self._leave()
                self._lost = True
                return
            if self._lookout.sight(lower).state is State.ALIVE:
                return
        self._lookout.update({**self._board.read(range(self._world)), self._rank: record})
        self._judge()

    def _tick_alone(self) -> None:
        """The board is gone, or does not answer: what this rank can tell by itself."""
        record = self._record()
        if record.waits_s < self.limits.look_after and record.end is not End.CUT_OFF:
            return
        self._lookout.update({self._rank: record})
        sights = [one for one in self._lookout.sights() if one.record is not None]
        verdict = judge(sights, self.limits)
        if self._lost and (verdict is None or not verdict.fatal):
            keeper = f"rank {self._keeper}" if self._keeper is not None else "the launcher"
            verdict = Verdict(f"the process of {keeper}, where the ranks met, is gone", True)
        if verdict is not None and self._tell(verdict, sights):
            self._end()

    def _judge(self) -> None:
        sights = self._lookout.sights()
        verdict = judge(sights, self.limits)
        if verdict is None:
            self._next_report = self.limits.report_after
        elif self._tell(verdict, sights):
            self._board.decide(f"{verdict.headline} (the table of all ranks is in the output of rank {self._rank})")
            time.sleep(2.5 * self.limits.tick)  # the others read it; this process may keep the board
            self._end()

    def _tell(self, verdict: Verdict, sights: list[Sight]) -> bool:
        """Print a report if it is time for one; whether the run is over."""
        longest = max(one.waits_s for one in sights)
        if verdict.fatal or longest >= self._next_report:
            self._next_report = 2 * longest
            logger.error(report(verdict, sights, self._rank))
        if verdict.fatal:
            self._decided.set()
        return verdict.fatal

    def _record(self) -> Record:
        now = time.monotonic()
        if self._through is not None:
            place, end, error = self._through
        else:
            place, end, error = self._watcher.look(), End.NO, ""
            if self._watcher.waits != self._held:
                self._held, self._since = self._watcher.waits, now
            if activity.last is not self._last or self._held is not None:
                self._last, self._busy_since = activity.last, now
        self._beat += 1
        return Record(
            self._rank,
            self._host,
            self._pid,
            self._beat,
            place,
            waits_s=max(now - self._since, 0.001) if self._held is not None else 0.0,
            idle_s=now - (self._since if self._through is not None else self._busy_since),
            end=end,
            error=error,
            left=activity.left,
            gone=self._lookout.gone_here(self._near),
        )

    def _knows_end_of(self, rank: int) -> bool:
        record = self._lookout.known.get(rank)
        return record is not None and record.end in (End.DONE, End.FAILED)

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._board.leave()

    def _await_farewells(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._board.left() < self._world - (not self._left) and time.monotonic() < until:
            time.sleep(0.02)

    def _end(self) -> None:
        """End this process, whatever its main thread does."""
        self._decided.set()
        if self._through is not None:  # its main thread is on the way out
            time.sleep(_FAREWELL_SECONDS)
        flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold a stream's lock
        flushing.start()
        flushing.join(1.0)
        for child in multiprocessing.active_children():
            child.kill()
        for other in self._lookout.known.values():  # who is stopped could not read that it is to end, and would stay
            if other.host == self._host and other.pid != self._pid and is_stopped(other.pid):
                with contextlib.suppress(OSError):
                    os.kill(other.pid, signal.SIGCONT)
        os._exit(ENDED_BY_WATCHDOG)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _host() -> str:
    """Tells this machine from others, and from itself before it was started again; and containers, which may share a
    name and do not see each other's processes."""
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        facts.append(file.read().strip())
    return " ".join(facts)
