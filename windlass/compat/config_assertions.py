"""Combinations of keys that the stand-in for DeepSpeed refuses in `deepspeed.initialize` with AssertionError, as
DeepSpeed does.

Most of the combinations work with `windlass.initialize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError
from windlass.compat.config_getters import ValueConfigError, get_gradient_allreduce_op
from windlass.compat.optimizers.deepspeed_cpu_optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion
from windlass.compat.optimizers.deepspeed_muon import MuonWithAuxAdam
from windlass.compat.optimizers.fused_optimizers import FusedAdam, FusedLion
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential

TESTED_OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    FusedAdam,
    FusedLion,
    DeepSpeedCPUAdam,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPULion,
    MuonWithAuxAdam,
)
"""Optimizer classes that `zero_allow_untested_optimizer: false` allows."""

NCCL_START_ALIGNMENT_FACTOR = 2
"""Number of elements that must divide DeepSpeed's `allgather_bucket_size` at stages 1 and 2."""


class CombinationError(ConfigError, AssertionError):
    """Error for a combination of keys that DeepSpeed asserts against."""


def assert_supported_by_deepspeed(given: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    """Raise CombinationError for a combination that the caller wrote and DeepSpeed refuses.

    Defaults never raise: only keys that are present in the configuration are compared.

    Args:
        given: configuration as the caller wrote it.
        optimizer: argument of `initialize`.

    Raises:
        ValueConfigError: `gradient_allreduce_op` is sum at stage 3, where DeepSpeed raises ValueError.
    """
    section = given.get("zero_optimization")
    section = section if isinstance(section, dict) else {}
    stage = section.get("stage", 0)
    stage = stage if isinstance(stage, int) else 0  # a stage of another type is reported with the other invalid values
    if stage == 3 and get_gradient_allreduce_op(given) == "sum":
        raise ValueConfigError(
            "gradient_allreduce_op 'sum' is not supported with ZeRO stage 3 by deepspeed.initialize; remove it, or use "
            "windlass.initialize"
        )
    bucket = section.get("allgather_bucket_size", 0)
    if stage in (1, 2) and isinstance(bucket, int | float) and bucket % NCCL_START_ALIGNMENT_FACTOR:
        raise CombinationError(
            f"zero_optimization.allgather_bucket_size is {bucket}: allgather_bucket_size must be a multiple of "
            f"nccl_start_alignment_factor, {NCCL_START_ALIGNMENT_FACTOR}"
        )
    if given.get("managed_gradient_accumulation") is False:
        if section.get("overlap_comm") is True and stage < 2:
            raise CombinationError(
                f"zero_optimization.overlap_comm is true at stage {stage}: managed_gradient_accumulation=False "
                "supports ZeRO overlap_comm only with ZeRO stage 2; delete overlap_comm"
            )
        if isinstance(model, PipelineSequential):
            raise CombinationError(
                "managed_gradient_accumulation=False is not supported with pipeline parallelism, where train_batch "
                "runs all micro-batches of a step; delete the key"
            )
    untested = isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, TESTED_OPTIMIZERS)
    if untested and stage and given.get("zero_allow_untested_optimizer") is False:
        raise CombinationError(
            f"zero_allow_untested_optimizer is false, and {type(optimizer).__name__} is none of "
            f"{', '.join(one.__name__ for one in TESTED_OPTIMIZERS)}; delete the key: windlass shards every optimizer"
        )
