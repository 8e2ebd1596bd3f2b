"""Time of steps on a device, and the device's peak rates."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch

# Function that trains on `[batch, length]` tokens, and returns the loss without synchronizing.
Step = Callable[[torch.Tensor], torch.Tensor]


def run(
    step: Step, batches: Iterator[torch.Tensor], count: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the seconds of each of `count` steps, and their losses.

    On a GPU, events mark the stream between steps, and nothing synchronizes until the last step is queued: the CPU may
    run ahead as in training, and a synchronization inside an engine counts in its own steps. Work on other streams
    counts as far as the step's stream waits for it.
    """
    losses = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            losses.append(step(next(batches)))
            mark.record()
        torch.cuda.synchronize(device)
        seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False)]
    else:
        times = [time.perf_counter()]
        for _ in range(count):
            losses.append(step(next(batches)))
            times.append(time.perf_counter())
        seconds = [b - a for a, b in zip(times, times[1:], strict=False)]
    return seconds, [float(loss) for loss in losses]


def free(device: torch.device) -> None:
    """Free unreferenced device memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def roofs(device: torch.device) -> dict[str, float]:
    """Measure the device's peak rates: bf16 matrix products (FLOP/s) and copies (bytes/s, read and written)."""
    results = {"matmul": _matmul(device), "copy": _copy(device)}
    free(device)
    return results


def _matmul(device: torch.device) -> float:
    side = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / _median(lambda: a @ b, device)


def _copy(device: torch.device) -> float:
    elements = 1 << 28 if device.type == "cuda" else 1 << 20
    source, target = (torch.ones(elements, device=device) for _ in range(2))
    return 8 * elements / _median(lambda: target.copy_(source), device)


def _median(work: Callable[[], object], device: torch.device) -> float:
    """Return the median of ten times in seconds, after three warm-up runs."""

    def step(_: torch.Tensor) -> torch.Tensor:
        work()
        return torch.zeros(())

    nothing = iter([torch.zeros(())] * 13)
    return statistics.median(run(step, nothing, 13, device)[0][3:])
