"""`PipelineParallelGrid`: groups of a topology with the axes pipe, data and model.

Its methods have the names of Megatron's model-parallel unit (`mpu`) and of DeepSpeed's pipelines.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.comm.group_creation import new_process_group
from windlass.compat.process_topology import PipeDataParallelTopology, ProcessTopology


class PipelineParallelGrid:
    """Groups of ranks along each axis of a topology. The constructor is collective over all ranks.

    "Model parallel" has DeepSpeed's meaning: all ranks that together hold one copy of the model, along pipe and model.
    "Slice parallel" means only the ranks along model.

    Args:
        topology: topology with axes among pipe, data and model. Default: pipe x data, to which the prime factors of the
            world size are assigned in turn.
        process_group: group of the topology's ranks; all ranks by default.

    Raises:
        ConfigError: the product of the axes is not the number of ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._topo = topology if topology is not None else _two_axes(self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ConfigError(
                f"the topology {self._topo} has {self._topo.world_size()} ranks, but the job has {self.world_size}; "
                "start as many ranks as the topology has"
            )
        self._base = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._made: dict[tuple[tuple[int, ...], ...], tuple[Any, list[int]]] = {}
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.model_parallel_size = max(self._topo.get_dim("model"), 1)
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        copies = [self._topo.filter_match(data=copy) for copy in range(self.data_parallel_size)]
        if "data" not in self._topo.axes:
            copies = [list(range(self.world_size))]
        self.ds_model_proc_group, model_ranks = self._mine(copies)
        self.ds_model_rank, self.ds_model_world_size = model_ranks.index(self.global_rank), len(model_ranks)
        self.dp_groups = self._lists("data")
        self.dp_proc_group, self.dp_group = self._mine(self.dp_groups)
        self.pipe_groups = self._lists("pipe")
        self.pp_proc_group, self.pp_group = self._mine(self.pipe_groups)
        self.model_groups = self._lists("model")
        self.slice_proc_group, self.slice_group = self._mine(self.model_groups)
        self.mp_group = self.model_groups
        after = {rank: group[(i + 1) % len(group)] for group in self.pipe_groups for i, rank in enumerate(group)}
        self.p2p_groups = [[rank, after[rank]] for rank in range(self.world_size)]

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return self._place("pipe")

    def get_data_parallel_id(self) -> int:
        """Return the index of this rank among the copies of its stage."""
        return self._place("data")

    def stage_to_global(self, stage_id: int, **places: int) -> int:
        """Return the rank of stage `stage_id` at this rank's coordinates on the other axes, or at the given ones."""
        here = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**here, "pipe": stage_id, **places})

    def get_global_rank(self) -> int:
        """Return this rank's number in the topology."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Return the group of the ranks that differ only in their stage."""
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among the copies of its part of the model."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of copies of the model."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the group of the ranks with copies of this rank's part of the model."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks with copies of this rank's part of the model."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that together hold one copy of the model."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that together hold one copy of the model, over stages and slices."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Return the group of the ranks that hold this copy of the model."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's index among the ranks over which matrices are sharded."""
        return self._place("model")

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of ranks over which matrices are sharded."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Return the group of the ranks over which this rank's matrices are sharded."""
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group

    def _place(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def _lists(self, axis: str) -> list[list[int]]:
        return self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]

    def _mine(self, partition: list[list[int]]) -> tuple[Any, list[int]]:
        """Return this rank's process group in a partition, and the group's ranks.

        Every rank creates all groups, in the same order.
        """
        key = tuple(map(tuple, partition))
        for ranks in partition if key not in self._made else ():
            group = new_process_group([self._base[rank] for rank in ranks])
            if self.global_rank in ranks:
                self._made[key] = group, ranks
        return self._made[key]


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number in ascending order; none for 1.

    Raises:
        ValueError: the number is not positive.
    """
    if number <= 0:
        raise ValueError(f"{number} has no prime factors; give a positive number")
    found, prime = [], 2
    while number > 1:
        if number % prime:
            prime += 1
            continue
        found.append(prime)
        number //= prime
    return found


def _two_axes(world: int) -> ProcessTopology:
    """Return pipe and data axes, to which the prime factors of the world size are assigned in turn."""
    factors = prime_factors(world)
    return PipeDataParallelTopology(num_pp=math.prod(factors[::2]), num_dp=math.prod(factors[1::2]))
