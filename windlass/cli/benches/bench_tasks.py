"""Tasks that `windlass bench` sends to its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ZeroMemoryTask:
    """Training of a linear stack for a few steps under one engine; memory is read at four points until the end of the
    first step.

    Args:
        engine: a name for `make_engine`.
        width, depth: width of each layer, number of layers.
        batch: rows on a rank.
        steps: number of steps, after which the sum of all parameters is reported, to compare engines.
    """

    engine: str
    width: int
    depth: int
    batch: int
    steps: int


@dataclass(frozen=True)
class TrainingTask:
    """Training of a language model under several configurations alternately, or under one to measure its memory.

    Args:
        configs: configurations by label: a configuration of windlass; `{"engine": "none"}` for plain compute without an
            engine; or `{"engine": "deepspeed", "config": ...}`.
        vocabulary, hidden, layers, length: sizes of the model.
        batch: sequences on a rank.
        rounds, steps: in each of `rounds` rounds, each configuration trains one untimed step and `steps` timed steps.
        measure_memory: measure memory too; this disturbs the timing.
    """

    configs: dict[str, dict[str, Any]]
    vocabulary: int
    hidden: int
    layers: int
    length: int
    batch: int
    rounds: int
    steps: int
    measure_memory: bool


BenchTask = ZeroMemoryTask | TrainingTask
