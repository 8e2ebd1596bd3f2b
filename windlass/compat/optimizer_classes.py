"""DeepSpeed's optimizer classes, for `isinstance` checks on an engine's optimizer.

`initialize` creates a `ShardedOptimizer` at every stage and precision. Scripts check the class to find out the stage,
or the name of the attribute with the master weights. Therefore `isinstance` is True for each class here only with
optimizers of its kind.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from windlass.compat.optimizers.fused_optimizers import FusedAdam, FusedLamb, FusedLion
from windlass.config import Config
from windlass.engine.sharded_optimizer import ShardedOptimizer
from windlass.zero import parameter_registry
from windlass.zero.access.shard_values import replica_states
from windlass.zero.update.elementwise_update import clone_optimizer

KIND_ATTRIBUTE = "deepspeed_kind"
"""Name of the attribute that holds an optimizer's kind."""


def optimizer_kind_of(config: Config) -> str:
    """Return the kind of optimizer that DeepSpeed creates for a configuration; "basic" means the script's own."""
    stage = config.zero_optimization.stage
    if stage == 3:
        return "stage 3"
    offload = config.zero_optimization.offload_optimizer
    on_host = offload is not None and offload.device == "cpu"
    if stage == 1 and config.bf16.enabled and config.data_types.grad_accum_dtype == "fp32" and not on_host:
        return "bf16"
    if stage in (1, 2):
        return "stages 1 and 2"
    if config.fp16.enabled or config.bf16.enabled:
        named = config.optimizer is not None and config.optimizer.type.lower() in ("adam", "adamw")
        return "fused" if named else "unfused"
    return "basic"


_TORCH_ATTRIBUTES = frozenset({"defaults", "state", "param_groups"})

_BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    "adam": FusedAdam,
    "adamw": FusedAdam,
    "lamb": FusedLamb,
    "lion": FusedLion,
}


class BasicOptimizer(ShardedOptimizer):
    """Optimizer of stage 0 in fp32, where DeepSpeed returns the script's own object.

    Its `__class__` is the class of that object, or DeepSpeed's class for an optimizer that the configuration names. It
    compares equal to the wrapped optimizer, but behaves as a `ShardedOptimizer`. Methods and attributes that only the
    class of the wrapped optimizer has are those of the wrapped optimizer, so that a value that a script sets is used.
    Its copies and pickles are plain optimizers of that class, with the states.
    """

    passes_for: type[torch.optim.Optimizer]

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("optimizer")
        if wrapped is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get("optimizer")
        if name not in self.__dict__ and _is_own_attribute(wrapped, name):
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.optim.Optimizer]:  # type: ignore[override]
        return self.passes_for

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.optimizer

    def __hash__(self) -> int:
        return hash(self.optimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce a plain optimizer with copies of the states, of which every rank has all at stage 0. Not collective.

        Raises:
            ModelError: the states are offloaded.
        """
        plain = clone_optimizer(self.optimizer)
        plain.__class__ = self.passes_for
        plain.param_groups = self.param_groups
        plain.state.update(self.optimizer.state)
        for group in self.param_groups:
            for parameter in group["params"]:
                states = replica_states(parameter) if parameter_registry.find(parameter) is not None else {}
                step = states.get("step")
                if isinstance(step, torch.Tensor) and (group.get("fused") or group.get("capturable")):
                    states["step"] = step.to(parameter.device)  # such steps read the count on the device
                if states:
                    plain.state[parameter] = states
        return plain.__reduce_ex__(protocol)


def pass_for_basic(optimizer: ShardedOptimizer, config: Config, *, named: bool) -> None:
    """Make an optimizer of stage 0 in fp32 an instance of the class that DeepSpeed would use.

    Args:
        named: True if the configuration names the optimizer; False if the script constructed it.
    """
    section = config.optimizer
    found = _BY_NAME.get(section.type.lower()) if named and section is not None else None
    if section is not None and section.params.get("torch_adam"):
        found = None
    optimizer.__class__ = BasicOptimizer
    optimizer.__dict__["passes_for"] = found or type(optimizer.optimizer)
    # The constructor copied these attributes, and steps and scripts change those of the wrapped optimizer.
    for name, value in vars(optimizer.optimizer).items():
        if _is_own_attribute(optimizer.optimizer, name) and optimizer.__dict__.get(name) is value:
            del optimizer.__dict__[name]


def _is_own_attribute(wrapped: Any, name: str) -> bool:
    """Return True if an optimizer has the public attribute `name`, and neither torch's class nor the wrapper has it."""
    taken = name.startswith("_") or name in _TORCH_ATTRIBUTES or hasattr(ShardedOptimizer, name)
    return wrapped is not None and not taken and (name in vars(wrapped) or hasattr(type(wrapped), name))


class _OptimizerKindMeta(type):
    """Metaclass of classes for which `isinstance` is True with an optimizer of one of the class's `kinds`."""

    kinds: tuple[str, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedOptimizer) and getattr(instance, KIND_ATTRIBUTE, None) in cls.kinds


class ZeROOptimizer(ShardedOptimizer, metaclass=_OptimizerKindMeta):
    """Optimizer of stages 1 to 3."""

    kinds: ClassVar[tuple[str, ...]] = ("stage 3", "stages 1 and 2", "bf16")


class DeepSpeedZeroOptimizer(ShardedOptimizer, metaclass=_OptimizerKindMeta):
    """Optimizer of stages 1 and 2."""

    kinds: ClassVar[tuple[str, ...]] = ("stages 1 and 2",)


class DeepSpeedZeroOptimizer_Stage3(ShardedOptimizer, metaclass=_OptimizerKindMeta):
    """Optimizer of stage 3."""

    kinds: ClassVar[tuple[str, ...]] = ("stage 3",)


class BF16_Optimizer(ShardedOptimizer, metaclass=_OptimizerKindMeta):
    """Optimizer of stage 1 with bf16 parameters and fp32 accumulation."""

    kinds: ClassVar[tuple[str, ...]] = ("bf16",)


class FP16_Optimizer(ShardedOptimizer, metaclass=_OptimizerKindMeta):
    """Optimizer of stage 0 with 16-bit parameters and a fused update (Adam)."""

    kinds: ClassVar[tuple[str, ...]] = ("fused",)


class FP16_UnfusedOptimizer(ShardedOptimizer, metaclass=_OptimizerKindMeta):
    """Optimizer of stage 0 with 16-bit parameters and an update that is not fused."""

    kinds: ClassVar[tuple[str, ...]] = ("unfused",)
