"""Function `deepspeed.zero.unwrap_model_for_generation`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from windlass.compat.deepspeed_engine import DeepSpeedEngine
from windlass.compat.parameter_offload import ParameterOffload
from windlass.zero import GatheredParameters


@contextmanager
def unwrap_model_for_generation(model: DeepSpeedEngine) -> Iterator[nn.Module]:
    """Yield the plain module with all parameters gathered, for `generate` and similar calls. Collective."""
    offload = getattr(model.optimizer, "parameter_offload", model.optimizer)
    with GatheredParameters(model.module.parameters()):
        if not isinstance(offload, ParameterOffload):  # below stage 3
            yield model.module
            return
        offload._remove_module_hooks()
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        try:
            yield model.module
        finally:
            offload.setup_zero_stage3_hooks()
