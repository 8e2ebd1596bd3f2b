"""Sharding of peft's low-rank adapters on sharded linear layers.

[Note: adapters of sharded layers] An adapter adds B(A(x)) to the output of its base layer. On a column layer, whose
output features are sharded, B is sharded as the base is. A is replicated; through its part of B each rank computes only
a part of A's gradient, and the parts are summed. On a row layer, whose input features are sharded, A is sharded as the
base is and its products are summed over ranks, so B is replicated and has a complete gradient; with a sequence-sharded
output, each rank applies B to its own tokens, and the gradients are summed. If a rank uses only some rows of the base,
it uses the same rows of B. Checkpoints therefore contain the full adapter, and its gradients equal those of one
process.
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
    """Shard the adapters of a layer in the same way as the layer. No effect without adapters.

    Args:
        input_hook: input hook of the dependency chain (column layers, then a row layer) that the layer belongs to.
        sequence_sharding: sequence sharding of the output of a row layer; None: the output is replicated.
        tp_overlap_chunks: see `linear_sharding.row_parallel_linear`.
    """
    if layer.adapter_module is None:
        return
    row = shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT)
    for down, up in _lora_pairs(layer.name, layer.adapter_module):
        if row:
            shard_row(down, shard, input_hook, sequence_sharding, tp_overlap_chunks)
            if sequence_sharding is not None:  # each rank applies B to its own tokens only: partial gradients
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
                hook = _LocalRngHook(input_hook) if row else _SharedRngHook(input_hook)
                module.register_forward_pre_hook(hook.pre_forward)
                module.register_forward_hook(hook.post_forward)


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
    """Hooks around dropout of a replicated activation, inside a chain that draws rank-specific random numbers.

    They switch to the random numbers that all ranks share, so that all ranks drop the same elements.
    """

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
    """Hooks around dropout of a sharded activation, after its chain has ended.

    In training they switch to rank-specific random numbers, so that each rank drops elements of its own part.
    """

    def __init__(self, input_hook: ChainInputHook) -> None:
        assert input_hook.local_rng is not None
        self._local_rng = input_hook.local_rng

    def pre_forward(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if module.training:
            self._local_rng.begin(args[0].device)

    def post_forward(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._local_rng.end()
