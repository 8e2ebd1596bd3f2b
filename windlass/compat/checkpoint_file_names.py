"""Mixin with the engine's methods that name single checkpoint files, in DeepSpeed's layout."""

from __future__ import annotations

import os
from typing import Any

from windlass.compat.checkpoint_constants import (
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    ZERO_FILE_PREFIX,
)


class CheckpointFileNames:
    """Paths of checkpoint files in DeepSpeed's layout. No method accesses a file."""

    def _get_zero_ckpt_prefix(self, dp_rank: int, bf16_mode: bool) -> str:
        return f"{'bf16_' if bf16_mode else ''}{ZERO_FILE_PREFIX}{dp_rank}"

    def _get_rank_zero_ckpt_name(
        self, checkpoints_path: str, tag: Any, mp_rank: int, dp_rank: int, bf16_mode: bool
    ) -> str:
        name = f"{self._get_zero_ckpt_prefix(dp_rank, bf16_mode)}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
        return os.path.join(checkpoints_path, str(tag), name)

    def _get_zero_ckpt_name(self: Any, checkpoints_path: str, tag: Any) -> str:
        bf16, rank = self.bfloat16_enabled(), self.get_data_parallel_rank()
        name: str = self._get_rank_zero_ckpt_name(checkpoints_path, tag, self.checkpoint_mp_rank, rank, bf16)
        return name

    def _get_ckpt_name(
        self: Any, checkpoints_path: str, tag: Any, mp_placeholder: Any = None, pp_placeholder: Any = None
    ) -> str:
        place = f"{self.checkpoint_mp_rank:02d}" if mp_placeholder is None else mp_placeholder
        name = f"{MODEL_FILE_PREFIX}{place}{MODEL_FILE_SUFFIX}"
        if self.zero_optimization_stage() == 3:
            rank = self.get_data_parallel_rank() if pp_placeholder is None else pp_placeholder
            name = f"{ZERO_FILE_PREFIX}{rank}_{name}"
        return os.path.join(checkpoints_path, str(tag), name)

    def _get_optimizer_ckpt_name(self: Any, checkpoints_path: str, tag: Any, expp_rank: int) -> str:
        name = f"expp_rank_{expp_rank}_{MODEL_FILE_PREFIX}{self.checkpoint_mp_rank:02d}{OPTIM_FILE_SUFFIX}"
        return os.path.join(checkpoints_path, str(tag), name)
