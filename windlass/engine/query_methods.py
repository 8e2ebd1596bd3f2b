"""What a script may ask of an engine: sizes, progress, rates, what the configuration says."""

from __future__ import annotations

from typing import Any

from windlass.comm.mesh import Mesh
from windlass.config import Config
from windlass.engine.sharded_optimizer import ShardedOptimizer
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import LossScale
from windlass.zero.sharded_model import ShardedModel


class QueryMethods:
    """The part of an engine that only answers. Names are DeepSpeed's."""

    progress: TrainingProgress
    _optimizer: ShardedOptimizer | None
    _config: Config
    _sharded: ShardedModel
    _scaler: LossScale
    _grad_norm: float | None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends a step."""
        return self.progress.is_at_boundary()

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters."""
        return self.progress.last_step_applied

    def grad_norm(self) -> float | None:
        """Norm of the whole unclipped gradient of the last step; None before the first."""
        return self._grad_norm

    def get_global_grad_norm(self) -> float | None:
        """As `grad_norm`."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group now."""
        return [group["lr"] for group in self._optimizer.param_groups] if self._optimizer is not None else []

    def get_mom(self) -> list[Any]:
        """The momentum (or betas) of each group now."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [group.get("momentum", group.get("betas")) for group in groups]

    def train_batch_size(self) -> int:
        """Samples in a step over all ranks."""
        return self.progress.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a forward on one rank."""
        return self.progress.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a step."""
        return self.progress.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage of the configuration."""
        return self._sharded.policy.stage

    def zero_optimization(self) -> bool:
        """Whether the stage is above 0."""
        return self._sharded.policy.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self._config.bf16.enabled

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0: none."""
        return self._config.gradient_clipping

    def steps_per_print(self) -> float | None:
        """Steps between two lines of the log."""
        return self._config.steps_per_print

    def optimizer_name(self) -> str | None:
        """The optimizer that the configuration names, or the class of the one that was passed."""
        if self._config.optimizer is not None:
            return self._config.optimizer.type.lower()
        return type(self._optimizer.optimizer).__name__ if self._optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """The schedule that the configuration names."""
        return self._config.scheduler.type if self._config.scheduler is not None else None

    def loss_scale(self) -> float:
        """The loss scale now; 1 without fp16."""
        return self._scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self._scaler.dynamic

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """`stage3_gather_16bit_weights_on_model_save` of the configuration."""
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    @property
    def mesh(self) -> Mesh:
        """All ranks on their axes."""
        return self._sharded.mesh

    @property
    def data_loading_ranks(self) -> tuple[int, int]:
        """`(count, number)`: ranks that read samples of their own, and which of them this one is, or reads with."""
        world = self._sharded.mesh.world
        grid = self._sharded.mesh.grid
        return grid.data_loading_size, grid.data_loading_rank(world.ranks[world.index])

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self.progress.micro_steps

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.progress.global_steps

    @property
    def global_samples(self) -> int:
        """Samples so far."""
        return self.progress.global_samples

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient overflowed."""
        return self.progress.skipped_steps
