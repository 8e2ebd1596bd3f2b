"""Parameters that a module returns, which the calling module then uses: DeepSpeed's external parameters.

windlass needs no record of these parameters to gather them. But scripts read `module.ds_external_parameters()` and
`parameter.is_external_param`, so the first forward of an engine at stage 3 records them, unless the module is compiled.
Later forwards have no hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from windlass.base.tensor_tree import iterate_tensors


class ReturnedParameterRecorder:
    """Recorder of the parameters that modules return, in one forward.

    Args:
        model: model whose modules are watched.
        record: called as `record(caller, module, parameter)` if `module`, which `caller` called, returns the parameter.
    """

    def __init__(self, model: nn.Module, record: Callable[[nn.Module, nn.Module, nn.Parameter], None]) -> None:
        self._record = record
        self._running: list[nn.Module] = []
        self._handles = [
            handle
            for module in model.modules()
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass
        if self._running:
            for tensor in iterate_tensors(output):
                if isinstance(tensor, nn.Parameter):
                    self._record(self._running[-1], module, tensor)
