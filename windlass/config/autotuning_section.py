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
    """Options of the search that a launcher starts with `--autotuning tune|run`. A run without `--autotuning` ignores
    this section."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Allow `--autotuning`. If false, a launcher refuses `--autotuning`."""
    fast: bool = honoured(True)
    """Do not vary bucket sizes, except those that the configuration sets to "auto" or to a list of values."""
    results_dir: str = honoured("autotuning_results", min_length=1)
    """Folder of results: one folder for each trial, and ds_config_optimal.json."""
    exps_dir: str = honoured("autotuning_exps", min_length=1)
    """Folder of the files with each trial's settings."""
    overwrite: bool = honoured(True)
    """Ignore earlier results. If false, results of an earlier search in results_dir are reused, for the same
    configuration and number of ranks."""
    start_profile_step: Count = honoured(3)
    """First step of a trial that is timed, counted from 1; the first step of a process is never timed."""
    end_profile_step: Count = honoured(5)
    """Last step of a trial."""
    metric: Literal["latency", "throughput", "flops", "forward", "step"] = honoured("throughput")
    """Quantity to optimize. latency: time of a step; throughput and flops: samples per second; forward: time of the
    forward; step: time of the optimizer step."""
    metric_path: str | None = accepted(None, _PATH_REASON)
    tuner_type: Literal["gridsearch", "random", "model_based"] = honoured("gridsearch")
    """Order of the trials. gridsearch: the predicted fastest first; random: random order; model_based: vary one key at
    a time, starting from the best trial."""
    tuner_early_stopping: Count = honoured(5)
    """Number of successive trials without a gain after which the search ends; 0: the search does not end early."""
    tuner_num_trials: Positive = honoured(50)
    """Maximum number of trials."""
    arg_mappings: dict[str, Any] | None = honoured(None)
    """Command-line options of the script by configuration key, such as
    `{"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}`. A trial starts the script with the trial's
    value of the key in this option."""
    model_info: ModelInfo = accepted(ModelInfo, _MODEL_REASON)
    model_info_path: str | None = accepted(None, _PATH_REASON)
    mp_size: Positive = accepted(1, "axes of the configuration give the number of data ranks")
    max_train_batch_size: Positive | None = honoured(None)
    """Largest global batch; null: the configuration's global batch is kept."""
    min_train_batch_size: Positive = honoured(1)
    """Smallest global batch; without effect unless max_train_batch_size is set."""
    max_train_micro_batch_size_per_gpu: Positive = honoured(1024)
    """Largest micro-batch."""
    min_train_micro_batch_size_per_gpu: Positive = honoured(1)
    """Smallest micro-batch."""
    num_tuning_micro_batch_sizes: Positive = honoured(3)
    """Number of micro-batch sizes to try."""
