"""Interface between the schedule executor and the stages of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class MicroBatchResult:
    """Result of the last stage for one micro-batch.

    Attributes:
        loss: a scalar; None if no loss was requested.
        output: return value of the model.
    """

    loss: torch.Tensor | None
    output: Any


class PipelineStages(Protocol):
    """Stages of one rank.

    Attributes:
        total_stages: number of stages of the pipeline, over all ranks.
        stages: indices of this rank's stages in the pipeline.
        has_dynamic_shapes: True if the shapes of stage outputs do not follow from the shapes in a micro-batch.
        shared_parameters: names of this rank's parameters that other ranks of the pipeline also hold, with the
            positions of all these ranks along the pp axis. The gradients of each parameter must be summed over these
            ranks.
    """

    has_dynamic_shapes: bool
    shared_parameters: dict[str, tuple[int, ...]]

    @property
    def total_stages(self) -> int: ...

    @property
    def stages(self) -> Sequence[int]: ...

    def check_batch(self, batch: Any, *, compute_loss: bool = True) -> None:
        """Check a micro-batch before anything runs. All ranks of the pipeline check the same one, so all raise or none.

        Raises:
            ModelError: the micro-batch can't be run.
        """
        ...

    def run_stage(
        self, call_module: Callable[..., Any], stage: int, stage_input: Any, batch: Any, *, compute_loss: bool = True
    ) -> Any:
        """Run one stage for one micro-batch.

        Args:
            call_module: calls the module, including its hooks.
            stage: index of the stage in the pipeline.
            stage_input: output of the previous stage; None for the first stage.
            batch: the micro-batch, as the loader returned it.
            compute_loss: True if the last stage computes a loss.

        Returns:
            The input of the next stage; on the last stage a `MicroBatchResult`.
        """
        ...
