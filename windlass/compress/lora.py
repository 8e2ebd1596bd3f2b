"""Low-rank adapters of peft around packed, frozen layers (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.kernels.packed_linear import PackedLinear


def add_adapters(model: nn.Module, config: Any) -> nn.Module:
    """Return `peft.get_peft_model(model, config)` of a model with packed layers (Dettmers et al. 2023,
    https://arxiv.org/abs/2305.14314). Call it before `initialize`. The packed layers may be sharded already.

    Args:
        config: `peft.LoraConfig`, which is changed. `target_modules="all-linear"` selects all linear layers, packed or
            not, except the head.

    Raises:
        ConfigError: peft is missing, or the configuration needs the values of the packed weights.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("adapters need peft: pip install peft") from error
    needs_values = config.use_dora or config.init_lora_weights not in (True, False, "gaussian")
    if needs_values:
        raise ConfigError(
            f"use_dora is {config.use_dora} and init_lora_weights {config.init_lora_weights!r}, which read the base "
            "weights, and these are packed; set use_dora to False and init_lora_weights to True or 'gaussian'"
        )
    if config.target_modules == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        config.target_modules = {
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | PackedLinear) and module is not head
        }
    config._register_custom_module({PackedLinear: packed_lora_class()})
    with _announced_device(model):
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


@contextmanager
def _announced_device(model: nn.Module) -> Iterator[None]:
    """Give packed layers an empty `qweight`, so that peft reads its device: reading the device of `weight` would unpack
    it."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        layer.__dict__["qweight"] = torch.empty(0, device=next(layer.parameters()).device)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("qweight", None)


@cache
def packed_lora_class() -> type[nn.Module]:
    """Return the class of peft's layers around a `PackedLinear`. It is defined on the first call, because peft is
    optional."""
    from peft.tuners.lora.layer import LoraLayer

    class PackedLora(nn.Module, LoraLayer):
        """Packed layer with adapters: `base(x) + scaling * B(A(dropout(x)))`."""

        def __init__(
            self,
            base_layer: nn.Module,
            adapter_name: str,
            config: Any,
            r: int = 0,
            lora_alpha: int = 1,
            **options: Any,
        ) -> None:
            super().__init__()
            LoraLayer.__init__(self, base_layer, **options)
            self._active_adapter = adapter_name
            self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = self.base_layer(x, *args, **kwargs)
            if self.disable_adapters:
                return result
            for name in self.active_adapters:
                if name in self.lora_A:
                    down, up = self.lora_A[name], self.lora_B[name]
                    inner = self.lora_dropout[name](
                        x if torch.is_autocast_enabled(x.device.type) else x.to(_dtype(down))
                    )
                    result = result + (up(down(inner)) * self.scaling[name]).to(result.dtype)
            return result

        def merge(self, *args: Any, **kwargs: Any) -> None:
            raise ModelError(
                "adapters are not merged into packed weights, whose rounding would take most of them away; merge them "
                "into the unquantized model and compress it again"
            )

        def unmerge(self) -> None:
            raise ModelError("adapters of packed layers are never merged, so that none can be unmerged")

        def _get_in_out_features(self, module: nn.Module) -> tuple[Any, Any]:
            return module.in_features, module.out_features

        def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[None, None]:
            return None, None  # adapters keep their device and dtype; reading the base's weight would unpack it

    return PackedLora


def _dtype(module: nn.Module) -> torch.dtype:
    weight: Any = module.weight
    found: torch.dtype = weight.dtype
    return found
