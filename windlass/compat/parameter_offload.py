"""What takes the place of DeepSpeed's manager of stage-3 parameters, whose hooks scripts take off and put back."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from windlass.compat.deepspeed_engine import DeepSpeedEngine


class NoopHookHandle:
    """Of a hook that is in nobody's way: inside `GatheredParameters` windlass's own use what is gathered already."""

    def remove(self) -> None:
        """Nothing."""


class NoopParameterCoordinator:
    """Windlass keeps no trace that a forward of another kind could spoil; it remembers that somebody thought so."""

    def __init__(self) -> None:
        self._invalid = False

    def is_invalid_trace(self) -> bool:
        """Whether `_invalidate_trace` was called."""
        return self._invalid

    def _invalidate_trace(self) -> None:
        self._invalid = True


class ParameterOffload:
    """`engine.optimizer.parameter_offload`, or `engine.optimizer` itself where nothing is trained: hooks that can be
    taken off and put back, the model, the coordinator.

    Args:
        engine: at stage 3.
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
        """Put the hooks back."""
        self._register_deepspeed_module(self.module)

    def _remove_module_hooks(self) -> None:
        for hook in [*self.forward_hooks, *self.backward_hooks]:
            hook.remove()
        self.forward_hooks, self.backward_hooks = [], []

    def destroy(self) -> None:
        """Take the hooks off."""
        self._remove_module_hooks()

    def get_param_coordinator(self, *_: Any, **__: Any) -> NoopParameterCoordinator:
        """The coordinator."""
        return self.param_coordinator

    def empty_partition_cache(self) -> None:
        """Nothing: what a forward gathered is released when it ends."""

    def partition_all_parameters(self) -> None:
        """Nothing: parameters are released after use."""


class ZeROOrderedDict(OrderedDict[str, Any]):
    """Parameters of a module, in order. DeepSpeed puts it in place of `module._parameters` to gather what a forward
    reads; windlass gathers by itself and puts none there, so that one which a script makes only holds.

    Args:
        parent_module: whose parameters they are.
    """

    def __init__(self, parent_module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parent_module, self._in_forward = parent_module, False

    def __reduce__(self) -> Any:
        reduced: tuple[Any, ...] = tuple(super().__reduce__())
        return (reduced[0], (self._parent_module,), *reduced[2:])


def ensure_zero_ordered_dict(module: Any) -> None:
    """Put a module's parameters into a `ZeROOrderedDict`, and keep the container that they were in as
    `_original_parameters`. Does nothing where they are in one already."""
    given = getattr(module, "_parameters", None)
    if not isinstance(given, dict) or isinstance(given, ZeROOrderedDict):
        return
    if not hasattr(module, "_original_parameters"):
        module._original_parameters = given
    module._parameters = ZeROOrderedDict(module, given)
