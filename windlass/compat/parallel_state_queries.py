"""Engine mixin with DeepSpeed's queries on process groups, their sizes and this rank's index in them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from windlass.comm.mesh import Mesh
from windlass.compat.engine_groups import EngineGroups
from windlass.compat.expert_groups import _get_expert_data_parallel_group_dict, _get_expert_parallel_group_dict
from windlass.parallel.experts import MixtureOfExperts
from windlass.parallel.experts.top_k_gate import TopKGate


class ParallelStateQueries:
    """Mixin of the engine with queries on parallel groups. Data-loading ranks are ranks that read different samples."""

    module: nn.Module
    mesh: Mesh
    data_loading_ranks: tuple[int, int]
    mesh_device: Any = None
    _groups: EngineGroups

    # Data parallelism.

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among the data-loading ranks."""
        return self.data_loading_ranks[1]

    @property
    def dp_world_size(self) -> int:
        """Number of data-loading ranks."""
        return self.data_loading_ranks[0]

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Group of the data-loading ranks."""
        return self._groups.data_loading_group.process_group

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup:
        """Group of ranks over which gradients are reduced: data-loading ranks, and ranks along the sequence axis."""
        return self.mesh.dense.data.process_group

    @property
    def seq_dp_world_size(self) -> int:
        """Number of ranks over which gradients are reduced."""
        return self.mesh.dense.data.size

    # Model and tensor parallelism.

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that together hold one copy of the model."""
        return self._groups.model_parallel_group.index

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's index in its tensor-parallel group."""
        return self.mesh.tp.index

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self._groups.model_parallel_group.size

    @property
    def checkpoint_mp_rank(self) -> int:
        """Same as `get_model_parallel_rank()`."""
        return self._groups.model_parallel_group.index

    # Sequence parallelism.

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that hold parts of the same sequences."""
        return self.mesh.sp.size

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup | None:
        """Sequence-parallel group; None without sequence parallelism."""
        return self.mesh.sp.group.process_group if self.mesh.sp.size > 1 else None

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return `seq_parallel_group`."""
        return self.seq_parallel_group

    # Experts.

    @property
    def has_moe_layers(self) -> bool:
        """True if the model has MoE layers."""
        return any(isinstance(module, MixtureOfExperts) for module in self.module.modules())

    @property
    def moe_layers(self) -> list[nn.Module]:
        """Modules that contain the gate and the experts, one for each MoE layer."""
        return [module.deepspeed_moe for module in self.module.modules() if isinstance(module, MixtureOfExperts)]

    @property
    def gate_modules(self) -> list[nn.Module]:
        """Gates of the MoE layers."""
        return [module for module in self.module.modules() if isinstance(module, TopKGate)]

    @property
    def num_experts(self) -> list[int]:
        """Number of experts of each MoE layer, over all ranks."""
        return [module.num_experts for module in self.module.modules() if isinstance(module, MixtureOfExperts)]

    @property
    def expert_parallel_group(self) -> dict[str, dist.ProcessGroup]:
        """Groups of ranks over which experts are spread, by group name."""
        return _get_expert_parallel_group_dict()

    @property
    def expert_data_parallel_group(self) -> dict[str, dist.ProcessGroup]:
        """Groups of ranks that hold the same experts, by group name."""
        return _get_expert_data_parallel_group_dict()
