"""Replacement for DeepSpeed's stage-3 parameter manager. Scripts remove and restore its hooks."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from windlass.compat.deepspeed_engine import DeepSpeedEngine


class NoopHookHandle:
    """Handle of a hook that does nothing.

    Scripts remove hooks inside `GatheredParameters`. windlass's own hooks stay: they have nothing to gather there.
    """

    def remove(self) -> None:
        """Do nothing."""


class NoopParameterCoordinator:
    """Replacement for DeepSpeed's parameter coordinator. It has no trace, and only records that
    `_invalidate_trace` was called.
    """

    def __init__(self) -> None:
        self._invalid = False

    def is_invalid_trace(self) -> bool:
        """Return True if `_invalidate_trace` was called."""
        return self._invalid

    def _invalidate_trace(self) -> None:
        self._invalid = True


class ParameterOffload:
    """Object at `engine.optimizer.parameter_offload`, or at `engine.optimizer` if the engine has no optimizer.

    It has the model, the coordinator, and hooks that can be removed and restored.

    Args:
        engine: engine at stage 3.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.module: nn.Module = engine.module
        self.param_coordinator = NoopParameterCoordinator()
        self.param_groups: list[dict[str, Any]] = []
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self._register_deepspeed_module(self.module)

    def _register_deepspeed_module(self, module: nn.Module, *_: Any) -> None:
        self.forward_hooks, self.backward_hooks = [NoopHookHandle()], [NoopHookHandle()]

    def setup_zero_stage3_hooks(self) -> None:
        """Restore the hooks."""
        self._register_deepspeed_module(self.module)

    def _remove_module_hooks(self) -> None:
        for hook in [*self.forward_hooks, *self.backward_hooks]:
            hook.remove()
        self.forward_hooks, self.backward_hooks = [], []

    def destroy(self) -> None:
        """Remove the hooks."""
        self._remove_module_hooks()

    def get_param_coordinator(self, *_: Any, **__: Any) -> NoopParameterCoordinator:
        """Return the coordinator."""
        return self.param_coordinator

    def empty_partition_cache(self) -> None:
        """Do nothing: at its end, a forward frees the parameters that it gathered."""

    def partition_all_parameters(self) -> None:
        """Do nothing: parameters are resharded after use."""


class ZeROOrderedDict(OrderedDict[str, Any]):
    """Ordered dict of a module's parameters.

    DeepSpeed replaces `module._parameters` by this class to gather parameters that a forward reads. windlass gathers by
    other means and never installs this class; an instance made by a script only stores its entries.

    Args:
        parent_module: module that owns the parameters.
    """

    def __init__(self, parent_module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parent_module, self._in_forward = parent_module, False

    def __reduce__(self) -> Any:
        reduced: tuple[Any, ...] = tuple(super().__reduce__())
        return (reduced[0], (self._parent_module,), *reduced[2:])


def ensure_zero_ordered_dict(module: Any) -> None:
    """Move a module's parameters into a `ZeROOrderedDict`, and keep the previous container as `_original_parameters`.

    Does nothing if they are already in a `ZeROOrderedDict`.
    """
    given = getattr(module, "_parameters", None)
    if not isinstance(given, dict) or isinstance(given, ZeROOrderedDict):
        return
    if not hasattr(module, "_original_parameters"):
        module._original_parameters = given
    module._parameters = ZeROOrderedDict(module, given)
