"""Parts of an engine that its checkpoints contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.checkpoint.async_save import AsyncSave
from windlass.config import Config
from windlass.engine.sharded_optimizer import ShardedOptimizer
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import LossScale

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class EngineState:
    """Parts of an engine that a checkpoint saves or loads.

    Attributes:
        raw_config: the configuration as the script gave it.
        step_start_position: data position at the start of the current step.
        metadata: plain data of the engine's class, saved with the state under separate keys.
        saved_tags: directories and tags of the checkpoints that the engine wrote; a save adds its directory and tag on
            the rank that removes old checkpoints.
    """

    sharded: ShardedModel
    optimizer: ShardedOptimizer | None
    config: Config
    raw_config: Any
    progress: TrainingProgress
    scaler: LossScale
    lr_scheduler: Any
    training_dataloader: Any
    step_start_position: dict[str, Any] | None
    async_save: AsyncSave
    saved_tags: set[tuple[str, str]]
    metadata: dict[str, Any]
