"""Sections for metrics (TensorBoard, CSV, Weights & Biases, Comet), timers, and the FLOP profiler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from windlass.config.config_section import NUMBER, ConfigSection, Count, Int, Positive
from windlass.config.key_status import accepted, honoured


class TensorBoard(ConfigSection):
    """Event files for TensorBoard. Needs the `monitor` extra."""

    enabled: bool = honoured(False)
    """Write events on rank 0."""
    output_path: str = honoured("")
    """Folder of the event files; empty: `runs`."""
    job_name: str = honoured("DeepSpeedJobName")
    """Subfolder of this run."""


class CsvMonitor(ConfigSection):
    """One CSV file per metric."""

    enabled: bool = honoured(False)
    """Write rows on rank 0."""
    output_path: str = honoured("")
    """Folder of the files; empty: `csv_monitor`."""
    job_name: str = honoured("DeepSpeedJobName")
    """Subfolder of this run."""


class JsonlMonitor(ConfigSection):
    """Record of the run as one file of JSON lines, `run.jsonl`, which `windlass report` reads."""

    enabled: bool = honoured(False, windlass_only=True)
    """Write lines on rank 0: configuration and machine, each step with its phases, bytes and memory, checkpoints,
    warnings."""
    output_path: str = honoured("", windlass_only=True)
    """Folder of the file; empty: `jsonl_monitor`."""
    job_name: str = honoured("", windlass_only=True)
    """Subfolder of this run; empty: none."""


class Wandb(ConfigSection):
    """Logging to Weights & Biases. Needs the `monitor` extra."""

    enabled: bool = honoured(False)
    """Log on rank 0."""
    group: str | None = honoured(None)
    """Group of the run."""
    team: str | None = honoured(None)
    """Entity that owns the run."""
    project: str = honoured("deepspeed")
    """Project of the run."""


class Comet(ConfigSection):
    """Logging to Comet. Needs the `comet` extra. For keys at null, Comet's own configuration file and environment
    variables apply."""

    enabled: bool = honoured(False)
    """Log on rank 0."""
    samples_log_interval: Positive = honoured(100)
    """Number of samples after which a metric is logged again."""
    project: str | None = honoured(None)
    """Project of the experiment."""
    workspace: str | None = honoured(None)
    """Workspace of the project."""
    api_key: str | None = honoured(None)
    """API key of the account. In a file that others can read, leave it out and set the variable COMET_API_KEY."""
    experiment_name: str | None = honoured(None)
    """Name of the experiment."""
    experiment_key: str | None = honoured(None)
    """Key of the experiment, 32 to 50 letters and digits."""
    online: bool | None = honoured(None)
    """false: offline experiment, written to files."""
    mode: Literal["get", "create", "get_or_create"] | None = honoured(None)
    """`get`: continue the experiment of experiment_key; `create`: start a new one; `get_or_create`: either."""


class ThroughputTimerConfig(ConfigSection):
    """Timer of samples per second."""

    enabled: bool = accepted(
        True, "the engine prints no samples per second; `windlass train` shows tokens per second at every step"
    )
    synchronized: bool = accepted(True, "read only by that timer, which prints nothing here")


class TimersConfig(ConfigSection):
    """Timers that can be set one by one."""

    throughput: ThroughputTimerConfig = honoured(ThroughputTimerConfig)
    """Timer of samples per second."""


class FlopsProfiler(ConfigSection):
    """Report of the floating-point operations of one step on rank 0 ([profiling](profiling.md))."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Count one step, log the report, and add the arithmetic rate and MFU to the log lines of later steps."""
    recompute_fwd_factor: Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER] = honoured(0.0)
    """Number of forwards that the backward recomputes, which the rates in the report include; 0: the recomputation that
    was counted in the step."""
    profile_step: Count = honoured(1)
    """Number of steps before the counted step: 1 counts the second step, which is free of start-up costs."""
    module_depth: Int = honoured(-1)
    """Depth in the tree of modules for which the profile is aggregated by class; -1: every depth."""
    top_modules: Count = honoured(1)
    """Number of classes of modules shown at each depth."""
    detailed: bool = honoured(True)
    """Report every module."""
    output_file: str | None = honoured(None)
    """File that receives the report in place of the log."""
    peak_tflops: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER] | None = honoured(None, windlass_only=True)
    """Peak TFLOP/s of a device, which is 100 % MFU; by default from a table of GPUs, or measured."""
