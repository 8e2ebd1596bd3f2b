"""The part of a model that a rank of a pipeline has: what the schedule's executor asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class MicroBatchResult:
    """What the last stage came to for one micro-batch.

    Attributes:
        loss: a scalar; None where none was asked for.
        output: what the model returned.
    """

    loss: torch.Tensor | None
    output: Any


class PipelineStages(Protocol):
    """The stages of one rank.

    Attributes:
        count: stages of the whole pipeline, over all ranks.
        dynamic: shapes of what stages return don't follow from the shapes in a micro-batch.
        tied: parameters that several ranks of the pipeline hold, this one among them, by name, with the places of these
            ranks along the axis. Their gradients have to be added up.
    """

    has_dynamic_shapes: bool
    shared_parameters: dict[str, tuple[int, ...]]

    @property
    def total_stages(self) -> int: ...

    def check_batch(self, batch: Any, *, compute_loss: bool = True) -> None:
        """Look at a micro-batch before anything is run, on every rank alike.

        Raises:
            ModelError: it can't be run.
        """
        ...

    def run_stage(
        self, call_module: Callable[..., Any], stage: int, stage_input: Any, batch: Any, *, compute_loss: bool = True
    ) -> Any:
        """Run one stage for one micro-batch.

        Args:
            call: calls the module, hooks and all.
            stage: which.
            given: what the stage before returned; None of the first.
            batch: the micro-batch, as the loader gave it.
            loss: the last stage shall come to a loss.

        Returns:
            What goes to the next stage; of the last one an `Ended`.
        """
        ...
