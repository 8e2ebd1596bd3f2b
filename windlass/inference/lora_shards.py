"""Parts of LoRA adapters for linear layers that are sharded over the ranks of a model.

The rules are those of training; see [Note: adapters of sharded layers] in `windlass.parallel.tensor.lora_sharding`.
Unlike in training, A is not sharded on a row layer that gets all input features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.inference.lora_files import LowRankWeight
from windlass.parallel.placement import Ranges, get_placement
from windlass.parallel.tensor.linear_layers import as_linear_layer
from windlass.parallel.tensor.linear_sharding import PartialRowsForward, RowParallelForward, select_ranges


@dataclass(frozen=True)
class LayerShard:
    """Part of a linear layer on this rank.

    Attributes:
        in_features, out_features: sizes of the full layer.
        inputs: ranges of the input features that the forward gets.
        outputs: ranges of the output features that the forward returns, or the `PartialRowsForward` that selects them.
        axis: mesh axis over which `x @ a.T` is summed; None: the forward gets all input features.
    """

    in_features: int
    out_features: int
    inputs: Ranges
    outputs: Ranges | PartialRowsForward
    axis: MeshAxis | None

    def part_of(self, weight: LowRankWeight) -> LowRankWeight:
        """Return this rank's part of `weight`, the full LoRA matrices of one layer."""
        a = select_ranges(weight.a, 1, self.inputs)
        if isinstance(self.outputs, PartialRowsForward):
            return LowRankWeight(a, self.outputs.select(weight.b))
        return LowRankWeight(a, select_ranges(weight.b, 0, self.outputs))


def find_layer_shard(path: str, module: nn.Module) -> LayerShard | None:
    """Return the part of a linear layer that this rank has; None for other modules."""
    layer = as_linear_layer(path, module)
    weight = module._parameters.get("weight")
    if layer is None or layer.adapter_module is not None or weight is None:
        return _find_whole_layer(module)
    placement = get_placement(weight)
    in_features, out_features = placement.global_shape[layer.input_dim], placement.global_shape[layer.output_dim]
    all_inputs: Ranges = ((0, in_features),)
    inputs, outputs = placement.ranges[layer.input_dim], placement.ranges[layer.output_dim]
    forward = module.__dict__.get("forward")
    if isinstance(forward, PartialRowsForward):
        return LayerShard(in_features, out_features, all_inputs, forward, None)
    if isinstance(forward, RowParallelForward):
        if forward.splits_inputs:
            return LayerShard(in_features, out_features, all_inputs, outputs, None)
        return LayerShard(in_features, out_features, inputs, outputs, forward.axis)
    return LayerShard(in_features, out_features, inputs, outputs, None)


def _find_whole_layer(module: nn.Module) -> LayerShard | None:
    """Return a shard that covers the full layer if `module` has `in_features` and `out_features`, else None."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not isinstance(sizes[0], int) or not isinstance(sizes[1], int):
        return None
    return LayerShard(sizes[0], sizes[1], ((0, sizes[0]),), ((0, sizes[1]),), None)
