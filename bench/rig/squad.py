"""The ranks of one job: fresh processes that stay until the squad is dismissed."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from rig.job import Job
from rig.worker import Worker, main

_PATIENCE_SECONDS = 900


class SquadFailed(Exception):
    """A rank failed, ended, or did not answer; the message is its own last line."""


class Squad:
    """Starts the ranks of `job` and passes commands on to all of them.

    Args:
        kind: what each rank is.

    Raises:
        SquadFailed: from any method, when a rank fails.
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
        """Answers of the ranks to a command of `Worker`, by rank."""
        try:
            for end in self._ends:
                end.send((method, arguments))
            answers = [self._answer(rank) for rank in range(self.job.ranks)]
        except (BrokenPipeError, EOFError, ConnectionResetError) as error:
            raise SquadFailed(f"a rank of {self.job.engine} ended without a word in {method}") from error
        failed = [(rank, answer.strip().splitlines()[-1]) for rank, (well, answer) in enumerate(answers) if not well]
        if failed:  # one may only have lost its peer, which has more to say
            said = "; ".join(f"rank {rank}: {line}" for rank, line in failed)
            raise SquadFailed(f"{self.job.engine}: {said}")
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._ends[rank].poll(_PATIENCE_SECONDS):
            raise SquadFailed(f"rank {rank} of {self.job.engine} did not answer within {_PATIENCE_SECONDS} s")
        well, answer = self._ends[rank].recv()
        return well, answer

    def dismiss(self) -> None:
        """End the ranks. Doing it again does nothing."""
        for end, process in zip(self._ends, self._processes, strict=True):
            process.terminate()
            process.join()
            end.close()
        self._ends, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> Squad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()
