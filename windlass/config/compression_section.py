"""Sections for model compression: quantization, pruning, layer reduction."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.config_section import ConfigSection, Count, Float, Int, Names, Positive
from windlass.config.key_status import accepted, honoured


class LayerReduction(ConfigSection):
    """Distillation to a student with fewer layers."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Let `init_compression` copy layers of its argument `teacher_model` into the model."""
    keep_number_layer: Positive | None = honoured(None)
    """Number of layers of the smaller model."""
    module_name_prefix: str | None = honoured(None)
    """Name of the list of layers, e.g. `bert.encoder.layer`."""
    teacher_layer: list[Int] | None = honoured(None)
    """For each layer of the model, the index of the teacher's layer from which it is initialized."""
    other_module_name: Names | None = honoured(None)
    """Names of modules outside the list that are also copied from the teacher."""


class MixedQuantize(ConfigSection):
    """Gradual change from fp16 to quantized weights."""

    enabled: bool = honoured(False)
    """Mix rounded and unrounded weights at the beginning."""
    quantize_change_ratio: Float = honoured(0.001)
    """Decrease of the unrounded weight's share in each step."""


class CompressionSharedParams(ConfigSection):
    """Options common to all groups of modules of one compression technique."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Use the technique."""
    schedule_offset: Count = honoured(1000)
    """Optimizer step from which the technique runs."""


class WeightQuantizationShared(CompressionSharedParams):
    """Common options of weight quantization."""

    quantizer_kernel: bool = accepted(False, "rounding is part of the forward on every device")
    schedule_offset: Count = honoured(0)
    """Optimizer step from which weights are rounded."""
    quantize_groups: Positive = honoured(1)
    """Number of slices of a flattened weight. Each slice has its own scale, and in an embedding each row."""
    quantize_verbose: bool = accepted(False, "nothing is logged for each layer")
    quantization_type: Literal["symmetric", "asymmetric"] = honoured("symmetric")
    """`symmetric` around 0, or `asymmetric` with a zero point; without effect at 1 and 2 bits."""
    rounding: Literal["nearest", "stochastic"] = honoured("nearest")
    """Rounding to the `nearest` value, or `stochastic`: up or down at random. Without effect at 1 and 2 bits."""
    quantize_weight_in_forward: bool = accepted(
        False, "weights are rounded in the forward; the optimizer keeps unrounded ones in every precision"
    )
    fp16_mixed_quantize: MixedQuantize = honoured(MixedQuantize)
    """Gradual change from unrounded to rounded weights."""


class ActivationQuantizationShared(CompressionSharedParams):
    """Common options of activation quantization."""

    quantization_type: Literal["symmetric", "asymmetric"] = honoured("symmetric")
    """`symmetric` around 0, or `asymmetric` with a zero point."""
    range_calibration: Literal["dynamic", "static"] = honoured("dynamic")
    """Range of the rounded values. `dynamic`: computed for each token, in a convolution for each sample; `static`: a
    running range of all tokens."""


class PruningShared(CompressionSharedParams):
    """Common options of pruning."""

    method: str = honoured("l1")
    """Choice of the rows or channels to keep. `l1`: those with the largest sums of absolute weights at the beginning;
    `topk`: those with the highest trained scores."""


class SparsePruningShared(PruningShared):
    """Common options of sparse pruning."""

    method: str = honoured("l1")
    """Choice of the weights to keep. `l1`: the largest absolute values at the beginning; `topk`: the highest trained
    scores; `snip_momentum`: the largest products of weight and gradient, chosen again every schedule_offset_stride
    steps, each time fewer of them. The keys below apply only to `snip_momentum`."""
    schedule_offset_end: Count = honoured(1000)
    """Optimizer step of the last change of the mask."""
    schedule_offset_stride: Positive = honoured(1)
    """Number of optimizer steps between changes of the mask."""
    block_pattern: str = honoured("4x1")
    """Outputs x inputs of a block of weights that are removed together."""
    dense_ratio: Float = honoured(0.1)
    """Share of the blocks that stays at the end, unless a group sets its own."""
    excluded_modules: Names = honoured(list)
    """Regular expressions for names of layers that are not pruned."""


class HeadPruningShared(PruningShared):
    """Common options of head pruning."""

    method: str = honoured("topk")
    """Choice of the heads to keep. `topk`: those with the highest trained scores."""
    num_heads: Positive | None = honoured(None)
    """Number of attention heads of the model."""


class GroupParams(ConfigSection):
    """Options of one group of modules. A technique reads only the options that concern it."""

    start_bits: Positive | None = honoured(None)
    """Bits of weights at the beginning; `target_bits` by default."""
    target_bits: Positive | None = honoured(None)
    """Bits of weights at the end: 1, 2 (ternary), or 3 to 16."""
    weight_format: str | None = honoured(None, windlass_only=True)
    """Weight format, e.g. `int2_g64`, `ternary` or `binary`, instead of `target_bits` and `quantize_groups`: weights
    are rounded to the values that `pack_trained_layers` stores in this format."""
    quantization_period: Count = honoured(1)
    """Number of steps with `start_bits`. Then the bits fall by one at a time, each time after twice as many steps as
    the time before. 0: `target_bits` at once."""
    bits: Positive | None = honoured(None)
    """Bits of the inputs of layers, in `activation_quantization`; null: 8."""
    dense_ratio: Float | None = honoured(None)
    """Share of elements, rows, heads or channels that stays."""


