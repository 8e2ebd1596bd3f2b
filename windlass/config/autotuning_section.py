"""The `autotuning` section: search for the fastest configuration. Only `--autotuning` of a launcher reads it."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.config_section import ConfigSection, Count, Positive
from windlass.config.key_status import accepted, honoured

_MODEL_REASON = "the first trial reads the model itself"
_PATH_REASON = "a trial's files are in its folder of results_dir"


class ModelInfo(ConfigSection):
    """Properties of the model that are known in advance."""

    profile: bool = accepted(False, _MODEL_REASON)
    num_params: Count | None = accepted(None, _MODEL_REASON)
    hidden_size: Count | None = accepted(None, _MODEL_REASON)
    num_layers: Count | None = accepted(None, _MODEL_REASON)


class Autotuning(ConfigSection):
    """Options of the search that `--autotuning tune|run` of a launcher starts. A run without that option ignores
    them."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Allow `--autotuning`, which refuses a configuration without it."""
    fast: bool = honoured(True)
    """Leave out sizes of buckets, unless they are "auto" or lists."""
    results_dir: str = honoured("autotuning_results", min_length=1)
    """Folder of results: one folder for each trial, and ds_config_optimal.json."""
    exps_dir: str = honoured("autotuning_exps", min_length=1)
    """Folder of the orders of trials."""
    overwrite: bool = honoured(True)
    """false: results of an earlier search in results_dir count, if configuration and number of ranks are the same."""
    start_profile_step: Count = honoured(3)
    """First step of a trial that is timed, counted from 1; the first step of a process is never timed."""
    end_profile_step: Count = honoured(5)
    """Last step of a trial."""
    metric: Literal["latency", "throughput", "flops", "forward", "step"] = honoured("throughput")
    """Time of a step, samples or operations per second, time of the forward, or of the optimizer step."""
    metric_path: str | None = accepted(None, _PATH_REASON)
    tuner_type: Literal["gridsearch", "random", "model_based"] = honoured("gridsearch")
    """gridsearch: the best estimates first; random: in random order; model_based: one key at a time from the best."""
    tuner_early_stopping: Count = honoured(5)
    """Number of trials without a gain that end the search; 0: none does."""
    tuner_num_trials: Positive = honoured(50)
    """Maximum number of trials."""
    arg_mappings: dict[str, Any] | None = honoured(None)
    """Option of the script by configuration key, such as
    `{"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}`."""
    model_info: ModelInfo = accepted(ModelInfo, _MODEL_REASON)
    model_info_path: str | None = accepted(None, _PATH_REASON)
    mp_size: Positive = accepted(1, "axes of the configuration give the number of data ranks")
    max_train_batch_size: Positive | None = honoured(None)
    """Largest global batch; null: the configuration's global batch is kept."""
    min_train_batch_size: Positive = honoured(1)
    """Smallest global batch, read beside max_train_batch_size."""
    max_train_micro_batch_size_per_gpu: Positive = honoured(1024)
    """Largest micro-batch."""
    min_train_micro_batch_size_per_gpu: Positive = honoured(1)
    """Smallest micro-batch."""
    num_tuning_micro_batch_sizes: Positive = honoured(3)
    """Number of micro-batches that are searched."""
