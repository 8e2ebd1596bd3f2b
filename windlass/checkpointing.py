"""Activation checkpointing: recompute activations for the backward, and keep their inputs in host memory or in files.

`checkpoint(function, *args)` recomputes; `with offload_saved_tensors("cpu"):` moves the tensors that autograd saves.
`configure` takes the arguments of DeepSpeed's function of the same name. See docs/activations.md.
"""

from __future__ import annotations

from windlass.parallel.activation_checkpoint_api import checkpoint as checkpoint
from windlass.parallel.activation_checkpoint_api import configure as configure
from windlass.parallel.activation_checkpoint_api import get_offload_counters as get_offload_counters
from windlass.parallel.activation_checkpoint_api import is_configured as is_configured
from windlass.parallel.activation_checkpoint_api import manual_seed as model_parallel_cuda_manual_seed
from windlass.parallel.activation_checkpoint_api import non_reentrant_checkpoint as non_reentrant_checkpoint
from windlass.parallel.activation_checkpoint_api import offload_saved_tensors as offload_saved_tensors
from windlass.parallel.activation_checkpoint_api import (
    partition_activations_in_checkpoint as partition_activations_in_checkpoint,
)
from windlass.parallel.activation_checkpoint_api import reset as reset
from windlass.parallel.rng_tracker import RngTracker
from windlass.parallel.rng_tracker import rng_tracker as _tracker

__all__ = [
    "checkpoint",
    "configure",
    "get_offload_counters",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "offload_saved_tensors",
    "partition_activations_in_checkpoint",
    "reset",
]


def get_cuda_rng_tracker() -> RngTracker:
    """Return the named random generators, whose states `checkpoint` restores before a recomputation."""
    return _tracker
