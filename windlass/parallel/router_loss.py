"""Hook into the function that computes the load-balancing loss of a transformers model.

Such a model passes the logits of all its routers, `[tokens, experts]` each, to one function of the Python module that
defines the model. A `RouterLoss` replaces this function, and first passes the logits to optional callbacks: a
pipeline stage sends its logits to the next stage, and sequence parallelism gathers the logits of all parts of a
sequence. Without callbacks the function runs unchanged.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

FUNCTION_NAME = "load_balancing_loss_func"
RouterLogits = tuple[torch.Tensor, ...]

CollectLogits = Callable[[RouterLogits], RouterLogits | None]
"""Function from the logits of this forward to all logits that the loss is computed from, or to None if another stage
computes the loss."""

GatherLogits = Callable[[RouterLogits, torch.Tensor | None], tuple[RouterLogits, torch.Tensor | None]]
"""Function from the logits and the attention mask of a part of the tokens to those of all tokens."""


class RouterLoss:
    """Replacement for `load_balancing_loss_func`.

    Args:
        function: the original function. Its first parameter is gate_logits, and it may have attention_mask.

    Attributes:
        collect_logits: callback of pipeline parallelism.
        gather_logits: callback of sequence parallelism.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.collect_logits: CollectLogits | None = None
        self.gather_logits: GatherLogits | None = None
        self._signature = inspect.signature(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss, or return 0 if another stage computes it."""
        bound = self._signature.bind(*args, **kwargs)
        first = next(iter(self._signature.parameters))
        logits = bound.arguments[first]
        if self.collect_logits is not None and (logits is None or isinstance(logits, tuple)):
            logits = self.collect_logits(logits or ())
            if logits is None:
                return torch.zeros(())
        if self.gather_logits is not None and isinstance(logits, tuple) and logits:
            logits, mask = self.gather_logits(logits, bound.arguments.get("attention_mask"))
            if mask is not None:
                bound.arguments["attention_mask"] = mask
        bound.arguments[first] = logits
        return self.function(*bound.args, **bound.kwargs)


def install_router_loss(model: Any) -> RouterLoss | None:
    """Install a `RouterLoss` in the module that defines the class of `model`, or one of its base classes.

    Return the `RouterLoss`, which may have been installed before, or None if no module has such a function.
    """
    for kind in type(model).__mro__:
        module = sys.modules[kind.__module__]
        function = getattr(module, FUNCTION_NAME, None)
        if isinstance(function, RouterLoss):
            return function
        if function is not None:
            found = RouterLoss(function)
            setattr(module, FUNCTION_NAME, found)
            return found
    return None
