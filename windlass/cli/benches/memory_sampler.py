"""Watches how much memory this rank takes, from a baseline on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch

from windlass.base.errors import WindlassError
from windlass.observe.memory_usage import proportional_bytes, resident_bytes

_SAMPLE_INTERVAL_S = 0.02


class MemorySampler:
    """Bytes above those at construction.

    On a GPU they are torch's own count. On a CPU the kernel's proportional count is sampled by a thread: a page that n
    ranks share counts 1/n in each, so ranks add up to what the host holds. Where the kernel does not tell that,
    resident bytes stand in for it.

    Attributes:
        kind: which of these counts it is.
        base: bytes at construction.

    Raises:
        WindlassError: this system tells neither.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device, self._on_gpu = device, device.type == "cuda"
        self._stop_event = threading.Event()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            self.counter_name = "device bytes"
            self.baseline_bytes = torch.cuda.memory_allocated(device)
            return
        self.counter_name, self._read = _memory_reader()
        self.baseline_bytes = self._peak = self._read()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def peak_bytes(self) -> int:
        """The most that was taken so far, in bytes above the baseline."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device) - self.baseline_bytes
        self._peak = max(self._peak, self._read())
        return self._peak - self.baseline_bytes

    def stop(self) -> int:
        """Sample no more; returns `peak()`. What follows is not disturbed."""
        self._stop_event.set()
        if not self._on_gpu:
            self._thread.join()
        return self.peak_bytes()

    def _sample(self) -> None:
        while not self._stop_event.wait(_SAMPLE_INTERVAL_S):
            self._peak = max(self._peak, self._read())


def _memory_reader() -> tuple[str, Callable[[], int]]:
    for kind, read in (("proportional bytes (PSS)", proportional_bytes), ("resident bytes (RSS)", resident_bytes)):
        if read() is not None:
            return kind, lambda read=read: read() or 0
    raise WindlassError(
        "memory can't be measured here: /proc/self has neither smaps_rollup nor status; run this on Linux"
    )
