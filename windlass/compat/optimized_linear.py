"""Package `deepspeed.linear`: linear layers with a frozen, packed base and low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.compat.strict_mode import is_strict
from windlass.kernels.grouped_formats import MinifloatWeightFormat
from windlass.kernels.packed_linear import PackedLinear
from windlass.zero import GatheredParameters


@dataclass
class LoRAConfig:
    """Adapters of a layer.

    Attributes:
        lora_r: rank of the adapters.
        lora_alpha: the adapters' output is multiplied by `lora_alpha / lora_r`.
        base_weight_sharding: has no effect: `zero_optimization.stage` 3 shards the base over all ranks.
        offload, offload_ratio: refused; `zero_optimization.offload_param` keeps shards in host memory.
        delay_lora_init: has no effect: adapters exist from the start.
        target_mods: has no effect: `Init` adapts every linear layer that is constructed in it.
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
    """Floating-point format of a packed base weight.

    Attributes:
        q_bits: number of bits of a weight: 4, 6, 8 or 12.
        mantissa_bits: number of these bits that are mantissa.
        group_size: number of successive weights that share a scale.
        q_dtype: has no effect: packed bytes are torch.uint8.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8

    def weight_format(self) -> MinifloatWeightFormat:
        """Return the weight format.

        Raises:
            WeightFormatError: `q_bits`, `mantissa_bits` and `group_size` do not form a supported float format.
        """
        return MinifloatWeightFormat(self.q_bits, self.mantissa_bits, self.group_size)


class QuantizedParameterError(ModelError, ValueError):
    """Error for invalid arguments of a `QuantizedParameter`."""


@dataclass(frozen=True)
class QuantizationMetadata:
    """Properties of a `QuantizedParameter` that its packed bytes do not contain.

    Attributes:
        scale: scales of the groups.
        sizes: shape of the original tensor.
        dtype: dtype of the original tensor.
    """

    scale: torch.Tensor
    sizes: torch.Size
    dtype: torch.dtype


class QuantizedParameter(nn.Parameter):
    """Frozen parameter that holds the packed bytes of a tensor; `dequantized()` returns the tensor's values.

    `QuantizedParameter(p.data, **p.__dict__)` is a copy.

    Raises:
        QuantizedParameterError: `requires_grad` is True, or `quantizer` does not come from another
            `QuantizedParameter`.
    """

    quantization_config: QuantizationConfig
    quantizer: QuantizationMetadata

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = False,
        quantization_config: QuantizationConfig | None = None,
        quantizer: QuantizationMetadata | None = None,
    ) -> QuantizedParameter:
        if requires_grad:
            raise QuantizedParameterError(
                "QuantizedParameter: requires_grad is True, but packed bytes are not trained; pass False"
            )
        config = quantization_config or QuantizationConfig()
        if quantizer is None:
            packed = config.weight_format().pack(data.reshape(1, -1) if data.dim() != 2 else data)
            quantizer = QuantizationMetadata(packed["weight_scale"], data.shape, data.dtype)
            data = packed["weight_packed"]
        elif not isinstance(quantizer, QuantizationMetadata):
            raise QuantizedParameterError(
                f"QuantizedParameter: quantizer is a {type(quantizer).__name__}; leave it out, or pass that of another "
                "QuantizedParameter"
            )
        made: QuantizedParameter = torch.Tensor._make_subclass(cls, data, False)
        made.quantization_config, made.quantizer = config, quantizer
        return made

    def dequantized(self) -> torch.Tensor:
        """Return the values, with the shape and dtype of the original tensor."""
        known = self.quantizer
        sizes = known.sizes if len(known.sizes) == 2 else (1, known.sizes.numel())
        packed = {
            "weight_packed": self.detach().as_subclass(torch.Tensor),
            "weight_scale": known.scale.to(self.device),
            "weight_shape": torch.tensor(sizes),
        }
        return self.quantization_config.weight_format().unpack(packed).view(known.sizes).to(known.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedParameter:
        known = replace(self.quantizer, scale=self.quantizer.scale.clone())
        made = type(self)(self.data.clone(), False, replace(self.quantization_config), known)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.data, False, self.quantization_config, self.quantizer)


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
        linear_cls: Callable[..., nn.Linear] = nn.Linear,
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

    `load_state_dict` loads the `weight` and `bias` of a plain linear layer into the base.

    Args:
        base: layer to freeze and adapt; None: a new layer.

    Raises:
        ConfigError: `lora_config` sets `offload` or `offload_ratio`.
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
        base: nn.Module | None = None,
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
        self.linear_cls, self.dtype, self.disabled = linear_cls, dtype, False
        if base is None and quantization_config is not None:
            base = QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype, device, linear_cls)
        elif base is None:
            base = linear_cls(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
        self.base = base.requires_grad_(False)
        self.lora_weight_1 = linear_cls(input_dim, lora.lora_r, bias=False, dtype=dtype, device=device)
        self.lora_weight_2 = linear_cls(lora.lora_r, output_dim, bias=False, dtype=dtype, device=device)
        nn.init.zeros_(self.lora_weight_2.weight)
        self.register_load_state_dict_pre_hook(_rename_plain_weights)

    @property
    def weight(self) -> torch.Tensor:
        """The base weight; unpacked, if it is packed."""
        found = self.base.weight
        assert isinstance(found, torch.Tensor)
        return found

    def init_lora(self) -> None:
        """Freeze the base and train the adapters, unless the layer is disabled."""
        self.base.requires_grad_(False)
        if not self.disabled:
            self.lora_weight_1.requires_grad_(True)
            self.lora_weight_2.requires_grad_(True)

    def disable(self) -> None:
        """Remove the adapters, so that the layer is its frozen base alone; a packed base is unpacked."""
        if self.disabled:
            return
        self.disabled = True
        del self.lora_weight_1, self.lora_weight_2
        if isinstance(self.base, QuantizedLinear):
            packed = self.base
            device = next(packed.parameters()).device
            self.base = self.linear_cls(self.input_dim, self.output_dim, self.bias, device=device, dtype=self.dtype)
            self.base.requires_grad_(False)
            self.base.weight.copy_(packed.weight)
            if self.bias:
                self.base.bias.copy_(packed.get_parameter("bias"))

    def forward(self, input_tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(input_tensor)
        if self.disabled:
            return result
        adapted: torch.Tensor = self.lora_weight_2(self.lora_weight_1(input_tensor))
        return result + self.lora_scaling_factor * adapted


def _rename_plain_weights(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    if f"{prefix}weight" not in state_dict:
        return
    for name in ("weight", "bias"):
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}base.{name}"] = state_dict.pop(f"{prefix}{name}")
    for name, parameter in module.named_parameters():  # adapters, which a plain state lacks, keep their values
        if name.startswith("lora_weight"):
            state_dict.setdefault(prefix + name, parameter.detach())


class OptimizedLinear(nn.Module):
    """Constructor of a linear layer: plain, packed (`quantization_config`), or frozen with adapters (`lora_config`).

    Raises:
        ConfigError: a configuration is not a dataclass instance, or see `LoRAOptimizedLinear`.
    """

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
    """Context in which `torch.nn.Linear(...)` constructs an `OptimizedLinear`, in torch's default dtype (strict mode:
    bf16).

    transformers' `from_pretrained` and `from_config` load a model with plain layers and replace them by such layers,
    which keep the loaded values. With adapters, all other parameters of the model are frozen.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self._lora = None if lora_config is None else replace(lora_config)
        self._quantization = quant_config
        self._undo = ExitStack()

    def __enter__(self) -> OptimizedLinearInit:
        plain, lora, quantization = nn.Linear, self._lora, self._quantization
        standard = torch.bfloat16 if is_strict() else None  # DeepSpeed's layers are bf16 whatever torch's default is

        class OptimizedLinearWrapper(plain):  # type: ignore[misc, valid-type]
            """Stand-in for `nn.Linear` inside the context: its constructor returns an `OptimizedLinear`."""

            def __new__(  # type: ignore[misc]
                cls, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
            ) -> nn.Module:
                wanted = dtype or standard or torch.get_default_dtype()
                return OptimizedLinear(in_features, out_features, bias, lora, quantization, device, wanted, plain)

        self._undo.enter_context(_temporary_attribute(nn, "Linear", OptimizedLinearWrapper))
        if find_spec("transformers") is not None:
            from transformers import PreTrainedModel

            for name in ("from_pretrained", "_from_config"):
                changed = classmethod(partial(self._load_and_adapt, vars(PreTrainedModel)[name].__func__, plain))
                self._undo.enter_context(_temporary_attribute(PreTrainedModel, name, changed))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _load_and_adapt(
        self, load: Callable[..., Any], plain: type[nn.Linear], cls: type[nn.Module], *args: Any, **kwargs: Any
    ) -> Any:
        # Load with plain layers, by whose names the loader finds parameters.
        with _temporary_attribute(nn, "Linear", plain):
            found = load(cls, *args, **kwargs)
        model: nn.Module = found[0] if isinstance(found, tuple) else found
        adapt_linear_layers(model, self._lora, self._quantization, plain)
        if self._lora is not None:
            init_lora(model)
        return found


