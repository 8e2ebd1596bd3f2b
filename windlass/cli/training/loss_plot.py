"""Plot of a run's loss curve, with training and held-out loss on one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.base.figure_file import write_figure
from windlass.base.log import logger
from windlass.cli.training.run_metrics import MetricsRow

_SMOOTHED_COLOR, _STEP_COLOR, _HELD_OUT_COLOR = "#1f4e79", "#a9c4de", "#d1495b"


def plot_loss(rows: Sequence[MetricsRow], path: Path, bytes_per_token: float, title: str) -> bool:
    """Write a PNG to `path`. Return False, and log one line, if matplotlib is not installed.

    The training loss is converted to bits per byte too: nats per token, divided by ln 2 and by the corpus's bytes per
    token. The conversion is exact for the corpus as a whole, and approximate for one batch.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture of the loss: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    scale = 1 / math.log(2) / bytes_per_token

    def to_bits(nats: Any) -> Any:
        return nats * scale

    def to_nats(bits: Any) -> Any:
        return bits / scale

    steps = [row.step for row in rows if row.loss is not None]
    losses = [row.loss * scale for row in rows if row.loss is not None]
    held = [(row.step, row.held_out_bits_per_byte) for row in rows if row.held_out_bits_per_byte is not None]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=_STEP_COLOR, linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(losses), color=_SMOOTHED_COLOR, linewidth=1.8, label="training, smoothed")
    axes.scatter(
        [step for step, _ in held], [bits for _, bits in held], color=_HELD_OUT_COLOR, zorder=3, label="held out"
    )
    for (step, bits), side in zip(held[:1] + held[1:][-1:], ("left", "right"), strict=False):
        axes.annotate(
            f"{bits:.2f}", (step, bits), xytext=(0, 8), textcoords="offset points", color=_HELD_OUT_COLOR, ha=side
        )
    axes.set(xlabel="optimizer step", ylabel="bits per byte", title=title)
    right = axes.secondary_yaxis("right", functions=(to_nats, to_bits))
    right.set_ylabel("nats per token")
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.legend(frameon=False)
    write_figure(figure, path)
    return True


def smooth(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Return the exponential moving average of `values`, corrected for the bias towards zero at its start."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out
