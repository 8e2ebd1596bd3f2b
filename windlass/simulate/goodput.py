"""Failures, the interval between checkpoints, and the goodput that remains.

If each of n devices fails every T seconds on average, the run fails every M = T / n seconds. The best interval between
checkpoints that block training for C seconds is sqrt(2 C M) seconds (Young 1974), or more exactly, for C < 2 M,
sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + C / 18 M) - C (Daly 2006, equation 37). Goodput is the fraction of time that
advances the training; the rest is checkpoints, work lost by failures, and restarts. By Daly's complete model the
expected time for W seconds of work is M exp(R / M) (exp((t + C) / M) - 1) W / t, with R seconds of a restart and an
interval t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class Goodput:
    """Expected goodput of a run.

    Attributes:
        mtbf: Mean seconds between failures of the run.
        young, daly: Best interval between checkpoints by the formulas of Young and Daly, in seconds.
        interval: Interval that the goodput is computed for.
        goodput: Fraction of time that advances the training.
    """

    mtbf: float
    young: float
    daly: float
    interval: float
    goodput: float

    def as_json(self) -> dict[str, float]:
        """Return plain data."""
        return dict(vars(self))


def expected_goodput(
    devices: int, device_mtbf: float, checkpoint: float, restart: float, interval: float | None = None
) -> Goodput:
    """Return the expected goodput.

    Args:
        devices: Number of devices.
        device_mtbf: Mean seconds between failures of one device.
        checkpoint: Seconds for which a checkpoint blocks training.
        restart: Seconds from a failure until training resumes from the last checkpoint.
        interval: Seconds of work between checkpoints; None: Daly's.

    Raises:
        ConfigError: `devices`, `device_mtbf`, `checkpoint` or `interval` is not positive, or `restart` is negative.
    """
    positive = {"device_mtbf": device_mtbf, "checkpoint": checkpoint, "devices": devices}
    if interval is not None:
        positive["interval"] = interval
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name} = {value} is not positive; write a number above 0")
    if not restart >= 0:
        raise ConfigError(f"restart = {restart} is negative; write at least 0")
    mtbf = device_mtbf / devices
    young = math.sqrt(2 * checkpoint * mtbf)
    daly = young * (1 + math.sqrt(checkpoint / (2 * mtbf)) / 3 + checkpoint / (18 * mtbf)) - checkpoint
    if checkpoint >= 2 * mtbf:
        daly = mtbf
    chosen = daly if interval is None else interval
    # The inverse of the expected time has negative exponents, so goodput becomes 0 where the expected time overflows:
    # such a run fails before it has restarted.
    restarts, saves = math.exp(-restart / mtbf), -math.expm1(-(chosen + checkpoint) / mtbf)
    goodput = chosen / mtbf * restarts * math.exp(-(chosen + checkpoint) / mtbf) / saves
    return Goodput(mtbf, young, daly, chosen, goodput)
