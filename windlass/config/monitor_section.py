"""Where a run's numbers go: TensorBoard, CSV, Weights & Biases, Comet; timers and the FLOP profiler."""

from __future__ import annotations

from typing import Literal

from windlass.config.config_section import ConfigSection, Float, Int, Positive
from windlass.config.key_status import accepted, honoured, refused


class TensorBoard(ConfigSection):
    """Event files for TensorBoard (needs the `monitor` extra)."""

    enabled: bool = honoured(False)
    """Write events on rank 0."""
    output_path: str = honoured("")
    """Folder of the event files; empty: `runs`."""
    job_name: str = honoured("DeepSpeedJobName")
    """Sub-folder of this run."""


class CsvMonitor(ConfigSection):
    """One CSV file a quantity."""

    enabled: bool = honoured(False)
    """Write rows on rank 0."""
    output_path: str = honoured("")
    """Folder of the files; empty: `csv_monitor`."""
    job_name: str = honoured("DeepSpeedJobName")
    """Sub-folder of this run."""


class Wandb(ConfigSection):
    """Weights & Biases (needs the `monitor` extra)."""

    enabled: bool = honoured(False)
    """Log on rank 0."""
    group: str | None = honoured(None)
    """Group of the run."""
    team: str | None = honoured(None)
    """Entity that owns the run."""
    project: str = honoured("deepspeed")
    """Project of the run."""


class Comet(ConfigSection):
    """Comet (needs the `comet` extra). What is null is read from Comet's own configuration file and variables."""

    enabled: bool = honoured(False)
    """Log on rank 0."""
    samples_log_interval: Positive = honoured(100)
    """Log a quantity again once so many samples have passed since it was last logged."""
    project: str | None = honoured(None)
    """Project of the experiment."""
    workspace: str | None = honoured(None)
    """Workspace of the project."""
    api_key: str | None = honoured(None)
    """Key of the account; a file that others read should leave it to the variable COMET_API_KEY."""
    experiment_name: str | None = honoured(None)
    """Name of the experiment."""
    experiment_key: str | None = honoured(None)
    """Key of the experiment, 32 to 50 letters and digits."""
    online: bool | None = honoured(None)
    """false: an offline experiment, in files."""
    mode: Literal["get", "create", "get_or_create"] | None = honoured(None)
    """`get`: go on with the experiment of experiment_key; `create`: a new one; `get_or_create`: either."""


class ThroughputTimerConfig(ConfigSection):
    """The samples-per-second timer."""

    enabled: bool = accepted(
        True, "the engine prints no samples per second; `windlass train` shows tokens per second at every step"
    )
    synchronized: bool = accepted(True, "read only by that timer, which prints nothing here")


class TimersConfig(ConfigSection):
    """Timers that can be set one by one."""

    throughput: ThroughputTimerConfig = honoured(ThroughputTimerConfig)
    """The samples-per-second timer."""


class FlopsProfiler(ConfigSection):
    """Counts floating-point operations of one step."""

    refusal = "not yet built: the FLOP profiler; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    recompute_fwd_factor: Float = refused(0.0, "")
    profile_step: Int = refused(1, "")
    module_depth: Int = refused(-1, "")
    top_modules: Int = refused(1, "")
    detailed: bool = refused(True, "")
    output_file: str | None = refused(None, "")
