"""Adaptation of an attention module's head counts to the heads of this rank.

The module keeps its own forward, which reads head counts from its attributes, its configuration, or the shapes of its
layers' outputs. The first two are adapted here; shapes need no change.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import scatter_to_parallel_region
from windlass.parallel.tensor.head_counts import GROUP_SIZES, KEY_COUNT_ATTRIBUTES, QUERY_COUNT_ATTRIBUTES
from windlass.parallel.tensor.head_partition import HeadPartition

_WIDTHS = ("split_size", "all_head_size", "embed_dim", "hidden_size", "inner_dim", "qkv_dim", "q_size")
_KEY_WIDTHS = ("kv_dim", "kv_size")
HEAD_BIASES = ("alibi", "position_bias")
"""Names of arguments that are added to the attention scores of each head: `[heads, ...]`, `[batch x heads, ...]` or a
four-dimensional `[batch, heads, ...]`. Models with such an argument may add it to the mask too.
"""


def fit_attention_to_local_heads(
    module: nn.Module, head_partition: HeadPartition, axis: MeshAxis, query_features: int
) -> None:
    """Set the head counts of the module to those of this rank.

    Args:
        axis: tensor-parallel mesh axis.
        query_features: number of features of all query heads of the layer, over all ranks.
    """
    query, key = head_partition.local_counts(axis.index)
    size = query_features // head_partition.num_query_heads
    before = (head_partition.num_query_heads, head_partition.num_key_heads)
    set_head_counts(module, before, (query, key), size)
    if _reads_heads_elsewhere(module, *QUERY_COUNT_ATTRIBUTES, *KEY_COUNT_ATTRIBUTES) and hasattr(module, "config"):
        own = {"num_attention_heads": query, "num_key_value_heads": key}
        vars(module)["config"] = LocalHeadsConfig(module.config, own)
    arguments = inspect.signature(module.forward).parameters
    if any(name in HEAD_BIASES for name in arguments):
        biases = [name for name in arguments if name in (*HEAD_BIASES, "attention_mask")]
        module.register_forward_pre_hook(
            LocalHeadBias(biases, head_partition.num_query_heads, head_partition.query_ranges, axis), with_kwargs=True
        )


def set_head_counts(module: nn.Module, before: tuple[int, int], after: tuple[int, int], size: int) -> None:
    """Set the attributes of an attention module that count its heads or their features.

    Args:
        before, after: numbers of query heads and of key heads, before and after the change.
        size: number of features of one query head.
    """
    (query, key), (new_query, new_key) = before, after
    numbers = {
        **{name: (query, new_query) for name in QUERY_COUNT_ATTRIBUTES},
        **{name: (key, new_key) for name in KEY_COUNT_ATTRIBUTES},
        **{name: (query // key, new_query // new_key) for name in GROUP_SIZES},
        **{name: (query * size, new_query * size) for name in _WIDTHS},
        **{name: (key * size, new_key * size) for name in _KEY_WIDTHS},
    }
    for name, (whole, here) in numbers.items():
        if vars(module).get(name) == whole:
            setattr(module, name, here)


class LocalHeadsConfig:
    """View of a configuration for one module: a few values are overridden, all others are read from the model's
    configuration at each access.
    """

    def __init__(self, config: Any, overrides: dict[str, Any]) -> None:
        vars(self).update(
            _config=config, _own={name: value for name, value in overrides.items() if hasattr(config, name)}
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = vars(self)["_own"]
        return own[name] if name in own else getattr(vars(self)["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_config"], name, value)


class LocalHeadBias:
    """Pre-forward hook of attention: keep only the rank's heads of biases that are added to the scores.

    The backward gathers the gradients of all heads, so that the code that computes a bias gets the same gradient on
    each rank.

    Args:
        names: names of the bias arguments.
        num_heads: total number of heads.
        head_ranges: `[start, stop)` of each rank's heads.
        axis: tensor-parallel mesh axis.
    """

    def __init__(
        self, names: list[str], num_heads: int, head_ranges: Sequence[tuple[int, int]], axis: MeshAxis
    ) -> None:
        self._names, self._num_heads, self._axis = names, num_heads, axis
        self._counts = [stop - start for start, stop in head_ranges]
        self._own = head_ranges[axis.index]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        order = list(inspect.signature(module.forward).parameters)
        new_args = list(args)
        for name in self._names:
            at = order.index(name)
            if name in kwargs:
                kwargs = {**kwargs, name: self._local_heads(kwargs[name])}
            elif at < len(new_args):
                new_args[at] = self._local_heads(new_args[at])
        return tuple(new_args), kwargs

    def _local_heads(self, bias: Any) -> Any:
        if not isinstance(bias, torch.Tensor):
            return bias
        if bias.dim() == 4:
            return self._own_heads(bias) if bias.shape[1] == self._num_heads else bias
        if bias.dim() != 3:
            return bias
        return self._own_heads(bias.unflatten(0, (-1, self._num_heads))).flatten(0, 1)

    def _own_heads(self, bias: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a bias `[batch, heads, ...]`."""
        if bias.requires_grad and torch.is_grad_enabled():
            return scatter_to_parallel_region(bias, self._axis, 1, self._counts)
        return bias[:, slice(*self._own)]


def _reads_heads_elsewhere(module: nn.Module, *names: str) -> bool:
    """Return True if the module's forward may read one of these head counts from its configuration: its code uses
    `config` and one of the names.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "config" in code.co_names and bool(set(names) & set(code.co_names))
