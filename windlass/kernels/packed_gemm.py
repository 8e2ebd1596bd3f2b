"""Linear layers of inference: weights packed once in panels, products for few and for many rows.

[Note: batch-invariant products] `packed_linear` adds the products of an output sequentially, in the order of the input
features, in one accumulator. So a row of the result has the same bits for any other rows in the call, any position of
the row, and any number of threads. (The reference path does not guarantee this.)

[Note: rounded inputs] With `quantize_inputs`, inputs are rounded to the dtype that the processor multiplies fastest
with the weight. For integer weights each row is rounded to int8 with one scale, `max(abs) / 127`, for every 128
features, and multiplied in exact integers, up to four times as fast. Each input has an error of up to half its scale.
For bf16 weights float32 inputs are rounded to bf16 (an error of up to 2^-8 of each) and, where `vdpbf16ps` is fast,
multiplied in pairs, up to twice as fast.

[Note: panels] 16 outputs form a panel. One step of a panel is a cache line with 1 (float32), 2 (bf16) or 4 (int8, with
an offset of 128) input features of each output, side by side in 32 bits. All instruction sets read the same panels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.base.errors import ModelError, WeightFormatError
from windlass.kernels.coded_formats import CodedWeightFormat
from windlass.kernels.inference_path import InferencePath, get_inference_path, tensor_address
from windlass.kernels.low_bit_panels import LowBitFormat, LowBitPanels, has_native_codes
from windlass.kernels.mapped_bytes import MappedBytes
from windlass.kernels.packed_tensors import check_matrix
from windlass.kernels.panel_memory import take_panels
from windlass.kernels.reference.quantized_input import quantize_groups
from windlass.kernels.weight_format import (
    CastWeightFormat,
    JoinableFormat,
    WeightFormat,
    check_packed,
    get_weight_format,
)
from windlass.kernels.weight_format import PackedWeight as FormatTensors

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)
# Weight formats that `_pack` arranges in panels. Others are in `LowBitPanels`, or use `WeightFormat.linear`.
_PANEL_CODES = {"fp32": 0, "bf16": 1, "int8": 2}
_PANEL = 16  # outputs
_PART_BYTES = 4 << 20  # a file-mapped weight is packed in parts of this size, to keep only one part in memory


class PackedPanels:
    """Weight `[out_features, in_features]` of a linear layer, packed for `packed_linear`.

    Attributes:
        out_features, in_features: sizes of the layer.
        format: weight format of the values.
        quantize_inputs: inputs are rounded to int8 or bf16; see [Note: rounded inputs].

    Raises:
        WeightFormatError: inputs cannot be rounded for weights of the format.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        tensors: FormatTensors,
        sizes: tuple[int, int],
        path: InferencePath,
        quantize_inputs: bool,
        pages: MappedBytes | None = None,
    ) -> None:
        if quantize_inputs and narrow_input_dtype(weight_format) is None:
            raise WeightFormatError(
                f"inputs cannot be quantized with weights of format {weight_format.name!r}; use 'bf16', 'int8' or "
                "integers of fewer bits"
            )
        self.format, self.quantize_inputs = weight_format, quantize_inputs
        self.out_features, self.in_features = sizes
        coded = has_native_codes(weight_format)
        native = path.module is not None and (coded or weight_format.name in _PANEL_CODES)
        native = native and self.out_features * self.in_features > 0
        self._path = path if native else get_inference_path("reference")
        self._low_bit: LowBitPanels | None = None
        self._tensors: FormatTensors = {}
        if native and coded:
            assert isinstance(weight_format, LowBitFormat)
            self._low_bit = LowBitPanels(weight_format, tensors, self.out_features, self.in_features)
        else:
            self._tensors = self._pack(tensors, pages) if native else tensors

    @property
    def path(self) -> str:
        """Implementation that multiplies the weight: an instruction set, or "reference"."""
        return self._path.name

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, scales and padding included."""
        if self._low_bit is not None:
            return self._low_bit.nbytes
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def tensors(self) -> FormatTensors:
        """Packed tensors by name: panels and scales; on the reference path, the tensors of the format. Empty for
        low-bit codes.
        """
        return self._tensors

    def row_panels(self) -> torch.Tensor | None:
        """Return the panels of an fp32 or bf16 weight as int32 `[panels, steps, 16]`, the input of `panel_rows`; None
        for other formats and on the reference path."""
        if self._path.module is None or self.format.name not in ("fp32", "bf16"):
            return None
        return self._tensors["panels"].view(torch.int32).view(-(-self.out_features // _PANEL), -1, _PANEL)

    def _pack(self, tensors: FormatTensors, pages: MappedBytes | None) -> FormatTensors:
        """Return the tensors with the weight in panels; see [Note: panels].

        Args:
            pages: mapping of the weight; the pages of each part are dropped once it is packed.
        """
        module = self._path.module
        assert module is not None
        code, weight = _PANEL_CODES[self.format.name], tensors["weight"].contiguous()

        rows, columns = weight.shape
        row_bytes = columns * weight.itemsize
        part = rows if pages is None else max(_PART_BYTES // (_PANEL * row_bytes), 1) * _PANEL

        def fill(panels: torch.Tensor) -> None:
            source, threads = tensor_address("weight", weight), torch.get_num_threads()
            for first in range(0, rows, part):
                count = min(part, rows - first)
                target = panels.data_ptr() + (module.panel_bytes(code, first, columns) if first else 0)
                module.pack(code, source + first * row_bytes, count, columns, target, threads)
                if pages is not None:
                    pages.drop(first * row_bytes, (first + count) * row_bytes)

        panels = take_panels(module.panel_bytes(code, *weight.shape), fill)
        packed = {name: tensor.contiguous() for name, tensor in tensors.items() if name != "weight"}
        packed["panels"] = panels
        self._address = self._find_address(packed)
        return packed

    def _find_address(self, tensors: FormatTensors) -> tuple[int, ...]:
        """Return the arguments of the native `linear` that describe the weight."""
        scales = tensors.get("weight_scale")
        return (
            _PANEL_CODES[self.format.name],
            tensors["panels"].data_ptr(),
            self.out_features,
            self.in_features,
            0 if scales is None else scales.data_ptr(),
        )

    def native_call(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return the native function for tensors at fixed addresses, and its arguments.

        Args:
            x, out: contiguous `[..., in_features]` and `[..., out_features]` of one dtype.
            bias: float32 `[out_features]`, or None.
        """
        module = self._path.module
        assert module is not None
        if self._low_bit is not None:
            arguments = self._low_bit.arguments(self._path.number, x, out, bias, self.quantize_inputs)
            return self._low_bit.module.linear, arguments
        return module.linear, (
            self._path.number,
            *self._address,
            0 if bias is None else tensor_address("bias", bias),
            tensor_address("input", x),
            tensor_address("output", out),
            out.numel() // self.out_features,
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
            self.quantize_inputs,
        )

    def native_weight(self, bias: torch.Tensor | None) -> tuple[int, ...] | None:
        """Return format code, addresses and sizes of the weight, as `StepProgram.add_linear` takes them; None for
        low-bit codes and on the reference path."""
        if self._path.module is None or self._low_bit is not None:
            return None
        return (*self._address, 0 if bias is None else tensor_address("bias", bias))

    def foreign_product(self, bias: torch.Tensor | None, is_bf16: bool) -> tuple[int, int, Any] | None:
        """Return a product with low-bit codes for `StepProgram.add_foreign_product`: the addresses of the function
        and of the one that finds a thread's first part, and the weight, an object with an `address`. None for other
        formats."""
        if self._low_bit is None or self._path.module is None:
            return None
        weight = self._low_bit.foreign_weight(self._path.number, bias, is_bf16, self.quantize_inputs)
        return self._low_bit.module.foreign_product, self._low_bit.module.first_part, weight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute `packed_linear` without its checks."""
        if self._path.module is None:
            x = self._round_inputs(x) if self.quantize_inputs else x
            return self.format.linear(x, self._tensors, None if bias is None else bias.to(x.dtype))
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        if out.numel() == 0:
            return out
        wide_bias = None if bias is None else bias.to(torch.float32).contiguous()
        function, arguments = self.native_call(x, out, wide_bias)
        function(*arguments)
        return out

    def _round_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Round inputs as native code does."""
        if narrow_input_dtype(self.format) == torch.int8:
            return quantize_groups(x)
        return x.to(torch.bfloat16).to(x.dtype)

    def __repr__(self) -> str:
        kind, sizes = type(self).__name__, f"{self.out_features}, {self.in_features}"
        return f"{kind}({sizes}, format={self.format.name!r}, path={self.path!r})"


