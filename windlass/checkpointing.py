"""Activation checkpointing: compute again what a backward needs, and keep what it starts from in host memory or files.

`checkpoint(function, *args)` recomputes; `with offloaded("cpu"):` moves what autograd saves. `configure` has the
arguments of DeepSpeed's function of that name. See docs/activations.md.
"""

from __future__ import annotations

from windlass.parallel.activations import checkpoint as checkpoint
from windlass.parallel.activations import configure as configure
from windlass.parallel.activations import counts as counts
from windlass.parallel.activations import is_configured as is_configured
from windlass.parallel.activations import manual_seed as model_parallel_cuda_manual_seed
from windlass.parallel.activations import non_reentrant_checkpoint as non_reentrant_checkpoint
from windlass.parallel.activations import offloaded as offloaded
from windlass.parallel.activations import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from windlass.parallel.activations import reset as reset
from windlass.parallel.rng import RngTracker
from windlass.parallel.rng import tracker as _tracker

__all__ = [
    "checkpoint",
    "configure",
    "counts",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "offloaded",
    "partition_activations_in_checkpoint",
    "reset",
]


def get_cuda_rng_tracker() -> RngTracker:
    """The named random generators that `checkpoint` winds back for a recomputation."""
    return _tracker
