"""Panels of a packed layer outside of an inference engine, made again when the layer's bytes change.

Panels are a copy of the weight in the memory order that native matrix products read, see [Note: panels].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.low_bit_panels import has_native_codes
from windlass.kernels.mapped_bytes import MappedBytes
from windlass.kernels.ordered_formats import OrderedWeightFormat, inner_tensors
from windlass.kernels.packed_gemm import ACTIVATION_DTYPES, PackedPanels, pack_panels, packed_linear
from windlass.kernels.weight_format import PackedWeight, WeightFormat


class PanelProduct:
    """Product of an input and a weight in panels, see [Note: panels], without gradients."""

    def __init__(self, panels: PackedPanels, pages: Sequence[MappedBytes]) -> None:
        self._panels, self._pages = panels, pages

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            return packed_linear(input.detach(), self._panels, bias)

    def end_backward(self) -> None:
        """Drop the weight's mapped pages, which a backward has read; see [Note: dropped pages]."""
        for one in self._pages:
            one.drop()


class PanelCache:
    """Native product of one packed layer.

    [Note: kept panels] Panels are kept from the second product on, while address and version of every parameter are the
    same, and only for parameters that own their memory. Views of an engine's flat buffer do not: the buffer is filled
    without a change of versions. So their panels are made for each product; int8 weights are cast to float, without
    panels. Panels take as much memory as the packed weight, whose own pages are dropped if they are mapped from
    a file ([Note: dropped pages]). A copy or pickle of the layer has no panels. Changes through `.data` keep the
    version: use `PackedLinear.set_packed`.

    Attributes:
        pages: mappings of the parameters, by the address of each.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._panels: PackedPanels | None = None
        self.pages: dict[int, MappedBytes] = {}

    def product(
        self,
        weight_format: WeightFormat,
        packed: PackedWeight,
        sizes: tuple[int, int],
        parameters: Mapping[str, torch.Tensor],
        input: Any,
    ) -> PanelProduct | None:
        """Return the product by native kernels, or None if they do not support the format or the input. For [Note:
        ordered features] it is that of the sorted columns."""
        if isinstance(weight_format, OrderedWeightFormat):
            weight_format, packed = weight_format.inner, inner_tensors(packed)
        if not _is_native(weight_format, input):
            self._key = self._panels = None
            return None
        owned = all(
            one.untyped_storage().nbytes() == one.nbytes and not one.is_inference() for one in parameters.values()
        )
        key = tuple((one.data_ptr(), one._version) for one in parameters.values()) if owned else None
        if not owned and not has_native_codes(weight_format):
            self._key = self._panels = None
            return None  # a cast to float is cheaper than panels for one product
        again = owned and self._key == key
        panels = self._panels if again else None
        pages = [self.pages[one.data_ptr()] for one in parameters.values() if one.data_ptr() in self.pages]
        if panels is None:
            panels = pack_panels(packed, weight_format, sizes)
            for one in pages:
                one.drop()
        self._key, self._panels = key, panels if again else None
        return PanelProduct(panels, pages)

    def clear(self) -> None:
        """Free the panels."""
        self._key = self._panels = None

    def __reduce__(self) -> tuple[type[PanelCache], tuple[()]]:
        return PanelCache, ()


def _is_native(weight_format: WeightFormat, input: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or input.device.type != "cpu" or input.dtype not in ACTIVATION_DTYPES:
        return False
    known = weight_format.name == "int8" or has_native_codes(weight_format)
    return known and get_inference_path().module is not None and input.numel() > 0