class BorrowedPanels(PackedPanels):
    """Packed weight whose tensors are in memory only during a product.

    Args:
        path: "reference" for tensors of the format itself; None: panels, for the active instruction set.
        lend: returns a context that yields the tensors of `PackedPanels.tensors`, at any address.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        out_features: int,
        in_features: int,
        path: str | None,
        lend: Callable[[], AbstractContextManager[FormatTensors]],
    ) -> None:
        self.format, self.quantize_inputs = weight_format, False
        self.out_features, self.in_features = out_features, in_features
        self._path, self._lend = get_inference_path(path), lend
        self._low_bit = None
        self._tensors: FormatTensors = {}

    def native_weight(self, bias: torch.Tensor | None) -> None:
        """Return None: the weight has no fixed address."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute `packed_linear` without its checks."""
        if self._path.module is not None:
            return super().linear(x, bias)  # calls `native_call`, whose function borrows the tensors
        with self._lend() as tensors:
            self._tensors = tensors
            try:
                return super().linear(x, bias)
            finally:
                self._tensors = {}

    def native_call(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a function, and the arguments with which it writes the product into `out`."""
        module = self._path.module
        assert module is not None
        self._address = (0, 0, self.out_features, self.in_features, 0)
        _, (number, _, _, _, _, _, *rest) = super().native_call(x, out, bias)

        def multiply(*arguments: Any) -> None:
            with self._lend() as tensors:
                module.linear(number, *self._find_address(tensors), *arguments)

        return multiply, tuple(rest)


def narrow_input_dtype(weight_format: WeightFormat) -> torch.dtype | None:
    """Return the dtype to which inputs can be rounded for weights of a format, or None; see [Note: rounded inputs]."""
    if weight_format.name == "bf16":
        return torch.bfloat16
    return torch.int8 if weight_format.name == "int8" or isinstance(weight_format, CodedWeightFormat) else None


def join_packed(weight_format: WeightFormat, parts: Sequence[FormatTensors]) -> FormatTensors:
    """Return the packed matrix of the rows of all parts, in the order of `parts`.

    Raises:
        WeightFormatError: there are several parts, and the format does not join them.
    """
    if len(parts) == 1:
        return parts[0]
    if not isinstance(weight_format, JoinableFormat):
        raise WeightFormatError(f"format {weight_format.name!r} has no join; multiply its matrices one by one")
    return weight_format.join(parts)


def pack_weight(
    weight: torch.Tensor,
    format: WeightFormat | str = "fp32",
    *,
    quantize_inputs: bool = False,
    path: str | None = None,
    pages: MappedBytes | None = None,
) -> PackedPanels:
    """Pack the weight of a linear layer. The result holds no reference to `weight`.

    Args:
        weight: floating-point matrix `[out_features, in_features]` on the CPU. Join the weights of layers with the same
            input (query, key and value; gate and up) along dimension 0, to compute them in one call.
        format: a weight format or its registered name: "fp32", "bf16", "int8", ...
        quantize_inputs: round inputs, of bf16 and integer weights only; see [Note: rounded inputs].
        path: one of `list_inference_paths()` in place of the active one.
        pages: mapping of `weight`, whose pages are dropped as far as they are packed; see [Note: dropped pages].

    Raises:
        WeightFormatError: the format does not exist, or the weight does not fit it.
        ConfigError: the path is not available.
    """
    chosen = get_weight_format(format) if isinstance(format, str) else format
    found = get_inference_path(path)
    casts = isinstance(chosen, CastWeightFormat) and chosen.name in _PANEL_CODES and chosen.dtype == weight.dtype
    if casts and found.module is not None:
        if pages is None:
            check_matrix(weight, chosen.name)
        else:
            for rows in weight.split(max(_PART_BYTES // weight[:1].nbytes, 1)):
                check_matrix(rows, chosen.name)
                pages.drop()
        tensors: FormatTensors = {"weight": weight.detach()}  # panels are a copy already
    else:
        if weight.dim() == 2:
            chosen.file_form(*weight.shape)  # refuses sizes that the format does not pack
        tensors = chosen.pack(weight)
        check_packed(chosen, tensors, *weight.shape)
    sizes = (weight.shape[0], weight.shape[1])
    return PackedPanels(chosen, tensors, sizes, found, quantize_inputs, pages if casts else None)


def panel_rows(panels: torch.Tensor, index: torch.Tensor, dtype: torch.dtype, features: int) -> torch.Tensor:
    """Return the rows of a packed weight that `index` selects, `[..., features]`.

    Args:
        panels: result of `PackedPanels.row_panels`.
        index: int64 `[...]`.
        dtype: dtype of the weight.
    """
    rows = panels[index // _PANEL, :, index % _PANEL].contiguous()  # a view for an index without dimensions
    return rows.view(dtype)[..., :features]


def pack_panels(
    tensors: FormatTensors,
    format: WeightFormat | str,
    sizes: tuple[int, int],
    *,
    quantize_inputs: bool = False,
    path: str | None = None,
) -> PackedPanels:
    """Pack a weight that a weight format has packed already, e.g. from the file of a quantized checkpoint.

    Args:
        tensors: packed tensors that `WeightFormat.pack` returned.
        format: the format of `tensors`, or its registered name.
        sizes: output and input features of the weight.
        quantize_inputs: round inputs, of bf16 and integer weights only; see [Note: rounded inputs].
        path: one of `list_inference_paths()` in place of the active one.

    Raises:
        WeightFormatError: the format does not exist, does not fit `quantize_inputs`, or is not that of the tensors.
        ConfigError: the path is not available.
    """
    chosen = get_weight_format(format) if isinstance(format, str) else format
    check_packed(chosen, tensors, *sizes)
    return PackedPanels(chosen, tensors, sizes, get_inference_path(path), quantize_inputs)


def packed_linear(x: torch.Tensor, packed: PackedPanels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` in the dtype of `x`, without gradients.

    Native code accumulates in float32 and rounds once. The rows of the result do not depend on each other; see [Note:
    batch-invariant products].

    Args:
        x: float32 or bfloat16 `[..., in_features]`.
        packed: weight packed by `pack_weight`.
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
