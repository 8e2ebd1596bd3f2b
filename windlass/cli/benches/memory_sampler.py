"""Measurement of this rank's peak memory above a baseline."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch

from windlass.base.errors import WindlassError
from windlass.observe.memory_usage import proportional_bytes, resident_bytes

_SAMPLE_INTERVAL_S = 0.02


class MemorySampler:
    """Memory of this process above its memory at construction, in bytes.

    On a GPU, torch's count of allocated bytes is read. On a CPU, a thread samples the kernel's proportional set size
    (PSS): a page that n ranks share counts 1/n in each, so that the sum over ranks counts each page once. If the kernel
    does not report PSS, resident bytes are used.

    Attributes:
        counter_name: name of the count that is read.
        baseline_bytes: bytes at construction.

    Raises:
        WindlassError: the system reports neither count.
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
        """Return the peak so far, in bytes above the baseline."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device) - self.baseline_bytes
        self._peak = max(self._peak, self._read())
        return self._peak - self.baseline_bytes

    def stop(self) -> int:
        """Stop sampling and return `peak_bytes()`. The sampling thread ends, so that it cannot disturb later timing."""
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
