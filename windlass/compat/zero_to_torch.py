"""Command `python -m deepspeed.utils.zero_to_torch`."""

from windlass.compat.checkpoint.consolidated import (
    convert_zero_checkpoint_to_state_dict as convert_zero_checkpoint_to_state_dict,
)
from windlass.compat.checkpoint.consolidated import zero_to_torch as main

__all__ = ["convert_zero_checkpoint_to_state_dict", "main"]
