"""Feed-forward experts with packed weights: one native call for all experts of a layer.

[Note: packed experts] The native call sorts the choices of all tokens by expert, multiplies the rows of each chosen
expert by its packed weights, and adds the weighted results. The sum of a token is float32, in the order of the experts'
numbers, and rounded once. So a token has the same bits whatever other tokens are in the call. Experts without rows cost
nothing. The reference computes the same, expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.kernels.fused_layers import ACTIVATION_CODES, gated_activation
from windlass.kernels.inference_path import get_inference_path, tensor_address
from windlass.kernels.packed_gemm import ACTIVATION_DTYPES, PackedPanels, packed_linear

Gate = str | Callable[[torch.Tensor], torch.Tensor]


class PackedExperts:
    """Packed weights of all experts of a layer; see [Note: packed experts].

    Args:
        products: for each expert, gate and up as one matrix `[2 * inner, features]`, and down `[features, inner]`.
        gate: "silu" or "gelu_tanh"; or a function of gate and up `[rows, 2 * inner]` that returns `[rows, inner]`, for
            which there is no native call.

    Raises:
        ModelError: there are no experts, or they have different sizes.
    """

    def __init__(self, products: Sequence[tuple[PackedPanels, PackedPanels]], gate: Gate) -> None:
        sizes = {(up.out_features, up.in_features, down.out_features, down.in_features) for up, down in products}
        if len(sizes) != 1:
            raise ModelError(f"experts have the sizes {sorted(sizes)}; give experts of one size")
        ((double, self.features, out, self.inner),) = sizes
        if double != 2 * self.inner or out != self.features:
            raise ModelError(
                f"an expert of {self.features} -> {double}, {self.inner} -> {out} features is not a gated feed-forward "
                "layer; give gate and up as one matrix, and down"
            )
        self.products, self.gate = list(products), gate
        self._native: dict[bool, tuple[Any, list[Any]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights in memory."""
        return sum(panels.nbytes for pair in self.products for panels in pair)

    def native(self, dtype: torch.dtype) -> Any:
        """Return the native object for inputs of a dtype; None if a weight or the gate has no native code."""
        if dtype not in ACTIVATION_DTYPES or self.gate not in ACTIVATION_CODES:
            return None
        is_bf16 = dtype == torch.bfloat16
        if is_bf16 not in self._native:
            self._native[is_bf16] = self._make_native(is_bf16)
        return self._native[is_bf16][0]

    def _make_native(self, is_bf16: bool) -> tuple[Any, list[Any]]:
        """Return the native object, and the weights of another module that it has the addresses of."""
        path, kept = get_inference_path(), list[Any]()
        if path.module is None or any(panels.path != path.name for pair in self.products for panels in pair):
            return None, kept
        assert isinstance(self.gate, str)
        found = path.module.Experts(path.number, ACTIVATION_CODES[self.gate], self.features, self.inner, is_bf16)
        for panels in (one for pair in self.products for one in pair):
            if (fixed := panels.native_weight(None)) is not None:
                found.add_linear(*fixed[:-1], panels.quantize_inputs)
                continue
            foreign = panels.foreign_product(None, is_bf16)
            if foreign is None:
                return None, kept
            product, _, weight = foreign
            kept.append(weight)
            found.add_foreign_product(product, weight.address, panels.out_features, panels.in_features)
        return found, kept

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, `[tokens, features]` in the dtype of `x`.

        Args:
            x: float32 or bfloat16 `[tokens, features]`.
            index: number of each chosen expert, int64 `[tokens, chosen]`; numbers of no expert are ignored.
            weights: weights of the chosen experts, float32 or bfloat16 `[tokens, chosen]`.

        Raises:
            ModelError: shapes or dtypes do not match.
        """
        if x.dim() != 2 or x.shape[1] != self.features or x.dtype not in ACTIVATION_DTYPES:
            raise ModelError(
                f"the input of experts is {x.dtype} of shape {tuple(x.shape)}; give torch.float32 or bfloat16 of shape "
                f"[tokens, {self.features}]"
            )
        if index.shape != weights.shape or index.dim() != 2 or len(index) != len(x) or index.dtype != torch.int64:
            raise ModelError(
                f"choices of experts are {index.dtype} of shape {tuple(index.shape)} with weights of shape "
                f"{tuple(weights.shape)}; give torch.int64 and weights of shape [{len(x)}, chosen]"
            )
        native = self.native(x.dtype) if weights.dtype in ACTIVATION_DTYPES else None
        if native is None or index.numel() == 0:
            return self._compute_each(x, index, weights)
        x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
        out = torch.empty_like(x)
        native.run(
            tensor_address("input", x),
            tensor_address("choices", index),
            tensor_address("weights of the choices", weights),
            weights.dtype == torch.bfloat16,
            tensor_address("output", out),
            len(x),
            index.shape[1],
            torch.get_num_threads(),
        )
        return out

    def _compute_each(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute expert by expert."""
        total = torch.zeros(x.shape, dtype=torch.float32)
        for number in index.unique().tolist():
            if not 0 <= number < len(self.products):
                continue
            up, down = self.products[number]
            token, place = torch.where(index == number)
            both = packed_linear(x[token], up)
            inner = gated_activation(both, self.gate) if isinstance(self.gate, str) else self.gate(both)
            total.index_add_(0, token, packed_linear(inner, down).float() * weights[token, place, None].float())
        return total.to(x.dtype)
