"""What a rank of a pipeline does, one entry after another: computing for a micro-batch, sending, receiving."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """Kinds of actions; the value is how one prints."""

    FORWARD = "F"
    BACKWARD = "B"  # of inputs and weights at once
    BACKWARD_INPUT = "I"  # the backward of a stage's inputs alone, which is all that the stage before waits for
    BACKWARD_WEIGHT = "W"  # the rest of it
    SEND_ACTIVATION = "sa"
    RECEIVE_ACTIVATION = "ra"
    SEND_GRADIENT = "sg"
    RECEIVE_GRADIENT = "rg"

    @property
    def is_compute(self) -> bool:
        """It is no transfer."""
        return self in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)

    @property
    def is_send(self) -> bool:
        """It is the sender's half of a transfer."""
        return self in (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)


@dataclass(frozen=True)
class Action:
    """Something that one rank does for one micro-batch.

    Attributes:
        kind: what.
        stage: the stage for which, of all stages of the pipeline; stage `s` lies on rank `s % ranks`.
        micro: the micro-batch.
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


RankActions = list[Action]
"""What one rank does, in this order."""
