"""Temporary evaluation mode of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside the `with` block, and restore the mode of each module afterwards.

    Modules may have different modes, e.g. a frozen part. A module added inside the block gets the mode of the model,
    unless all modules were in eval mode before: then no mode is set.
    """
    if not any(module.training for module in model.modules()):
        yield  # no mode is set: that costs more than reading it, and an inference engine runs this in every step
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])  # some classes do more than set the mode, e.g. unmerge an adapter from a weight
        for module, mode in modes.items():
            module.training = mode
