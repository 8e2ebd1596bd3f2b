"""Package `deepspeed.linear`: linear layers with a frozen, packed base and low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.kernels.grouped_formats import MinifloatWeightFormat
from windlass.kernels.packed_linear import PackedLinear


@dataclass
class LoRAConfig:
    """Adapters of a layer.

    Attributes:
        lora_r: their rank.
        lora_alpha: the adapters' output is multiplied by `lora_alpha / lora_r`.
        base_weight_sharding: has no effect: `zero_optimization.stage` 3 shards the base over all ranks.
        offload, offload_ratio: refused; `zero_optimization.offload_param` keeps shards in host memory.
        delay_lora_init: has no effect: adapters exist from the start.
        target_mods: has no effect: `Init` adapts every linear layer that is made in it.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass
class QuantizationConfig:
    """Floats of a base weight.

    Attributes:
        q_bits: 4, 6, 8 or 12.
        mantissa_bits: of them.
        group_size: successive weights with one scale.
        q_dtype: torch.uint8.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8

    def weight_format(self) -> MinifloatWeightFormat:
        """Return the weight format.

        Raises:
            WeightFormatError: there are no floats of these sizes.
        """
        return MinifloatWeightFormat(self.q_bits, self.mantissa_bits, self.group_size)


class QuantizedParameter(nn.Parameter):
    """Frozen parameter of the packed bytes of a tensor; `dequantized()` returns its values."""

    quantization_config: QuantizationConfig
    _scale: torch.Tensor
    _sizes: torch.Size
    _wide_dtype: torch.dtype

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = False,
        quantization_config: QuantizationConfig | None = None,
        quantizer: Any = None,
    ) -> QuantizedParameter:
        if requires_grad:
            raise ModelError("QuantizedParameter: requires_grad is True, but packed bytes are not trained; pass False")
        config = quantization_config or QuantizationConfig()
        packed = config.weight_format().pack(data.reshape(1, -1) if data.dim() != 2 else data)
        made: QuantizedParameter = torch.Tensor._make_subclass(cls, packed["weight_packed"], False)
        made.quantization_config, made._scale = config, packed["weight_scale"]
        made._sizes, made._wide_dtype = data.shape, data.dtype
        return made

    def dequantized(self) -> torch.Tensor:
        """Return the values, in shape and dtype of the tensor before."""
        sizes = self._sizes if len(self._sizes) == 2 else (1, self._sizes.numel())
        packed = {
            "weight_packed": self.detach().as_subclass(torch.Tensor),
            "weight_scale": self._scale,
            "weight_shape": torch.tensor(sizes),
        }
        return self.quantization_config.weight_format().unpack(packed).view(self._sizes).to(self._wide_dtype)


class QuantizedLinear(PackedLinear):
    """Linear layer whose frozen weight is packed in floats of few bits."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
        linear_cls: type[nn.Linear] = nn.Linear,
    ) -> None:
        form = (quantization_config or QuantizationConfig()).weight_format()
        wide = linear_cls(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
        super().__init__(input_dim, output_dim, False, weight_format=form, device=wide.weight.device)
        if not wide.weight.is_meta:
            self.pack(wide.weight)
        if wide.bias is not None:
            self.register_parameter("bias", wide.bias)


class LoRAOptimizedLinear(nn.Module):
    """Frozen linear layer with low-rank adapters: `base(x) + lora_alpha / lora_r * lora_weight_2(lora_weight_1(x))`.

    A state with a plain `weight` is loaded into the base.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        lora = lora_config or LoRAConfig()
        if lora.offload or lora.offload_ratio:
            raise ConfigError(
                f"LoRAConfig has offload {lora.offload} and offload_ratio {lora.offload_ratio}; set them to False and "
                "0, and zero_optimization.offload_param.device to cpu"
            )
        self.input_dim, self.output_dim, self.bias, self.lora_config = input_dim, output_dim, bias, lora
        self.lora_scaling_factor = lora.lora_alpha / lora.lora_r
        base: nn.Module
        if quantization_config is not None:
            base = QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype, device, linear_cls)
        else:
            base = linear_cls(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
        self.base = base.requires_grad_(False)
        self.lora_weight_1 = linear_cls(input_dim, lora.lora_r, bias=False, dtype=dtype, device=device)
        self.lora_weight_2 = linear_cls(lora.lora_r, output_dim, bias=False, dtype=dtype, device=device)
        nn.init.zeros_(self.lora_weight_2.weight)
        self.register_load_state_dict_pre_hook(_rename_plain_weights)

    @property
    def weight(self) -> torch.Tensor:
        """The base weight; unpacked, if it is packed."""
        found: torch.Tensor = self.base.weight
        return found

    def forward(self, input_tensor: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.lora_weight_2(self.lora_weight_1(input_tensor))
        result: torch.Tensor = self.base(input_tensor) + self.lora_scaling_factor * adapted
        return result


def _rename_plain_weights(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    if f"{prefix}weight" not in state_dict:
        return
    for name in ("weight", "bias"):
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}base.{name}"] = state_dict.pop(f"{prefix}{name}")
    for name in ("lora_weight_1.weight", "lora_weight_2.weight"):  # adapters, which a plain state lacks, keep values
        state_dict.setdefault(prefix + name, module.get_parameter(name).detach())


class OptimizedLinear(nn.Module):
    """Constructor of a linear layer: plain, packed (`quantization_config`), or frozen with adapters (`lora_config`)."""

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Linear] = nn.Linear,
    ) -> nn.Module:
        for name, given in (("lora_config", lora_config), ("quantization_config", quantization_config)):
            if given is not None and (not is_dataclass(given) or isinstance(given, type)):
                kind = "LoRAConfig" if name == "lora_config" else "QuantizationConfig"
                raise ConfigError(f"OptimizedLinear: {name} is {given!r}; pass a {kind} of deepspeed.linear")
        if lora_config is not None:
            return LoRAOptimizedLinear(
                input_dim, output_dim, bias, lora_config, quantization_config, device, dtype, linear_cls
            )
        if quantization_config is not None:
            return QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype, device, linear_cls)
        return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)


class OptimizedLinearInit:
    """Context in which `torch.nn.Linear(...)` makes an `OptimizedLinear`, in torch's default dtype."""

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self._lora = None if lora_config is None else replace(lora_config)
        self._quantization, self._before = quant_config, nn.Linear

    def __enter__(self) -> OptimizedLinearInit:
        plain, lora, quantization = nn.Linear, self._lora, self._quantization
        self._before = plain

        class OptimizedLinearWrapper(plain):  # type: ignore[misc, valid-type]
            """`nn.Linear` inside the context."""

            def __new__(  # type: ignore[misc]
                cls, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
            ) -> nn.Module:
                wanted = dtype or torch.get_default_dtype()
                return OptimizedLinear(in_features, out_features, bias, lora, quantization, device, wanted, plain)

        nn.Linear = OptimizedLinearWrapper  # type: ignore[misc, assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nn.Linear = self._before  # type: ignore[misc]


def init_lora(model: nn.Module) -> None:
    """Freeze all parameters of a model but the adapters."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, LoRAOptimizedLinear):
            module.lora_weight_1.requires_grad_(True)
            module.lora_weight_2.requires_grad_(True)
