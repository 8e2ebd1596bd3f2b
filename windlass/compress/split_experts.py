"""Experts of a mixture-of-experts module as separate linear layers, in place of stacked matrices.

[Note: split experts] transformers 5 keeps the matrices of all experts in two stacked tensors, and files have a matrix
for each expert and projection. Formats round matrices, and other readers expect a packed layer for each expert. So a
module with stacked experts is replaced by `SplitExperts`, whose linear layers correspond to the tensors of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # parts of each stacked tensor
_OPERATIONS = {"gate_up_proj": [("MergeModulelist", 0), ("Concatenate", 1)], "down_proj": [("MergeModulelist", 0)]}


class SplitExperts(nn.Module):
    """Experts with the layers `<number>.gate_proj`, `<number>.up_proj` and `<number>.down_proj`.

    Args:
        stacked: module for which `can_split` is True. Its class computes the gate. The layers' weights are views of its
            tensors.
    """

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        weight = stacked.get_parameter("gate_up_proj")
        experts, double, hidden = weight.shape
        self.num_experts = experts
        down = stacked.get_parameter("down_proj")
        for number in range(experts):
            gate, up = weight.detach()[number].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down.detach()[number]}
            layers = {name: _linear(part, weight.requires_grad) for name, part in parts.items()}
            self.add_module(str(number), nn.ModuleDict(layers))
        for name in _STACKED:
            delattr(stacked, name)
        # not a submodule: only its activation is used, and the class name would select other rules for experts
        self.__dict__["_stacked"] = stacked

    def experts(self) -> list[nn.ModuleDict]:
        """Return the layers `gate_proj`, `up_proj` and `down_proj` of each expert."""
        return [cast(nn.ModuleDict, self.get_submodule(str(number))) for number in range(self.num_experts)]

    @property
    def gate(self) -> str | Callable[[Tensor], Tensor]:
        """Activation of gate and up: "silu" or "gelu_tanh"; for others, the function `[rows, 2 * inner]` -> `[rows,
        inner]` of the stacked module's class."""
        stacked: Any = self.__dict__["_stacked"]
        activation = getattr(stacked, "act_fn", None)
        if type(stacked)._apply_gate.__name__ == "_default_apply_gate":  # act_fn(gate) * up
            if type(activation).__name__ in ("SiLU", "SiLUActivation"):
                return "silu"
            if type(activation).__name__ in ("GELUTanh", "PytorchGELUTanh"):
                return "gelu_tanh"
        apply: Callable[[Tensor], Tensor] = stacked._apply_gate
        return apply

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: number of each chosen expert, `[tokens, chosen]`; numbers beyond the last expert are ignored.
            top_k_weights: weights of the chosen experts, `[tokens, chosen]`.
        """
        apply_gate: Any = self.__dict__["_stacked"]._apply_gate
        out = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            if not 0 <= number < self.num_experts:
                continue
            expert: Any = self.get_submodule(str(number))
            token, place = torch.where(top_k_index == number)
            rows = hidden_states[token]
            inner = apply_gate(torch.cat([expert["gate_proj"](rows), expert["up_proj"](rows)], -1))
            found = expert["down_proj"](inner) * top_k_weights[token, place, None]
            out.index_add_(0, token, found.to(out.dtype))
        return out


def _linear(weight: Tensor, trains: bool) -> nn.Linear:
    """Return a linear layer that has a tensor as its weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=trains)
    return layer


def can_split(module: nn.Module) -> bool:
    """Return True if a module is experts of transformers with the gate and up matrices in one stacked tensor, the down
    matrices in another, and no other parameters."""
    held = {name: one.dim() for name, one in module._parameters.items() if one is not None}
    if held != dict.fromkeys(_STACKED, 3) or not hasattr(module, "_apply_gate"):
        return False
    wanted = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
    wanted["has_post_expert_norm"] = False
    if any(getattr(module, name, value) != value for name, value in wanted.items()):
        return False
    up, down = module.get_parameter("gate_up_proj").shape, module.get_parameter("down_proj").shape
    return up[0] == down[0] and up[1] == 2 * down[2] and up[2] == down[1]


def stacked_names(name: str) -> list[str]:
    """Return the names of the stacked tensors of a module with experts."""
    return [f"{name}.{one}" for one in _STACKED]


def split_name(stacked: str, source: str, pattern: str, converter: Any) -> str | None:
    """Return the name of the weight of `SplitExperts` that a tensor of the files becomes; None if the tensor is not the
    matrix of one expert and projection.

    Args:
        stacked: name of the stacked tensor.
        source: name in the files.
        pattern: source pattern of the converter that matches the tensor.
        converter: conversion of transformers whose result is the stacked tensor.
    """
    owner, _, leaf = stacked.rpartition(".")
    parts = _STACKED[leaf]
    steps = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    numbers = [part for part in source.split(".") if part.isdigit()]
    if steps != _OPERATIONS[leaf] or len(converter.source_patterns) != len(parts) or not numbers:
        return None
    return f"{owner}.{numbers[-1]}.{parts[converter.source_patterns.index(pattern)]}.weight"
