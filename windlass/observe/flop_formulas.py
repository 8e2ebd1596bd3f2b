"""Floating-point operations of single torch operations: matrix products, convolutions, attention, recurrent layers.

A multiplication and an addition are two operations; elementwise work, products of two vectors, norms and softmax are
not counted. Products with a sparse matrix count only its stored elements. Attention is counted in full, also with a
causal mask, as in `torch.utils.flop_counter`. Operations for which torch has a formula use torch's. The backward of a
fused attention kernel computes its scores again: that product is counted as recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_ROWS_OF_A_PRODUCT = 25  # torch.cdist uses a product for more rows than this
_QUIET_NAMESPACES = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "higher_order"})


class OperationFlops(NamedTuple):
    """FLOPs of one operation, and the FLOPs of products that it computes again."""

    flops: int
    recomputed: int = 0


def count_operation(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> OperationFlops | None:
    """Return the FLOPs of one executed operation; None if there is no formula for it.

    Formulas that a script registered with `torch.utils.flop_counter.register_flop_formula` are used too.

    Args:
        operation: an overload packet such as `torch.ops.aten.mm`, or a higher-order operator.
    """
    own = _FORMULAS.get(operation)
    if own is not None:
        return OperationFlops(own(*args))
    backward = _ATTENTION_BACKWARDS.get(operation)
    if backward is not None:
        return _attention_backward(operation, backward, args, kwargs, output)
    known = flop_registry.get(operation)
    return None if known is None else OperationFlops(int(known(*args, **kwargs, out_val=output)))


def has_formula(operation: Any) -> bool:
    """Return True if the FLOPs of `operation` are counted."""
    return operation in _FORMULAS or operation in _ATTENTION_BACKWARDS or operation in flop_registry


def may_hide_products(operation: Any) -> bool:
    """Return True for an operation that has no formula and is not torch's own, such as a kernel of a library."""
    name = getattr(operation, "_qualified_op_name", "")
    return bool(name) and name.partition("::")[0] not in _QUIET_NAMESPACES and not has_formula(operation)


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of both products of attention.

    Args:
        query, key, value: shapes `[..., heads, tokens, features]`; keys may have fewer heads than queries.
    """
    rows = 1
    for size in query[:-1]:
        rows *= size
    return 2 * rows * key[-2] * (query[-1] + value[-1])


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> int:
    return attention_flops(query.shape, key.shape, value.shape)


def _attention_backward(
    operation: Any, first: int, args: Sequence[Any], kwargs: dict[str, Any], output: Any
) -> OperationFlops:
    """Count a fused backward: the scores again, then the gradients of weights, values, queries and keys.

    Args:
        first: index of the query among `args`; key and value follow.
    """
    query, key, value = args[first : first + 3]
    features, out_features = query.shape[-1], value.shape[-1]
    known = flop_registry.get(operation)
    if known is not None and operation not in _DENSE_BACKWARDS:
        total = int(known(*args, **kwargs, out_val=output))  # torch's formula handles sequences of unequal lengths
        recomputed = total * features // (3 * features + 2 * out_features)
        return OperationFlops(total - recomputed, recomputed)
    forward = attention_flops(query.shape, key.shape, value.shape)
    return OperationFlops(2 * forward, forward * features // (features + out_features))


def _stored(tensor: torch.Tensor) -> int:
    """Return the number of elements that a tensor stores: all elements, or for a sparse tensor the specified ones."""
    if tensor.layout is torch.strided:
        return tensor.numel()
    return (tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()).numel()


def _sparse_product(first: torch.Tensor, second: torch.Tensor, *rest: Any) -> int:
    """Count a product with at least one sparse factor."""
    if second.layout is torch.strided:
        return 2 * _stored(first) * second.shape[-1]
    if first.layout is torch.strided:
        return 2 * _stored(second) * first.shape[-2]
    columns = first.to_sparse_coo().coalesce().indices()[-1].bincount(minlength=first.shape[-1])
    rows = second.to_sparse_coo().coalesce().indices()[-2].bincount(minlength=second.shape[-2])
    return 2 * int(columns @ rows)


def _sampled_product(mask: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *rest: Any) -> int:
    """Count a dense product that is computed only at the elements that `mask` stores."""
    return 2 * _stored(mask) * first.shape[-1]


def _product(first: torch.Tensor, second: torch.Tensor, *rest: Any) -> int:
    """Count a matrix product, which may be batched (both factors 3-D) or grouped.

    In a grouped product at most one factor is 3-D. The groups divide rows, columns or terms, so the count is that of
    one product.
    """
    if not first.layout is second.layout is torch.strided:
        return _sparse_product(first, second)
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _added_product(added: Any, first: torch.Tensor, second: torch.Tensor, *rest: Any) -> int:
    return _product(first, second)


def _transposed_product(rows: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    """Count the product with a weight `[out, in]`."""
    return 2 * rows.numel() * weight.shape[0]


def _vector_product(matrix: torch.Tensor, *rest: Any) -> int:
    return 2 * _stored(matrix)


def _added_vector_product(added: Any, matrix: torch.Tensor, *rest: Any) -> int:
    return 2 * _stored(matrix)


def _reduced_product_backward(
    first: torch.Tensor, upstream: torch.Tensor, second: Any, reduce: str, positions: Any, wanted: Sequence[bool]
) -> int:
    """Count the gradients of both factors of `torch.sparse.mm(..., reduce=...)`."""
    return (wanted[0] + wanted[1]) * 2 * _stored(first) * upstream.shape[-1]


def _convolution_backward(
    upstream: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, biases: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, *rest: Any,
) -> int:  # fmt: skip
    """Count the gradients of inputs and weights: each costs as much as the forward, with groups too."""
    rows = source if transposed else upstream  # each of these elements belongs to one product with a filter
    wanted: Sequence[bool] = rest[2]
    return (wanted[0] + wanted[1]) * 2 * rows.numel() * (weight.numel() // max(1, weight.shape[0]))


def _time_convolution(rows: torch.Tensor, weight: torch.Tensor, bias: Any, pad: int = 0) -> int:
    """Count a convolution of `[time, batch, in]` with `[width, in, out]`."""
    width, _, out = weight.shape
    return 2 * (rows.shape[0] + 2 * pad - width + 1) * rows.shape[1] * width * rows.shape[2] * out


def _triple_product(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, expand_first: Sequence[int],
    expand_second: Sequence[int], expand_third: Sequence[int], summed: Sequence[int], *rest: Any,
) -> int:  # fmt: skip
    """Count the two products of a trilinear form, by which `nn.Bilinear` and its backward are computed.

    The first product is summed over dimensions along which `third` is expanded, before the second one.
    """

    def sizes(tensor: torch.Tensor, expanded: Sequence[int]) -> list[int]:
        found = list(tensor.shape)
        for dimension in sorted(expanded):
            found.insert(dimension, 1)
        return found

    pair = [max(two) for two in zip(sizes(first, expand_first), sizes(second, expand_second), strict=True)]
    between = [1 if at in summed and at in expand_third else size for at, size in enumerate(pair)]
    last = [max(two) for two in zip(between, sizes(third, expand_third), strict=True)]
    return 2 * (math.prod(pair) + math.prod(last))


def _euclidean_distances(first: torch.Tensor, second: torch.Tensor) -> int:
    """Count the matrix product from which distances are computed. Two elements are added to each row for it."""
    batch: int = math.prod(torch.broadcast_shapes(first.shape[:-2], second.shape[:-2]))
    return 2 * batch * first.shape[-2] * second.shape[-2] * (first.shape[-1] + 2)


def _distances(first: torch.Tensor, second: torch.Tensor, power: float, mode: int | None = None) -> int:
    """Count the product of `torch.cdist`, which it uses for many rows; other distances are elementwise work."""
    is_large = first.shape[-2] > _ROWS_OF_A_PRODUCT or second.shape[-2] > _ROWS_OF_A_PRODUCT
    uses_product = power == 2 and (mode == 1 or (not mode and is_large))
    return _euclidean_distances(first, second) if uses_product else 0


def _self_attention_layer(
    query: torch.Tensor, key: Any, value: Any, width: int, heads: int, qkv: torch.Tensor, *rest: Any
) -> int:
    """Count torch's fused self-attention for inference: projections, attention, output."""
    projection: torch.Tensor = rest[1]
    tokens = query.numel() // query.shape[-1] if not query.is_nested else query.numel() // width
    return 2 * tokens * (qkv.numel() + projection.numel()) + _square_attention(query, qkv.shape[0] // 3)


def _encoder_layer(source: torch.Tensor, width: int, heads: int, qkv: torch.Tensor, *rest: Any) -> int:
    """Count torch's fused `TransformerEncoderLayer` for inference."""
    weights = (qkv, rest[1], rest[10], rest[12])  # input and output projection, both layers of the MLP
    tokens = source.numel() // width
    return 2 * tokens * sum(weight.numel() for weight in weights) + _square_attention(source, width)


def _square_attention(source: torch.Tensor, width: int) -> int:
    if source.is_nested:  # sequences of unequal lengths
        return sum(4 * sequence.shape[0] ** 2 * width for sequence in source.unbind())
    return 4 * source.shape[0] * source.shape[1] ** 2 * width


def _recurrent_layer(rows: torch.Tensor, *weights: torch.Tensor) -> int:
    """Return the FLOPs of a fused recurrent layer, whose first two weights multiply inputs and hidden states."""
    return 2 * (rows.numel() // rows.shape[-1]) * sum(weight.numel() for weight in weights[:2])


def _recurrent_layer_backward(rows: torch.Tensor, *weights: torch.Tensor) -> int:
    return 2 * _recurrent_layer(rows, *weights)


def _recurrent_stack(rows: torch.Tensor, weights: Sequence[torch.Tensor], *rest: Any) -> int:
    """Count cuDNN's recurrent layers."""
    return 2 * (rows.numel() // rows.shape[-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _recurrent_stack_backward(rows: torch.Tensor, weights: Sequence[torch.Tensor], *rest: Any) -> int:
    return 2 * _recurrent_stack(rows, weights)


_NAMED_FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "mm": _product,
    "addmm": _added_product,
    "bmm": _product,
    "baddbmm": _added_product,
    "_sparse_addmm": _added_product,
    "sspaddmm": _added_product,
    "hspmm": _product,
    "_sparse_sparse_matmul": _product,
    "_sparse_mm_reduce_impl": _product,
    "_sparse_mm_reduce_impl_backward": _reduced_product_backward,
    "sparse_sampled_addmm": _sampled_product,
    "_grouped_mm": _product,
    "_scaled_grouped_mm": _product,
    "_scaled_grouped_mm_v2": _product,
    "_scaled_mm_v2": _product,
    "_int_mm": _product,
    "addmm_": _added_product,
    "_addmm_activation": _added_product,
    "baddbmm_": _added_product,
    "addbmm": _added_product,
    "addbmm_": _added_product,
    "_weight_int8pack_mm": _transposed_product,
    "convolution_backward": _convolution_backward,
    "conv_tbc": _time_convolution,
    "_trilinear": _triple_product,
    "_euclidean_dist": _euclidean_distances,
    "_cdist_forward": _distances,
    "mv": _vector_product,
    "addmv": _added_vector_product,
    "addmv_": _added_vector_product,
    "_native_multi_head_attention": _self_attention_layer,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    "_cudnn_rnn": _recurrent_stack,
    "_cudnn_rnn_backward": _recurrent_stack_backward,
}
# Names that a release of torch lacks are left out.
_FORMULAS: dict[Any, Callable[..., int]] = {
    getattr(_aten, name): formula for name, formula in _NAMED_FORMULAS.items() if hasattr(_aten, name)
}
_DENSE_BACKWARDS = {
    getattr(_aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    )
    if hasattr(_aten, name)
}
_ATTENTION_BACKWARDS: dict[Any, int] = {
    **dict.fromkeys(_DENSE_BACKWARDS, 1),
    _aten._flash_attention_backward: 1,
    _aten._efficient_attention_backward: 1,
    **({torch.ops.higher_order.flex_attention_backward: 0} if hasattr(torch.ops, "higher_order") else {}),
}
