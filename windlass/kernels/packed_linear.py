"""Modules whose matrix is packed in a weight format and frozen: a linear layer, and a table of embeddings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from windlass.base.errors import WeightFormatError
from windlass.kernels.mapped_bytes import MappedBytes
from windlass.kernels.panel_cache import PanelCache
from windlass.kernels.weight_format import (
    PackedTensorForm,
    PackedWeight,
    WeightFormat,
    get_weight_format,
    list_weight_formats,
    unpack_rows,
)

# parameters of weight formats that are made from a configuration, and thus not in the list of formats
_MADE_FORMATS = re.compile(r"(int\d(_g\d+)?(_zp)?_ordered|range\d+_g\d+(_outputs)?|float\d+_e\d+m\d+_g\d+)_weight")


class PackedMatrix(nn.Module):
    """Packed, frozen matrix `[rows, columns]`.

    [Note: packed parameters] Each packed tensor is a frozen uint8 parameter of its bytes, `<format>_<tensor>`, whose
    last dimension is multiplied by the bytes of an element: `int8_weight` `[out, in]` and `int8_weight_scale` `[out,
    4]`. Casts of floating-point parameters (`module.bfloat16()`, an engine with bf16 or fp16) leave integers alone, so
    that neither weights nor scales are ever rounded. ZeRO shards them like any parameters, independent of the format;
    all packed tensors of a block share one flat buffer of bytes. The name contains the format, so that a state
    dict of another format does not fit. ZeRO's thresholds and parameter counts count the bytes of these parameters as
    elements. The memory is undefined until `pack`, `set_packed` or `load_state_dict`, which packs a plain `weight`.

    Args:
        weight_format: a weight format, or its registered name.

    Raises:
        WeightFormatError: the format does not exist.
    """

    def __init__(
        self, rows: int, columns: int, weight_format: WeightFormat | str, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.format = get_weight_format(weight_format) if isinstance(weight_format, str) else weight_format
        self._sizes, self._is_part = (rows, columns), False
        self._form = self.format.file_form(rows, columns)
        self._panels = PanelCache()
        for name, form in self._form.items():
            *outer, last = form.shape or (1,)
            shape = (*outer, last * form.dtype.itemsize)
            memory = torch.empty(shape, dtype=torch.uint8, device=device)
            self.register_parameter(self.parameter_name(name), nn.Parameter(memory, requires_grad=False))

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._sizes

    def become_part(self, rows: int, columns: int) -> None:
        """Record that the parameters now hold only some rows and columns. `weight_shape` still has the sizes of the
        full matrix, on every rank.
        """
        self._sizes, self._is_part = (rows, columns), True
        self._form = self.format.file_form(rows, columns)

    def pack(self, weight: torch.Tensor) -> None:
        """Pack `weight` `[rows, columns]` into the parameters.

        Raises:
            WeightFormatError: the weight has another shape, or values outside of the format's range.
        """
        if tuple(weight.shape) != self._sizes:
            raise WeightFormatError(
                f"a weight of shape {tuple(weight.shape)} does not fit a {type(self).__name__} of "
                f"{self._sizes[0]} rows and {self._sizes[1]} columns; pass one of shape {self._sizes}"
            )
        self.set_packed(self.format.pack(weight))

    def set_packed(
        self, packed: Mapping[str, torch.Tensor], mapped: Mapping[str, tuple[torch.Tensor, MappedBytes]] | None = None
    ) -> None:
        """Copy packed tensors, with the names, dtypes and shapes of the format's `file_form`, into the layer.

        Args:
            mapped: for tensors that are used in a mapped file instead of copied: their bytes, and the file's memory
                mapping; see [Note: dropped pages].

        Raises:
            WeightFormatError: names, dtypes or shapes are not those of the format.
        """
        expected = {name: (form.dtype, form.shape) for name, form in self._form.items()}
        given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.items()}
        if given != expected:
            raise WeightFormatError(
                f"packed tensors {given} do not fit a layer of format {self.format.name!r}, which has {expected}; pass "
                "the tensors that the format packed"
            )
        with torch.no_grad():
            for name, tensor in packed.items():
                stored = self.get_parameter(self.parameter_name(name))
                if mapped is None or name not in mapped:
                    stored.copy_(tensor.reshape(-1).contiguous().view(torch.uint8).view(stored.shape))
                    continue
                content, pages = mapped[name]
                parameter = nn.Parameter(content.view(stored.shape), requires_grad=False)
                self.register_parameter(self.parameter_name(name), parameter)
                self._panels.pages[content.data_ptr()] = pages

    def packed(self) -> PackedWeight:
        """Return the packed tensors by the names of the format's `file_form`: views of the parameters' bytes, or copies
        of small tensors that are not aligned in a shared buffer."""
        found = {name: self._typed(name, form) for name, form in self._form.items()}
        if self._is_part and "weight_shape" in found:
            found["weight_shape"] = torch.tensor(self._sizes, device=found["weight_shape"].device)
        return found

    def share(self, other: PackedMatrix) -> None:
        """Use the packed tensors of another module of the same sizes and format."""
        for name in self._form:
            stored = self.parameter_name(name)
            self.register_parameter(stored, other.get_parameter(stored))

    def free_panels(self) -> None:
        """Free the panels: the copy of the weight in the layout of the CPU kernels. Later products make new panels."""
        self._panels.clear()

    def unpack(self) -> torch.Tensor:
        """Return the weight `[rows, columns]` in the format's own precision."""
        return self.format.unpack(self.packed())

    @property
    def weight(self) -> torch.Tensor:
        """Unpacked weight, computed at every access; changes to it are lost."""
        return self.unpack()

    def parameter_name(self, name: str) -> str:
        """Return the name of the parameter with the bytes of a packed tensor."""
        return f"{self.format.name}_{name}"

    def _stored(self, name: str) -> torch.Tensor:
        parameter = self._parameters[self.parameter_name(name)]
        assert parameter is not None
        return parameter.detach()

    def _typed(self, name: str, form: PackedTensorForm) -> torch.Tensor:
        """Return the bytes of a packed tensor as the format's dtype."""
        stored = self._stored(name)
        if stored.storage_offset() % form.dtype.itemsize:  # ZeRO aligns only parameters of at least 1024 elements
            stored = stored.clone()
        typed = stored.view(form.dtype)
        return typed if form.shape else typed.view(())  # the bytes of a 0-d tensor are stored as a vector

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Pack a plain `weight`. Raise if a tensor loaded into packed bytes is not uint8, since torch would convert its
        values."""
        stored = {name: prefix + self.parameter_name(name) for name in self._form}
        plain = prefix + "weight"
        if plain in state_dict and not any(key in state_dict for key in stored.values()):
            weight = state_dict.pop(plain)
            if tuple(weight.shape) != self._sizes:
                raise WeightFormatError(f"{plain!r} has shape {tuple(weight.shape)}, and the layer {self._sizes}")
            for name, tensor in self.format.pack(weight).items():
                target = self.get_parameter(self.parameter_name(name))
                state_dict[stored[name]] = tensor.reshape(-1).contiguous().view(torch.uint8).view(target.shape)
        for key in stored.values():
            value = state_dict.get(key)
            if value is not None and value.dtype != torch.uint8:
                raise WeightFormatError(
                    f"{key!r} is {value.dtype}, not the bytes (torch.uint8) of a weight packed as "
                    f"{self.format.name!r}; load the plain weight by the name {plain!r}"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


class PackedLinear(PackedMatrix):
    """Drop-in replacement of `nn.Linear` with a packed, frozen weight; see [Note: packed parameters].

    Native kernels multiply float32 and bfloat16 inputs on the CPU without unpacking the weight, for most formats: see
    [Note: kept panels]. On CUDA devices a Triton kernel multiplies (`device_matmul`). Other products, and the backward,
    unpack a block of rows at a time.

    The gradient flows to the input and to `bias`, which is an ordinary parameter. Under autocast the input is cast as
    `nn.Linear` casts it.

    Args:
        in_features, out_features, bias, device: as for `nn.Linear`.
        weight_format: a weight format, or its registered name.
        dtype: dtype of `bias`.

    Attributes:
        rounds_inputs: True if the layer's file requests inputs rounded to int8. The inference engine then rounds them
            if its activations are `auto`; the forward of this module does not.

    Raises:
        WeightFormatError: the format does not exist.
    """

    rounds_inputs: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight_format: WeightFormat | str = "int8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features, weight_format, device)
        self.in_features, self.out_features = in_features, out_features
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, weight_format: WeightFormat | str = "int8") -> PackedLinear:
        """Return a packed copy of a linear layer, with a copy of its bias that requires a gradient if the bias does.

        Raises:
            WeightFormatError: the weight has values that are not finite, or outside of the format's range.
        """
        weight, bias = linear.weight, linear.bias
        packed = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            weight_format=weight_format,
            device=weight.device,
            dtype=None if bias is None else bias.dtype,
        )
        packed.pack(weight)
        if packed.bias is not None:
            with torch.no_grad():
                packed.bias.copy_(bias)
            packed.bias.requires_grad_(bias.requires_grad)
        return packed.train(linear.training)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return an `nn.Linear` with the unpacked weight, in the format's own precision by default, and a copy of the
        bias in the same dtype."""
        weight = self.unpack().to(dtype)
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(weight)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(weight.dtype, copy=True))
        return linear.train(self.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._product(input, self.bias)

    def multiply(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output without the bias."""
        return self._product(input, None)

    def _product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.is_floating_point() and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        bias = bias.to(input.dtype) if bias is not None else None
        packed = self.packed()
        stored = {name: self._stored(name) for name in self._form}
        product = self._panels.product(self.format, packed, self._sizes, stored, input)
        return self.format.linear(input, packed, bias, product)

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight_format={self.format.name!r}"
        )


class PackedEmbedding(PackedMatrix):
    """Drop-in replacement of `nn.Embedding` with a packed, frozen table; see [Note: packed parameters].

    The forward unpacks the rows that are looked up.

    Args:
        dtype: dtype of the outputs; None: torch's default. Casts of the module change it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        weight_format: WeightFormat | str = "int8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, weight_format, device)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = unpack_rows(self.format, self.packed(), input.reshape(-1))
        return rows.to(self.get_buffer("_like").dtype).view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, weight_format={self.format.name!r}"


def is_packed_parameter(name: str, dtype: torch.dtype) -> bool:
    """Return True if a parameter has the name and dtype of a packed tensor; see [Note: packed parameters]."""
    own = name.rpartition(".")[2]
    known = any(own.startswith(f"{form}_") for form in list_weight_formats()) or _MADE_FORMATS.match(own) is not None
    return known and dtype == torch.uint8


def names_of_modules(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each module of a model, by the module's id; a module that is used in several places has
    several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


def pack_linear_layers(
    model: nn.Module, weight_format: WeightFormat | str, chosen: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Replace linear layers of a model by packed layers, in place and layer by layer. A layer is replaced under all of
    its names.

    Args:
        chosen: returns True for the names of the layers to be packed.

    Returns:
        The first name of each packed layer. Layers of other classes than `nn.Linear` stay as they are.

    Raises:
        WeightFormatError: a weight does not fit the format. The layers before it stay packed.
    """
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and chosen(name)]
    all_names = names_of_modules(model)
    for name in names:
        layer = model.get_submodule(name)
        try:
            packed = PackedLinear.from_linear(layer, weight_format)  # type: ignore[arg-type]
        except WeightFormatError as error:
            raise WeightFormatError(f"layer {name!r}: {error}") from error
        for one in all_names[id(layer)]:
            model.set_submodule(one, packed)
    return names
