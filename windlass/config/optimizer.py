"""The `optimizer` section: which update rule, and with which parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationInfo, field_validator

from windlass.config import parameters
from windlass.config.parameters import Parameter, Table, ignored, unbuilt
from windlass.config.problems import Problem, Refusal
from windlass.config.section import Section
from windlass.config.verdict import accepted, honoured

_LR = {"lr": Parameter("float", 1e-3)}
_BETAS = {"betas": Parameter("floats", [0.9, 0.999])}
_EPS = {"eps": Parameter("float", 1e-8)}
_DECAY = {"weight_decay": Parameter("float", 0.0)}
_GRADS = {"set_grad_none": ignored("bool", True, "gradients are always released, never filled with zeros")}
_TORCH_STEP = {
    "foreach": Parameter("bool", None),
    "fused": Parameter("bool", None),
    "maximize": Parameter("bool", False),
    "differentiable": unbuilt("bool", False, "not yet built: differentiating through a step; write false"),
}
_NO_AMSGRAD = {"amsgrad": unbuilt("bool", False, "not yet built: amsgrad in this optimizer; write false")}
_ADAM = {
    **_LR, **_BETAS, **_EPS, **_DECAY, **_GRADS, **_TORCH_STEP,
    "amsgrad": Parameter("bool", False),
    "capturable": Parameter("bool", False),
    "bias_correction": unbuilt("bool", True, "not yet built: Adam without bias correction; write true"),
    "torch_adam": ignored("bool", False, "Adam is torch's own in any case, fused where torch has a fused step"),
    "fp32_optimizer_states": unbuilt("bool", True, "not yet built: optimizer states are fp32; write true"),
}  # fmt: skip
_ALWAYS_DECOUPLED = unbuilt("bool", True, 'AdamW decouples its decay; for coupled decay write type "Adam"')
_ONE_BIT_ONLY = {
    "freeze_step": Parameter("int", 100_000),
    "cuda_aware": Parameter("bool", False),
    "comm_backend_name": Parameter("str", "nccl"),
    "var_freeze_step": Parameter("int", 100_000),
    "var_update_scaler": Parameter("int", 16),
    "local_step_scaler": Parameter("int", 32_678),
    "local_step_clipper": Parameter("int", 16),
    "coeff_beta": Parameter("float", 0.9),
    "factor_max": Parameter("float", 4.0),
    "factor_min": Parameter("float", 0.5),
    "factor_threshold": Parameter("float", 0.1),
}  # fmt: skip
_LAMB = {
    **_LR, **_BETAS, **_EPS, **_DECAY, **_NO_AMSGRAD,
    "bias_correction": Parameter("bool", True),
    "max_coeff": Parameter("float", 10.0),
    "min_coeff": Parameter("float", 0.01),
    "eps_inside_sqrt": Parameter("bool", False),
    "max_grad_norm": Parameter("float", 0.0),
}  # fmt: skip
_ONE_BIT = {**_LAMB, **_GRADS, **_ONE_BIT_ONLY}

PARAMETERS: dict[str, Table] = {
    "Adam": {**_ADAM, "adam_w_mode": Parameter("bool", True)},
    "AdamW": {**_ADAM, "weight_decay": Parameter("float", 0.01), "adam_w_mode": _ALWAYS_DECOUPLED},
    "SGD": {
        **_LR, **_DECAY, **_TORCH_STEP,
        "momentum": Parameter("float", 0.0),
        "dampening": Parameter("float", 0.0),
        "nesterov": Parameter("bool", False),
    },
    "Adagrad": {
        **_DECAY, **_TORCH_STEP, **_NO_AMSGRAD,
        "lr": Parameter("float", 1e-2),
        "lr_decay": Parameter("float", 0.0),
        "eps": Parameter("float", 1e-10),
        "initial_accumulator_value": Parameter("float", 0.0),
    },
    "Lion": {**_DECAY, **_GRADS, "lr": Parameter("float", 1e-4), "betas": Parameter("floats", [0.9, 0.99])},
    "Lamb": _LAMB,
    "Muon": {
        **_LR, **_BETAS, **_EPS, **_GRADS,
        "weight_decay": Parameter("float", 0.1),
        "momentum": Parameter("float", 0.95),
        "nesterov": Parameter("bool", True),
        "ns_coefficients": Parameter("floats", [3.4445, -4.775, 2.0315]),
        "ns_steps": Parameter("int", 5),
        "ns_eps": Parameter("float", 1e-7),
        "adjust_lr_fn": Parameter("str", None),
        "muon_lr": Parameter("float", None),
        "adam_lr": Parameter("float", None),
        "ns_method": ignored("str", "gram", "two orders of the same matrix products; the result is the same"),
        "per_head_muon": unbuilt("bool", False, "not yet built: one orthogonalization a head; write false"),
        "bias_correction": unbuilt("bool", True, "not yet built: AdamW without bias correction; write true"),
        "torch_adam": ignored("bool", False, "AdamW is torch's own arithmetic in any case"),
        "adam_w_mode": _ALWAYS_DECOUPLED,
    },
    "OneBitAdam": _ONE_BIT,
    "ZeroOneAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
    "MuAdam": _ADAM,
    "MuAdamW": _ADAM,
    "MuSGD": {**_LR, **_DECAY, "momentum": Parameter("float", 0.0)},
}  # fmt: skip
"""Per optimizer, the parameters known without importing torch: DeepSpeed's words, and what every torch has."""

