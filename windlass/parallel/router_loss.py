"""The seam at which the loss that balances the routers of a model of transformers is computed.

Such a model puts the logits of all its routers, `[tokens, experts]` of each, through one function of its module. It is
replaced, once a module, by an object that asks whoever cut the model what to do with the logits first: a stage of a
pipeline sends its own on (`pipeline/routers`), a part of a sequence is put together with the others
(`sequence/routers`). Where nobody says anything it is the function.
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
"""Given the logits that this forward heard, those that the loss is of; None: another stage computes it."""

GatherLogits = Callable[[RouterLogits, torch.Tensor | None], tuple[RouterLogits, torch.Tensor | None]]
"""Given the logits and the attention mask of a part of the tokens, those of all."""


class RouterLoss:
    """Stands for `load_balancing_loss_func`.

    Args:
        function: of gate_logits first, and attention_mask among the others.

    Attributes:
        collect: set by who cuts models into stages.
        join: set by who cuts sequences.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.collect_logits: CollectLogits | None = None
        self.gather_logits: GatherLogits | None = None
        self._signature = inspect.signature(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function; 0 where another stage computes it."""
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
    """What stands for the function in the module that defines `model`, or a class that it is made from; None where
    there is none."""
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
