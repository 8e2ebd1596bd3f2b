"""Recomputing activations instead of keeping them."""

from __future__ import annotations

from windlass.config.section import Positive, Section
from windlass.config.verdict import accepted, refused


class ActivationCheckpointing(Section):
    """Options of DeepSpeed's own checkpoint function; a model that uses torch's is not touched by them."""

    partition_activations: bool = refused(
        False, "not yet built: activations cut over model-parallel ranks; write false"
    )
    number_checkpoints: Positive | None = accepted(None, "read only by contiguous_memory_optimization")
    contiguous_memory_optimization: bool = refused(
        False, "not yet built: one buffer for all kept activations; write false"
    )
    synchronize_checkpoint_boundary: bool = accepted(False, "a device synchronization for timing; it changes no result")
    profile: bool = refused(False, "not yet built: timing of recomputation; write false")
    cpu_checkpointing: bool = refused(False, "not yet built: activations in host memory; write false")
