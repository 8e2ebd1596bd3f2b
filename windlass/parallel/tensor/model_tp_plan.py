"""Reader of the `tp_plan` of a transformers model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.kernels.packed_linear import PackedEmbedding, PackedMatrix
from windlass.parallel.tensor.find_language_model import find_language_model
from windlass.parallel.tensor.fused_experts_layout import has_fused_experts
from windlass.parallel.tensor.linear_layers import as_linear_layer, find_local_modules, is_inside
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle, make_cannot_shard_error

_STYLE_OF_TP_PLAN = {
    "colwise": ShardStyle.COLUMN,
    "packed_colwise": ShardStyle.COLUMN,
    "colwise_gather_output": ShardStyle.COLUMN_GATHERED,
    "colwise_rep": ShardStyle.COLUMN_GATHERED,
    "rowwise": ShardStyle.ROW,
    "rowwise_split_input": ShardStyle.ROW_SPLIT,
    "rowwise_rep": ShardStyle.ROW_SPLIT,
    "embedding_rowwise": ShardStyle.VOCABULARY,
    "replicated_with_grad_allreduce": ShardStyle.PARTIAL,
    "mla_kv_a_proj": ShardStyle.TAIL_FEATURES,
    "moe_tp_experts": ShardStyle.EXPERTS,
    "moe_identity_expert": ShardStyle.IDENTITY,
    "replicate": ShardStyle.REPLICATED,
    "local_params": ShardStyle.REPLICATED,
    "embedding_colwise": ShardStyle.REPLICATED,
    "sequence_parallel": ShardStyle.REPLICATED,
}


def read_tp_plan(model: nn.Module) -> dict[str, str]:
    """Return the model's own plan, with `*` for numbers in names.

    The result is empty if the model has no plan, or if no name with `*` in the plan is a module of the model, e.g.
    because its layers were replaced by modules with other names. All transformers models have an entry for the output
    head, so this entry alone is not a plan.
    """
    prefix, inner = find_language_model(model)
    plan: Any = getattr(inner, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    names = {_wildcard_name(name) for name, _ in model.named_modules()}
    styles = {f"{prefix}.{name}" if prefix else name: str(style) for name, style in plan.items()}
    return styles if any("*" in name and name in names for name in styles) else {}


def read_tp_plan_entries(model: nn.Module, tp_plan: Mapping[str, str]) -> dict[str, PlanEntry]:
    """Convert the plan to entries for the model's modules, and for single parameters.

    Raises:
        ModelError: the plan contains an unknown style, or the style of a linear layer for another module.
    """
    found: dict[str, PlanEntry] = {}
    modules = find_local_modules(model)
    experts = [name for name, module in modules.items() if has_fused_experts(module)]
    whole = _packed_tables(model)
    for name, module in modules.items():
        tp_style = tp_plan.get(_wildcard_name(name))
        if name in whole:
            continue
        if tp_style is None or any(is_inside(name, holder) and tp_style != "moe_identity_expert" for holder in experts):
            continue
        found[name] = _plan_entry(name, module, tp_style)
    for holder, module in modules.items():
        if holder in experts or as_linear_layer(holder, module) is not None:
            continue
        for name, _ in module.named_parameters(prefix=holder, recurse=False):
            if _wildcard_name(name) in tp_plan:
                found[name] = PlanEntry(name, ShardStyle.PARAMETER)
    return found


def _plan_entry(name: str, module: nn.Module, tp_style: str) -> PlanEntry:
    if tp_style not in _STYLE_OF_TP_PLAN:
        raise make_cannot_shard_error(name, f"the model's own plan has the style {tp_style!r}, which is unknown")
    style = _STYLE_OF_TP_PLAN[tp_style]
    layer = as_linear_layer(name, module)
    if (
        style
        in (
            ShardStyle.COLUMN,
            ShardStyle.COLUMN_GATHERED,
            ShardStyle.ROW,
            ShardStyle.ROW_SPLIT,
            ShardStyle.TAIL_FEATURES,
        )
        and layer is None
    ):
        raise make_cannot_shard_error(
            name,
            f"the model's own plan has the style {tp_style!r}, but it is a {type(module).__name__}, not a linear layer",
        )
    if tp_style == "packed_colwise" and layer is not None:
        return PlanEntry(name, style, (layer.out_features // 2,) * 2)
    return PlanEntry(name, style)


def _wildcard_name(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _packed_tables(model: nn.Module) -> set[str]:
    """Return the names of packed embeddings and of packed layers that share a table with them. They are not sharded."""
    tables = [module for module in model.modules() if isinstance(module, PackedEmbedding)]
    shared = {id(parameter) for table in tables for parameter in table.parameters()}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, PackedMatrix) and any(id(parameter) in shared for parameter in module.parameters())
    }
