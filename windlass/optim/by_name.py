"""From `optimizer.type` and `optimizer.params` of a configuration to an optimizer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.errors import ConfigError
from windlass.optim.lamb import Lamb
from windlass.optim.lion import Lion
from windlass.optim.muon import Muon

_OWN: dict[str, type[torch.optim.Optimizer]] = {"lion": Lion, "lamb": Lamb, "muon": Muon}
_TORCH: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}

_ONE_BIT = "not yet built: it reduces compressed gradients itself; use Adam or Lamb"
_MUP = "not yet built: it needs the mup package's parameter shapes; use Adam, AdamW or SGD with groups of their own lr"
_REFUSED = {
    "lbfgs": "it evaluates the model again inside step() through a closure, which engine.step() has not; use AdamW",
    "sparseadam": "it takes only sparse gradients, and gradients are reduced dense; use Adam",
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
}


@dataclass(frozen=True)
class _Extra:
    """A parameter that DeepSpeed has and the class has not: which values change nothing, why others are refused."""

    allowed: tuple[Any, ...] | None  # None: every value changes nothing
    reason: str = ""


_NO_EFFECT = _Extra(None)
_ADAM_EXTRAS = {
    "torch_adam": _NO_EFFECT,
    "set_grad_none": _NO_EFFECT,
    "bias_correction": _Extra((True,), "torch's Adam always corrects the bias; delete it"),
    "fp32_optimizer_states": _Extra((True,), "optimizer states are fp32; delete it"),
}
_EXTRAS: dict[str, dict[str, _Extra]] = {
    "adam": {**_ADAM_EXTRAS, "adam_w_mode": _NO_EFFECT},  # it chose the class, see resolve_class
    "adamw": {
        **_ADAM_EXTRAS,
        "adam_w_mode": _Extra((True,), 'AdamW decouples the decay; for L2 write type "Adam" and adam_w_mode false'),
    },
    "adagrad": {"amsgrad": _Extra((False,), "Adagrad has no AMSGrad variant; delete it")},
    "lion": {"set_grad_none": _NO_EFFECT},
    "muon": {
        "torch_adam": _NO_EFFECT,
        "set_grad_none": _NO_EFFECT,
        "ns_method": _Extra(("gram", "standard"), 'both name the same polynomial; write "standard"'),
        "adam_w_mode": _Extra((True,), "parameters that are no hidden matrices get AdamW; delete it"),
        "bias_correction": _Extra((True,), "AdamW always corrects the bias; delete it"),
        "per_head_muon": _Extra(
            (False,), "not yet built: a projection is one matrix, not one for each head; delete it"
        ),
    },
}
_CHOSEN_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay": 0.0}  # torch's Adam: the mathematics is AdamW's, the name and the default stay Adam's
}


def build(
    type: str, params: Mapping[str, Any] | None, param_groups: Iterable[torch.Tensor] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer that a configuration names.

    Args:
        type: Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon or any class of `torch.optim`, in any case.
        params: keyword arguments; torch's defaults hold where nothing is said.
        param_groups: parameters, or groups as torch takes them.

    Raises:
        ConfigError: an unknown or refused name, unknown parameters (all of them at once), or values the class refuses.
    """
    given = dict(params or {})
    wrong = problems(type, given)
    if wrong:
        raise ConfigError("\n".join(wrong))
    key, cls = type.lower(), resolve_class(type, given)
    keywords = {**_CHOSEN_DEFAULTS.get(key, {}), **given}
    for name in _EXTRAS.get(key, {}):
        keywords.pop(name, None)
    keywords = {name: tuple(value) if isinstance(value, list) else value for name, value in keywords.items()}
    make: Callable[..., torch.optim.Optimizer] = cls
    try:
        return make(param_groups, **keywords)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer {type} with params {given} was refused by {cls.__name__}: {error}") from error


def resolve_class(type: str, params: Mapping[str, Any] | None = None) -> type[torch.optim.Optimizer]:
    """The class behind a name; `Adam` is AdamW unless `params` says `adam_w_mode: false`, as in DeepSpeed.

    Raises:
        ConfigError: the name is unknown (with the nearest one) or refused (with the reason).
    """
    key = str(type).lower()
    if key in _REFUSED:
        raise ConfigError(f"optimizer.type {type!r} is refused: {_REFUSED[key]}")
    if key == "adam" and (params or {}).get("adam_w_mode", True):
        return torch.optim.AdamW
    cls = _OWN.get(key) or _TORCH.get(key)
    if cls is None:
        raise ConfigError(
            f"optimizer.type {type!r} is unknown{_nearest(str(type), names())}; known: {', '.join(names())}"
        )
    return cls


def names() -> list[str]:
    """Every name that `build` takes, as its class is spelled."""
    classes = {**_TORCH, **_OWN}
    return sorted(cls.__name__ for key, cls in classes.items() if key not in _REFUSED)


def accepted_params(type: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The parameters that `type` takes, with the defaults in force; those without effect have the default None.

    Raises:
        ConfigError: as `resolve_class`.
    """
    signature = inspect.signature(resolve_class(type, params).__init__)
    own = {name: p.default for name, p in signature.parameters.items() if name not in ("self", "params")}
    extras: dict[str, Any] = dict.fromkeys(_EXTRAS.get(type.lower(), {}))
    return {**extras, **own, **_CHOSEN_DEFAULTS.get(type.lower(), {})}


def problems(type: str, params: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with `optimizer.type` and `optimizer.params`, one sentence each; needs no parameters.

    Values are checked only where the class itself could not say which key is meant.
    """
    params = params or {}
    try:
        accepted = accepted_params(type, params)
    except ConfigError as error:
        return [str(error)]
    extras = _EXTRAS.get(type.lower(), {})
    found = []
    for name, value in params.items():
        extra = extras.get(name)
        if name not in accepted:
            found.append(_unknown(type, name, accepted))
        elif extra is not None:
            if extra.allowed is not None and value not in extra.allowed:
                found.append(f"optimizer.params.{name} is {value!r} for {type}: {extra.reason}")
        elif isinstance(value, str) and isinstance(accepted[name], int | float | tuple):
            found.append(
                f"optimizer.params.{name} is {value!r} for {type}: it must be a number (default {accepted[name]})"
            )
    return found


def _unknown(type: str, name: str, accepted: Mapping[str, Any]) -> str:
    if name == "max_grad_norm":
        return f"optimizer.params.max_grad_norm is no parameter of {type}: set the top-level gradient_clipping instead"
    return (
        f"optimizer.params.{name} is no parameter of {type}{_nearest(name, accepted)}; it takes {', '.join(accepted)}"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    match = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[match[0]]}?" if match else ""
