"""Forwards of modules that an engine compiles in place, and their restoration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class CompiledForwards:
    """Compiled forwards of modules, and the forwards that they replace."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []  # module, and the `forward` that a script set on it or None

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def compile(self, modules: Sequence[nn.Module], **options: Any) -> None:
        """Compile the forward of each module.

        Args:
            options: arguments of `torch.compile`, which raises for an unknown back end or option.
        """
        for module in modules:
            compiled = torch.compile(module.forward, **options)
            self._replaced.append((module, module.__dict__.get("forward")))
            module.forward = compiled

    def restore(self) -> None:
        """Give each module its former forward."""
        for module, forward in self._replaced:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward
        self._replaced.clear()