UNBUILT_TYPES = {
    **dict.fromkeys(
        ("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), "not yet built: 1-bit optimizers; write AdamW or Lamb"
    ),
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), "not yet built: muP scaling; write Adam, AdamW or SGD"),
    "LBFGS": "it calls the model again inside its step, which an engine cannot do; write another optimizer",
    "SparseAdam": "gradients are dense here; write Adam",
}
"""Optimizers that are known and refused, and why."""
_FROM_TORCH = ("Adam", "AdamW", "SGD", "Adagrad")


class ResolvedOptimizer(NamedTuple):
    """The class to build (in `torch.optim`, or windlass's Lion, Lamb or Muon) and its keyword arguments."""

    name: str
    arguments: dict[str, Any]


class OptimizerConfig(Section):
    """Which optimizer the engine builds when the caller gives none."""

    type: str = honoured(...)
    """Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon (in any case of letters), or a class of torch.optim."""
    params: dict[str, Any] = honoured(dict)
    """Its parameters; what is absent has torch's default."""
    legacy_fusion: bool = accepted(False, "chooses among DeepSpeed's fp16 wrappers; there is one path here")

    @field_validator("type")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return {name.lower(): name for name in PARAMETERS}.get(value.lower(), value)

    @field_validator("params")
    @classmethod
    def _whole_numbers(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return parameters.integral(value, PARAMETERS.get(info.data.get("type", ""), {}))

    def resolved(self) -> ResolvedOptimizer:
        """The class and the arguments that remain once DeepSpeed's own words are spelled out.

        `Adam` decays weights apart from the gradient (it is AdamW) unless `adam_w_mode` is false, as in DeepSpeed.
        """
        table = PARAMETERS.get(self.type, {})
        kept = {
            name: value for name, value in self.params.items() if name not in table or table[name].verdict == "honoured"
        }
        if self.type == "Adam" and kept.pop("adam_w_mode", True):
            return ResolvedOptimizer("AdamW", {"weight_decay": 0.0, **kept})
        return ResolvedOptimizer(self.type, kept)


def parameter_problems(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """An unknown type, unknown parameter names and values of the wrong shape."""
    table = _table(optimizer)
    if table is None:
        yield parameters.unknown_type("optimizer.type", "optimizer", optimizer.type, (*PARAMETERS, *_torch_classes()))
        return
    yield from parameters.problems("optimizer.params", optimizer.params, table, optimizer.type)


def parameter_refusals(optimizer: OptimizerConfig) -> Iterator[Refusal]:
    """A type that is not built, parameters that are not built, and parameters left at "auto"."""
    if optimizer.type in UNBUILT_TYPES:
        yield Refusal("optimizer.type", optimizer.type, UNBUILT_TYPES[optimizer.type])
        return
    yield from parameters.refusals("optimizer.params", optimizer.params, _table(optimizer) or {})


def _table(optimizer: OptimizerConfig) -> Table | None:
    known = PARAMETERS.get(optimizer.type)
    if known is None:
        by_lower = {name.lower(): table for name, table in _torch_classes().items()}
        return by_lower.get(optimizer.type.lower())
    if optimizer.type not in _FROM_TORCH or set(optimizer.params) <= set(known):
        return known
    return {**_torch_classes()[optimizer.type], **known}


@cache
def _torch_classes() -> dict[str, Table]:
    """Every optimizer of the installed torch with its parameters; imports torch, so it is asked last."""
    import torch

    classes = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    return {name: signature_table(value, skip=1) for name, value in classes.items()}


def signature_table(owner: type, skip: int) -> Table:
    """The parameters in the signature of a class, without the first `skip`; shapes are not known there."""
    names = list(inspect.signature(owner).parameters.values())[skip:]
    return {one.name: Parameter("any", ... if one.default is one.empty else one.default) for one in names}
