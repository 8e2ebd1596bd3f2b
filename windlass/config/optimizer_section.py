"""The `optimizer` section: type of the optimizer and its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationInfo, field_validator

from windlass.config import parameter_tables
from windlass.config.config_problems import ConfigProblem, ConfigRefusal, ProblemKind
from windlass.config.config_section import ConfigSection
from windlass.config.key_status import KeyStatus, accepted, honoured
from windlass.config.parameter_tables import (
    ParameterSpec,
    ParameterTable,
    accepted_parameter,
    refused_parameter,
    shape_of_default,
)
from windlass.config.registered_codecs import codec_names
from windlass.config.registered_optimizers import registered_optimizers

_LR = {"lr": ParameterSpec("float", 1e-3, minimum=0)}
_BETAS = {"betas": ParameterSpec("floats", [0.9, 0.999], minimum=0, less_than=1)}
_EPS = {"eps": ParameterSpec("float", 1e-8, minimum=0)}
_DECAY = {"weight_decay": ParameterSpec("float", 0.0, minimum=0)}
_GRADS = {"set_grad_none": accepted_parameter("bool", True, "gradients are always freed, never filled with zeros")}
_TORCH_STEP = {
    "foreach": ParameterSpec("bool", None),
    "fused": ParameterSpec("bool", None),
    "maximize": ParameterSpec("bool", False),
    "differentiable": refused_parameter("bool", False, "not yet built: differentiating through a step; write false"),
}
_NO_AMSGRAD = {"amsgrad": refused_parameter("bool", False, "not yet built: amsgrad in this optimizer; write false")}
_ADAM = {
    **_LR, **_BETAS, **_EPS, **_DECAY, **_GRADS, **_TORCH_STEP,
    "amsgrad": ParameterSpec("bool", False),
    "capturable": ParameterSpec("bool", False),
    "bias_correction": refused_parameter("bool", True, "not yet built: Adam without bias correction; write true"),
    "torch_adam": accepted_parameter("bool", False, "Adam is always torch's own, fused where torch has a fused step"),
    "fp32_optimizer_states": refused_parameter("bool", True, "not yet built: optimizer states are fp32; write true"),
}  # fmt: skip
_ALWAYS_DECOUPLED = refused_parameter("bool", True, 'AdamW decouples its decay; for coupled decay write type "Adam"')
_MESSAGES = {
    "cuda_aware": accepted_parameter("bool", False, "messages take the engine's transport"),
    "comm_backend_name": accepted_parameter("str", "nccl", "messages take the engine's transport"),
}
_SYNC = {"sync_interval": ParameterSpec("int", None, minimum=1)}
_ONE_BIT_LAMB = {
    "freeze_step": ParameterSpec("int", 100_000, minimum=1),
    **_MESSAGES,
    **_SYNC,
    "coeff_beta": ParameterSpec("float", 0.9, minimum=0, less_than=1),
    "factor_max": ParameterSpec("float", 4.0, greater_than=0),
    "factor_min": ParameterSpec("float", 0.5, greater_than=0),
    "factor_threshold": ParameterSpec("float", 0.1, greater_than=0),
}
_ZERO_ONE = {
    "var_freeze_step": ParameterSpec("int", 100_000, minimum=1),
    "var_update_scaler": ParameterSpec("int", 16, minimum=1),
    "local_step_scaler": ParameterSpec("int", 32_678, minimum=1),
    "local_step_clipper": ParameterSpec("int", 16, minimum=1),
    **_MESSAGES,
}
_NO_CLIP = {"max_grad_norm": refused_parameter("float", 0.0, "write gradient_clipping at the top level instead")}
_AS_ADAMW = {
    **_LR, **_BETAS, **_EPS, **_DECAY, **_GRADS, **_NO_AMSGRAD, **_NO_CLIP, **_MESSAGES, **_SYNC,
    "bias_correction": ParameterSpec("bool", True),
    "eps_inside_sqrt": refused_parameter("bool", False, "the steps are AdamW's; write false"),
    "max_update": ParameterSpec("float", None, greater_than=0),
}  # fmt: skip
_LAMB = {
    **_LR, **_BETAS, **_EPS, **_DECAY, **_NO_AMSGRAD,
    "bias_correction": ParameterSpec("bool", True),
    "max_coeff": ParameterSpec("float", 10.0, minimum=0),
    "min_coeff": ParameterSpec("float", 0.01, minimum=0),
    "eps_inside_sqrt": ParameterSpec("bool", False),
    "max_grad_norm": refused_parameter("float", 0.0, "write gradient_clipping at the top level instead"),
}  # fmt: skip
_SGD = {
    **_LR, **_DECAY, **_TORCH_STEP,
    "momentum": ParameterSpec("float", 0.0, minimum=0),
    "dampening": ParameterSpec("float", 0.0),
    "nesterov": ParameterSpec("bool", False),
}  # fmt: skip
# class that updates the parameters; the learning rates of the groups are already scaled by the width of layers (muP)
_MUP = {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "SGD"}

OPTIMIZER_PARAMETERS: dict[str, ParameterTable] = {
    "Adam": {**_ADAM, "adam_w_mode": ParameterSpec("bool", True)},
    "AdamW": {**_ADAM, "weight_decay": ParameterSpec("float", 0.01, minimum=0), "adam_w_mode": _ALWAYS_DECOUPLED},
    "SGD": _SGD,
    "Adagrad": {
        **_DECAY, **_TORCH_STEP, **_NO_AMSGRAD,
        "lr": ParameterSpec("float", 1e-2, minimum=0),
        "lr_decay": ParameterSpec("float", 0.0, minimum=0),
        "eps": ParameterSpec("float", 1e-10, minimum=0),
        "initial_accumulator_value": ParameterSpec("float", 0.0, minimum=0),
    },
    "Lion": {
        **_DECAY, **_GRADS,
        "lr": ParameterSpec("float", 1e-4, minimum=0),
        "betas": ParameterSpec("floats", [0.9, 0.99], minimum=0, less_than=1),
    },
    "Lamb": _LAMB,
    "Muon": {
        **_LR, **_BETAS, **_EPS, **_GRADS,
        "weight_decay": ParameterSpec("float", 0.1, minimum=0),
        "momentum": ParameterSpec("float", 0.95, minimum=0),
        "nesterov": ParameterSpec("bool", True),
        "ns_coefficients": ParameterSpec("floats", [3.4445, -4.775, 2.0315]),
        "ns_steps": ParameterSpec("int", 5, minimum=0, less_than=100),
        "ns_eps": ParameterSpec("float", 1e-7),
        "adjust_lr_fn": ParameterSpec("str", None, choices=("original", "match_rms_adamw")),
        "muon_lr": ParameterSpec("float", None, minimum=0),
        "adam_lr": ParameterSpec("float", None, minimum=0),
        "ns_method": ParameterSpec(
            "str", "gram", KeyStatus.ACCEPTED, "two orders of the same matrix products; the result is the same",
            choices=("gram", "standard"),
        ),
        "per_head_muon": refused_parameter("bool", False, "not yet built: one orthogonalization per head; write false"),
        "bias_correction": refused_parameter("bool", True, "not yet built: AdamW without bias correction; write true"),
        "torch_adam": accepted_parameter("bool", False, "AdamW always uses torch's own arithmetic"),
        "adam_w_mode": _ALWAYS_DECOUPLED,
    },
    "DiLoCo": {
        **_LR, **_BETAS, **_EPS,
        "weight_decay": ParameterSpec("float", 0.01, minimum=0),
        "inner_steps": ParameterSpec("int", 32, minimum=1),
        "outer_lr": ParameterSpec("float", 0.7, greater_than=0),
        "outer_momentum": ParameterSpec("float", 0.9, minimum=0, less_than=1),
        "fragments": ParameterSpec("int", 1, minimum=1),
        "codec": ParameterSpec("str", "int8", choices=codec_names()),
        "overlap_steps": ParameterSpec("int", 0, minimum=0),
        "mixing": ParameterSpec("float", 0.5, minimum=0, less_than=1),
        "start_step": ParameterSpec("int", 0, minimum=0),
    },
    "PowerSGD": {
        **_LR, **_DECAY,
        "momentum": ParameterSpec("float", 0.9, minimum=0),
        "nesterov": ParameterSpec("bool", False),
        "rank": ParameterSpec("int", 4, minimum=1),
        "start_step": ParameterSpec("int", 1000, minimum=0),
        "min_compression_rate": ParameterSpec("float", 2.0, minimum=1),
    },
    "OneBitAdam": {**_AS_ADAMW, "freeze_step": ParameterSpec("int", 100_000, minimum=1)},
    "ZeroOneAdam": {**_AS_ADAMW, **_ZERO_ONE},
    "OneBitLamb": {**_LAMB, **_GRADS, **_ONE_BIT_LAMB},
    "MuAdam": _ADAM,
    "MuAdamW": _ADAM,
    "MuSGD": _SGD,
}  # fmt: skip
"""Parameters by optimizer, known without importing torch: DeepSpeed's names, and those that every torch version has."""

