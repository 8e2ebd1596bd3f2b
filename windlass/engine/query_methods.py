"""Query methods of an engine: batch sizes, progress, learning rates and configuration."""

from __future__ import annotations

from typing import Any

from windlass.comm.mesh import Mesh
from windlass.engine.engine_parts import EngineParts


class QueryMethods(EngineParts):
    """Methods of an engine that only return information. Where DeepSpeed has the same method, the name is the same."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch ends a step."""
        return self.progress.is_at_boundary()

    def was_step_applied(self) -> bool:
        """Return True if the last `step()` updated the parameters."""
        return self.progress.last_step_applied

    def grad_norm(self) -> float | None:
        """Return the norm of the full unclipped gradient of the last step; None before the first step."""
        return self._grad_norm

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the full unclipped gradient, as `grad_norm` does (DeepSpeed's name)."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each parameter group."""
        return [group["lr"] for group in self._optimizer.param_groups] if self._optimizer is not None else []

    def get_mom(self) -> list[Any]:
        """Return the current momentum (or betas) of each parameter group."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [group.get("momentum", group.get("betas")) for group in groups]

    def train_batch_size(self) -> int:
        """Return the number of samples per step, summed over all ranks."""
        return self.progress.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in a forward on one rank."""
        return self.progress.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in a step."""
        return self.progress.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage of the configuration."""
        return self._sharded.policy.stage

    def zero_optimization(self) -> bool:
        """Return True if the stage is above 0."""
        return self._sharded.policy.stage > 0

    def fp16_enabled(self) -> bool:
        """Return True if parameters are fp16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Return True if parameters are bf16."""
        return self._config.bf16.enabled

    def gradient_clipping(self) -> float:
        """Return the gradient norm above which gradients are clipped; 0: no clipping."""
        return self._config.gradient_clipping

    def steps_per_print(self) -> float | None:
        """Return the number of steps between two log lines; None: no log lines."""
        return self._config.steps_per_print

    def optimizer_name(self) -> str | None:
        """Return the optimizer name in the configuration, in lower case, or else the class name of the optimizer."""
        if self._config.optimizer is not None:
            return self._config.optimizer.type.lower()
        return type(self._optimizer.optimizer).__name__ if self._optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """Return the learning rate scheduler name in the configuration."""
        return self._config.scheduler.type if self._config.scheduler is not None else None

    def loss_scale(self) -> float:
        """Return the current loss scale; 1 without fp16."""
        return self._scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Return True if the loss scale is dynamic."""
        return self._scaler.dynamic

    @property
    def mesh(self) -> Mesh:
        """Mesh of all ranks."""
        return self._sharded.mesh

    @property
    def data_loading_ranks(self) -> tuple[int, int]:
        """`(count, index)`: the number of ranks that read different samples, and this rank's index among them.

        Ranks along pp, sp and tp have the same index and samples.
        """
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
        """Steps skipped because a gradient was not finite."""
        return self.progress.skipped_steps
