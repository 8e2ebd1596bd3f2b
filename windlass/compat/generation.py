"""`deepspeed.zero.unwrap_model_for_generation`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from windlass.compat.engine import DeepSpeedEngine
from windlass.zero import GatheredParameters


@contextmanager
def unwrap_model_for_generation(model: DeepSpeedEngine) -> Iterator[nn.Module]:
    """The plain module with whole parameters, for `generate` and the like. Collective."""
    with GatheredParameters(model.module.parameters()):
        yield model.module
