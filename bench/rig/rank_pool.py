"""Ranks of one job: fresh processes that live until the pool is dismissed."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from rig.job import Job
from rig.worker import Worker, main

_PATIENCE_SECONDS = 900


class RankPoolFailed(Exception):
    """Failure of a rank: it raised, ended, or did not answer. The message is the rank's last line."""


class RankPool:
    """Pool of the ranks of `job`, to which commands are sent.

    Args:
        kind: class of the worker on each rank.

    Raises:
        RankPoolFailed: from any method, when a rank fails.
    """

    def __init__(self, job: Job, kind: type[Worker] = Worker) -> None:
        self.job = job
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="windlass-bench-")
        meeting = str(Path(self._folder.name, "meeting"))
        self._ends, self._processes = [], []
        for rank in range(job.ranks):
            here, there = context.Pipe()
            process = context.Process(target=main, args=(there, job, rank, meeting, kind), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """Send a command of `Worker`. Return the answers by rank."""
        try:
            for end in self._ends:
                end.send((method, arguments))
            answers = [self._answer(rank) for rank in range(self.job.ranks)]
        except (BrokenPipeError, EOFError, ConnectionResetError) as error:
            raise RankPoolFailed(f"a rank of {self.job.engine} ended without an error message in {method}") from error
        failed = [(rank, answer.strip().splitlines()[-1]) for rank, (well, answer) in enumerate(answers) if not well]
        if failed:  # a rank may only have lost its peer, whose error is the cause
            said = "; ".join(f"rank {rank}: {line}" for rank, line in failed)
            raise RankPoolFailed(f"{self.job.engine}: {said}")
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._ends[rank].poll(_PATIENCE_SECONDS):
            raise RankPoolFailed(f"rank {rank} of {self.job.engine} did not answer within {_PATIENCE_SECONDS} s")
        well, answer = self._ends[rank].recv()
        return well, answer

    def dismiss(self) -> None:
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
        self.dismiss()
