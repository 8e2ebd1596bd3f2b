"""How ranks talk to each other, and the log of what they said."""

from __future__ import annotations

from typing import Literal

from windlass.config.config_section import ConfigSection, Names
from windlass.config.key_status import honoured


class CommConfig(ConfigSection):
    """The transport of the core's collectives."""

    transport: Literal["auto", "shm", "gloo", "nccl"] = honoured("auto", windlass_only=True)
    """shm: CPU ranks of one host through shared memory; gloo; nccl; auto picks the fastest that works everywhere.
    The environment variable WINDLASS_TRANSPORT overrides it."""


class CommsLoggerConfig(ConfigSection):
    """A log of the collectives that a script calls through `deepspeed.comm` or `windlass.compat.collectives`, and of how much
    the engines moved; `log_summary()` shows it."""

    enabled: bool = honoured(False)
    """Off, nothing is recorded, whatever the other keys say."""
    prof_all: bool = honoured(True)
    """Record every collective; else those in `prof_ops` and calls with `prof=True`."""
    prof_ops: Names = honoured(list)
    """Names of collectives, or the `log_name` of calls."""
    verbose: bool = honoured(False)
    """A line for each of them as it ends."""
    debug: bool = honoured(False)
    """Tell calls apart by the function that called."""
