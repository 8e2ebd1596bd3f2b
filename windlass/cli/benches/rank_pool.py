"""Fresh processes of ranks that run commands, for `windlass bench` and for the scripts of the folder bench."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from windlass.base.errors import WindlassError
from windlass.base.processes import temporary_environment
from windlass.base.text import print_escaped
from windlass.cli.expected_errors import describe_expected_error

_AFTER_FAILURE_S = 5.0  # wait for further failures: often another rank caused the first one


class RankPoolError(WindlassError):
    """Error of a rank that failed, ended, or did not answer in time."""


class RankPool:
    """Processes of one machine, one for each rank, which wait for commands until the pool is closed.

    Args:
        make_worker: class or function that can be pickled. Each rank calls `make_worker` with its number and a URL for
            `init_process_group`. The methods of the returned object are the commands.
        nproc: number of ranks.
        label: name of the pool in errors.
        env: variables to add to the environment of the ranks.
        timeout_s: time that a command may take; None: unlimited.
    """

    def __init__(
        self,
        make_worker: Callable[[int, str], Any],
        nproc: int,
        *,
        label: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.label, self._timeout_s = label, timeout_s
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-bench-")
        init_method = "file://" + str(Path(self._folder.name, "init_method"))
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        common = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": "0", **(env or {})}
        for rank in range(nproc):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, make_worker, rank, init_method), daemon=True)
            variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with temporary_environment(variables), _interrupts_held():
                process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of each rank's worker. Return the results, by rank.

        Raises:
            RankPoolError: a rank failed, ended or did not answer in time.
        """
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._ends))
        for rank, end in waiting.items():
            try:
                end.send((method, arguments))
            except (BrokenPipeError, ConnectionResetError):
                failures[rank] = self._end_of(rank)
        deadline = time.monotonic() + self._timeout_s if self._timeout_s is not None else None
        while waiting := {rank: end for rank, end in waiting.items() if rank not in {**answers, **failures}}:
            if failures:
                deadline = min(deadline or float("inf"), time.monotonic() + _AFTER_FAILURE_S)
            ready = wait(list(waiting.values()), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                failures = failures or {rank: f"no answer to {method!r} in {self._timeout_s:g} s" for rank in waiting}
                break
            for rank in [rank for rank, end in waiting.items() if end in ready]:
                try:
                    succeeded, answer = waiting[rank].recv()
                except (EOFError, ConnectionResetError):
                    succeeded, answer = False, self._end_of(rank)
                (answers if succeeded else failures)[rank] = answer
        if failures:
            raise RankPoolError(f"{self.label}: {'; '.join(f'rank {rank}: {failures[rank]}' for rank in failures)}")
        return [answers[rank] for rank in range(len(self._ends))]

    def close(self) -> None:
        """End the ranks. Further calls do nothing."""
        for end, process in zip(self._ends, self._processes, strict=True):
            process.terminate()
            process.join()
            end.close()
        self._ends, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_of(self, rank: int) -> str:
        self._processes[rank].join(_AFTER_FAILURE_S)
        return f"ended with exit code {self._processes[rank].exitcode}"


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C inside the context. A process that starts in it never receives Ctrl-C, not even while it imports
    modules, before it ignores the signal itself."""
    resource_tracker.ensure_running()  # its own start, by the first process, would release SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, make_worker: Callable[[int, str], Any], rank: int, init_method: str) -> None:
    """Run one rank: execute commands until the other end of the connection is closed or a command fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the pool's process, and the pool ends the ranks
    try:
        worker = make_worker(rank, init_method)
        while True:
            method, arguments = connection.recv()
            connection.send((True, getattr(worker, method)(**arguments)))
    except EOFError:
        os._exit(0)
    except Exception as error:
        if (message := describe_expected_error(error)) is None:
            print_escaped(traceback.format_exc(), to_stderr=True)
            message = f"{type(error).__name__}: {error}"
        connection.send((False, message))
    sys.stderr.flush()
    os._exit(1)  # without waiting for peers, which may have failed
