"""Questions about experts that are spread over ranks: here there are none, and the answers are no."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers whose experts are spread, and how many experts."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is one of an expert's, by the mark that such parameters carry."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether an optimizer's group is one of experts, by its mark."""
    return bool(param_group.get("moe"))
