"""The `activation_checkpointing` section: recomputation of activations in the backward."""

from __future__ import annotations

from windlass.config.config_section import ConfigSection, Paths, Positive
from windlass.config.key_status import honoured


class ActivationCheckpointing(ConfigSection):
    """Options of `windlass.checkpointing.checkpoint`. If `enabled` is true, layers of transformers models call it too.
    The options do not affect models that call torch's own checkpoint function."""

    enabled: bool = honoured(False, windlass_only=True)
    """Call `gradient_checkpointing_enable` of the model in `initialize`, as transformers' Trainer does. If another key
    of the section is set, its layers call `windlass.checkpointing.checkpoint`."""
    partition_activations: bool = honoured(False)
    """Shard the saved inputs of checkpointed calls over the ranks of the model-parallel group. No effect if the group
    has one rank."""
    number_checkpoints: Positive | None = honoured(None)
    """Number of checkpointed calls in a forward: the buffer of contiguous_memory_optimization has space for the inputs
    of so many."""
    contiguous_memory_optimization: bool = honoured(False)
    """Store the saved inputs of checkpointed calls in one contiguous buffer."""
    synchronize_checkpoint_boundary: bool = honoured(False)
    """Synchronize the device before and after each checkpointed call."""
    profile: bool = honoured(False)
    """Log after each backward the time of checkpointed calls and of their recomputation."""
    cpu_checkpointing: bool = honoured(False)
    """Store the saved inputs of checkpointed calls in host memory."""
    nvme_path: Paths = honoured(list, windlass_only=True)
    """Store the saved inputs of checkpointed calls in files in these folders; empty: no files. Blocks of data are
    distributed over the folders round-robin."""

    @property
    def changes_storage(self) -> bool:
        """True if torch's checkpoint function would not do what the section requests."""
        return any(
            (
                *(self.partition_activations, self.contiguous_memory_optimization, self.cpu_checkpointing),
                *(self.synchronize_checkpoint_boundary, self.profile, bool(self.nvme_path)),
            )
        )
