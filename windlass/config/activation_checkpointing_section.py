"""Recomputing activations instead of keeping them."""

from __future__ import annotations

from windlass.config.config_section import ConfigSection, Names, Positive
from windlass.config.key_status import honoured


class ActivationCheckpointing(ConfigSection):
    """How `windlass.checkpointing.checkpoint` keeps its inputs; a model that uses torch's function is not touched."""

    partition_activations: bool = honoured(False)
    """Cut what is kept over the ranks of the model-parallel group; a group of one rank has nothing to cut."""
    number_checkpoints: Positive | None = honoured(None)
    """For how many checkpointed calls the buffer of contiguous_memory_optimization is."""
    contiguous_memory_optimization: bool = honoured(False)
    """Keep it in one buffer."""
    synchronize_checkpoint_boundary: bool = honoured(False)
    """Wait for the device before and after each checkpointed call."""
    profile: bool = honoured(False)
    """Log once a backward how long checkpointed calls and their recomputation took."""
    cpu_checkpointing: bool = honoured(False)
    """Keep it in host memory."""
    nvme_path: Names = honoured(list, windlass_only=True)
    """Keep it in files in these folders, over which blocks go round."""
