"""Sections for model compression: quantization, pruning, layer reduction."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.config_section import ConfigSection, Count, Float, Int, Names, Positive
from windlass.config.key_status import accepted, honoured, refused

_SNIP = "belongs to the method snip_momentum, which is not built; use l1 or topk, and delete the key"


class LayerReduction(ConfigSection):
    """Distillation to a student with fewer layers."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    keep_number_layer: Positive | None = honoured(None)
    module_name_prefix: str | None = honoured(None)
    teacher_layer: list[Int] | None = honoured(None)
    other_module_name: Names | None = honoured(None)


class MixedQuantize(ConfigSection):
    """Gradual change from fp16 to quantized weights."""

    enabled: bool = honoured(False)
    quantize_change_ratio: Float = honoured(0.001)


class CompressionSharedParams(ConfigSection):
    """Options common to all groups of a technique."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    schedule_offset: Count = honoured(1000)


class WeightQuantizationShared(CompressionSharedParams):
    """Common options of weight quantization."""

    quantizer_kernel: bool = accepted(False, "rounding is part of the forward on every device")
    schedule_offset: Count = honoured(0)
    quantize_groups: Positive = honoured(1)
    quantize_verbose: bool = accepted(False, "nothing is logged for each layer")
    quantization_type: Literal["symmetric", "asymmetric"] = honoured("symmetric")
    rounding: Literal["nearest", "stochastic"] = honoured("nearest")
    quantize_weight_in_forward: bool = accepted(
        False, "weights are rounded in the forward; the optimizer keeps the wide ones in every precision"
    )
    fp16_mixed_quantize: MixedQuantize = honoured(MixedQuantize)


class ActivationQuantizationShared(CompressionSharedParams):
    """Common options of activation quantization."""

    quantization_type: Literal["symmetric", "asymmetric"] = honoured("symmetric")
    range_calibration: Literal["dynamic", "static"] = honoured("dynamic")


class PruningShared(CompressionSharedParams):
    """Common options of pruning."""

    method: str = honoured("l1")


class SparsePruningShared(PruningShared):
    """Common options of sparse pruning."""

    schedule_offset_end: Count = refused(1000, _SNIP)
    schedule_offset_stride: Positive = refused(1, _SNIP)
    block_pattern: str = refused("4x1", _SNIP)
    dense_ratio: Float = refused(0.1, _SNIP)
    excluded_modules: Names = refused(list, _SNIP)


class HeadPruningShared(PruningShared):
    """Common options of head pruning."""

    method: str = honoured("topk")
    num_heads: Positive | None = honoured(None)


class GroupParams(ConfigSection):
    """Options of one group of modules; each technique reads its own."""

    start_bits: Positive | None = honoured(None)
    target_bits: Positive | None = honoured(None)
    quantization_period: Positive = honoured(1)
    bits: Positive | None = honoured(None)
    dense_ratio: Float | None = honoured(None)


class CompressionGroup(ConfigSection):
    """Group of modules with the same options."""

    params: GroupParams = honoured(GroupParams)
    modules: Names = honoured(["*"])
    related_modules: list[Any] | None = honoured(None)


class CompressionTechnique(ConfigSection):
    """Technique with common options and named groups of modules."""

    enable_key = "shared_parameters.enabled"

    shared_parameters: CompressionSharedParams = honoured(CompressionSharedParams)
    different_groups: dict[str, CompressionGroup] = honoured(dict)


class WeightQuantizationTraining(CompressionTechnique):
    """Quantization-aware training of weights."""

    shared_parameters: WeightQuantizationShared = honoured(WeightQuantizationShared)


class ActivationQuantization(CompressionTechnique):
    """Quantization of activations."""

    shared_parameters: ActivationQuantizationShared = honoured(ActivationQuantizationShared)


class SparsePruning(CompressionTechnique):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared = honoured(SparsePruningShared)


class RowPruning(CompressionTechnique):
    """Pruning of rows of matrices."""

    shared_parameters: PruningShared = honoured(PruningShared)


class HeadPruning(CompressionTechnique):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = honoured(HeadPruningShared)


class ChannelPruning(CompressionTechnique):
    """Pruning of channels of convolutions."""

    shared_parameters: PruningShared = honoured(PruningShared)


class CompressionTraining(ConfigSection):
    """Compression during training."""

    layer_reduction: LayerReduction = honoured(LayerReduction)
    weight_quantization: WeightQuantizationTraining = honoured(WeightQuantizationTraining)
    activation_quantization: ActivationQuantization = honoured(ActivationQuantization)
    sparse_pruning: SparsePruning = honoured(SparsePruning)
    row_pruning: RowPruning = honoured(RowPruning)
    head_pruning: HeadPruning = honoured(HeadPruning)
    channel_pruning: ChannelPruning = honoured(ChannelPruning)


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
