"""Number of heads of an attention module, from its attributes and the sizes of its layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from windlass.parallel.tensor.linear_layers import LinearLayer
from windlass.parallel.tensor.tensor_parallel_plan import make_cannot_shard_error

QUERY_NAMES = ("q_proj", "query", "q", "q_lin", "q_linear", "query_proj", "wq", "Wq", "to_q")
KEY_NAMES = ("k_proj", "key", "k", "k_lin", "k_linear", "key_proj", "wk", "Wk", "to_k")
VALUE_NAMES = ("v_proj", "value", "v", "v_lin", "v_linear", "value_proj", "wv", "Wv", "to_v")
FUSED_NAMES = ("c_attn", "query_key_value", "qkv_proj", "qkv", "qkv_linear", "Wqkv", "W_pack", "in_proj", "to_qkv")

QUERY_COUNT_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "heads")
KEY_COUNT_ATTRIBUTES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
GROUP_SIZES = ("num_key_value_groups", "n_rep")
HEAD_DIM_ATTRIBUTES = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head")


def is_attention(module: nn.Module, columns: Sequence[LinearLayer]) -> bool:
    """Return True if the module has a head count, or a layer named like a query, key, value or fused projection."""
    known = {*QUERY_NAMES, *KEY_NAMES, *VALUE_NAMES, *FUSED_NAMES}
    return find_positive_int(module, QUERY_COUNT_ATTRIBUTES) is not None or any(
        column.leaf_name in known for column in columns
    )


_INPUT_WIDTH = re.compile(r"\w+, \w+, (\w+) = hidden_states\.(?:size\(\)|shape)\s")


def requires_input_width(module: nn.Module, projection: str) -> bool:
    """Return True if an attention module's forward reshapes the result of its heads to the width of its input.

    Some forwards, e.g. TrOCR's, read this width from the shape of `hidden_states`. They fail on a rank with only a part
    of the heads, whose result has fewer features.

    Args:
        projection: name of the layer that multiplies the result of all heads. After it, the width is that of the input.
    """
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):  # a class without a source file
        return False
    heads = source.split(f"self.{projection}(", 1)[0]
    return any(
        re.search(rf"(?<!hidden_states)\.(?:reshape|view)\([^()]*, {name}\)", heads)
        for name in _INPUT_WIDTH.findall(source)
    )


def find_positive_int(module: Any, names: Sequence[str]) -> int | None:
    """Return the first positive integer among the attributes `names` of a module, or None."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def count_heads(
    name: str, module: nn.Module, config: Any, columns: Sequence[LinearLayer], outputs: LinearLayer
) -> tuple[int, int]:
    """Return the numbers of query heads and key heads of the attention module `name`.

    The module's own attributes take precedence over the sizes of its layers, and the sizes over the configuration,
    which describes all layers at once.

    Raises:
        ModelError: the counts are unknown, or do not match the sizes.
    """
    config = getattr(module, "config", config)
    size, groups = find_positive_int(module, HEAD_DIM_ATTRIBUTES), find_positive_int(module, GROUP_SIZES)
    query, key = find_positive_int(module, QUERY_COUNT_ATTRIBUTES), find_positive_int(module, KEY_COUNT_ATTRIBUTES)
    keys = next((column for column in columns if column.leaf_name in KEY_NAMES), None)
    if key is None and size is not None and keys is not None and keys.out_features % size == 0:
        key = keys.out_features // size
    if key is None and query is None:
        key = find_positive_int(config, KEY_COUNT_ATTRIBUTES)
    if query is None and key is not None and groups is not None:
        query = key * groups
    if query is None:
        query = find_positive_int(config, QUERY_COUNT_ATTRIBUTES)
    if query is None:
        raise make_cannot_shard_error(
            name,
            f"its number of heads is unknown: it is missing in {', '.join(QUERY_COUNT_ATTRIBUTES)} or its config",
            *((column.name, "column of 8 heads") for column in columns),
            (outputs.name, "row of 8 heads"),
        )
    if key is None:
        key = query // groups if groups is not None else query
    if key < 1 or query % key or outputs.in_features % query:
        raise make_cannot_shard_error(
            name,
            f"{query} query heads, {key} key heads and {outputs.in_features} input features of {outputs.leaf_name} "
            "don't match",
            (outputs.name, "row of 8 heads"),
        )
    return query, key
