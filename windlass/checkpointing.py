"""Activation checkpointing: recompute activations in the backward, and store saved tensors in host memory or files.

`checkpoint(function, *args)` recomputes the activations of `function`; `with offload_saved_tensors("cpu"):` offloads to
host memory the tensors that autograd saves.
`configure` takes the keys of the section `activation_checkpointing`. See docs/activations.md.
"""

from __future__ import annotations

from windlass.parallel.activation_checkpoint_api import checkpoint as checkpoint
from windlass.parallel.activation_checkpoint_api import configure as configure
from windlass.parallel.activation_checkpoint_api import get_offload_counters as get_offload_counters
from windlass.parallel.activation_checkpoint_api import is_configured as is_configured
from windlass.parallel.activation_checkpoint_api import manual_seed as manual_seed
from windlass.parallel.activation_checkpoint_api import offload_saved_tensors as offload_saved_tensors
from windlass.parallel.activation_checkpoint_api import reset as reset
from windlass.parallel.rng_tracker import rng_tracker as rng_tracker

__all__ = [
    "checkpoint",
    "configure",
    "get_offload_counters",
    "is_configured",
    "manual_seed",
    "offload_saved_tensors",
    "reset",
    "rng_tracker",
]