class CompressionGroup(ConfigSection):
    """Group of modules with the same options."""

    params: GroupParams = honoured(GroupParams)
    """Options of the group."""
    modules: Names = honoured(["*"])
    """Regular expressions that are searched in names of layers; `*`: all."""
    related_modules: list[Any] | None = honoured(None)
    """For each pattern in `modules`, patterns of the layers that read the pruned outputs, or that compute the pruned
    heads. `redundancy_clean` removes the pruned parts from them too."""


class CompressionTechnique(ConfigSection):
    """Technique with common options and named groups of modules."""

    enable_key = "shared_parameters.enabled"

    shared_parameters: CompressionSharedParams = honoured(CompressionSharedParams)
    """Options of all groups."""
    different_groups: dict[str, CompressionGroup] = honoured(dict)
    """Groups of layers, each under a name of your choice."""


class WeightQuantizationTraining(CompressionTechnique):
    """Quantization-aware training of weights."""

    shared_parameters: WeightQuantizationShared = honoured(WeightQuantizationShared)
    """Options of all groups."""


class ActivationQuantization(CompressionTechnique):
    """Quantization of activations."""

    shared_parameters: ActivationQuantizationShared = honoured(ActivationQuantizationShared)
    """Options of all groups."""


class SparsePruning(CompressionTechnique):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared = honoured(SparsePruningShared)
    """Options of all groups. With `snip_momentum` and without groups all linear layers and convolutions are pruned."""


class RowPruning(CompressionTechnique):
    """Pruning of rows of matrices."""

    shared_parameters: PruningShared = honoured(PruningShared)
    """Options of all groups."""


class HeadPruning(CompressionTechnique):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = honoured(HeadPruningShared)
    """Options of all groups."""


class ChannelPruning(CompressionTechnique):
    """Pruning of channels of convolutions."""

    shared_parameters: PruningShared = honoured(PruningShared)
    """Options of all groups."""


class CompressionTraining(ConfigSection):
    """Compression during training."""

    layer_reduction: LayerReduction = honoured(LayerReduction)
    """Student with fewer layers, which are initialized from layers of a teacher."""
    weight_quantization: WeightQuantizationTraining = honoured(WeightQuantizationTraining)
    """Rounded weights."""
    activation_quantization: ActivationQuantization = honoured(ActivationQuantization)
    """Rounded inputs of layers."""
    sparse_pruning: SparsePruning = honoured(SparsePruning)
    """Masks of single weights."""
    row_pruning: RowPruning = honoured(RowPruning)
    """Masks of output features."""
    head_pruning: HeadPruning = honoured(HeadPruning)
    """Masks of attention heads."""
    channel_pruning: ChannelPruning = honoured(ChannelPruning)
    """Masks of channels of convolutions."""


class ModuleQuantization(ConfigSection):
    """Format of the packed weights of some modules."""

    num_bits: Literal[2, 3, 4, 6, 8] | None = honoured(None)
    """Bits of a weight; DeepSpeed has only 4 and 8. If the key is absent, nothing is packed."""
    group_size: Positive = honoured(64)
    """Number of successive weights with one scale."""
    group_dim: Literal[0, 1] = honoured(1)
    """Dimension along which the weights of a group follow one another: 0, output features, or 1, input features."""
    symmetric: bool = honoured(False)
    """False: the integers cover the range from the minimum to the maximum of a group, as in DeepSpeed. True: they cover
    a range symmetric around zero (windlass's `int` formats), and native kernels multiply with the packed weights."""


class WeightQuantization(ConfigSection):
    """Packed, frozen weights of linear layers and embeddings."""

    enabled: bool = honoured(True)
    """False: the keys below have no effect."""
    num_bits: Positive = accepted(
        8, "DeepSpeed never reads this key; write the bits in quantized_initialization or post_init_quant"
    )
    q_type: Literal["symmetric", "asymmetric"] = accepted("symmetric", "as `num_bits`")
    q_groups: Positive = accepted(1, "as `num_bits`")
    quantized_initialization: ModuleQuantization = honoured(ModuleQuantization)
    """Format of all linear layers and embeddings. `zero.Init` and `windlass.from_pretrained` pack them while the model
    is built; `initialize` packs the remaining ones.
    """
    post_init_quant: dict[str, ModuleQuantization] = honoured(dict)
    """Format of the modules whose names contain the key. `initialize` and `init_inference` pack these modules."""


class Eigenvalue(ConfigSection):
    """Measurement of the curvature of each block of layers. In `quantize_training`, a block with a larger curvature
    keeps its number of bits longer."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Measure the largest eigenvalue of each block's Hessian."""
    verbose: bool = accepted(False, "nothing is logged for each block")
    max_iter: Positive = honoured(100)
    """Maximum number of iterations for an eigenvalue, each with two forwards and backwards."""
    tol: Float = honoured(0.01)
    """The iteration ends when the eigenvalue changes by less than this, relative to its value."""
    stability: Float = honoured(1e-6)
    """Number added to a norm before a vector is divided by the norm."""
    gas_boundary_resolution: Positive = honoured(1)
    """Number of steps; bits may decrease only at multiples of this number."""
    layer_name: str = honoured("bert.encoder.layer")
    """Name of the list of blocks; empty: the numbered layers of the model itself, as a `PipelineModule` has them."""
    layer_num: Count = honoured(0)
    """Number of blocks; 0: all blocks of the list."""
