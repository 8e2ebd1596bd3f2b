"""Sections for data efficiency: curricula, dynamic batches, dropped tokens."""

from __future__ import annotations

from typing import Literal

from windlass.config.config_section import ConfigSection, Count, Float, Int, Positive
from windlass.config.key_status import refused


class CurriculumSchedule(ConfigSection):
    """Growth of difficulty with the steps."""

    total_curriculum_step: Positive | None = refused(None, "")
    difficulty_step: Positive | None = refused(None, "")
    root_degree: Positive | None = refused(None, "")
    difficulty: list[Int] | None = refused(None, "")
    max_step: list[Int] | None = refused(None, "")


class CurriculumLearning(ConfigSection):
    """Legacy curriculum on the sequence length."""

    refusal = "not yet built: curriculum learning; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    curriculum_type: str | None = refused(None, "")
    min_difficulty: Int | None = refused(None, "")
    max_difficulty: Int | None = refused(None, "")
    schedule_type: str | None = refused(None, "")
    schedule_config: CurriculumSchedule = refused(CurriculumSchedule, "")


class CurriculumMetric(ConfigSection):
    """Measure of the difficulty of samples, and its growth during training."""

    index_to_sample_path: str | None = refused(None, "")
    index_to_metric_path: str | None = refused(None, "")
    difficulty_type: Literal["value", "percentile"] | None = refused(None, "")
    clustering_type: Literal["schedule_based", "single_cluster"] | None = refused(None, "")
    min_difficulty: Int | None = refused(None, "")
    max_difficulty: Int | None = refused(None, "")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = refused(None, "")
    schedule_config: CurriculumSchedule = refused(CurriculumSchedule, "")


class SamplingCurriculum(ConfigSection):
    """Curriculum over samples with measured difficulty."""

    enabled: bool = refused(False, "")
    data_cluster_path: str | None = refused(None, "")
    curriculum_metrics: dict[str, CurriculumMetric] = refused(dict, "")


class DynamicBatching(ConfigSection):
    """Batches with about equal numbers of tokens."""

    enabled: bool = refused(False, "")
    metrics_path: str | None = refused(None, "")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = refused("linear", "")
    min_batch_size: Positive = refused(1, "")
    max_batch_size: Positive | None = refused(None, "")
    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = refused("dataloader", "")
    max_tokens: Positive | None = refused(None, "")
    verbose: bool = refused(False, "")


class DataSampling(ConfigSection):
    """Order in which samples are drawn."""

    enabled: bool = refused(False, "")
    num_epochs: Positive = refused(1000, "")
    num_workers: Count = refused(0, "")
    pin_memory: bool = refused(False, "")
    curriculum_learning: SamplingCurriculum = refused(SamplingCurriculum, "")
    dynamic_batching: DynamicBatching = refused(DynamicBatching, "")


class RandomLtdScheduleConfig(ConfigSection):
    """Rate at which the number of processed tokens grows during training."""

    require_steps: Positive | None = refused(None, "")
    seq_per_step: Positive | None = refused(None, "")


class RandomLtdSchedule(ConfigSection):
    """Number of tokens that the middle layers process."""

    min_value: Positive | None = refused(None, "")
    max_value: Positive | None = refused(None, "")
    schedule_type: Literal["fixed_linear"] | None = refused(None, "")
    schedule_config: RandomLtdScheduleConfig = refused(RandomLtdScheduleConfig, "")


class LayerTokenLrSchedule(ConfigSection):
    """Learning rate as a function of the tokens seen."""

    enabled: bool = refused(False, "")
    total_layer_tokens: Count | None = refused(None, "")
    warmup_type: str | None = refused(None, "")
    warmup_layer_tokens: Count | None = refused(None, "")


class RandomLtd(ConfigSection):
    """Random layer-wise token dropping."""

    enabled: bool = refused(False, "")
    total_layer_num: Positive | None = refused(None, "")
    random_ltd_layer_num: Positive | None = refused(None, "")
    random_ltd_layer_id: list[Int] | None = refused(None, "")
    model_mask_name: str | None = refused(None, "")
    model_type: Literal["encoder", "decoder"] | None = refused(None, "")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = refused(None, "")
    random_ltd_schedule: RandomLtdSchedule = refused(RandomLtdSchedule, "")
    layer_token_lr_schedule: LayerTokenLrSchedule = refused(LayerTokenLrSchedule, "")


class DataRouting(ConfigSection):
    """Choice of the tokens that pass through each layer."""

    enabled: bool = refused(False, "")
    random_ltd: RandomLtd = refused(RandomLtd, "")


class DataEfficiency(ConfigSection):
    """Sampling and routing of data."""

    refusal = "not yet built: data efficiency; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    seed: Int = refused(1234, "")
    data_sampling: DataSampling = refused(DataSampling, "")
    data_routing: DataRouting = refused(DataRouting, "")


class ProgressiveLayerDrop(ConfigSection):
    """Random skipping of layers, increasing during training."""

    refusal = "not yet built: progressive layer drop; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    theta: Float = refused(1.0, "")
    gamma: Float = refused(0.001, "")
