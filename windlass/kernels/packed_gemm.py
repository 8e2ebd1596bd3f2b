"""Linear layers of inference: weights packed once in panels, products for few and for many rows.

[Note: batch-invariant products] `packed_linear` adds the products of an output in the order of the input features, one
after the other, in one accumulator. So a row of the result has the same bits whatever other rows are in the call,
wherever the row lies, and however many threads share the outputs.
"""

from __future__ import annotations

import torch

from windlass.base.errors import ModelError
from windlass.kernels.weight_format import PackedWeight as FormatTensors
from windlass.kernels.weight_format import WeightFormat, get_weight_format

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)


class PackedPanels:
    """Weight `[out_features, in_features]` of a linear layer, packed for `packed_linear`.

    Attributes:
        out_features, in_features: of the layer.
        format: weight format of the values.
        nbytes: bytes of the packed weight, scales and padding included.
    """

    def __init__(self, weight_format: WeightFormat, tensors: FormatTensors, shape: tuple[int, int]) -> None:
        self.format = weight_format
        self.out_features, self.in_features = shape
        self._tensors = tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.format.linear(x, self._tensors, None if bias is None else bias.to(x.dtype))

    def __repr__(self) -> str:
        return f"PackedPanels({self.out_features}, {self.in_features}, format={self.format.name!r})"


def pack_weight(weight: torch.Tensor, format: WeightFormat | str = "fp32") -> PackedPanels:
    """Pack the weight of a linear layer. The result holds no reference to `weight`.

    Args:
        weight: floating-point matrix `[out_features, in_features]` on the CPU. Join the weights of layers with the same
            input (query, key and value; gate and up) along dimension 0, to compute them in one call.
        format: a weight format or its registered name: "fp32", "bf16", "int8", ...

    Raises:
        WeightFormatError: the format does not exist, or the weight does not fit it.
    """
    chosen = get_weight_format(format) if isinstance(format, str) else format
    return PackedPanels(chosen, chosen.pack(weight), (weight.shape[0], weight.shape[1]))


def pack_panels(tensors: FormatTensors, format: WeightFormat | str) -> PackedPanels:
    """Pack a weight that a weight format has packed already, e.g. from the file of a quantized checkpoint.

    Args:
        tensors: as `WeightFormat.pack` returns them.
        format: the format of `tensors`, or its registered name.
    """
    chosen = get_weight_format(format) if isinstance(format, str) else format
    shape = chosen.unpack(tensors).shape
    return PackedPanels(chosen, dict(tensors), (shape[0], shape[1]))


def packed_linear(x: torch.Tensor, packed: PackedPanels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` in the dtype of `x`, without gradients.

    Native code accumulates in float32 and rounds once. The rows of the result do not depend on each other; see [Note:
    batch-invariant products].

    Args:
        x: float32 or bfloat16 `[..., in_features]`.
        packed: from `pack_weight`.
        bias: `[out_features]`, or None.

    Returns:
        `[..., out_features]`.

    Raises:
        ModelError: shapes or dtypes do not match, or a gradient of `x` is needed.
    """
    if x.dtype not in ACTIVATION_DTYPES:
        raise ModelError(f"the input of a packed linear layer is {x.dtype}; convert it to torch.float32 or bfloat16")
    if x.dim() == 0 or x.shape[-1] != packed.in_features:
        raise ModelError(
            f"an input of shape {tuple(x.shape)} does not fit {packed}; its last dimension must be {packed.in_features}"
        )
    if bias is not None and tuple(bias.shape) != (packed.out_features,):
        raise ModelError(f"a bias of shape {tuple(bias.shape)} does not fit {packed}; give ({packed.out_features},)")
    if x.requires_grad and torch.is_grad_enabled():
        raise ModelError("packed_linear computes no gradients; call it under torch.no_grad() or use PackedLinear")
    return packed.linear(x, bias)
