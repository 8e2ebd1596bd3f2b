"""Predicted time of one optimizer step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """Activity of one lane of the timeline.

    Attributes:
        process: Group of lanes: a rank, or `links`.
        lane: A stream of the rank, or a link.
        name: Label.
        start, stop: Seconds from the start of the step.
        nbytes: Bytes that the rank receives, or that the link transfers; 0 for computation.
    """

    process: str
    lane: str
    name: str
    start: float
    stop: float
    nbytes: int = 0


@dataclass(frozen=True)
class KindPrediction:
    """Prediction for one kind of step, for an optimizer with several kinds, e.g. exact and compressed steps.

    Attributes:
        kind: Name of the kind.
        step: Index of one step of this kind in the run, from 1.
        share: Fraction of steps of this kind in a long run.
        seconds: Time of the step.
        received: Bytes that a rank receives in the step, along all axes.
    """

    kind: str
    step: int
    share: float
    seconds: float
    received: int


@dataclass
class StepPrediction:
    """Prediction of one optimizer step with all its micro-batches.

    Attributes:
        seconds: Time of the step.
        world_size: Number of ranks.
        tokens: Tokens of the global batch.
        model_flops: Floating-point operations of the global batch without recomputation, from which MFU is computed.
        device_flops: Operations that the slowest pipeline stage's device executes, with recomputation.
        peak_flops: Peak rate of one device in the computation's dtype, in FLOP/s.
        compute_seconds: Computation of the slowest pipeline stage's device, with its optimizer update.
        waits: Idle seconds of that device by cause: an axis (`data`, `tp`, `sp`, `ep`), `pipeline` (bubble and
            transfers), `host`, `disk`. With `compute_seconds` they sum to `seconds`.
        moved: Bytes that a rank of each pipeline stage receives, by axis and operation, as `MeshAxis.traffic` and
            `engine.report()` count them.
        link_bytes: Bytes over the most loaded link of each kind.
        link_busy: Fraction of the step during which the busiest link of each kind is used.
        spans: Timeline; empty unless it was requested.
        notes: Assumptions of the prediction.
    """

    seconds: float
    world_size: int
    tokens: int
    model_flops: float
    device_flops: float
    peak_flops: float
    compute_seconds: float
    waits: dict[str, float] = field(default_factory=dict)
    moved: list[dict[str, dict[str, int]]] = field(default_factory=list)
    link_bytes: dict[str, float] = field(default_factory=dict)
    link_busy: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in a second."""
        return self.tokens / self.seconds

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of one device, without recomputation."""
        return self.model_flops / self.seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: fraction of the devices' peak rate, without recomputation."""
        return self.flops_per_device / self.peak_flops

    def as_json(self) -> dict[str, Any]:
        """Return the prediction as plain data, without the timeline."""
        return {
            "seconds": self.seconds,
            "world_size": self.world_size,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "model_flops": self.model_flops,
            "flops_per_device": self.flops_per_device,
            "mfu": self.mfu,
            "compute_seconds": self.compute_seconds,
            "waits": self.waits,
            "moved": self.moved,
            "link_bytes": self.link_bytes,
            "link_busy": self.link_busy,
            "notes": self.notes,
        }
