"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: groups of ranks along the sequence, for a whole process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from windlass.parallel.sequence.ulysses_sp import SequenceParallelGroups

__all__ = [
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]

_current: list[tuple[Any, SequenceParallelGroups]] = []  # and the ranks that there were


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make the groups. Collective over all ranks.

    Raises:
        ConfigError: the size does not divide the ranks.
        AssertionError: torch.distributed is not started, or they are made already.
    """
    assert dist.is_initialized(), "ranks do not know each other yet: call deepspeed.init_distributed() first"
    assert not _groups_exist(), "groups along the sequence are made already"
    _current[:] = [(dist.group.WORLD, SequenceParallelGroups(sequence_parallel_size))]


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Ranks that have parts of the same sequences."""
    return _current_groups().sp.group.process_group


def get_sequence_parallel_world_size() -> int:
    """How many."""
    return _current_groups().sp.size


def get_sequence_parallel_rank() -> int:
    """Which of them this is."""
    return _current_groups().sp.index


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Ranks over which gradients are reduced: all."""
    return _current_groups().data.group.process_group


def get_sequence_data_parallel_world_size() -> int:
    """How many."""
    return _current_groups().data.size


def get_sequence_data_parallel_rank() -> int:
    """Which of them this is."""
    return _current_groups().data.index


def _groups_exist() -> bool:
    """Whether there are groups, of the ranks that there are now."""
    return bool(_current) and dist.is_initialized() and _current[0][0] is dist.group.WORLD


def _current_groups() -> SequenceParallelGroups:
    assert _groups_exist(), "there are no groups along the sequence: call initialize_sequence_parallel(size) first"
    return _current[0][1]
