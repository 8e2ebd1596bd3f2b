"""Law: a bounded number of Python frames of windlass lies between a call of the engine and the collective it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import windlass
from tests.dist.harness import run_ranks

PACKAGE = str(Path(windlass.__file__).parent)
FROM_FORWARD, FROM_GRADIENT_HOOK = 9, 8


def windlass_frames() -> list[str]:
    """Return the functions of windlass on the stack, outermost first."""
    frame, result = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            result.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return result[::-1]


def stacks_of_transfers(stage: int) -> tuple[list[list[str]], list[list[str]]]:
    """Train over gloo, and return the stacks of transfers that start inside a forward, and inside a gradient hook."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_merge_threshold": 0},
        "comm": {"transport": "gloo"},
    }
    engine = windlass.initialize(model=model, config=config)[0]
    stacks: list[list[str]] = []

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            stacks.append([name for name in windlass_frames() if not name.startswith("test_")])
            return call(*args, **options)

        return start

    for step in range(3):
        loss = engine(torch.ones(1, 8)).sum()
        if step == 2:  # the ranks agree on the order of the collectives from the second step on
            forward, stacks = stacks, []
        engine.backward(loss)
        if step == 2:
            backward, stacks = stacks, []
        engine.step()
        if step == 1:
            stacks = []
            patch.object(dist, "isend", recorded(dist.isend)).start()
    patch.stopall()
    engine.destroy()
    in_forward = [stack for stack in forward if "training_engine.py:forward" in stack[0]]
    in_hooks = [stack for stack in backward if any(name.endswith(":after_accumulate") for name in stack)]
    return in_forward, [stack[[n.endswith(":after_accumulate") for n in stack].index(True) :] for stack in in_hooks]


def test_call_depth_from_the_engine_to_a_collective_is_bounded() -> None:
    for forward, hooks in run_ranks(stacks_of_transfers, 2, 3):
        assert forward and max(map(len, forward)) <= FROM_FORWARD, max(forward, key=len, default=[])
        assert hooks and max(map(len, hooks)) <= FROM_GRADIENT_HOOK, max(hooks, key=len, default=[])
