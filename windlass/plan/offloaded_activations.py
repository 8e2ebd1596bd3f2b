"""Inputs of checkpointed layers that a run stores in host memory or in files: their bytes at each moment of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from windlass.config import Config
from windlass.parallel.activation_store import ActivationTier, StoredActivation
from windlass.parallel.checkpoint_profiler import CheckpointProfiler
from windlass.parallel.device_copies import CompletedCopy, PendingCopy
from windlass.parallel.model_checkpointing import replace_checkpoint_function
from windlass.parallel.recompute import RecomputeSettings, recompute
from windlass.parallel.saved_tensor_offload import SavedTensorOffloader


def activation_tier_of(config: Config, *, has_own_memory: bool) -> ActivationTier:
    """Return the tier in which a run stores the inputs of checkpointed layers.

    Args:
        has_own_memory: The device has memory of its own; else host memory is the device's, and no copy is made.
    """
    section = config.activation_checkpointing
    if config.parallel.recompute and config.parallel.activation_tier != "device":
        tier: ActivationTier = config.parallel.activation_tier
    elif config.parallel.recompute or section.enabled:
        tier = "nvme" if section.nvme_path else "cpu" if section.cpu_checkpointing else "device"
    else:
        tier = "device"
    return "device" if tier == "cpu" and not has_own_memory else tier


class PlannedActivationStore:
    """Store of a traced forward, whose tensors have no memory: it counts bytes.

    Attributes:
        live, peak: Bytes in the store now, and at most since it was made.
    """

    is_collective = False
    max_in_flight = 1

    def __init__(self, tier: ActivationTier) -> None:
        self.tier = tier
        self.live = self.peak = 0

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        """See `ActivationStore.begin_call`."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return True."""
        return True

    def put(self, flat: torch.Tensor) -> StoredActivation:
        """Count a tensor `[n]`."""
        return _CountedActivation(self, flat)

    def install(self, model: nn.Module) -> None:
        """Let the checkpointed layers of a model store their inputs here."""
        settings = RecomputeSettings(_TracedOffloader(self), CheckpointProfiler(log_times=False, synchronize=False))

        def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("use_reentrant", None)
            return recompute(settings, function, args, kwargs)

        replace_checkpoint_function(model, checkpoint)


class _TracedOffloader(SavedTensorOffloader):
    """Offloader that also takes tensors without memory."""

    def is_offloadable(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and not isinstance(tensor, nn.Parameter)


class _CountedActivation:
    """Tensor that a store has counted. Deleting this object takes it out of the store."""

    is_source_free = True

    def __init__(self, store: PlannedActivationStore, flat: torch.Tensor) -> None:
        self._store, self._numel, self._dtype, self._nbytes = store, flat.numel(), flat.dtype, flat.nbytes
        store.live += self._nbytes
        store.peak = max(store.peak, store.live)

    def __del__(self) -> None:
        self._store.live -= self._nbytes

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def fetch(self) -> PendingCopy:
        return CompletedCopy(torch.empty(self._numel, dtype=self._dtype))
