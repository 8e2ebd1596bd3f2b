"""Processes of all ranks of a sharded model except the first, which is the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import sys
from collections.abc import Mapping

from windlass.base.log import logger
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.program import Program
from windlass.launch.rank_jobs import make_rank_jobs
from windlass.launch.rank_output import OutputRouting, RankConsole, write_stream
from windlass.launch.rank_placement import Host
from windlass.launch.rank_processes import ERR, RankProcesses
from windlass.launch.rendezvous_store import LOOPBACK, RendezvousStore
from windlass.launch.supervisor import RankEvents
from windlass.serving.engine_loading import EngineSource
from windlass.serving.process_exit import WorkerExitError, describe_exit

_POLL_SECONDS = 0.05
_STOP_SECONDS = 5.0


class EngineRankError(WorkerExitError):
    """Error for a process of another rank of the served model that ended. The output of that process has the reason."""


class EngineRanks:
    """Ranks 1, 2, ... of the model, as processes that end with this one, which is rank 0.

    The output of the processes goes to this process's standard error, labelled by rank.

    Args:
        source: model and options.
    """

    def __init__(self, source: EngineSource) -> None:
        self._source = source
        self._store = RendezvousStore(0, all_interfaces=False)
        self._selector = selectors.DefaultSelector()
        console = RankConsole(
            OutputRouting(),
            lambda rank: f"[rank {rank}] ",
            lambda rank: rank,
            emit=lambda stream, data: write_stream(ERR, data),
        )
        self._events = RankEvents(console)
        self._processes: RankProcesses | None = None
        self._polling: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    def start(self) -> None:
        """Start the processes, and set this process's environment variables to those of rank 0. Called in the main
        thread.

        Raises:
            LaunchError: a process cannot be started.
        """
        self._store.serve()
        plan = LaunchPlan(
            Program(("windlass.serving.rank_process", self._source.to_json()), "module"),
            (Host("localhost", tuple(range(self._source.num_ranks))),),
        )
        own, *others = make_rank_jobs(plan, 0, (LOOPBACK, self._store.port))
        _take_environment(own.env)
        self._processes = RankProcesses(others, self._events, self._selector, capture=True)
        self._polling = asyncio.ensure_future(self._poll())

    @property
    def exit_code(self) -> int:
        """Exit code of the first rank that has ended, negative for a signal; 0 while all of them run."""
        return next(iter(self._events.status_of_rank.values()), 0)

    @property
    def failure(self) -> str | None:
        """Text that states how the first rank ended; None while all of them run."""
        for rank, status in self._events.status_of_rank.items():
            return f"rank {rank} of the model ended {describe_exit(status)}"
        return None

    async def wait_for_end(self) -> str:
        """Wait until a rank has ended. Return `failure`, the text that states how."""
        await self._ended.wait()
        return self.failure or ""

    async def stop(self) -> None:
        """Wait until the ranks have ended, after the engine was closed; kill them after a few seconds."""
        if self._processes is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_for_all(), _STOP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """End the ranks at once."""
        if self._polling is not None:
            self._polling.cancel()
        if self._processes is not None:
            self._processes.close(succeeded=not self._processes.alive)
            self._processes = None
        self._store.close()

    async def _wait_for_all(self) -> None:
        while self._processes is not None and self._processes.alive:
            await asyncio.sleep(_POLL_SECONDS)

    async def _poll(self) -> None:
        while self._processes is not None:
            for key, _ in self._selector.select(0):
                key.data()
            self._processes.poll()
            if self._events.status_of_rank:
                self._ended.set()
            await asyncio.sleep(_POLL_SECONDS)


def needs_ranks(source: EngineSource, environ: Mapping[str, str]) -> bool:
    """Return True if the model needs other ranks, and no launcher has started them already."""
    return source.num_ranks > 1 and environ.get("WORLD_SIZE", "1") in ("", "1")


def _take_environment(environment: Mapping[str, str]) -> None:
    has_threads = "OMP_NUM_THREADS" in os.environ
    os.environ.update(environment)
    if not has_threads and "torch" in sys.modules:  # torch no longer reads the variable
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    logger.debug("rank 0 of %s", environment["WORLD_SIZE"])
