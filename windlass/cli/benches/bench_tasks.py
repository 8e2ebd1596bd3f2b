"""What a rank is told to do and what it tells back: files in a folder that the command made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ZeroMemoryTask:
    """One engine trains a linear stack for a few steps; its memory is read at four points of the first.

    Args:
        engine: a name for `trainee.make`.
        width, depth: of the stack.
        batch: rows on a rank.
        steps: after which the parameters are added up.
    """

    engine: str
    width: int
    depth: int
    batch: int
    steps: int


@dataclass(frozen=True)
class TrainingTask:
    """Configurations train a language model; several take turns, one alone shows its memory.

    Args:
        configs: by label: windlass's own; `{"engine": "none"}`, the compute alone; or `{"engine": "deepspeed",
            "config": ...}`.
        vocabulary, hidden, layers, length: of the model.
        batch: sequences on a rank.
        rounds, steps: each configuration trains `steps` steps in each of `rounds` rounds, and one untimed one before.
        watch: measure memory; the timing suffers from it.
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
TASK_TYPES: dict[str, type[ZeroMemoryTask] | type[TrainingTask]] = {
    "zero_memory": ZeroMemoryTask,
    "training": TrainingTask,
}
