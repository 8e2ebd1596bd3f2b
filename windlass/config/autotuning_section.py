"""The `autotuning` section: search for the fastest configuration."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.config_section import ConfigSection, Count, Positive
from windlass.config.key_status import refused


class ModelInfo(ConfigSection):
    """Properties of the model that are known in advance."""

    profile: bool = refused(False, "")
    num_params: Count | None = refused(None, "")
    hidden_size: Count | None = refused(None, "")
    num_layers: Count | None = refused(None, "")


class Autotuning(ConfigSection):
    """Options of the autotuner."""

    refusal = "not yet built: the tuner; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    fast: bool = refused(True, "")
    results_dir: str = refused("autotuning_results", "", min_length=1)
    exps_dir: str = refused("autotuning_exps", "", min_length=1)
    overwrite: bool = refused(True, "")
    start_profile_step: Count = refused(3, "")
    end_profile_step: Count = refused(5, "")
    metric: Literal["latency", "throughput", "flops", "forward", "step"] = refused("throughput", "")
    metric_path: str | None = refused(None, "")
    tuner_type: Literal["gridsearch", "random", "model_based"] = refused("gridsearch", "")
    tuner_early_stopping: Count = refused(5, "")
    tuner_num_trials: Count = refused(50, "")
    arg_mappings: dict[str, Any] | None = refused(None, "")
    model_info: ModelInfo = refused(ModelInfo, "")
    model_info_path: str | None = refused(None, "")
    mp_size: Positive = refused(1, "")
    max_train_batch_size: Positive | None = refused(None, "")
    min_train_batch_size: Positive = refused(1, "")
    max_train_micro_batch_size_per_gpu: Positive = refused(1024, "")
    min_train_micro_batch_size_per_gpu: Positive = refused(1, "")
    num_tuning_micro_batch_sizes: Positive = refused(3, "")