COMPRESSED_OPTIMIZERS = {"OneBitAdam": 2, "ZeroOneAdam": 2, "OneBitLamb": 2, "DiLoCo": 0, "PowerSGD": 0}
"""Optimizers that send compressed messages by themselves, with the highest ZeRO stage of each."""
FIRST_COMPRESSED_STEP = ("freeze_step", "var_freeze_step", "start_step")
"""Parameters of compressed optimizers: number of steps before messages are compressed, or before the first steps
without communication."""
UNSUPPORTED_OPTIMIZERS = {
    "LBFGS": "it calls the model again inside step() through a closure, which engine.step() does not take; write AdamW",
    "SparseAdam": "it takes only sparse gradients, and gradients are reduced dense; write Adam",
}
"""Known optimizers that are refused, with the reason."""
_FROM_TORCH = ("Adam", "AdamW", "SGD", "Adagrad")


class ResolvedOptimizer(NamedTuple):
    """Name of the class to construct (of `torch.optim`, or windlass's Lion, Lamb, Muon, ...), and its arguments."""

    name: str
    arguments: dict[str, Any]


class OptimizerConfig(ConfigSection):
    """Optimizer that the engine constructs if the caller passes none."""

    type: str = honoured(...)
    """Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, DiLoCo, PowerSGD, MuAdam,
    MuAdamW, MuSGD (case-insensitive), a class of torch.optim, or a name that the script registered with
    windlass.optim.register_update."""
    params: dict[str, Any] = honoured(dict)
    """Parameters of the optimizer. An absent parameter has the default of the optimizer's class."""
    legacy_fusion: bool = accepted(False, "chooses among DeepSpeed's fp16 wrappers; there is one path here")

    @field_validator("type")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return {name.lower(): name for name in (*OPTIMIZER_PARAMETERS, *UNSUPPORTED_OPTIMIZERS)}.get(
            value.lower(), value
        )

    @field_validator("params")
    @classmethod
    def _integral_params(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return parameter_tables.convert_integers(value, OPTIMIZER_PARAMETERS.get(info.data.get("type", ""), {}))

    def resolve(self) -> ResolvedOptimizer:
        """Return the name of the class and its arguments. Parameters without effect are left out.

        As in DeepSpeed, `Adam` has decoupled weight decay (it is AdamW) unless `adam_w_mode` is false.
        """
        table = OPTIMIZER_PARAMETERS.get(self.type, {})
        kept = {
            name: value for name, value in self.params.items() if name not in table or table[name].status == "honoured"
        }
        if self.type == "Adam" and kept.pop("adam_w_mode", True):
            return ResolvedOptimizer("AdamW", {"weight_decay": 0.0, **kept})
        if self.type in _MUP:
            return ResolvedOptimizer(_MUP[self.type], {"weight_decay": 0.0, **kept})
        return ResolvedOptimizer(self.type, kept)


def find_parameter_problems(optimizer: OptimizerConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for an unknown type, unknown parameters, values of a wrong type or range, and conflicting values.

    `windlass check` and `initialize` both call this function, so that they accept the same configurations.
    """
    table = _parameter_table(optimizer)
    if table is None:
        yield parameter_tables.unknown_type_problem(
            "optimizer.type", "optimizer", optimizer.type, (*OPTIMIZER_PARAMETERS, *_classes_by_name())
        )
        return
    if optimizer.type in UNSUPPORTED_OPTIMIZERS:
        return
    found = list(parameter_tables.table_problems("optimizer.params", optimizer.params, table, optimizer.type))
    yield from found
    if found:
        return
    for name, sentence in _conflicting_values(optimizer.type, optimizer.params, table):
        yield ConfigProblem(ProblemKind.CONTRADICTION, f"optimizer.params.{name}", sentence)
    if optimizer.type not in OPTIMIZER_PARAMETERS:
        filled = {name: value for name, value in optimizer.params.items() if value != "auto"}
        yield from parameter_tables.try_construct(
            "optimizer.params", optimizer.type, lambda: build_trial_optimizer(optimizer.type, filled)
        )


def _conflicting_values(kind: str, params: Mapping[str, Any], table: ParameterTable) -> Iterator[tuple[str, str]]:
    """Yield (parameter, sentence) for values of several parameters that exclude each other."""

    def value(name: str) -> Any:
        given = params.get(name, table[name].default) if name in table else None
        return None if given == "auto" else given

    momentum, dampening = value("momentum"), value("dampening")
    if kind == "SGD" and value("nesterov") and None not in (momentum, dampening) and (momentum <= 0 or dampening != 0):
        yield (
            "nesterov",
            f"true, with momentum {momentum} and dampening {dampening}; write a momentum above 0 and a dampening of 0, "
            "or nesterov false",
        )
    least, most = value("min_coeff"), value("max_coeff")
    if kind in ("Lamb", "OneBitLamb") and None not in (least, most) and least > most:
        yield "min_coeff", f"{least} is more than max_coeff {most}; exchange them"
    if kind == "PowerSGD" and value("nesterov") and momentum == 0:
        yield "nesterov", "true, but momentum is 0; write a momentum above 0, such as 0.9, or nesterov false"
    smallest, largest = value("factor_min"), value("factor_max")
    if None not in (smallest, largest) and smallest > largest:
        yield "factor_min", f"{smallest} is more than factor_max {largest}; exchange them"
    inner, fragments, overlap = value("inner_steps"), value("fragments"), value("overlap_steps")
    if None not in (inner, fragments) and fragments > inner:
        yield (
            "fragments",
            f"{fragments} is more than inner_steps {inner}, and at most one part of the model is sent after each; "
            f"write at most {inner}",
        )
    if None not in (inner, overlap) and overlap >= inner:
        yield (
            "overlap_steps",
            f"{overlap} is not less than inner_steps {inner}, and a message has to arrive before the next one is sent; "
            f"write at most {inner - 1}",
        )
    if kind in _FROM_TORCH and value("fused") and value("foreach"):
        yield "foreach", "true, and so is fused: they are two implementations of one step; write false for one"


def late_start_warning(params: Mapping[str, Any], total_steps: Any) -> str:
    """Return a warning if a schedule ends before a compressed optimizer's freeze or first local step; else empty.

    Args:
        params: parameters of the optimizer, with their defaults.
        total_steps: `scheduler.params.total_num_steps`; None if the schedule has none.
    """
    if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps <= 0:
        return ""
    for key in FIRST_COMPRESSED_STEP:
        first = params.get(key)
        if isinstance(first, int) and first >= total_steps:
            # ZeroOneAdam compresses odd steps before the freeze, once its variance interval exceeds 1.
            exact = params.get("var_update_scaler", total_steps) if key == "var_freeze_step" else total_steps
            compresses = exact + exact % 2 < total_steps
            lost = "no step will be without messages" if compresses else "nothing will be compressed"
            return (
                f"optimizer.params.{key} is {first}, and scheduler.params.total_num_steps is {total_steps}: {lost} "
                f"in this run; write about 15 % of all steps, {max(1, total_steps * 15 // 100)}"
            )
    return ""


def build_trial_optimizer(kind: str, params: Mapping[str, Any]) -> Any:
    """Construct an optimizer over one small matrix, to try parameters or a schedule.

    For a type in `OPTIMIZER_PARAMETERS`, it is a plain `torch.optim.Optimizer` with the defaults of the type; for any
    other type, it is an object of that class. Imports torch. Raises the exception that the class raises for these
    parameters.
    """
    import torch

    weights = [torch.zeros(2, 2, requires_grad=True)]
    if kind in OPTIMIZER_PARAMETERS:
        defaults = {name: parameter.default for name, parameter in OPTIMIZER_PARAMETERS[kind].items()}
        return torch.optim.Optimizer(weights, {**defaults, **params})
    return _torch_class(kind)(weights, **params)


def find_parameter_refusals(optimizer: OptimizerConfig) -> Iterator[ConfigRefusal]:
    """Yield a refusal for an unsupported type, unsupported parameters, and parameters left at "auto"."""
    if optimizer.type in UNSUPPORTED_OPTIMIZERS:
        yield ConfigRefusal("optimizer.type", optimizer.type, UNSUPPORTED_OPTIMIZERS[optimizer.type])
        return
    yield from parameter_tables.table_refusals("optimizer.params", optimizer.params, _parameter_table(optimizer) or {})


def _parameter_table(optimizer: OptimizerConfig) -> ParameterTable | None:
    known = OPTIMIZER_PARAMETERS.get(optimizer.type)
    if known is None:
        by_lower = {name.lower(): owner for name, owner in _classes_by_name().items()}
        owner = by_lower.get(optimizer.type.lower())
        return table_from_signature(owner, skip=1) if owner else None
    if optimizer.type not in _FROM_TORCH or set(optimizer.params) <= set(known):
        return known
    return {**table_from_signature(_torch_classes()[optimizer.type], skip=1), **known}


def _torch_class(kind: str) -> type:
    return {name.lower(): value for name, value in _classes_by_name().items()}[kind.lower()]


def _classes_by_name() -> dict[str, type]:
    """Return every optimizer class of the installed torch, and those that user code registered."""
    return {**_torch_classes(), **registered_optimizers()}


@cache
def _torch_classes() -> dict[str, type]:
    """Return every optimizer class of the installed torch, by name. Imports torch, so callers look the type up in
    `OPTIMIZER_PARAMETERS` first."""
    import torch

    return {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def table_from_signature(owner: type, skip: int) -> ParameterTable:
    """Return the parameters in a class's signature, without the first `skip`; value types follow from the defaults."""
    names = list(inspect.signature(owner).parameters.values())[skip:]
    return {
        one.name: ParameterSpec(shape_of_default(one.default), ... if one.default is one.empty else one.default)
        for one in names
    }
