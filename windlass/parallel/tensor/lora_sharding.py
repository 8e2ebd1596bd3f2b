"""Low-rank adapters of peft beside linear layers that are cut.

[Note: adapters of cut layers] An adapter adds B(A(x)) to what its base layer makes of x. Beside a column, whose output
features are cut, B is cut as the base is; A is whole, and since each rank's B sends it back only a part of its
gradient, these parts are added up. Beside a row, whose input features are cut, A is cut as the base is and its products
are added up over ranks, so that B is whole and sees all. Of a base of which a rank uses some rows, it uses the same
rows of B. So an adapter is saved whole, and its gradients are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from windlass.parallel.tensor.input_hooks import ChainInputHook
from windlass.parallel.tensor.linear_layers import LinearLayer, as_linear_layer
from windlass.parallel.tensor.linear_sharding import select_needed_rows, shard_outputs, shard_row
from windlass.parallel.tensor.parameter_sharding import mark_partial_gradient
from windlass.parallel.tensor.stack_sequence_sharding import StackSequenceSharding
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle


def shard_adapters(
    layer: LinearLayer,
    shard: ModuleShard,
    input_hook: ChainInputHook,
    sequence_sharding: StackSequenceSharding | None,
    tp_overlap_chunks: int,
) -> None:
    """Cut the adapters of a layer as the layer itself is; nothing happens where it has none.

    Args:
        entrance: the chain's.
        sequence: that cuts the layer's output, of a row.
        chunks: see `row_product`.
    """
    if layer.adapter_module is None:
        return
    row = shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT)
    for down, up in _lora_pairs(layer.name, layer.adapter_module):
        if row:
            shard_row(down, shard, input_hook, sequence_sharding, tp_overlap_chunks)
            if sequence_sharding is not None:  # each rank adds for its own tokens
                _mark_partial_gradients(up.module, input_hook)
            continue
        _mark_partial_gradients(down.module, input_hook)
        if shard.style is ShardStyle.COLUMN_SHARED:
            select_needed_rows(up, shard, input_hook, None)
        else:
            shard_outputs(up, shard, input_hook.axis)
    if input_hook.local_rng is not None and shard.style is not ShardStyle.ROW_SPLIT:
        for module in layer.adapter_module.lora_dropout.modules():  # type: ignore[union-attr]
            if isinstance(module, nn.modules.dropout._DropoutNd):
                turn = _LocalRngHook(input_hook) if row else _SharedRngHook(input_hook)
                module.register_forward_pre_hook(turn.pre_forward)
                module.register_forward_hook(turn.post_forward)


def _lora_pairs(name: str, outer: nn.Module) -> Iterator[tuple[LinearLayer, LinearLayer]]:
    downs: Any = outer.lora_A
    ups: Any = outer.lora_B
    for key, module in downs.items():
        down, up = as_linear_layer(f"{name}.lora_A.{key}", module), as_linear_layer(f"{name}.lora_B.{key}", ups[key])
        assert down is not None and up is not None
        yield down, up


def _mark_partial_gradients(module: nn.Module, input_hook: ChainInputHook) -> None:
    for parameter in module.parameters():
        mark_partial_gradient(parameter, input_hook.axis.name)


class _SharedRngHook:
    """A dropout of what is whole on every rank, between layers that draw numbers of their own."""

    def __init__(self, input_hook: ChainInputHook) -> None:
        assert input_hook.local_rng is not None
        self._local_rng, self._was_active = input_hook.local_rng, False

    def pre_forward(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._was_active = self._local_rng.is_active
        self._local_rng.end()

    def post_forward(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self._was_active:
            self._local_rng.begin(output.device)


class _LocalRngHook:
    """A dropout of what is cut, after its chain has ended."""

    def __init__(self, input_hook: ChainInputHook) -> None:
        assert input_hook.local_rng is not None
        self._local_rng = input_hook.local_rng

    def pre_forward(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if module.training:
            self._local_rng.begin(args[0].device)

    def post_forward(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._local_rng.end()
