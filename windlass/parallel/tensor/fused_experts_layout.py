"""Memory layout of expert modules with fused weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class FusedExpertsLayout:
    """Layout of the weights of an expert module.

    Attributes:
        up_name: name of the parameter that computes the intermediate features (gate and up, or only up): `[experts,
            features, hidden]`, or transposed `[experts, hidden, features]`.
        down_name: name of the parameter that maps intermediate features to outputs: `[experts, hidden, intermediate]`,
            or transposed `[experts, intermediate, hidden]`.
        intermediate_size: number of intermediate features of one expert.
        num_sections: number of sections of `intermediate_size` features in the first parameter: 2 with a gate, else 1.
        is_interleaved: True if gate and up features alternate; False: all gate features, then all up features.
        up_dim, down_dim: dimension of the intermediate features in the first and in the second parameter.
        up_bias, down_bias: names of the biases `[experts, features]` and `[experts, hidden]`, or None.
    """

    up_name: str
    down_name: str
    intermediate_size: int
    num_sections: int
    is_interleaved: bool
    up_dim: int
    down_dim: int
    up_bias: str | None
    down_bias: str | None


def has_fused_experts(module: nn.Module) -> bool:
    """Return True if the module holds the weights of all its experts in two three-dimensional parameters."""
    own = dict(module.named_parameters(recurse=False))
    first = own.get("gate_up_proj", own.get("up_proj"))
    second = own.get("down_proj")
    return first is not None and second is not None and first.dim() == 3 and second.dim() == 3


def read_fused_experts_layout(module: nn.Module) -> FusedExpertsLayout | str:
    """Return the layout of the weights, or the reason why it is unknown.

    transformers records on the module whether weights are transposed and whether gate and up alternate. Without these
    attributes, the shapes decide if the weights are transposed, and gate and up do not alternate.
    """
    own = dict(module.named_parameters(recurse=False))
    first_name = "gate_up_proj" if "gate_up_proj" in own else "up_proj"
    if first_name not in own or "down_proj" not in own:
        return f"{first_name} and down_proj are not both parameters of it; an adapter may have replaced them"
    first, second = own[first_name], own["down_proj"]
    hidden = {tuple(first.shape[1:])[dim] for dim in (0, 1)} & {tuple(second.shape[1:])[dim] for dim in (0, 1)}
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert, before outputs are added up"
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        straight = first.shape[2] == second.shape[1]
        turned = first.shape[1] == second.shape[2]
        if straight == turned:
            return f"shapes {tuple(first.shape)} and {tuple(second.shape)} leave the hidden dimension ambiguous"
        transposed = turned
    first_dim, second_dim = (2, 1) if transposed else (1, 2)
    intermediate, features = second.shape[second_dim], first.shape[first_dim]
    if not hidden or features not in (intermediate, 2 * intermediate):
        return f"{first_name} has {features} output features and down_proj has {intermediate} input features"
    known = {first_name, "down_proj", f"{first_name}_bias", "down_proj_bias"}
    if set(own) - known:
        return f"the roles of its parameters {sorted(set(own) - known)} are unknown"
    return FusedExpertsLayout(
        up_name=first_name,
        down_name="down_proj",
        intermediate_size=intermediate,
        num_sections=features // intermediate,
        is_interleaved=not getattr(module, "is_concatenated", True),
        up_dim=first_dim,
        down_dim=second_dim,
        up_bias=f"{first_name}_bias" if f"{first_name}_bias" in own else None,
        down_bias="down_proj_bias" if "down_proj_bias" in own else None,
    )
