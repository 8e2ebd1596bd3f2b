"""How many heads an attention module has, by what it says of itself and by the sizes of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from windlass.parallel.tensor.linear_layers import Linear
from windlass.parallel.tensor.plan import refused

QUERY = ("q_proj", "query", "q", "q_lin", "q_linear", "query_proj", "wq", "Wq", "to_q")
KEY = ("k_proj", "key", "k", "k_lin", "k_linear", "key_proj", "wk", "Wk", "to_k")
VALUE = ("v_proj", "value", "v", "v_lin", "v_linear", "value_proj", "wv", "Wv", "to_v")
FUSED = ("c_attn", "query_key_value", "qkv_proj", "qkv", "qkv_linear", "Wqkv", "W_pack", "in_proj", "to_qkv")

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
GROUPS = ("num_key_value_groups", "n_rep")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head")


def is_attention(holder: nn.Module, columns: Sequence[Linear]) -> bool:
    """It says how many heads it has, or its layers are called like queries and keys."""
    known = {*QUERY, *KEY, *VALUE, *FUSED}
    return number(holder, QUERY_COUNTS) is not None or any(column.leaf in known for column in columns)


def number(module: Any, names: Sequence[str]) -> int | None:
    """The first positive number among these attributes."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def count_heads(
    name: str, holder: nn.Module, config: Any, columns: Sequence[Linear], outputs: Linear
) -> tuple[int, int]:
    """Query heads and key heads of the attention module `holder`.

    What the module says goes before the sizes of its layers, and those before the configuration, which speaks of all
    layers at once.

    Raises:
        ModelError: nothing tells, or sizes don't fit.
    """
    config = getattr(holder, "config", config)
    size, groups = number(holder, HEAD_SIZES), number(holder, GROUPS)
    query, key = number(holder, QUERY_COUNTS), number(holder, KEY_COUNTS)
    keys = next((column for column in columns if column.leaf in KEY), None)
    if key is None and size is not None and keys is not None and keys.outputs % size == 0:
        key = keys.outputs // size
    if key is None and query is None:
        key = number(config, KEY_COUNTS)
    if query is None and key is not None and groups is not None:
        query = key * groups
    if query is None:
        query = number(config, QUERY_COUNTS)
    if query is None:
        raise refused(
            name,
            f"it does not tell how many heads it has, in {', '.join(QUERY_COUNTS)} or its config",
            *((column.name, "column of 8 heads") for column in columns),
            (outputs.name, "row of 8 heads"),
        )
    if key is None:
        key = query // groups if groups is not None else query
    if key < 1 or query % key or outputs.inputs % query:
        raise refused(
            name,
            f"{query} query heads, {key} key heads and {outputs.inputs} features into {outputs.leaf} don't fit",
            (outputs.name, "row of 8 heads"),
        )
    return query, key
