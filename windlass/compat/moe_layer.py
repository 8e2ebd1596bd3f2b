"""Class `deepspeed.moe.layer.MoE`: windlass's MoE layer with DeepSpeed's attributes."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError
from windlass.compat.parameter_attributes import mark_expert
from windlass.parallel import experts


class MoE(experts.MixtureOfExperts):
    """MoE layer like `windlass.MoE`, with DeepSpeed's conventions.

    Expert parameters are marked by `parameter.allreduce` and `parameter.group_name`, and `ep_size` must divide the
    number of experts. The layer is constructed with all experts; `initialize` keeps only each rank's own.

    Attributes:
        expert_group_name: name of the group of ranks over which experts are spread.
        num_local_experts: number of experts on each of these ranks.

    Raises:
        ConfigError: inconsistent numbers.
    """

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
        for parameter in self.deepspeed_moe["experts"].parameters():
            mark_expert(parameter, self.expert_group_name)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: `initialize` spreads the experts over neighbouring ranks."""


MoE.__init__.__signature__ = signature(experts.MixtureOfExperts.__init__)  # type: ignore[attr-defined]