def adapt_linear_layers(
    model: nn.Module,
    lora_config: LoRAConfig | None,
    quantization_config: QuantizationConfig | None,
    linear_cls: type[nn.Linear] = nn.Linear,
) -> None:
    """Replace the layers of class `linear_cls` of a model by optimized layers with the same values, in place.

    Collective if weights are quantized and the model is sharded.
    """
    made: dict[nn.Module, nn.Module] = {}
    for name, linear in list(model.named_modules(remove_duplicate=False)):
        if type(linear) is not linear_cls:
            continue
        if linear not in made:
            made[linear] = _optimized(linear, lora_config, quantization_config).train(linear.training)
        model.set_submodule(name, made[linear])


def _optimized(linear: nn.Linear, lora: LoRAConfig | None, quantization: QuantizationConfig | None) -> nn.Module:
    sizes, weight = (linear.in_features, linear.out_features, linear.bias is not None), linear.weight
    base: nn.Module = linear
    if quantization is not None:
        with GatheredParameters(list(linear.parameters())):
            base = QuantizedLinear(*sizes, quantization, weight.dtype, weight.device, lambda *_, **__: linear)
    if lora is None:
        return base
    return LoRAOptimizedLinear(*sizes, lora, None, weight.device, weight.dtype, type(linear), base)


@contextmanager
def _temporary_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def init_lora(model: nn.Module) -> None:
    """Freeze all parameters of a model except the adapters."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, LoRAOptimizedLinear):
            module.init_lora()
