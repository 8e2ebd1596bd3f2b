"""Actions of a pipeline rank: computation for a micro-batch, sends and receives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """Kind of an action. The value is its abbreviation in text."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights at once
    BACKWARD_INPUT = "I"  # gradients of the stage's inputs, the only ones that the previous stage waits for
    BACKWARD_WEIGHT = "W"  # gradients of the weights
    SEND_ACTIVATION = "sa"
    RECEIVE_ACTIVATION = "ra"
    SEND_GRADIENT = "sg"
    RECEIVE_GRADIENT = "rg"

    @property
    def is_compute(self) -> bool:
        """True if the action computes, False if it is a transfer."""
        return self in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)

    @property
    def is_send(self) -> bool:
        """True if the action is the sender's half of a transfer."""
        return self in (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)


@dataclass(frozen=True)
class Action:
    """One computation or transfer of one rank for one micro-batch.

    Attributes:
        kind: kind of the action.
        stage: index of the stage among all stages of the pipeline. Stage `s` is on rank `s % ranks`.
        micro_batch: index of the micro-batch in the batch.
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


RankActions = list[Action]
"""The actions of one rank, in order."""
