"""Function of `deepspeed.inference.quantization`, which quantizes and packs weights before an engine is built."""

from __future__ import annotations

from typing import Any

from torch import nn

from windlass.compress.weight_quantization import quantize_weights
from windlass.config import load_config
from windlass.zero import GatheredParameters


def init_group_wise_weight_quantization(model: nn.Module, ds_config: Any) -> nn.Module:
    """Quantize and pack, in place, the weights that the section `weight_quantization` selects. Return the model.

    Collective for a sharded model.

    Raises:
        ConfigError: the configuration is invalid, a key matches no module, or a format does not fit a weight.
    """
    quantize_weights(model, load_config(ds_config).weight_quantization, gather=GatheredParameters)
    return model
