"""Module `deepspeed.utils.timer`: named timers that synchronize with the device, and samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from windlass.compat.accelerator.real_accelerator import get_accelerator
from windlass.compat.rank_logging import logger, print_dist

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")


def _synchronized_time() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


class Timer:
    """Named timer that records intervals in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._started_at = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Start the timer.

        Raises:
            AssertionError: the timer is already running.
        """
        assert not self.started_, f"timer {self.name_!r} is started twice; stop it first"
        self._started_at, self.started_ = _synchronized_time(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the timer and record the elapsed time; `reset` deletes earlier records.

        Raises:
            AssertionError: the timer is not running.
        """
        assert self.started_, f"timer {self.name_!r} is stopped but was not started; start it first"
        if reset:
            self._records.clear()
        self._records.append(1000 * (_synchronized_time() - self._started_at))
        self.started_ = False

    def reset(self) -> None:
        """Delete all records, and stop without recording."""
        self.started_ = False
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds of all records, including a running interval. A running timer is restarted.

        Args:
            reset: delete the records; False: keep them, with the running interval as a record.
        """
        running = self.started_
        if running:
            self.stop()
        total = sum(self._records)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean of the records, without the slowest and the fastest tenth."""
        self.elapsed(reset=False)
        return trim_mean(self._records, 0.1)


_Timer = Timer


class SynchronizedWallClockTimer:
    """Collection of timers by name: `timers("forward").start()`."""

    Timer = Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def get_timers(self) -> dict[str, _Timer]:
        """Return all timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Return the device's memory use as one line."""
        device = get_accelerator()
        figures = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return "".join(f" | {name}: {size / _GIB:.4f} GB" for name, size in figures.items())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the elapsed times of the timers `names`, divided by `normalizer`, on rank 0 or on `ranks`.

        Raises:
            AssertionError: `normalizer` is not positive.
        """
        assert normalizer > 0.0, f"normalizer is {normalizer}; it must be positive"
        known = [name for name in names if name in self.timers]
        parts = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known]
        line = " | ".join(["time (ms)", *parts]) + (self.memory_usage() if memory_breakdown else "")
        print_dist(line, ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean of each timer's records in milliseconds, divided by `normalizer`.

        Args:
            reset: has no effect, as in DeepSpeed: the records stay.

        Raises:
            AssertionError: `normalizer` is not positive.
        """
        assert normalizer > 0.0, f"normalizer is {normalizer}; it must be positive"
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


class NoopTimer:
    """Collection of timers that measure nothing."""

    class Timer:
        """Timer that never runs."""

        def start(self) -> None: ...

        def reset(self) -> None: ...

        def stop(self, **kwargs: Any) -> None: ...

        def elapsed(self, **kwargs: Any) -> float:
            return 0

        def mean(self) -> float:
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, _Timer]:
        return {}

    def log(self, *args: Any, **kwargs: Any) -> None: ...

    def get_mean(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Timer of samples per second, excluding the first steps.

    Args:
        config: object with `enabled` and `synchronized`.
        batch_size: samples of a step over all ranks.
        start_step: number of initial steps to exclude.
        steps_per_output: number of steps between reports; None: never report.
        monitor_memory: also report the percentage of the host's memory and swap that is in use (Linux only).
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.started = self.initialized = False
        self.start_time = self.end_time = 0.0  # start and end of the last counted micro-batch
        self._started_at: float | None = None

    def update_epoch_count(self) -> None:
        """Advance the epoch count, and reset the micro-batch count."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Record the start of a micro-batch."""
        if self.config.enabled:
            self.started = self.initialized = True
            self._started_at = self._now() if self.global_step_count >= self.start_step else None
            self.start_time = self._started_at or 0.0

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Record the end of a micro-batch, and with `global_step` the end of a step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._started_at is None:
            return
        self.end_time = self._now()
        took = self.end_time - self._started_at
        self.total_elapsed_time += took
        self.step_elapsed_time += took
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over all counted steps; -inf before the first."""
        steps = self.global_step_count - self.start_step
        return (
            self.batch_size * steps / self.total_elapsed_time
            if steps > 0 and self.total_elapsed_time
            else -float("inf")
        )

    def _now(self) -> float:
        return _synchronized_time() if self.config.synchronized else time.perf_counter()

    def _report(self) -> None:
        device = get_accelerator()
        place = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
        self.logging(
            f"{place}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={self.batch_size / max(self.step_elapsed_time, 1e-6)}, "
            f"MemAllocated={device.memory_allocated() / _GIB:.2f}GB, "
            f"MaxMemAllocated={device.max_memory_allocated() / _GIB:.2f}GB"
        )
        if self.monitor_memory and _MEMINFO.exists():
            lines = [line.split() for line in _MEMINFO.read_text().splitlines()]
            kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
            memory = _percent_used(kib.get("MemTotal", 0), kib.get("MemAvailable", 0))
            self.logging(
                f"{place}, vm %: {memory}, swap %: {_percent_used(kib.get('SwapTotal', 0), kib.get('SwapFree', 0))}"
            )


def _percent_used(total: int, free: int) -> float:
    return round(100 * (total - free) / total, 1) if total else 0.0


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without the smallest and largest fraction `trim_percent` (0 to 1); 0 for no data.

    Raises:
        AssertionError: `trim_percent` is out of range.
    """
    assert 0.0 <= trim_percent <= 1.0, f"trim_percent is {trim_percent}; it must be in [0, 1]"
    dropped = round(len(data) * trim_percent)
    kept = sorted(data)[dropped : len(data) - dropped]
    return sum(kept) / len(kept) if kept else 0.0
