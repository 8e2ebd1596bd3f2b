"""Sections for model compression: quantization, pruning, layer reduction."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.config_section import ConfigSection, Count, Float, Int, Names, Positive
from windlass.config.key_status import refused


class LayerReduction(ConfigSection):
    """Distillation to a student with fewer layers."""

    enable_key = "enabled"

    enabled: bool = refused(False, "")
    keep_number_layer: Positive | None = refused(None, "")
    module_name_prefix: str | None = refused(None, "")
    teacher_layer: list[Int] | None = refused(None, "")
    other_module_name: Names | None = refused(None, "")


class MixedQuantize(ConfigSection):
    """Gradual change from fp16 to quantized weights."""

    enabled: bool = refused(False, "")
    quantize_change_ratio: Float = refused(0.001, "")


class CompressionSharedParams(ConfigSection):
    """Options common to all groups of a technique."""

    enable_key = "enabled"

    enabled: bool = refused(False, "")
    schedule_offset: Count = refused(1000, "")


class WeightQuantizationShared(CompressionSharedParams):
    """Common options of weight quantization."""

    quantizer_kernel: bool = refused(False, "")
    schedule_offset: Count = refused(0, "")
    quantize_groups: Positive = refused(1, "")
    quantize_verbose: bool = refused(False, "")
    quantization_type: Literal["symmetric", "asymmetric"] = refused("symmetric", "")
    rounding: Literal["nearest", "stochastic"] = refused("nearest", "")
    quantize_weight_in_forward: bool = refused(False, "")
    fp16_mixed_quantize: MixedQuantize = refused(MixedQuantize, "")


class ActivationQuantizationShared(CompressionSharedParams):
    """Common options of activation quantization."""

    quantization_type: Literal["symmetric", "asymmetric"] = refused("symmetric", "")
    range_calibration: Literal["dynamic", "static"] = refused("dynamic", "")


class PruningShared(CompressionSharedParams):
    """Common options of pruning."""

    method: str = refused("l1", "")


class SparsePruningShared(PruningShared):
    """Common options of sparse pruning."""

    schedule_offset_end: Count = refused(1000, "")
    schedule_offset_stride: Positive = refused(1, "")
    block_pattern: str = refused("4x1", "")
    dense_ratio: Float = refused(0.1, "")
    excluded_modules: Names = refused(list, "")


class HeadPruningShared(PruningShared):
    """Common options of head pruning."""

    method: str = refused("topk", "")
    num_heads: Positive | None = refused(None, "")


class GroupParams(ConfigSection):
    """Options of one group of modules; each technique reads its own."""

    start_bits: Positive | None = refused(None, "")
    target_bits: Positive | None = refused(None, "")
    quantization_period: Positive = refused(1, "")
    bits: Positive | None = refused(None, "")
    dense_ratio: Float | None = refused(None, "")


class CompressionGroup(ConfigSection):
    """Group of modules with the same options."""

    params: GroupParams = refused(GroupParams, "")
    modules: Names = refused(["*"], "")
    related_modules: list[Any] | None = refused(None, "")


class CompressionTechnique(ConfigSection):
    """Technique with common options and named groups of modules."""

    enable_key = "shared_parameters.enabled"

    shared_parameters: CompressionSharedParams = refused(CompressionSharedParams, "")
    different_groups: dict[str, CompressionGroup] = refused(dict, "")


class WeightQuantizationTraining(CompressionTechnique):
    """Quantization-aware training of weights."""

    shared_parameters: WeightQuantizationShared = refused(WeightQuantizationShared, "")


class ActivationQuantization(CompressionTechnique):
    """Quantization of activations."""

    shared_parameters: ActivationQuantizationShared = refused(ActivationQuantizationShared, "")


class SparsePruning(CompressionTechnique):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared = refused(SparsePruningShared, "")


class RowPruning(CompressionTechnique):
    """Pruning of rows of matrices."""

    shared_parameters: PruningShared = refused(PruningShared, "")


class HeadPruning(CompressionTechnique):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = refused(HeadPruningShared, "")


class ChannelPruning(CompressionTechnique):
    """Pruning of channels of convolutions."""

    shared_parameters: PruningShared = refused(PruningShared, "")


class CompressionTraining(ConfigSection):
    """Compression during training."""

    refusal = "not yet built: compression; write false"

    layer_reduction: LayerReduction = refused(LayerReduction, "")
    weight_quantization: WeightQuantizationTraining = refused(WeightQuantizationTraining, "")
    activation_quantization: ActivationQuantization = refused(ActivationQuantization, "")
    sparse_pruning: SparsePruning = refused(SparsePruning, "")
    row_pruning: RowPruning = refused(RowPruning, "")
    head_pruning: HeadPruning = refused(HeadPruning, "")
    channel_pruning: ChannelPruning = refused(ChannelPruning, "")


class WeightQuantization(ConfigSection):
    """Quantized weights for inference."""

    refusal = "not yet built: quantized weights; delete the section"

    enabled: bool = refused(True, "")
    num_bits: Positive = refused(8, "")
    q_type: Literal["symmetric", "asymmetric"] = refused("symmetric", "")
    q_groups: Positive = refused(1, "")
    quantized_initialization: dict[str, Any] = refused(dict, "")
    post_init_quant: dict[str, Any] = refused(dict, "")

    def requested_key(self) -> str | None:
        if self.enabled and self.quantized_initialization:
            return "quantized_initialization"
        return "post_init_quant" if self.enabled and self.post_init_quant else None


class Eigenvalue(ConfigSection):
    """Curvature estimates that control quantization."""

    refusal = "not yet built: eigenvalue estimation; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    verbose: bool = refused(False, "")
    max_iter: Positive = refused(100, "")
    tol: Float = refused(0.01, "")
    stability: Float = refused(1e-6, "")
    gas_boundary_resolution: Positive = refused(1, "")
    layer_name: str = refused("bert.encoder.layer", "")
    layer_num: Count = refused(0, "")
