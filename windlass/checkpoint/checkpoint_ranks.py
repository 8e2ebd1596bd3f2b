"""Ranks that save or load together: a step that fails on one rank raises the same error on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import CheckpointError
from windlass.comm.rank_group import RankGroup, world_group

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointRanks:
    """Ranks that save or load together; a single process if there is no process group.

    Attributes:
        group: the ranks as a group; None without a process group.
        in_background: a writer thread uses the group. Its waits are not reported to the watchdog, which follows the
            training thread.
    """

    group: RankGroup | None
    rank: int
    world_size: int
    is_single_process: bool
    in_background: bool = False

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None) -> CheckpointRanks:
        """Return the ranks of `group`; None: the default group, or this process alone if there is none.

        Raises:
            CheckpointError: this rank is not in the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1, is_single_process=True)
        rank = dist.get_rank(group)
        if rank < 0:
            raise CheckpointError(f"rank {dist.get_rank()} is not in the process group given; call on its ranks only")
        ranks = world_group() if group is None else RankGroup.of(group)
        return cls(ranks, rank, ranks.size, is_single_process=False)

    def run_on_all(self, step: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results in rank order. Collective.

        Raises:
            CheckpointError: on every rank and with the same text, if `work` raised on any. The text names the ranks and
                `step`. With one rank, a CheckpointError of `work` is raised unchanged.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            if self.world_size == 1 and isinstance(error, CheckpointError):
                raise
            failure = error
        with self.waiting(step):
            outcomes = self._all_gather_object((None if failure is None else error_text(failure), result))
        failures = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
        if failures:
            raise CheckpointError(join_failures(step, failures, self.world_size)) from failure
        return [found for _, found in outcomes]

    def run_on_first(self, step: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result on every rank. Collective; raises as `run_on_all` does."""
        results = self.run_on_all(step, lambda: work() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]

    def waiting(self, step: str) -> AbstractContextManager[None]:
        """Return a context that reports a wait for other ranks in `step` to the watchdog, unless `in_background`."""
        return nullcontext() if self.in_background else WaitScope(step)

    def gather_to_first(self, step: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank. Return all results on rank 0, and an empty list on the others. Collective.

        Raises as `run_on_all` does.
        """
        if self.world_size == 1:
            return self.run_on_all(step, work)
        failure: Exception | None = None
        local: tuple[str | None, T | None] = (None, None)
        try:
            local = (None, work())
        except Exception as error:
            failure, local = error, (error_text(error), None)
        assert self.group is not None
        found: list[Any] = self.group.gather_object(local)
        failures = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
        failures = self.group.broadcast_object(failures)
        if failures:
            raise CheckpointError(join_failures(step, failures, self.world_size)) from failure
        return [result for _, result in found]

    def _all_gather_object(self, item: Any) -> list[Any]:
        return [item] if self.group is None else self.group.all_gather_object(item)


def join_failures(step: str, failures: Mapping[int, str], world_size: int) -> str:
    """Return one text for the failures of several ranks: each different text once, after the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks_of.setdefault(text, []).append(rank)
    if world_size == 1:
        return f"{step} failed: {next(iter(ranks_of))}"
    rank_failures = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()
    ]
    return f"{step} failed on {'; '.join(rank_failures)}"


def error_text(error: BaseException) -> str:
    """Return the text of an error, with its type if it is not a CheckpointError."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
