"""Operations of a decoder layer, of the embedding and of the head: FLOPs, memory traffic, and their time on a device.

[Note: time of an operation] An operation takes the longest of three times: its FLOPs at the rate that the device
reaches in matrix products, its bytes at the rate that the device reaches in copies, and the launches of its kernels.
The bytes of a product are its inputs, weights and outputs. The bytes of other operations are every access of eager
PyTorch (`fused=False`), or one read of each input and one write of each output (`fused=True`: torch.compile, or fused
kernels).

Model FLOPs count all scores of causal attention, as the formulas of Megatron and PaLM do. The time of fused causal
attention counts half of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.parallel.model_shape import ModelShape
from windlass.parallel.tensor.head_partition import partition_heads
from windlass.parallel.tensor.rank_ranges import count_elements, make_even_ranges, make_expert_ranges
from windlass.simulate.hardware_parts import DevicePart

_WIDE = 4  # bytes of an intermediate element of norms and losses

CHECKPOINTING = ("none", "full", "selective")
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp64": 8}


@dataclass(frozen=True)
class ComputeStyle:
    """Style of a model's computation.

    Attributes:
        dtype: Short name of the computation's dtype.
        fused: Operations between products are fused, by torch.compile or by hand.
        linear_dtype: Dtype of the products of linear layers, such as `fp8`; empty: `dtype`.
        checkpointing: `none`, `full` (a layer's forward runs again before its backward) or `selective` (every second
            product and all other operations except attention run again).
        causal: Attention is causal.
    """

    dtype: str = "bf16"
    fused: bool = False
    linear_dtype: str = ""
    checkpointing: str = "none"
    causal: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an activation element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Operation:
    """Operations of one kind that run in sequence.

    Attributes:
        kind: `product`, `attention` or `other`.
        flops: FLOPs that the device executes.
        nbytes: Bytes that the device reads and writes.
        launches: Number of kernels.
        dtype: Dtype of a product, by short name.
        model_flops: FLOPs as counted for model FLOPs utilization (MFU).
        cast_bytes: Bytes that kernels before a product read and write to convert its inputs to the product's dtype.
    """

    kind: str
    flops: float
    nbytes: float
    launches: int = 1
    dtype: str = "bf16"
    model_flops: float = 0.0
    cast_bytes: float = 0.0

    def scaled(self, factor: float) -> Operation:
        """Return the operation with `factor` times the FLOPs and bytes, in as many kernels."""
        return replace(
            self, flops=factor * self.flops, nbytes=factor * self.nbytes, cast_bytes=factor * self.cast_bytes
        )

    def seconds(self, device: DevicePart) -> float:
        """Return the time on a device."""
        share = device.matmul_efficiency
        if self.kind == "attention" and device.attention_efficiency:
            share = device.attention_efficiency
        arithmetic = self.flops / (device.peak(self.dtype) * share) if self.flops else 0.0
        rate = device.memory_rate * device.memory_efficiency
        return max(arithmetic, self.nbytes / rate, self.launches * device.launch_seconds) + self.cast_bytes / rate


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the part of a layer that one rank computes, for one micro-batch.

    Attributes:
        tokens: Tokens of the rank.
        length: Tokens that an attention head attends over.
        attended: Tokens for which the rank computes attention in each of `attention_heads` heads.
        heads, kv_heads: Heads of the projections on this rank.
        attention_heads: Heads for which the rank computes attention.
        inner: Inner width of the rank's feed-forward network or of one expert.
        rows: Rows that the rank's feed-forward network or experts process.
        norm_tokens: Tokens for which the rank computes norms and residuals.
        vocabulary: Rows of the rank's embedding and head.
        local_experts: Experts on this rank; 0: one feed-forward network.
        shares_keys: Several ranks along tp compute the same key heads, so that each has the full matrices of keys and
            values.
    """

    tokens: int
    length: int
    attended: int
    heads: int
    kv_heads: int
    attention_heads: int
    inner: int
    rows: int
    norm_tokens: int
    vocabulary: int
    local_experts: int
    shares_keys: bool = False


