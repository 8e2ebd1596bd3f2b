"""In-place sharding of linear layers, by hooks around a module's own forward, or by a new forward if it must be
computed in parts.

A chain consists of column-parallel layers and the row-parallel layer that takes their outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windlass.comm.mesh_axis import MeshAxis
from windlass.kernels.packed_linear import PackedLinear, PackedMatrix
from windlass.parallel.autograd_collectives import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    reduce_scatter,
    scatter_to_parallel_region,
)
from windlass.parallel.hidden_states import get_input
from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.contiguous_non_view import as_contiguous_non_view
from windlass.parallel.tensor.input_hooks import ChainInputHook
from windlass.parallel.tensor.linear_layers import LinearLayer, used_bias, used_input, used_weight
from windlass.parallel.tensor.packed_sharding import shard_packed
from windlass.parallel.tensor.parameter_sharding import mark_partial_gradient, shard_parameter
from windlass.parallel.tensor.rank_ranges import count_elements, count_rank_elements
from windlass.parallel.tensor.stack_sequence_sharding import StackSequenceSharding
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle, make_cannot_shard_error


def row_parallel_linear(
    inputs: torch.Tensor, weight: torch.Tensor, axis: MeshAxis, tp_overlap_chunks: int = 1
) -> torch.Tensor:
    """Compute `inputs @ weight.T`, summed over the axis. Collective. The incoming gradient must be complete on each
    rank.

    Args:
        inputs: `[..., features of this rank]`.
        weight: `[outputs, features of this rank]`.
        tp_overlap_chunks: split the tokens into this many chunks; the all-reduce of one overlaps the product of the
            next (Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023).
    """
    if axis.size == 1:
        return functional.linear(inputs, weight)
    device = inputs.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        inputs, weight = inputs.to(kind), weight.to(kind)
    return _RowParallelLinear.apply(axis, tp_overlap_chunks, inputs, weight)  # type: ignore[no-any-return]


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: MeshAxis, tp_overlap_chunks: int, inputs: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        rows = inputs.reshape(-1, inputs.shape[-1])
        out = rows.new_empty((*inputs.shape[:-1], weight.shape[0]))
        results = out.view(-1, weight.shape[0]).tensor_split(tp_overlap_chunks)
        travelling = []
        for part, result in zip(rows.tensor_split(tp_overlap_chunks), results, strict=True):
            torch.mm(part, weight.t(), out=result)
            travelling.append(axis.start_all_reduce(result))
        for pending in travelling:
            pending.wait()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradients[0].reshape(-1, weight.shape[0])
        to_inputs = rows.mm(weight).view(inputs.shape) if ctx.needs_input_grad[2] else None
        to_weight = rows.t().mm(inputs.reshape(-1, inputs.shape[-1])) if ctx.needs_input_grad[3] else None
        return None, None, to_inputs, to_weight


def shard_column(
    layer: LinearLayer, shard: ModuleShard, input_hook: ChainInputHook, column_hook: ColumnInputHook | None
) -> None:
    """Shard the output features of a layer.

    Args:
        input_hook: input hook of the layer's chain, shared by its column layers.
        column_hook: hook that applies `input_hook` to the layer's input; None if the input already passed it.
    """
    axis = input_hook.axis
    shard_outputs(layer, shard, axis)
    if column_hook is not None:
        layer.entry_module.register_forward_pre_hook(column_hook)
    if shard.style is ShardStyle.COLUMN_GATHERED:
        layer.entry_module.register_forward_hook(ColumnGatherHook(axis, count_rank_elements(shard.rank_ranges)))
    elif input_hook.local_rng is not None:
        layer.entry_module.register_forward_hook(ColumnRngHook(input_hook))


def shard_outputs(layer: LinearLayer, shard: ModuleShard, axis: MeshAxis) -> None:
    """Shard only the output features of a layer: no hooks are added, the output stays sharded."""
    ranges = shard.rank_ranges[axis.index]
    _shard_weight(layer, layer.output_dim, ranges, axis.name)
    bias = layer.module._parameters.get("bias")
    if bias is not None:
        shard_parameter(f"{layer.name}.bias", bias, 0, ranges, axis.name)
    _set_features(layer, outputs=count_elements(ranges))


def select_needed_rows(
    layer: LinearLayer, shard: ModuleShard, input_hook: ChainInputHook, column_hook: ColumnInputHook | None
) -> None:
    """Keep the full weight of a layer, and compute only the output features that this rank needs."""
    axis = input_hook.axis
    for parameter in layer.module.parameters(recurse=False):
        mark_partial_gradient(parameter, axis.name)
    rank = axis.index
    if column_hook is not None:
        layer.entry_module.register_forward_pre_hook(column_hook)
    layer.module.forward = PartialRowsForward(layer, shard.rank_ranges[rank], shard.repeated_ranges[rank])
    if input_hook.local_rng is not None:
        layer.entry_module.register_forward_hook(ColumnRngHook(input_hook))


def shard_row(
    layer: LinearLayer,
    shard: ModuleShard,
    input_hook: ChainInputHook,
    sequence_sharding: StackSequenceSharding | None,
    tp_overlap_chunks: int,
) -> None:
    """Shard the input features of a layer.

    Args:
        input_hook: input hook of the layer's chain, which ends with this layer.
        sequence_sharding: shards the layer's output along the sequence; None: the output is replicated.
        tp_overlap_chunks: see `row_parallel_linear`.
    """
    axis = input_hook.axis
    _shard_weight(layer, layer.input_dim, shard.rank_ranges[axis.index], axis.name)
    bias = layer.module._parameters.get("bias")
    if bias is not None and sequence_sharding is not None:
        mark_partial_gradient(bias, axis.name)
    _set_features(layer, inputs=count_elements(shard.rank_ranges[axis.index]))
    sizes = count_rank_elements(shard.rank_ranges) if shard.style is ShardStyle.ROW_SPLIT else None
    layer.module.forward = RowParallelForward(layer, input_hook, sizes, sequence_sharding, tp_overlap_chunks)


def hook_tail_features(layer: LinearLayer, features: int, axis: MeshAxis) -> None:
    """Hook a replicated layer so that the backward sums over the ranks the gradient of the last `features` of its
    output, which the heads of all ranks use.
    """
    layer.entry_module.register_forward_hook(TailInputHook(axis, features))


class ColumnInputHook:
    """Pre-forward hook of a column layer: pass the input through the chain's input hook, which copies or all-gathers it
    once per chain.
    """

    def __init__(self, input_hook: ChainInputHook, sequence_sharding: StackSequenceSharding | None) -> None:
        self._input_hook, self.sequence_sharding = input_hook, sequence_sharding

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = get_input(module, args)
        sizes = self.sequence_sharding.rank_sizes(inputs) if self.sequence_sharding is not None else None
        return self._input_hook(inputs, sizes), *args[1:]


class ColumnGatherHook:
    """Forward hook of a column layer: all-gather the output features."""

    def __init__(self, axis: MeshAxis, sizes: list[int]) -> None:
        self._axis, self._sizes = axis, sizes

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return as_contiguous_non_view(gather_from_parallel_region(output, self._axis, -1, self._sizes))


class ColumnRngHook:
    """Forward hook of a column layer: switch to rank-specific random numbers until the row layer of the chain. No
    effect after the first column layer of the chain.
    """

    def __init__(self, input_hook: ChainInputHook) -> None:
        self._input_hook = input_hook

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        draws = self._input_hook.local_rng
        if module.training and draws is not None:
            draws.begin(output.device)


class PartialRowsForward:
    """Forward of a replicated layer that computes the output features that this rank needs, possibly repeated."""

    def __init__(self, layer: LinearLayer, rows: Ranges, repeats: Ranges) -> None:
        self._module, self._dim, self._rows = layer.module, layer.output_dim, rows
        self._repeats = _merge_ranges(repeats)

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of `[full output features, ...]` that correspond to the outputs of this forward."""
        some = select_ranges(rows, 0, self._rows)
        return torch.cat([some[start:stop] for start, stop in self._repeats])

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        made = self._needed(inputs)
        if self._repeats == ((0, made.shape[-1]),):
            return made
        return torch.cat([made[..., start:stop] for start, stop in self._repeats], -1)

    def _needed(self, inputs: torch.Tensor) -> torch.Tensor:
        if isinstance(self._module, PackedLinear):  # the product of all rows needs no unpacked weight
            return select_ranges(PackedLinear.forward(self._module, inputs), -1, self._rows)
        weight, bias = used_weight(self._module), used_bias(self._module)
        some = select_ranges(weight, self._dim, self._rows)
        return functional.linear(
            used_input(self._module, inputs),
            some if self._dim == 0 else some.t(),
            None if bias is None else select_ranges(bias, 0, self._rows),
        )


