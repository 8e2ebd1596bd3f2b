"""The `watchdog` section: reports of hangs, and the time after which a hanging run is ended."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from windlass.config.config_section import NUMBER, ConfigSection
from windlass.config.key_status import honoured

Seconds = Annotated[float, Field(ge=1, allow_inf_nan=False), NUMBER]


class WatchdogConfig(ConfigSection):
    """Thread on every rank that reports the reason for a hang, and ends a run that cannot continue."""

    enabled: bool = honoured(True, windlass_only=True)
    """Watch all runs of more than one rank."""
    report_after_s: Seconds = honoured(30.0, windlass_only=True)
    """Seconds that a rank waits for others before the state of all ranks is reported. A proven hang ends the run within
    the same time."""
    timeout_s: Seconds = honoured(600.0, windlass_only=True)
    """A wait of this many seconds ends all ranks, even if the awaited rank is alive."""
