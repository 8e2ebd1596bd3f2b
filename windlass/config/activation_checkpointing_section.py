"""The `activation_checkpointing` section: recomputation of activations in the backward."""

from __future__ import annotations

from windlass.config.config_section import ConfigSection, Paths, Positive
from windlass.config.key_status import honoured


class ActivationCheckpointing(ConfigSection):
    """Options of `windlass.checkpointing.checkpoint`. Except for `enabled`, the options do not affect models that call
    torch's own checkpoint function."""

    enabled: bool = honoured(False, windlass_only=True)
    """Call `gradient_checkpointing_enable` of the model in `initialize`, as transformers' Trainer does."""
    partition_activations: bool = honoured(False)
    """Shard saved inputs over the ranks of the model-parallel group. No effect if the group has one rank."""
    number_checkpoints: Positive | None = honoured(None)
    """Number of checkpointed calls for which contiguous_memory_optimization allocates its buffer."""
    contiguous_memory_optimization: bool = honoured(False)
    """Keep saved inputs in one contiguous buffer."""
    synchronize_checkpoint_boundary: bool = honoured(False)
    """Synchronize the device before and after each checkpointed call."""
    profile: bool = honoured(False)
    """Log after each backward the time of checkpointed calls and of their recomputation."""
    cpu_checkpointing: bool = honoured(False)
    """Keep saved inputs in host memory."""
    nvme_path: Paths = honoured(list, windlass_only=True)
    """Folders for files of saved inputs. Blocks are distributed over the folders round-robin."""