class RowParallelForward:
    """Forward of a layer with sharded input features: the partial product, its sum over ranks, then the bias, added
    once.
    """

    def __init__(
        self,
        layer: LinearLayer,
        input_hook: ChainInputHook,
        sizes: list[int] | None,
        sequence_sharding: StackSequenceSharding | None,
        tp_overlap_chunks: int,
    ) -> None:
        self._name, self._module, self._transposed = layer.name, layer.module, layer.transposed
        self._input_hook, self._sizes, self._sequence_sharding, self._tp_overlap_chunks = (
            input_hook,
            sizes,
            sequence_sharding,
            tp_overlap_chunks,
        )

    @property
    def axis(self) -> MeshAxis:
        """Axis over which the products are summed."""
        return self._input_hook.axis

    @property
    def splits_inputs(self) -> bool:
        """True if the inputs are replicated, and this forward takes its rank's part."""
        return self._sizes is not None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        hook, axis = self._input_hook, self._input_hook.axis
        gathered = hook.gathered_sizes
        hook.end_chain()
        if self._sizes is not None:
            inputs = scatter_to_parallel_region(inputs, axis, -1, self._sizes)
        if isinstance(self._module, PackedLinear):
            out = self._sum(self._module.multiply(inputs), gathered)
            return out if self._module.bias is None else out + self._module.bias.to(out.dtype)
        inputs, weight = used_input(self._module, inputs), used_weight(self._module)
        weight = weight.t() if self._transposed else weight
        if inputs.shape[-1] != weight.shape[-1]:
            raise make_cannot_shard_error(
                self._name,
                f"its input has {inputs.shape[-1]} features, not the {weight.shape[-1]} that this rank's part of the "
                "column-parallel layers computes, so it does not take their outputs alone",
                (self._name, "replicated"),
            )
        if self._sequence_sharding is None:
            out = row_parallel_linear(inputs, weight, axis, self._tp_overlap_chunks)
        else:
            out = self._sum(functional.linear(inputs, weight), gathered)
        bias = used_bias(self._module)
        return out if bias is None else out + bias.to(out.dtype)

    def _sum(self, partial: torch.Tensor, gathered: Any) -> torch.Tensor:
        """Return the sum of all ranks' products; only this rank's part of it if the sequence is sharded."""
        axis = self._input_hook.axis
        if self._sequence_sharding is None:
            return reduce_from_parallel_region(partial, axis)
        return as_contiguous_non_view(reduce_scatter(partial, axis, -2, gathered))


class TailInputHook:
    """Forward hook of a replicated layer: sum the gradient of the last output features over ranks in the backward."""

    def __init__(self, axis: MeshAxis, features: int) -> None:
        self._axis, self._features = axis, features

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        head, tail = output.split([output.shape[-1] - self._features, self._features], -1)
        return torch.cat([head, copy_to_parallel_region(tail, self._axis)], -1)


def _shard_weight(layer: LinearLayer, dim: int, ranges: Ranges, axis: str) -> None:
    if isinstance(layer.module, PackedMatrix):
        shard_packed(layer.name, layer.module, dim, ranges, axis)
        return
    weight = layer.module._parameters["weight"]
    assert weight is not None
    shard_parameter(f"{layer.name}.weight", weight, dim, ranges, axis)


def _set_features(layer: LinearLayer, inputs: int | None = None, outputs: int | None = None) -> None:
    """Update the feature counts in the module's attributes; `Conv1D` uses them in its forward."""
    for names, size in ((("in_features", "nx"), inputs), (("out_features", "nf"), outputs)):
        for name in names:
            if size is not None and hasattr(layer.module, name):
                setattr(layer.module, name, size)


def select_ranges(tensor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _merge_ranges(ranges: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
