"""What an engine knows of this rank's place: the groups, sizes and numbers that DeepSpeed's scripts ask it for."""

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
    """The part of an engine that says where this rank sits."""

    module: nn.Module
    mesh: Mesh
    data_loading_ranks: tuple[int, int]
    mesh_device: Any = None
    _groups: EngineGroups

    # data parallelism

    def get_data_parallel_rank(self) -> int:
        """This rank among those that read samples of their own."""
        return self.data_loading_ranks[1]

    @property
    def dp_world_size(self) -> int:
        """How many ranks read samples of their own."""
        return self.data_loading_ranks[0]

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Those ranks."""
        return self._groups.data_loading_group.process_group

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks over which gradients are reduced: readers, and those along the sequence."""
        return self.mesh.dense.data.process_group

    @property
    def seq_dp_world_size(self) -> int:
        """How many these are."""
        return self.mesh.dense.data.size

    # model and tensor parallelism

    def get_model_parallel_rank(self) -> int:
        """This rank among those that have one copy of the model together."""
        return self._groups.model_parallel_group.index

    def get_tensor_parallel_rank(self) -> int:
        """This rank among those over which matrices are cut."""
        return self.mesh.tp.index

    @property
    def mp_world_size(self) -> int:
        """How many ranks have one copy of the model together."""
        return self._groups.model_parallel_group.size

    @property
    def checkpoint_mp_rank(self) -> int:
        """As `get_model_parallel_rank`."""
        return self._groups.model_parallel_group.index

    # sequence parallelism

    @property
    def sequence_parallel_size(self) -> int:
        """How many ranks have parts of the same sequences."""
        return self.mesh.sp.size

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup | None:
        """Those ranks; None where sequences are whole."""
        return self.mesh.sp.group.process_group if self.mesh.sp.size > 1 else None

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """As `seq_parallel_group`."""
        return self.seq_parallel_group

    # experts

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has layers of `MoE`."""
        return any(isinstance(module, MixtureOfExperts) for module in self.module.modules())

    @property
    def moe_layers(self) -> list[nn.Module]:
        """What holds gate and experts in each layer of `MoE`."""
        return [module.deepspeed_moe for module in self.module.modules() if isinstance(module, MixtureOfExperts)]

    @property
    def gate_modules(self) -> list[nn.Module]:
        """Routers of these layers."""
        return [module for module in self.module.modules() if isinstance(module, TopKGate)]

    @property
    def num_experts(self) -> list[int]:
        """Of each layer, on all ranks together."""
        return [module.num_experts for module in self.module.modules() if isinstance(module, MixtureOfExperts)]

    @property
    def expert_parallel_group(self) -> dict[str, dist.ProcessGroup]:
        """Ranks over which experts are spread, by the name of their group."""
        return _get_expert_parallel_group_dict()

    @property
    def expert_data_parallel_group(self) -> dict[str, dist.ProcessGroup]:
        """Ranks that hold the same experts, by the name of their group."""
        return _get_expert_data_parallel_group_dict()
