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
from windlass.base.tensor_tree import iterate_tensors
from windlass.config import Config

# `windlass.plan` is a higher layer, so its module is imported by name, and only after an out-of-memory error.
_PLANNER = "windlass.plan.out_of_memory_note"
_CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


@dataclass(frozen=True)
class FailedRun:
    """Run that ran out of memory: the values from which the note is made.

    Attributes:
        model: the module, possibly sharded.
        config: configuration of the run.
        world_size: number of ranks.
        device: device of this rank.
        moment: `load`, `forward`, `backward` or `step`.
        batch: rows and length of the last input; None: unknown.
    """

    model: nn.Module
    config: Config
    world_size: int
    device: torch.device
    moment: str
    batch: tuple[int, int] | None = None

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
    """Add a note to an out-of-memory error that has no note yet. Other errors stay unchanged. Never raises."""
    if not is_out_of_memory(error) or getattr(error, "__notes__", None):
        return
    try:
        planner: Any = importlib.import_module(_PLANNER)
        error.add_note(planner.out_of_memory_note(failed))
    except Exception as second:  # the note must not hide the error that it explains
        logger.debug("no note on the memory of this run: %s: %s", type(second).__name__, second)


def batch_shape(inputs: Any) -> tuple[int, int] | None:
    """Return rows and length of the first tensor with two dimensions or more in the inputs of a forward."""
    for tensor in iterate_tensors(inputs):
        if tensor.dim() >= 2:
            return tensor.shape[0], tensor.shape[1]
    return None
