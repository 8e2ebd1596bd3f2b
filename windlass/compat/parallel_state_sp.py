"""Module `deepspeed.runtime.sequence_parallel.parallel_state_sp`: process-wide sequence-parallel groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from windlass.compat.ulysses_sp import SequenceParallelGroups

__all__ = [
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]

_current: list[tuple[Any, SequenceParallelGroups]] = []  # at most one entry: (world group at creation, groups)


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Create the sequence-parallel groups. Collective over all ranks.

    Raises:
        ConfigError: `sequence_parallel_size` does not divide the number of ranks.
        AssertionError: torch.distributed is not initialized, or the groups exist already.
    """
    assert dist.is_initialized(), "no process group is initialized: call deepspeed.init_distributed() first"
    assert not _groups_exist(), "the sequence-parallel groups exist already: call initialize_sequence_parallel once"
    _current[:] = [(dist.group.WORLD, SequenceParallelGroups(sequence_parallel_size))]


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that hold parts of the same sequences."""
    return _current_groups().sp.group.process_group


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that hold parts of the same sequences."""
    return _current_groups().sp.size


def get_sequence_parallel_rank() -> int:
    """Return this rank's index in its sequence-parallel group."""
    return _current_groups().sp.index


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks over which gradients are reduced: all ranks."""
    return _current_groups().data.group.process_group


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks over which gradients are reduced."""
    return _current_groups().data.size


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's index among the ranks over which gradients are reduced."""
    return _current_groups().data.index


# A script whose only model parallelism is sequence parallelism can pass this module as `mpu`: an mpu has these names.
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_rank = get_sequence_parallel_rank
get_model_parallel_world_size = get_sequence_parallel_world_size


def _groups_exist() -> bool:
    """Return True if groups exist for the current world group."""
    return bool(_current) and dist.is_initialized() and _current[0][0] is dist.group.WORLD


def _current_groups() -> SequenceParallelGroups:
    assert _groups_exist(), "there are no sequence-parallel groups: call initialize_sequence_parallel(size) first"
    return _current[0][1]
