"""Construction of an optimizer from `optimizer.type` and `optimizer.params` of a configuration.

Names, parameters and ranges are those of `windlass.config.optimizer_section`, which `windlass check` uses too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from windlass.base.errors import ConfigError
from windlass.base.text import nearest_name
from windlass.config.key_status import KeyStatus
from windlass.config.optimizer_section import (
    OPTIMIZER_PARAMETERS,
    UNSUPPORTED_OPTIMIZERS,
    OptimizerConfig,
    find_parameter_problems,
    find_parameter_refusals,
)
from windlass.config.registered_optimizers import find_registered_optimizer, registered_optimizers
from windlass.optim import mup
from windlass.optim.diloco import DiLoCo
from windlass.optim.lamb import Lamb
from windlass.optim.lion import Lion
from windlass.optim.muon import Muon
from windlass.optim.one_bit_adam import OneBitAdam
from windlass.optim.one_bit_lamb import OneBitLamb
from windlass.optim.power_sgd import PowerSGD
from windlass.optim.zero_one_adam import ZeroOneAdam

_WINDLASS_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "lion": Lion,
    "lamb": Lamb,
    "muon": Muon,
    "diloco": DiLoCo,
    "powersgd": PowerSGD,
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
}
_TORCH_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
_REFUSED = {name.lower(): reason for name, reason in UNSUPPORTED_OPTIMIZERS.items()}


def build_optimizer(
    type: str, params: Mapping[str, Any] | None, param_groups: Iterable[torch.Tensor] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build the optimizer that a configuration names.

    Args:
        type: a name of `list_optimizer_names`, ignoring case.
        params: keyword arguments of the optimizer; its defaults apply to missing ones.
        param_groups: parameters or parameter groups, as a torch optimizer takes them.

    Raises:
        ConfigError: an unknown or refused name, unknown parameters or values out of range (reported together), or
            groups that the class rejects.
    """
    wrong = check_optimizer(type, params)
    if wrong:
        raise ConfigError("\n".join(wrong))
    name, keywords = OptimizerConfig(type=type, params=dict(params or {})).resolve()
    cls = resolve_optimizer_class(type, params)
    keywords = {key: tuple(value) if isinstance(value, list) else value for key, value in keywords.items()}
    if type.lower() in mup.STEP_CLASSES:
        options = {**accepted_params(type, params), **keywords}
        param_groups = mup.mup_groups(type.lower(), param_groups, options["lr"], options["weight_decay"])
    make: Callable[..., torch.optim.Optimizer] = cls
    try:
        return make(param_groups, **keywords)
    except ConfigError:
        raise
    except Exception as error:  # any error of a third-party constructor
        raise ConfigError(f"optimizer {name} with params {keywords} was refused by {cls.__name__}: {error}") from error


def resolve_optimizer_class(type: str, params: Mapping[str, Any] | None = None) -> type[torch.optim.Optimizer]:
    """Return the optimizer class of a name; `Adam` is AdamW unless `params` has `adam_w_mode: false`, as in DeepSpeed.

    Raises:
        ConfigError: the name is unknown (the message has the nearest one) or refused (the message has the reason).
    """
    key = str(type).lower()
    if key in _REFUSED:
        raise ConfigError(f"optimizer.type {type!r} is refused: {_REFUSED[key]}")
    if key == "adam" and (params or {}).get("adam_w_mode", True):
        return torch.optim.AdamW
    cls = _WINDLASS_CLASSES.get(key) or mup.STEP_CLASSES.get(key) or _TORCH_CLASSES.get(key)
    cls = cls or find_registered_optimizer(key)
    if cls is None:
        near = nearest_name(str(type), list_optimizer_names())
        hint = f"; nearest is {near}" if near else ""
        raise ConfigError(f"optimizer.type {type!r} is unknown{hint}; known: {', '.join(list_optimizer_names())}")
    return cls


def list_optimizer_names() -> list[str]:
    """Return the sorted names that `build_optimizer` accepts."""
    classes = {**_TORCH_CLASSES, **_WINDLASS_CLASSES}
    own = [cls.__name__ for key, cls in classes.items() if key not in _REFUSED]
    return sorted([*own, *mup.OPTIMIZER_NAMES, *registered_optimizers()])


def accepted_params(type: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the parameters of `type` with their values: those in `params`, else the defaults. A parameter that the
    configuration accepts and the class lacks has the value None.

    Raises:
        ConfigError: the name is unknown or refused, as in `resolve_optimizer_class`.
    """
    signature = inspect.signature(resolve_optimizer_class(type, params).__init__)
    own = {name: p.default for name, p in signature.parameters.items() if name not in ("self", "params")}
    section = OptimizerConfig(type=type, params=dict(params or {}))
    table = OPTIMIZER_PARAMETERS.get(section.type, {})
    extras = {name: None for name, parameter in table.items() if parameter.status is not KeyStatus.HONOURED}
    if section.type == "Adam":
        extras["adam_w_mode"] = None  # the key has selected the class
    return {**extras, **own, **section.resolve().arguments}


def check_optimizer(type: str, params: Mapping[str, Any] | None) -> list[str]:
    """Return one sentence for each problem in `optimizer.type` and `optimizer.params`. Needs no model parameters."""
    section = OptimizerConfig(type=str(type), params=dict(params or {}))
    return [str(one) for one in (*find_parameter_problems(section), *find_parameter_refusals(section))]
