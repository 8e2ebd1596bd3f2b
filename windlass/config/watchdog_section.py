"""When a run that does not go on is reported, and when it is ended."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from windlass.config.config_section import NUMBER, ConfigSection
from windlass.config.key_status import honoured

Seconds = Annotated[float, Field(ge=1, allow_inf_nan=False), NUMBER]


class WatchdogConfig(ConfigSection):
    """A thread on every rank that says why a run hangs, and ends what cannot go on."""

    enabled: bool = honoured(True, windlass_only=True)
    """Watch the ranks of a run of more than one."""
    report_after_s: Seconds = honoured(30.0, windlass_only=True)
    """Seconds that a rank waits for others before all ranks are shown; a proved hang ends the run within as many."""
    timeout_s: Seconds = honoured(600.0, windlass_only=True)
    """Seconds of one wait after which the ranks are ended though the one that is waited for is alive."""
