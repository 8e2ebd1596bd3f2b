"""Specifications of modules that hold experts as tensors with one matrix per expert along the first dimension."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.parallel.experts.grouped_linear import RowGroups, grouped_linear

RunRows = Callable[[nn.Module, torch.Tensor, RowGroups], torch.Tensor]
TokenRouting = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ExpertModuleSpec:
    """Description of the experts of a module class, and of how to run them on sorted rows.

    Attributes:
        count_attribute: attribute with the number of experts. It is set to the local number after sharding.
        parameter_names: names, relative to the module, of the parameters to shard. Their first dimension consists of
            one equal part for each expert. None: all parameters of the module itself, without those of its children.
        run_rows: maps the module, rows `[rows, hidden]` sorted by expert, and their `RowGroups` to output rows. None:
            use the module's own forward with `(rows, expert of each row [rows, 1], ones [rows, 1])`; the forward is not
            called with zero rows.
        read_routing: maps the total number of experts and the forward's arguments to `(hidden [tokens, hidden], experts
            [tokens, k], weights [tokens, k])`. None: the forward's arguments are these three.
    """

    count_attribute: str = "num_experts"
    parameter_names: Sequence[str] | None = None
    run_rows: RunRows | None = None
    read_routing: Callable[..., TokenRouting] | None = None

    def sharded_parameters(self, module: nn.Module) -> list[str]:
        """Return the names of the parameters to shard, relative to `module`."""
        if self.parameter_names is not None:
            return list(self.parameter_names)
        return [name for name, _ in module.named_parameters(recurse=False)]


def register_experts(
    class_name: str,
    *,
    count_attribute: str = "num_experts",
    parameter_names: Sequence[str] | None = None,
    run_rows: RunRows | None = None,
    read_routing: Callable[..., TokenRouting] | None = None,
) -> None:
    """Register how modules of a class hold experts, so that `apply_expert_parallel` can distribute them.

    Args:
        class_name: name of the class, or of a base class, of the module that holds all experts of a layer.
        count_attribute, parameter_names, run_rows, read_routing: see `ExpertModuleSpec`.
    """
    _registry[class_name] = ExpertModuleSpec(count_attribute, parameter_names, run_rows, read_routing)


def list_registered_classes() -> list[str]:
    """Return the class names that have a registered spec."""
    return sorted(_registry)


def find_expert_spec(module: nn.Module) -> ExpertModuleSpec | None:
    """Return the spec of a module, by its class or its structure. None: no experts, or an unknown kind of experts."""
    for kind in type(module).__mro__:
        if kind.__name__ in _registry:
            return _registry[kind.__name__]
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not own or any(one.dim() < 2 or one.shape[0] != count for one in own):
        return None
    if all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")):
        return ExpertModuleSpec(run_rows=run_interface_rows)
    return ExpertModuleSpec() if _accepts_routing(module) else None


def run_interface_rows(module: nn.Module, rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Run sorted rows through a module of transformers' experts interface (`use_experts_implementation`)."""
    untyped: Any = module
    up = "gate_up_proj" if untyped.has_gate else "up_proj"

    def through(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = getattr(untyped, name)
        bias = getattr(untyped, f"{name}_bias") if untyped.has_bias else None
        return grouped_linear(rows.to(weight.dtype), weight, groups, bias, transposed=untyped.is_transposed)

    rows = through(up, rows)
    rows = through("down_proj", untyped._apply_gate(rows) if untyped.has_gate else untyped.act_fn(rows))
    normed: torch.Tensor = untyped.post_expert_norm(rows) if getattr(untyped, "has_post_expert_norm", False) else rows
    return normed


def _accepts_routing(module: nn.Module) -> bool:
    """Return True if the parameter names of the module's forward mean tokens, expert indices and expert weights."""
    names = [name.lower() for name in inspect.signature(module.forward).parameters]
    if len(names) != 3:
        return False
    index = any(word in names[1] for word in ("index", "indices", "selected"))
    return index and any(word in names[2] for word in ("weight", "score"))


def _run_llama4_rows(module: nn.Module, rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    untyped: Any = module
    gate, up = grouped_linear(rows, untyped.gate_up_proj, groups, transposed=True).chunk(2, dim=-1)
    return grouped_linear(up * untyped.act_fn(gate), untyped.down_proj, groups, transposed=True)


def _read_llama4_routing(num_experts: int, hidden: torch.Tensor) -> TokenRouting:
    """Reconstruct the routing from the input of Llama 4's expert module.

    Llama 4 passes every token, times its score, to each expert. The score is 0 for tokens of other experts. Such rows
    have zero outputs and zero gradients, so they are not dispatched.

    Args:
        hidden: `[experts x tokens, hidden]`, the first expert's rows first.
    """
    index = torch.arange(num_experts, device=hidden.device).repeat_interleave(hidden.shape[0] // num_experts)
    index = index.masked_fill(~hidden.detach().any(-1), num_experts)[:, None]
    return hidden, index, hidden.new_ones(index.shape)


_registry: dict[str, ExpertModuleSpec] = {
    "DbrxExperts": ExpertModuleSpec(parameter_names=("mlp.w1", "mlp.v1", "mlp.w2")),
    "Llama4TextExperts": ExpertModuleSpec(run_rows=_run_llama4_rows, read_routing=_read_llama4_routing),
}