def layer_sizes(
    shape: ModelShape,
    samples: int,
    length: int,
    *,
    tp: int,
    sp: int,
    ep: int,
    ulysses: int,
    sequence_norms: bool,
    tp_rank: int = 0,
) -> LayerSizes:
    """Return the sizes of one rank's part of a layer, for a micro-batch of `samples` sequences of `length` tokens.

    Args:
        tp_rank: Rank along tp. If the parts differ, those of the first ranks are the largest.
    """
    tokens = samples * -(-length // sp)
    partition = partition_heads("attention", shape.heads, shape.resolved_kv_heads, tp)
    (first, last), (first_key, last_key) = partition.query_ranges[tp_rank], partition.key_range(tp_rank)
    heads = last - first
    split = make_expert_ranges if shape.experts else make_even_ranges
    rounds = sp // ulysses
    return LayerSizes(
        tokens=tokens,
        length=length,
        attended=samples * -(-length // rounds),
        heads=heads,
        kv_heads=last_key - first_key,
        shares_keys=partition.has_shared_keys,
        attention_heads=-(-heads // ulysses),
        inner=count_elements(split(shape.intermediate or 4 * shape.hidden, tp)[tp_rank]),
        rows=tokens * (shape.top_k if shape.experts else 1),
        norm_tokens=-(-tokens // tp) if sequence_norms else tokens,
        vocabulary=count_elements(make_even_ranges(shape.vocabulary, tp)[tp_rank]),
        local_experts=-(-shape.experts // ep),
    )


def product(m: float, k: float, n: float, style: ComputeStyle, *, weights: int = 1, linear: bool = True) -> Operation:
    """Return the operation of a product `[m, k] x [k, n]`, whose m input rows are divided among `weights` matrices
    `[k, n]`, e.g. those of experts."""
    flops, size = 2.0 * m * k * n, style.itemsize
    dtype = (style.linear_dtype or style.dtype) if linear else style.dtype
    inputs, cast_bytes = m * k + weights * k * n, 0.0
    nbytes = size * (inputs + m * n)
    if dtype == "fp8" and style.dtype != "fp8":
        # Kernels before the product read each input for its largest value, read it again, and write it in fp8.
        cast_bytes = (2 * size + 1) * inputs
        nbytes = inputs + size * m * n
    return Operation("product", flops, nbytes, weights, dtype, flops, cast_bytes)


def backward_of(one: Operation) -> Operation:
    """Return the backward of an operation, with twice the work of its forward.

    The backward of a product is two products: the gradients of its input and of its weight. Other operations read or
    write about twice the bytes.
    """
    return replace(one.scaled(2), launches=2 * one.launches, model_flops=2 * one.model_flops)


def elementwise(elements: float, eager: float, fused: float, launches: int, style: ComputeStyle) -> Operation:
    """Return operations that read and write `eager` bytes per element, or `fused` bytes if they are fused."""
    return Operation(
        "other", 0.0, elements * (fused if style.fused else eager), 1 if style.fused else launches, style.dtype
    )


def attention(
    shape: ModelShape, sizes: LayerSizes, style: ComputeStyle, device: DevicePart, *, back: bool
) -> Operation:
    """Return the attention of one layer: scores, softmax and weighted values. The backward of fused attention
    recomputes the scores."""
    width, size = shape.resolved_head_dim, style.itemsize
    scores = float(sizes.attended) * sizes.length * sizes.attention_heads
    model = 4.0 * scores * width * (2 if back else 1)
    fused = device.attention_efficiency > 0
    flops = model * (0.5 if style.causal and fused else 1.0) * (1.25 if back and fused else 1.0)
    rows = sizes.attended * sizes.attention_heads * width
    nbytes = size * rows * (8.0 if back else 4.0)
    if not fused:
        # Product, softmax and dropout each write the scores, and the next operation reads them.
        nbytes += scores * size * (12 if back else 6)
    return Operation("attention", flops, nbytes, 3 if back else 1, style.dtype, model)


def _norm_bytes(style: ComputeStyle) -> float:
    size = style.itemsize
    return 4 * size + 7 * _WIDE - (2 * size + 2 * _WIDE if size == _WIDE else 0)


@dataclass(frozen=True)
class Segment:
    """Computation between two collectives of a layer.

    Attributes:
        name: Name of the segment: `attention inputs`, `attention`, `attention output`, `feed-forward inputs`,
            `feed-forward`, `embedding`, `head`, `gradients`.
    """

    name: str
    operations: tuple[Operation, ...]

    def seconds(self, device: DevicePart) -> float:
        """Return the time on a device."""
        return sum(one.seconds(device) for one in self.operations)

    @property
    def flops(self) -> float:
        """FLOPs that the device executes."""
        return sum(one.flops for one in self.operations)

    @property
    def model_flops(self) -> float:
        """FLOPs as counted for MFU."""
        return sum(one.model_flops for one in self.operations)


def layer_forward(shape: ModelShape, sizes: LayerSizes, style: ComputeStyle, device: DevicePart) -> list[Segment]:
    """Return the forward of a layer in five segments, in order."""
    size, hidden, width = style.itemsize, shape.hidden, shape.resolved_head_dim
    projected = (sizes.heads + 2 * sizes.kv_heads) * width
    norm = elementwise(sizes.norm_tokens * hidden, _norm_bytes(style), 2 * size, 6, style)
    residual = elementwise(sizes.norm_tokens * hidden, 3 * size, 3 * size, 1, style)
    rotary = elementwise(sizes.tokens * (sizes.heads + sizes.kv_heads) * width, 11 * size, 2 * size, 10, style)
    activation = elementwise(
        sizes.rows * sizes.inner, (5 if shape.gated else 2) * size, (3 if shape.gated else 2) * size, 2, style
    )
    experts = max(1, sizes.local_experts)
    ways = 2 if shape.gated else 1
    inner = replace(product(sizes.rows, hidden, ways * sizes.inner, style, weights=experts), launches=ways * experts)
    routing = [product(sizes.tokens, hidden, shape.experts, style, linear=False)] if shape.experts else []
    moved = elementwise(sizes.rows * hidden, 4 * size, 4 * size, 2, style)
    return [
        Segment("attention inputs", (norm, product(sizes.tokens, hidden, projected, style), rotary)),
        Segment("attention", (attention(shape, sizes, style, device, back=False),)),
        Segment("attention output", (product(sizes.tokens, sizes.heads * width, hidden, style),)),
        Segment("feed-forward inputs", (residual, norm, *routing, *([moved] if shape.experts else []))),
        Segment(
            "feed-forward",
            (
                inner,
                activation,
                product(sizes.rows, sizes.inner, hidden, style, weights=experts),
                *([moved] if shape.experts else []),
                residual,
            ),
        ),
    ]


def layer_backward(shape: ModelShape, sizes: LayerSizes, style: ComputeStyle, device: DevicePart) -> list[Segment]:
    """Return the backward of a layer in five segments, in the order of the backward: the feed-forward first."""
    segments = []
    for one in reversed(layer_forward(shape, sizes, style, device)):
        if one.name == "attention":
            segments.append(Segment(one.name, (attention(shape, sizes, style, device, back=True),)))
        else:
            segments.append(Segment(one.name, tuple(backward_of(operation) for operation in one.operations)))
    return segments


def recomputed(segments: list[Segment], style: ComputeStyle) -> list[Segment]:
    """Return the part of a layer's forward that runs again before its backward, in the order of the forward."""
    if style.checkpointing == "none":
        return []
    if style.checkpointing == "full":
        return [
            replace(one, operations=tuple(replace(op, model_flops=0.0) for op in one.operations)) for one in segments
        ]
    found, products = [], 0
    for one in segments:
        kept = []
        for op in one.operations:
            if op.kind == "attention":
                continue
            products += op.kind == "product"
            if op.kind == "product" and products % 2 == 0:
                continue
            kept.append(replace(op, model_flops=0.0))
        found.append(Segment(one.name, tuple(kept)))
    return found


def embedding_work(shape: ModelShape, sizes: LayerSizes, style: ComputeStyle) -> tuple[Segment, Segment]:
    """Return the forward and backward of the embedding."""
    size = style.itemsize
    rows = elementwise(sizes.tokens * shape.hidden, 2 * size, 2 * size, 1, style)
    filled = elementwise(sizes.vocabulary * shape.hidden, size, size, 1, style)  # dense gradient of the embedding
    return Segment("embedding", (rows,)), Segment("embedding", (rows, filled))


def head_work(shape: ModelShape, sizes: LayerSizes, style: ComputeStyle) -> tuple[Segment, Segment]:
    """Return the forward and backward of the last norm, the head and the loss."""
    size, logits = style.itemsize, sizes.tokens * sizes.vocabulary
    norm = elementwise(sizes.norm_tokens * shape.hidden, _norm_bytes(style), 2 * size, 6, style)
    head = product(sizes.tokens, shape.hidden, sizes.vocabulary, style, linear=False)
    loss = elementwise(logits, size + 3 * _WIDE, size, 3, style)
    back = elementwise(logits, size + 3 * _WIDE, 2 * size, 3, style)
    return Segment("head", (norm, head, loss)), Segment("head", (back, backward_of(head), backward_of(norm)))
