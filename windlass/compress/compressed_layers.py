"""Linear layers, convolutions and embeddings that are rounded and masked while they train.

Only the class of a layer changes: its parameters, their names and its place in the model stay. So an engine shards the
layer as before, and the full weight is in memory when the forward runs, at every stage of ZeRO.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.base.errors import ConfigError
from windlass.comm.mesh_axis import MeshAxis
from windlass.compress.fake_rounding import rounded_values, straight_through, top_share
from windlass.compress.sharded_weight import ShardedWeight, find_sharded_weight, is_partial, mark_scores

_MOMENTUM = 0.95  # momentum of the moving average of a static input range


class CompressionClock:
    """Counter of optimizer steps, which the techniques of all layers read.

    Attributes:
        source: function that returns the number of steps of an engine; None: a loop without engine sets `step`.
    """

    def __init__(self) -> None:
        self._step = 0
        self.source: Callable[[], int] | None = None

    @property
    def step(self) -> int:
        return self._step if self.source is None else self.source()

    @step.setter
    def step(self, value: int) -> None:
        self._step, self.source = value, None


@dataclass(frozen=True)
class WeightRounding:
    """Rounding of a weight from step `offset` on. Bits fall from `start_bits` to `target_bits`, by one after each
    period. The first period is `period` steps long, and each further period twice as long as the period before."""

    start_bits: int
    target_bits: int
    period: int = 1
    groups: int = 1
    symmetric: bool = True
    stochastic: bool = False
    offset: int = 0
    mixed_ratio: float = 0.0  # the unrounded weight's share falls from 1 by this per step; 0: rounded weight only
    form: str | None = None  # name of a weight format, used instead of bits and groups

    def bits(self, step: int) -> int:
        """Return the bits at a step."""
        bits, period, left = self.start_bits, self.period, step - self.offset
        while bits > self.target_bits and left >= period:
            bits, left, period = bits - 1, left - period, 2 * period
        return bits


@dataclass(frozen=True)
class InputRounding:
    """Rounding of a layer's inputs from step `offset` on: with a range for each vector along the last dimension, e.g. a
    token, or in a convolution for each sample (dynamic), or with a moving average of the ranges of full inputs
    (static)."""

    bits: int
    symmetric: bool = True
    static: bool = False
    offset: int = 0


@dataclass(frozen=True)
class Pruning:
    """Pruning mask of a weight.

    Attributes:
        kind: parts that are removed: `sparse`: single elements; `row` or `channel`: outputs; `head`: inputs of the
            attention's output layer, by head.
        method: rule by which weights stay: l1 (largest magnitude when the mask is added), topk (trained scores), or
            snip_momentum ([Note: SNIP scores]).
        dense_ratio: share of these parts that is kept.
        offset: first step with the mask.
        heads: number of heads, for `head`.
        end: step of the last change of the mask, for snip_momentum.
        stride: number of steps between two changes, for snip_momentum.
        block: numbers of outputs and of inputs of a block of weights that is removed together, for snip_momentum.
    """

    kind: str
    method: str
    dense_ratio: float
    offset: int = 0
    heads: int = 0
    end: int = 0
    stride: int = 1
    block: tuple[int, int] = (1, 1)


@dataclass
class LayerCompression:
    """Compression techniques of one layer."""

    name: str
    clock: CompressionClock
    weight: WeightRounding | None = None
    inputs: InputRounding | None = None
    prunings: dict[str, Pruning] = field(default_factory=dict)
    sharded: ShardedWeight | None = None  # division of the weight over tensor-parallel ranks
    partial: MeshAxis | None = None  # ranks that each compute a part of the gradient of the same weight
    # number of tensor-parallel ranks that each add the full bias, if the weight is sharded on its inputs; 0: only one
    # copy is added
    repeats_bias: int = 0
    values: Callable[[str, Tensor], Tensor] | None = None  # function that rounds a weight to a named format
    products: Tensor | None = None  # sum of weight times gradient over the backwards of a step
    shift: Tensor | None = None  # tensor that is added to the weight, to measure curvature
    shifted_square: float = 0.0  # sum of squares of the weight before the last shift
    planned_bits: Callable[[], int] | None = None  # function that replaces the schedule of bits


class CompressedLayer(nn.Module):
    """Base class of layers with compression techniques."""

    compression: LayerCompression
    weight: Any
    bias: Any

    def compressed_weight(self) -> Tensor:
        """Return the weight as the forward uses it."""
        clock, rounding = self.compression.clock.step, self.compression.weight
        weight: Tensor = self.weight
        if rounding is not None and clock >= rounding.offset:
            weight = self._rounded(weight, rounding, clock)
        for pruning in self.compression.prunings.values():
            if clock >= pruning.offset:
                weight = weight * self._local(self._spread(pruning, self.mask(pruning))).to(weight.dtype)
                if pruning.method == "snip_momentum" and clock <= max(pruning.offset, pruning.end):
                    self._record_products(weight)
        if self.compression.shift is not None:
            self.compression.shifted_square = float(weight.detach().float().square().sum())
            weight = weight + self.compression.shift.to(weight.dtype)
        return weight

    def take_products(self) -> Tensor | None:
        """Return the sum of weight times gradient over the backwards since the last call; None: there was none."""
        found, self.compression.products = self.compression.products, None
        return found

    def _record_products(self, used: Tensor) -> None:
        if not (self.training and used.requires_grad):
            return
        own = self.weight

        def add(grad: Tensor) -> None:
            product = own.detach().float() * grad.float()
            before = self.compression.products
            self.compression.products = product if before is None else before + product

        used.register_hook(add)

    def compressed_bias(self) -> Tensor | None:
        """Return the bias as the forward uses it, with pruned outputs set to 0; None: the layer has no bias."""
        bias: Tensor | None = self.bias
        for pruning in self.compression.prunings.values():
            if (
                bias is not None
                and pruning.kind in ("row", "channel")
                and self.compression.clock.step >= pruning.offset
            ):
                mask = self._spread(pruning, self.mask(pruning))
                if pruning.method == "topk" and self.compression.repeats_bias:
                    # each rank adds the full bias, and the scores' gradients are summed over ranks: scale these down
                    mask = mask.detach() + (mask - mask.detach()) / self.compression.repeats_bias
                bias = bias * self._local(mask).flatten().to(bias.dtype)
        return bias

    def mask(self, pruning: Pruning) -> Tensor:
        """Return the mask of a technique: `[out, in, ...]` for elements, `[out]` for outputs, or `[heads]`."""
        if pruning.method != "topk":
            return self.get_buffer(mask_name(pruning))
        return top_share(self.get_parameter(mask_name(pruning)), pruning.dense_ratio)

    def compressed_input(self, input: Tensor) -> Tensor:
        """Return the input as the forward uses it."""
        rounding = self.compression.inputs
        if rounding is None or self.compression.clock.step < rounding.offset or not input.is_floating_point():
            return input
        sharded = self.compression.sharded
        whole = sharded.gather(input, input.dim() - 1) if sharded is not None and sharded.dim == 1 else input.detach()
        if not whole.numel():  # an expert without tokens
            return input
        if rounding.static:
            span = self.get_buffer("input_range")
            seen = torch.stack(torch.aminmax(whole.float()))
            fresh = (span == 0).all()  # stays on the device, without a sync
            if self.training:
                span.copy_(torch.where(fresh, seen, _MOMENTUM * span + (1 - _MOMENTUM) * seen))
            else:  # if `fresh`, no training step has set the range yet: take the range of this input
                span = torch.where(fresh, seen, span)
            rounded = _round_in_range(whole, span, rounding)
        else:
            rounded = rounded_values(whole, rounding.bits, self._ranges(whole), symmetric=rounding.symmetric)
        if whole.shape != input.shape:
            assert sharded is not None
            rounded = sharded.local(rounded, input.dim() - 1)
        return straight_through(input, rounded)

    def _ranges(self, input: Tensor) -> int:
        """Return the number of ranges of a non-empty input with dynamic ranges: one for each vector."""
        return input.numel() // input.shape[-1]

    def _rounded(self, weight: Tensor, rounding: WeightRounding, clock: int) -> Tensor:
        sharded = self.compression.sharded
        whole = weight.detach() if sharded is None else sharded.gather(weight, sharded.dim)
        if rounding.form is not None:
            assert self.compression.values is not None
            rounded = self.compression.values(rounding.form, whole).to(weight.dtype)
        else:
            rounded = self._rounded_whole(whole, rounding, clock)
        rounded = straight_through(weight, rounded if sharded is None else sharded.local(rounded, sharded.dim))
        wide = max(0.0, 1 - rounding.mixed_ratio * (clock - rounding.offset)) if rounding.mixed_ratio else 0.0
        return wide * weight + (1 - wide) * rounded if wide else rounded

    def _rounded_whole(self, whole: Tensor, rounding: WeightRounding, clock: int) -> Tensor:
        noise = None
        if rounding.stochastic:  # equal noise on all ranks, and in recomputed forwards
            noise = torch.Generator().manual_seed(zlib.crc32(f"{self.compression.name} {clock}".encode()))
        planned = self.compression.planned_bits
        bits = rounding.bits(clock) if planned is None else planned()
        return rounded_values(whole, bits, rounding.groups, symmetric=rounding.symmetric, noise=noise)

    def _local(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a mask."""
        sharded = self.compression.sharded
        return whole if sharded is None else sharded.local(whole, sharded.dim)

    def _spread(self, pruning: Pruning, mask: Tensor) -> Tensor:
        """Return a mask that broadcasts to the shape of the full weight."""
        if pruning.kind == "head":
            sharded = self.compression.sharded
            inputs = sharded.size if sharded is not None and sharded.dim == 1 else self.weight.shape[1]
            return mask.flatten().repeat_interleave(inputs // pruning.heads)[None]
        if pruning.kind == "sparse":
            return mask
        return mask.view(-1, *[1] * (self.weight.dim() - 1))


class CompressedLinear(CompressedLayer, nn.Linear):
    """Linear layer with compression techniques."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.compressed_input(input), self.compressed_weight(), self.compressed_bias())


class CompressedConv2d(CompressedLayer, nn.Conv2d):
    """Convolution with compression techniques."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(self.compressed_input(input), self.compressed_weight(), self.compressed_bias())
        return out

    def _ranges(self, input: Tensor) -> int:
        """Return the number of samples: a row of an image, unlike a token, has no range of its own."""
        return len(input) if input.dim() == 4 else 1


class CompressedEmbedding(CompressedLayer, nn.Embedding):
    """Embedding whose weight is rounded."""

    bias = None

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(
            input,
            self.compressed_weight(),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


COMPRESSED: dict[type[nn.Module], type[CompressedLayer]] = {
    nn.Linear: CompressedLinear,
    nn.Conv2d: CompressedConv2d,
    nn.Embedding: CompressedEmbedding,
}


def mask_name(pruning: Pruning) -> str:
    """Return the name of the buffer or parameter of a mask."""
    return f"{pruning.kind}_pruning_{'scores' if pruning.method == 'topk' else 'mask'}"


def replace_class(module: nn.Module, compression: LayerCompression) -> CompressedLayer:
    """Change a layer's class to its class in `COMPRESSED`, in place, and set `compression`. A layer with that class is
    returned unchanged.
    """
    if not isinstance(module, CompressedLayer):
        module.__class__ = COMPRESSED[type(module)]
        module.__dict__["compression"] = compression
    assert isinstance(module, CompressedLayer)
    return module


def add_pruning(layer: CompressedLayer, pruning: Pruning) -> None:
    """Add a mask of the largest weights (l1), scores that the mask is computed from (topk), or a mask that keeps all
    weights at first (snip_momentum).

    Raises:
        ConfigError: the layer has a mask of this kind, the heads do not divide its inputs, or its weight is not in
            memory.
    """
    weight = layer.weight
    if pruning.kind in layer.compression.prunings:
        raise ConfigError(f"two groups of {pruning.kind}_pruning name {layer.compression.name!r}; leave one out")
    if pruning.kind == "head" and (not pruning.heads or weight.shape[1] % pruning.heads):
        raise ConfigError(
            f"head_pruning.shared_parameters.num_heads is {pruning.heads or None}, which does not divide the "
            f"{weight.shape[1]} inputs of {layer.compression.name!r}; write the model's number of heads"
        )
    if weight.is_meta or weight.numel() == 0:
        raise ConfigError(
            f"the weight of {layer.compression.name!r} is not in memory; call init_compression before initialize, on a "
            "model that was built without zero.Init"
        )
    norms = weight.detach().abs().float()
    if pruning.kind == "head":
        norms = norms.view(len(weight), pruning.heads, -1).sum((0, 2))
    elif pruning.kind != "sparse":
        norms = norms.flatten(1).sum(1)
    if pruning.method == "l1":
        layer.register_buffer(mask_name(pruning), top_share(norms, pruning.dense_ratio) > 0)
    elif pruning.method == "snip_momentum":
        layer.register_buffer(mask_name(pruning), torch.ones_like(weight, dtype=torch.bool))
        layer.register_buffer("sparse_pruning_momentum", torch.zeros_like(norms))
    else:  # scores are initialized so that they give the same mask as l1
        scores = norms / norms.mean().clamp(min=1e-12)
        layer.register_parameter(mask_name(pruning), nn.Parameter(scores.to(weight.dtype)))
    layer.compression.prunings[pruning.kind] = pruning


def shard_compressed_layers(model: nn.Module, axis: MeshAxis) -> None:
    """Record in compressed layers the tensor-parallel ranks that hold parts of their weights. Call it after the model
    is divided over the axis, and before ZeRO shards it. Collective over the axis."""
    for module in model.modules():
        if not isinstance(module, CompressedLayer):
            continue
        sharded = module.compression.sharded = find_sharded_weight(module.weight, axis)
        module.compression.partial = axis if is_partial(module.weight, axis) else None
        bias = getattr(module, "bias", None)
        if sharded is not None and sharded.dim == 1 and bias is not None and not is_partial(bias, axis):
            module.compression.repeats_bias = axis.size
        for pruning in module.compression.prunings.values():
            if pruning.method == "topk" and (sharded is not None or module.compression.partial is not None):
                mark_scores(module.get_parameter(mask_name(pruning)), axis)


def _round_in_range(input: Tensor, span: Tensor, rounding: InputRounding) -> Tensor:
    levels = 2**rounding.bits
    low, high = span[0], span[1]
    if rounding.symmetric:
        scale = (2 * span.abs().max() / levels).clamp(min=1e-12)
        rounded = (input.float() / scale).round().clamp_(-levels / 2, levels / 2 - 1) * scale
    else:
        scale = ((high - low) / levels).clamp(min=1e-12)
        zero = (low / scale).round() * scale
        rounded = ((input.float() - zero) / scale).round().clamp_(0, levels - 1) * scale + zero
    result: Tensor = rounded.to(input.dtype)
    return result
