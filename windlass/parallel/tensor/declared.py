"""What a model of transformers says of itself: its `tp_plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.parallel.tensor.experts_layout import is_experts
from windlass.parallel.tensor.inner import language_model
from windlass.parallel.tensor.linear_layers import below, linear, stands_in
from windlass.parallel.tensor.plan import Style, refused
from windlass.parallel.tensor.wishes import Wish

_STYLES = {
    "colwise": Style.COLUMN,
    "packed_colwise": Style.COLUMN,
    "colwise_gather_output": Style.GATHERED,
    "colwise_rep": Style.GATHERED,
    "rowwise": Style.ROW,
    "rowwise_split_input": Style.SPLIT,
    "rowwise_rep": Style.SPLIT,
    "embedding_rowwise": Style.VOCABULARY,
    "replicated_with_grad_allreduce": Style.PARTIAL,
    "mla_kv_a_proj": Style.TAIL,
    "moe_tp_experts": Style.EXPERTS,
    "moe_identity_expert": Style.IDENTITY,
    "replicate": Style.REPLICATED,
    "local_params": Style.REPLICATED,
    "embedding_colwise": Style.REPLICATED,
    "sequence_parallel": Style.REPLICATED,
}


def declared_plan(model: nn.Module) -> dict[str, str]:
    """The model's own plan, by names in which `*` stands for numbers; without what lies beside its layers.

    Empty where it has none, or where all modules that it names were replaced by others of other names: that of the
    layer which makes logits is said of all models of transformers.
    """
    prefix, inner = language_model(model)
    plan: Any = getattr(inner, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    names = {_generic(name) for name, _ in model.named_modules()}
    said = {f"{prefix}.{name}" if prefix else name: str(style) for name, style in plan.items()}
    return said if any("*" in name and name in names for name in said) else {}


def read_declared(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Wish]:
    """What the plan says of the modules of the model, and of parameters by themselves.

    Raises:
        ModelError: it says something that is not known here.
    """
    found: dict[str, Wish] = {}
    modules = dict(model.named_modules())
    experts = [name for name, module in modules.items() if is_experts(module)]
    for name, module in modules.items():
        said = plan.get(_generic(name))
        if stands_in(module):
            continue
        if said is None or any(below(name, holder) and said != "moe_identity_expert" for holder in experts):
            continue
        found[name] = _wish(name, module, said)
    for name, _ in model.named_parameters():
        said, holder = plan.get(_generic(name)), name.rpartition(".")[0]
        if said is not None and holder not in experts and linear(holder, modules[holder]) is None:
            found[name] = Wish(name, Style.PARAMETER)
    return found


def _wish(name: str, module: nn.Module, said: str) -> Wish:
    if said not in _STYLES:
        raise refused(name, f"the model's own plan says {said!r}, which is not known here")
    style = _STYLES[said]
    layer = linear(name, module)
    if style in (Style.COLUMN, Style.GATHERED, Style.ROW, Style.SPLIT, Style.TAIL) and layer is None:
        raise refused(name, f"the model's own plan says {said!r}, and it is a {type(module).__name__}, no linear layer")
    if said == "packed_colwise" and layer is not None:
        return Wish(name, style, (layer.outputs // 2,) * 2)
    return Wish(name, style)


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
