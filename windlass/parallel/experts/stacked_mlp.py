"""Feed-forward experts of a layer as stacked tensors, with one grouped product for each of their matrices."""

from __future__ import annotations

import math

import torch
from torch import nn

from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.experts.expert_dispatch import dispatch_and_combine
from windlass.parallel.experts.expert_modules import run_interface_rows


class StackedMLP(nn.Module):
    """Stack of feed-forward experts, passed to `MoE` in place of a module of one expert.

    All experts of a rank run in one grouped kernel per matrix, if torch has such a kernel (`grouped_linear`).

    It implements transformers' experts interface, so it is sharded like the expert modules of transformers.

    Args:
        hidden_size: width of a token.
        intermediate_size: inner width of each expert.
        num_experts: number of experts.
        activation: activation between the matrices; SiLU by default.
        gated: compute `down(activation(gate(x)) * up(x))` (arXiv:2002.05202) instead of `down(activation(up(x)))`.
        bias: add biases.
    """

    has_post_expert_norm = False
    is_transposed = False
    is_concatenated = True

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: nn.Module | None = None,
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.has_gate, self.has_bias = gated, bias
        self.act_fn = nn.SiLU() if activation is None else activation
        name, rows = ("gate_up_proj", 2 * intermediate_size) if gated else ("up_proj", intermediate_size)
        shapes = {name: (rows, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, (outer, inner) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, outer, inner)))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(num_experts, outer)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each expert's matrices and biases as `nn.Linear` does."""
        for name, parameter in self.named_parameters(recurse=False):
            matrix = self.get_parameter(name.removesuffix("_bias"))
            bound = 1 / math.sqrt(matrix.shape[-1])
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, dropless: bool = False
    ) -> torch.Tensor:
        """Run tokens `[tokens, hidden]` through their experts (`dispatch_and_combine`). Used while all experts are
        on this rank; `apply_expert_parallel` replaces this method."""
        return dispatch_and_combine(
            hidden,
            index,
            weights,
            num_experts=self.num_experts,
            axis=single_rank_axis("ep"),
            run_local_experts=lambda rows, groups: run_interface_rows(self, rows, groups),
            dropless=dropless,
        )

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        gated: torch.Tensor = self.act_fn(gate) * up
        return gated

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts"
