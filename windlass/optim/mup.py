"""Learning rates per parameter for the maximal update parametrization (muP).

Source: Yang & Hu et al., Tensor Programs V, arXiv:2203.03466, table 8. The widths come from `infshape`, the attribute
that `mup.set_base_shapes(model, base)` sets on each parameter. The package `mup` is not required here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from windlass.base.errors import ConfigError

STEP_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "muadam": torch.optim.Adam,
    "muadamw": torch.optim.AdamW,
    "musgd": torch.optim.SGD,
}
"""torch optimizer class of each muP optimizer, by lower-case name."""
OPTIMIZER_NAMES = ("MuAdam", "MuAdamW", "MuSGD")


def mup_groups(
    kind: str, parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters into groups of one learning rate each, and scale the rates and decays by width.

    `m` is a parameter's width divided by its width in the base model. Under Adam, a matrix with two scaling dimensions
    has lr / m and decay * m. Under SGD, this matrix has lr / r and decay * r, where r is the fan-in's m over the
    fan-out's, and a parameter with one scaling dimension has lr * m and decay / m. All other parameters are unchanged.

    Args:
        kind: a key of `STEP_CLASSES`.
        parameters: parameters or groups, as torch takes them; a group's own `lr` and `weight_decay` are scaled.
        lr, weight_decay: values for groups without their own.

    Raises:
        ConfigError: a parameter has no base shape, or more than two scaling dimensions.
    """
    found = []
    for given in _as_param_groups(parameters):
        options = {"lr": lr, "weight_decay": weight_decay, **{k: v for k, v in given.items() if k != "params"}}
        by_factor: dict[float, list[torch.Tensor]] = defaultdict(list)
        for parameter in given["params"]:
            by_factor[_lr_factor(kind, parameter)].append(parameter)
        for factor, members in by_factor.items():
            scaled = {"lr": options["lr"] * factor, "weight_decay": options["weight_decay"] / factor}
            found.append({**options, **scaled, "params": members})
    return found


def _as_param_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(parameters)
    return given if given and isinstance(given[0], dict) else [{"params": given}]


def _lr_factor(kind: str, parameter: torch.Tensor) -> float:
    """Return the factor of a parameter's learning rate."""
    shape: Any = getattr(parameter, "infshape", None)
    if shape is None:
        raise ConfigError(
            f"optimizer.type is a muP optimizer, but a parameter of shape {list(parameter.shape)} has no base shape: "
            "call mup.set_base_shapes(model, base) before initialize, on a model built without zero.Init"
        )
    scaling_dims = shape.ninf()
    if scaling_dims > 2:
        raise ConfigError(
            f"muP defines no learning rate for a parameter with {scaling_dims} scaling dimensions (shape "
            f"{list(parameter.shape)}): "
            "give its group another optimizer, or keep a dimension equal to the base model's"
        )
    if scaling_dims == 2:
        return 1.0 / float(shape.fanin_fanout_mult_ratio() if kind == "musgd" else shape.width_mult())
    return float(shape.width_mult()) if scaling_dims == 1 and kind == "musgd" else 1.0
