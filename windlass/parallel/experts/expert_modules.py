"""Which modules hold experts as tensors with one matrix each along the first dimension, and how they are run."""

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
    """How the modules of a class hold experts, and how their forward is to be taken apart.

    Attributes:
        number: the attribute that says how many there are; it is set to how many are here.
        tensors: names of parameters, as seen from the module, whose first dimension is cut: so many equal parts as
            there are experts. None: all of its own, none of its children's.
        rows: the module, rows `[rows, hidden]` sorted by expert, and whose they are, to rows. None: its own forward,
            which is given `(rows, expert of each row [rows, 1], ones [rows, 1])`, and is not called if there is no row.
        routing: how many experts there are in all, and the forward's arguments, to `(hidden [tokens, hidden],
            experts [tokens, k], weights [tokens, k])`. None: the arguments are these.
    """

    count_attribute: str = "num_experts"
    parameter_names: Sequence[str] | None = None
    run_rows: RunRows | None = None
    read_routing: Callable[..., TokenRouting] | None = None

    def sharded_parameters(self, module: nn.Module) -> list[str]:
        """The parameters that are cut."""
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
    """Say how modules of a class hold experts, so that `apply_expert_parallel` can spread them.

    Args:
        class_name: of the module that holds the tensors of all experts of a layer.
        number, tensors, rows, routing: see `Family`.
    """
    _registry[class_name] = ExpertModuleSpec(count_attribute, parameter_names, run_rows, read_routing)


def list_registered_classes() -> list[str]:
    """The classes that are known by name."""
    return sorted(_registry)


def find_expert_spec(module: nn.Module) -> ExpertModuleSpec | None:
    """How a module holds experts as tensors, by its class or by its structure; None if it doesn't, or nobody knows."""
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
    """What transformers' experts interface says of a module (`use_experts_implementation`), on rows that are sorted."""
    said: Any = module
    up = "gate_up_proj" if said.has_gate else "up_proj"

    def through(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = getattr(said, name)
        bias = getattr(said, f"{name}_bias") if said.has_bias else None
        return grouped_linear(rows.to(weight.dtype), weight, groups, bias, transposed=said.is_transposed)

    rows = through(up, rows)
    rows = through("down_proj", said._apply_gate(rows) if said.has_gate else said.act_fn(rows))
    normed: torch.Tensor = said.post_expert_norm(rows) if getattr(said, "has_post_expert_norm", False) else rows
    return normed


def _accepts_routing(module: nn.Module) -> bool:
    """Whether its forward takes tokens, the experts of each, and their weights, going by names."""
    names = [name.lower() for name in inspect.signature(module.forward).parameters]
    if len(names) != 3:
        return False
    index = any(word in names[1] for word in ("index", "indices", "selected"))
    return index and any(word in names[2] for word in ("weight", "score"))


def _run_llama4_rows(module: nn.Module, rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    said: Any = module
    gate, up = grouped_linear(rows, said.gate_up_proj, groups, transposed=True).chunk(2, dim=-1)
    return grouped_linear(up * said.act_fn(gate), said.down_proj, groups, transposed=True)


def _read_llama4_routing(num_experts: int, hidden: torch.Tensor) -> TokenRouting:
    """Llama 4 gives each expert every token times its score, which is 0 for the tokens of others: those rows come out
    as 0, and so do their gradients, so they need not go anywhere.

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
