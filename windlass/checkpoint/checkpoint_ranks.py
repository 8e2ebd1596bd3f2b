"""Ranks that agree: a step that fails on one rank raises the same error on all, so that none is left waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointRanks:
    """The ranks that save or load together; one alone where there is no process group.

    Attributes:
        behind: they are met by a thread beside the one that trains, of whose waits alone a process tells.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    is_single_process: bool
    in_background: bool = False

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None) -> CheckpointRanks:
        """The ranks of `group`, by default of the default group, or this process alone where there is none.

        Raises:
            CheckpointError: this rank is not in the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1, is_single_process=True)
        rank = dist.get_rank(group)
        if rank < 0:
            raise CheckpointError(f"rank {dist.get_rank()} is not in the process group given; call on its ranks only")
        return cls(group, rank, dist.get_world_size(group), is_single_process=False)

    def run_on_all(self, step: str, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank and returns the results of all, in rank order. Collective.

        Raises:
            CheckpointError: on every rank and with the same text, where `work` raised on any; the text names the rank
                and `step`.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            if self.world_size == 1 and isinstance(error, CheckpointError):
                raise
            failure = error
        with nullcontext() if self.in_background else WaitScope(step):
            outcomes = self._all_gather_object((None if failure is None else error_text(failure), result))
        failures = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
        if failures:
            raise CheckpointError(join_failures(step, failures, self.world_size)) from failure
        return [found for _, found in outcomes]

    def run_on_first(self, step: str, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 alone and returns its result on every rank. Collective; raises as `each` does."""
        results = self.run_on_all(step, lambda: work() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]

    def gather_to_first(self, step: str, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank and returns the results of all on rank 0, nothing on others. Collective; raises as
        `each` does."""
        if self.world_size == 1:
            return self.run_on_all(step, work)
        failure: Exception | None = None
        mine: tuple[str | None, T | None] = (None, None)
        try:
            mine = (None, work())
        except Exception as error:
            failure, mine = error, (error_text(error), None)
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(mine, found, group=self.group, group_dst=0)
        failures = [{rank: text for rank, (text, _) in enumerate(found or ()) if text is not None}]
        dist.broadcast_object_list(failures, group=self.group, group_src=0)
        if failures[0]:
            raise CheckpointError(join_failures(step, failures[0], self.world_size)) from failure
        return [result for _, result in found or ()]

    def _all_gather_object(self, item: Any) -> list[Any]:
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.group)
        return items


def join_failures(step: str, failures: Mapping[int, str], world_size: int) -> str:
    """One text for what went wrong on some ranks: each text once, after the ranks that it comes from."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks_of.setdefault(text, []).append(rank)
    if world_size == 1:
        return f"{step} failed: {next(iter(ranks_of))}"
    told = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()]
    return f"{step} failed on {'; '.join(told)}"


def error_text(error: BaseException) -> str:
    """The text of an error; of one that is not ours, with its type."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
