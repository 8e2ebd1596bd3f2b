"""Class `deepspeed.moe.layer.MoE`: windlass's MoE layer with DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.comm.bootstrap import init_distributed
from windlass.comm.point_to_point import as_bytes
from windlass.comm.rank_group import world_group
from windlass.compat.parameter_attributes import mark_expert
from windlass.parallel import experts
from windlass.parallel.experts.expert_list import Experts


class MoE(experts.MixtureOfExperts):
    """MoE layer like `windlass.MoE`, with DeepSpeed's conventions.

    Expert parameters are marked by `parameter.allreduce` and `parameter.group_name`, and `ep_size` must divide the
    number of experts. The layer is constructed with all experts; `initialize` drops those of other ranks. Before
    `initialize`, `load_state_dict` also accepts a state dict with only this rank's experts, which DeepSpeed numbers
    from 0 on every rank; `initialize` then exchanges them between the ranks.

    Attributes:
        expert_group_name: name of the group of ranks over which experts are spread.
        num_local_experts: number of experts on each of these ranks.

    Raises:
        ConfigError: `ep_size` does not divide `num_experts`, or see `windlass.MoE`.
    """

    has_only_local_experts = False  # True from the load of a state dict with only this rank's experts to `initialize`

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, expert, num_experts, ep_size, *args, **kwargs)
        if num_experts % ep_size:
            raise ConfigError(
                f"number of experts ({num_experts}) should be divisible by expert parallel size ({ep_size}); "
                "windlass.MoE supports uneven numbers too"
            )
        self.expert_group_name, self.num_local_experts = f"ep_size_{ep_size}", num_experts // ep_size
        if ep_size > 1:
            self.register_load_state_dict_pre_hook(_number_local_experts)
        for parameter in self.deepspeed_moe["experts"].parameters():
            mark_expert(parameter, self.expert_group_name)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: `initialize` spreads the experts over neighbouring ranks."""


def _number_local_experts(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Extend a state dict with only one rank's experts to all experts, by repeating them under the other numbers."""
    assert isinstance(module, MoE)
    held = module.deepspeed_moe["experts"]
    if not isinstance(held, Experts) or held.axis.size > 1:
        return
    start, num_local = f"{prefix}deepspeed_moe.experts.deepspeed_experts.", module.num_local_experts
    given = [(*key[len(start) :].split(".", 1), value) for key, value in state_dict.items() if key.startswith(start)]
    numbers = {number for number, _, _ in given}
    if numbers:
        module.has_only_local_experts = numbers == {str(number) for number in range(num_local)}
    for number, name, value in given if module.has_only_local_experts else ():
        for copy in range(int(number) + num_local, module.num_experts, num_local):
            state_dict[f"{start}{copy}.{name}"] = value


def exchange_local_experts(model: nn.Module, config_dict: Mapping[str, Any], mpu: Any, port: int) -> None:
    """Broadcast the experts that each rank loaded for itself to all ranks. Collective if a layer has `ep_size` above 1.

    Args:
        config_dict: configuration, which determines how many neighbouring ranks hold the same experts.
        port: port of the rendezvous, if the default process group does not exist yet.

    Raises:
        ModelError: ranks loaded only their own experts into different layers, or an `mpu` was passed.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE) and module.ep_size > 1]
    if not layers or not (dist.is_initialized() or any(layer.has_only_local_experts for layer in layers)):
        return
    init_distributed(port=port)
    world = world_group()
    loaded = world.all_gather_object([layer.has_only_local_experts for layer in layers])
    if not any(map(any, loaded)):
        return
    if mpu is not None or loaded.count(loaded[0]) != len(loaded):
        others = [rank for rank, flags in enumerate(loaded) if flags != loaded[0]]
        raise ModelError(
            f"MoE layers of {type(model).__name__}: state dicts of only one rank's experts were loaded "
            + (f"on ranks {others} into other layers than on rank 0" if others else "before initialize with an mpu")
            + "; load a state dict of all experts on all ranks"
        )
    neighbours = _count_neighbours(config_dict)
    with torch.no_grad():
        for layer in (layer for layer in layers if layer.has_only_local_experts):
            held: Any = layer.deepspeed_moe["experts"]
            for number, expert in enumerate(held.deepspeed_experts.children()):
                owner = number // layer.num_local_experts * neighbours
                for tensor in (*expert.parameters(), *expert.buffers()):
                    values = tensor.detach().contiguous()
                    world.broadcast(as_bytes(values), owner)
                    tensor.detach().copy_(values)
            layer.has_only_local_experts = False


def _count_neighbours(config_dict: Mapping[str, Any]) -> int:
    """Return the number of neighbouring ranks that hold the same experts: those along tp and sp."""
    tensor, parallel = config_dict.get("tensor_parallel") or {}, config_dict.get("parallel") or {}
    tp = tensor.get("autotp_size") or parallel.get("tp") or 1
    return int(tp) * int(config_dict.get("sequence_parallel_size") or parallel.get("sp") or 1)


MoE.__init__.__signature__ = signature(experts.MixtureOfExperts.__init__)  # type: ignore[attr-defined]
