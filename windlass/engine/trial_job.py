"""Job of a tuning trial: configuration values to replace, the number of steps, and the path of the result.

[Note: tuning trial] `windlass tune` starts the user's own program with the environment variable `WINDLASS_TUNE_TRIAL`.
`initialize` reads it: the keys of the trial replace those of the configuration that the program passes, and after some
steps the engine writes its measurements and ends the program. So a program needs no change and may be started in any
way. Launchers export the variable to the ranks of other hosts.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.base.errors import ConfigError

VARIABLE = "WINDLASS_TUNE_TRIAL"


@dataclass(frozen=True)
class TrialJob:
    """Job of one trial.

    Attributes:
        result: Path of the JSON file that rank 0 writes.
        overrides: Values by dotted key that replace those of the program's configuration.
        warmup: Steps that are not timed.
        steps: Steps that are timed.
        slow_s: Seconds. The trial ends early if the first two timed steps both take longer; None: it never ends early.
        forecast: `module:attribute` of a function that rank 0 calls with the model before it is sharded. The function's
            result is called with the first batch. Empty: no forecast.
        forecast_order: Path of the file with the settings of the forecast.
    """

    result: str
    overrides: dict[str, Any] = field(default_factory=dict)
    warmup: int = 2
    steps: int = 5
    slow_s: float | None = None
    forecast: str = ""
    forecast_order: str = ""

    def environment(self) -> dict[str, str]:
        """Return the environment variable that passes this job to the ranks."""
        text = json.dumps(asdict(self))
        return {VARIABLE: base64.urlsafe_b64encode(text.encode()).decode()}


def trial_from_environment(environ: Mapping[str, str] = os.environ) -> TrialJob | None:
    """Return the job in the environment, or None.

    Raises:
        ConfigError: the variable does not hold a job.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        return TrialJob(**json.loads(base64.urlsafe_b64decode(text.encode())))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{VARIABLE} = {text!r:.60} is not a job of `windlass tune`, which sets it for its own trials; unset it"
        ) from error
