"""Note on an out-of-memory error: the predicted and the actual memory, and the cheapest change of the
configuration with which the run fits."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.base.device_memory import emulated_device_memory
from windlass.base.errors import DeviceMemoryError
from windlass.base.log import logger
from windlass.config import Config
from windlass.engine.batch_shapes import BatchShapes

# `windlass.plan` is a higher layer, so its module is imported by name, and only after an out-of-memory error.
_PLANNER = "windlass.plan.out_of_memory_note"
NOTE_START = "windlass: memory of this rank"
_CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


@dataclass(frozen=True)
class FailedRun:
    """Run that ran out of memory: the values from which the note is made.

    Attributes:
        model: the module, possibly sharded.
        config: configuration of the run.
        world_size: number of ranks.
        device: device of this rank.
        moment: `load`, `forward`, `backward`, `step`, or `schedule` of a pipeline.
        batch: inputs of the last forward, or the last micro-batch of a pipeline; None: there was none.
    """

    model: nn.Module
    config: Config
    world_size: int
    device: torch.device
    moment: str
    batch: BatchShapes | None = None

    @property
    def has_own_memory(self) -> bool:
        """True if the device has memory separate from the host's."""
        return self.device.type != "cpu" or emulated_device_memory() is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of a GPU's allocator, of the emulated device, or of the host."""
    if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_ALLOCATOR)


def note_out_of_memory(error: BaseException, failed: FailedRun) -> None:
    """Add a note to an out-of-memory error that has none of these yet. Other errors stay unchanged. Never raises."""
    if not is_out_of_memory(error) or any(str(n).startswith(NOTE_START) for n in getattr(error, "__notes__", ())):
        return
    try:
        planner: Any = importlib.import_module(_PLANNER)
        error.add_note(planner.out_of_memory_note(failed))
    except Exception as second:  # the note must not hide the error that it explains
        logger.debug("no note on the memory of this run: %s: %s", type(second).__name__, second)
