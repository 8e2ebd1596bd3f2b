"""Rank that trains on sequences of growing length and measures the memory of a step."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

from rig.job import Job
from rig.method_rank import pin
from rig.models import build, samples
from rig.techniques import ROWS, SIZES
from rig.worker import Worker

_EVERY_SECONDS = 0.001
_WARM = 64  # tokens of a warm-up step, which creates states and buffers and loads code
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Peak:
    """Peaks while sampling: of all resident bytes, and of those that are not activations offloaded to host memory."""

    def __init__(self, away: Any) -> None:
        self._away, self._ended = away, threading.Event()
        self.resident = self.here = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        with Path("/proc/self/statm").open() as file:
            while not self._ended.wait(_EVERY_SECONDS):
                away = self._away()
                resident = resident_bytes(file)
                self.resident, self.here = max(self.resident, resident), max(self.here, resident - away)


def resident_bytes(file: Any) -> int:
    """Read the resident bytes of this process from its open `statm`."""
    file.seek(0)
    return int(file.read().split()[1]) * _PAGE


class LengthRank(Worker):
    """Worker of a `RankPool` for the row of `rig.techniques` that the job's `engine` names."""

    def __init__(self, job: Job, rank: int, meeting: str) -> None:
        pin(rank)
        super().__init__(job, rank, meeting)
        self._keepers: list[Any] = []

    def build(self, watch: bool = False) -> dict[str, Any]:
        """Build the model and the engine, and train one step. `watch` is not used: all steps are sampled."""
        import windlass
        from windlass.parallel.saved_tensor_offload import SavedTensorOffloader
        from windlass.parallel.sequence.long_context import apply_long_context

        self._remember(SavedTensorOffloader)
        tricks = ROWS[self._job.engine]
        gc.collect()
        with Path("/proc/self/statm").open() as file:
            self._base = resident_bytes(file)
        model = build(SIZES)
        if tricks.inputs == "nvme":
            folder = os.environ["WINDLASS_BENCH_FILES"]
            apply_long_context(model, tiled_mlp=False, tiled_loss=False, activation_tier="nvme", nvme_path=folder)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "parallel": tricks.section(),
            "comm": {"transport": "gloo"},
            "steps_per_print": 10**9,
        }
        self._engine: Any = windlass.initialize(model=model, config=config)[0]
        self.step(_WARM)
        return {}

    def step(self, length: int) -> dict[str, Any]:
        """Train one step on a sequence of `length` tokens."""
        tokens = samples(SIZES.vocabulary, 1, length, length)
        gc.collect()
        self._dist.barrier()
        peak, start = Peak(self._waiting), time.perf_counter()
        loss = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        self._engine.step()
        results = {"loss": loss.item(), "seconds": time.perf_counter() - start}
        peak.stop()
        return {**results, "peak": peak.here - self._base, "resident": peak.resident - self._base}

    def _waiting(self) -> int:
        """Return the bytes of activations that are offloaded to host memory at present."""
        return sum(keeper.counters.stored_bytes["cpu"] for keeper in self._keepers)

    def _remember(self, kind: Any) -> None:
        plain, keepers = kind.__init__, self._keepers

        def noting(keeper: Any, *args: Any, **kwargs: Any) -> None:
            plain(keeper, *args, **kwargs)
            keepers.append(keeper)

        kind.__init__ = noting
