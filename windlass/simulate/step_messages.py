"""Messages of a step of an optimizer that reduces gradients itself.

[Note: kinds of steps] The steps of such an optimizer differ: the first steps reduce gradients in full, later steps send
compressed messages, or none. The kind of a step has the codec of its messages and the parts of the model that are sent.
The rules are those of the optimizers themselves, so that step `s` of a simulation is step `s` of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from windlass.optim.diloco import fragment_due
from windlass.optim.zero_one_adam import StepKind, kind_of_step
from windlass.zero.update.compressed_phase import CODEC, FINE_CODEC

IN_FULL, COMPRESSED, LOCAL, SYNC, OUTER, LOW_RANK = (
    "in full",
    "compressed",
    "local",
    "synchronizing",
    "outer",
    "low rank",
)
_DOUBLINGS = 31  # doublings of an interval of 0/1 Adam, after which it no longer grows
_ALL = frozenset({0})


@dataclass(frozen=True)
class StepMessages:
    """Messages of one kind of step; by default those of the engine, which reduces gradients in full.

    Attributes:
        kind: Name of the kind.
        codec: Codec of the messages.
        parts: Number of parts of the model; unit `i` belongs to part `i % parts`.
        averaged: Parts whose values are sent to the owners of their elements.
        answered: Parts whose means the owners send to all ranks, at stage 0.
        publishes: After the update, owners send the changes of parameters to all ranks, at stages 1 and 2.
        thin: Matrix rank and smallest compression rate of PowerSGD; None: another optimizer.
        overlaps: The step does not wait for its messages.
    """

    kind: str = IN_FULL
    codec: str = ""
    parts: int = 1
    averaged: frozenset[int] = frozenset()
    answered: frozenset[int] = frozenset()
    publishes: bool = False
    thin: tuple[int, float] | None = None
    overlaps: bool = False

    @property
    def keeps_local(self) -> bool:
        """True if the engine reduces no gradient."""
        return self.kind != IN_FULL


@dataclass(frozen=True)
class KindOfStep:
    """One kind of the steps of a run.

    Attributes:
        messages: Messages of a step of this kind.
        step: Number of a step of this kind, from 1.
        share: Fraction of steps of this kind in a long run, once the optimizer's schedule no longer changes.
    """

    messages: StepMessages
    step: int
    share: float


def messages_of_step(optimizer: str, options: dict[str, Any], step: int, *, shards: bool) -> StepMessages:
    """Return the messages of step `step`, counted from 1.

    Args:
        optimizer: Class of the optimizer. The engine reduces gradients in full for classes that have no rule here.
        options: Hyper-parameters of the optimizer.
        shards: States are sharded: stages 1 and 2.
    """
    if optimizer in ("OneBitAdam", "OneBitLamb"):
        return _one_bit(COMPRESSED, shards=shards) if step > options["freeze_step"] else StepMessages()
    if optimizer == "ZeroOneAdam":
        kind = kind_of_step(step, options)
        if kind is StepKind.LOCAL:
            return StepMessages(LOCAL)
        if kind in (StepKind.SYNC, StepKind.COMPRESSED):
            return _one_bit(SYNC if kind is StepKind.SYNC else COMPRESSED, shards=shards)
    if optimizer == "PowerSGD" and step > options["start_step"]:
        return StepMessages(LOW_RANK, averaged=_ALL, thin=(options["rank"], options["min_compression_rate"]))
    if optimizer == "DiLoCo" and step > options["start_step"]:
        return _outer(options, step)
    return StepMessages()


def _one_bit(kind: str, *, shards: bool) -> StepMessages:
    codec = FINE_CODEC if shards else CODEC
    return StepMessages(kind, codec, averaged=_ALL, answered=frozenset() if shards else _ALL, publishes=shards)


def _outer(options: dict[str, Any], step: int) -> StepMessages:
    parts, overlap = options["fragments"], options["overlap_steps"]
    late = max(1, overlap // 2) if overlap else 0  # steps from send to answer: [Note: overlapped outer steps]

    def due(at: int) -> frozenset[int]:
        return frozenset(part for part in range(parts) if fragment_due(at, part, options))

    sent, answered = due(step), due(step - late)
    if not sent and not answered:
        return StepMessages(LOCAL)
    return StepMessages(OUTER, options["codec"], parts, sent, answered, overlaps=overlap > 0)


def kinds_of_steps(optimizer: str, options: dict[str, Any], *, shards: bool) -> tuple[KindOfStep, ...]:
    """Return the kinds of steps in the order of their first step; one kind for optimizers whose steps are all equal."""
    early, cycle = _early_and_cycle(optimizer, options)
    found: dict[StepMessages, tuple[int, int]] = {}
    for steps, counts in ((early, 0), (cycle, 1)):
        for step in steps:
            messages = messages_of_step(optimizer, options, step, shards=shards)
            first, count = found.get(messages, (step, 0))
            found[messages] = first, count + counts
    total = sum(count for _, count in found.values())
    return tuple(KindOfStep(messages, step, count / total) for messages, (step, count) in found.items())


def _early_and_cycle(optimizer: str, options: dict[str, Any]) -> tuple[Iterable[int], Iterable[int]]:
    """Return examples of all kinds of steps at the start of a run, and the steps of the cycle that then repeats."""
    if optimizer in ("OneBitAdam", "OneBitLamb"):
        return [1], [options["freeze_step"] + 1]
    if optimizer == "PowerSGD":
        return [1], [options["start_step"] + 1]
    if optimizer == "ZeroOneAdam":
        scaler, interval = options["var_update_scaler"], min(options["local_step_clipper"], 1 << _DOUBLINGS - 1)
        first = -(-(options["var_freeze_step"] + 1 + _DOUBLINGS * options["local_step_scaler"]) // interval) * interval
        return [1, scaler + 1, scaler + 2], range(first, first + interval)
    if optimizer == "DiLoCo":
        first = options["start_step"] + 2 * options["inner_steps"] + 1
        return [1], range(first, first + options["inner_steps"])
    return [], [1]
