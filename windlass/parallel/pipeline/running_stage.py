"""Running stage of a pipeline, for hooks of the model: arguments of the forward, and terms that hooks add to the loss.

[Note: terms of the loss] Only the last stage has the model's loss. Terms that hooks add on another stage are summed.
The sum, a scalar, is sent with the hidden states to the next stage, which adds its own terms, and the last stage adds
the sum to its loss. The gradient of the sum returns along the same path.
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
        is_last: True on the stage that computes the loss.
        arguments: the model's arguments in the micro-batch, including labels. The forward receives labels only on the
            last stage.
        terms: sum of the loss terms of this stage and all previous stages; None without such terms.
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
    """Make `stage` the running stage inside the context."""
    token = _running.set(stage)
    try:
        yield stage
    finally:
        _running.reset(token)


def get_running_stage() -> RunningStage | None:
    """Return the running stage; None outside a stage's forward."""
    return _running.get()
