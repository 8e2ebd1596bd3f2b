"""Stage whose forward runs, for hooks of the model: its arguments, and terms of the loss that it passes on.

[Note: terms of the loss] Only the last stage has the model's loss. A hook that adds a term to the loss on another stage
passes its sum on: the scalar travels with the hidden states to the next stage, which adds its own terms, and the last
stage adds the sum to its loss. The gradient of the sum returns along the same path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class RunningStage:
    """Forward of one stage.

    Attributes:
        number: number of the stage.
        is_last: the stage computes the loss.
        arguments: the model's arguments in the micro-batch, with the labels, which only the last stage's forward gets.
        terms: sum of the terms of the loss, of this stage and all previous ones; None if there are none.
    """

    number: int
    is_last: bool
    arguments: Mapping[str, Any]
    terms: torch.Tensor | None = None

    def add_term(self, term: torch.Tensor) -> None:
        """Add a scalar to the terms of the loss."""
        self.terms = term if self.terms is None else self.terms + term


_running: ContextVar[RunningStage | None] = ContextVar("windlass_running_stage", default=None)


@contextmanager
def running_stage(stage: RunningStage) -> Iterator[RunningStage]:
    """Make a stage the one that runs inside the context."""
    token = _running.set(stage)
    try:
        yield stage
    finally:
        _running.reset(token)


def get_running_stage() -> RunningStage | None:
    """Return the stage of a pipeline whose forward runs; None outside of one."""
    return _running.get()
