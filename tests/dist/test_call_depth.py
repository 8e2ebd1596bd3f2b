"""Law: the number of windlass's Python frames from a call of the engine to the collective that it starts is bounded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import windlass
from tests.dist.harness import run_ranks
from windlass.comm.shm_transport import ShmTransport

PACKAGE = str(Path(windlass.__file__).parent)
EXACT = {"forward": 9, "gather in backward": 9, "hook": 6}
# The transport encodes ZeRO++'s messages, which adds frames. A reduction's second hop starts when a rank polls the
# first hop.
QUANTIZED = {"forward": 10, "gather in backward": 10, "hook": 9, "second hop in a hook": 10}
# On shared memory a collective starts with the call of the transport, which is not counted.
SHARED = {"forward": 7, "gather in backward": 7, "hook": 4}
SMALL: dict[str, Any] = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}
ZERO_PLUS_PLUS = SMALL | {"zero_quantized_weights": True, "zero_quantized_gradients": True}
CALLS: dict[str, list[tuple[Any, str]]] = {
    "gloo": [(dist, "isend"), (dist, "irecv"), (dist, "all_gather")],
    "shm": [(ShmTransport, "all_gather"), (ShmTransport, "reduce")],
}


class Chain(nn.Module):
    """Four layers. If `differs`, each rank skips a different one."""

    def __init__(self, differs: bool) -> None:
        super().__init__()
        self.layers, self.differs = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), differs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if not (self.differs and index == dist.get_rank() + 1):
                x = layer(x)
        return x


def windlass_frames() -> list[str]:
    """Return the functions of windlass on the stack, outermost first."""
    frame, result = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            result.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return result[::-1]


def deepest_stacks(transport: str, options: dict[str, Any], differs: bool) -> list[dict[str, list[str]]]:
    """Train, and return the deepest stack at the start of a collective, for each step and caller of windlass."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "unit_merge_threshold": 0,
            **options,
        },
        "comm": {"transport": transport},
    }
    engine = windlass.initialize(model=Chain(differs), config=config)[0]
    deepest: dict[str, list[str]] = {}

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            stack = windlass_frames()
            names = [name.partition(":")[2] for name in stack]
            if "after_accumulate" in names:
                caller = "second hop in a hook" if "_turn" in names else "hook"
                stack = stack[names.index("after_accumulate") :]
            elif "pre_forward" in names:
                caller = "forward"
            elif "pre_backward" in names and "join_unshard" in names:
                caller = "gather in backward"
            else:
                return call(*args, **options)
            deepest[caller] = max(deepest.get(caller, []), stack, key=len)
            return call(*args, **options)

        return start

    steps = []
    with ExitStack() as patched:
        for owner, name in CALLS[transport]:
            patched.enter_context(patch.object(owner, name, recorded(getattr(owner, name))))
        for _ in range(4):
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()
            steps.append(dict(deepest))
            deepest.clear()
    engine.destroy()
    return steps


@pytest.mark.parametrize(
    ("transport", "options", "differs", "bounds"),
    [
        ("gloo", {}, False, EXACT),
        ("gloo", SMALL, False, EXACT),
        ("gloo", SMALL, True, EXACT),  # ranks exchange their lists of collectives, which differ
        ("gloo", ZERO_PLUS_PLUS, False, QUANTIZED),
        ("shm", SMALL, False, SHARED),
    ],
)
def test_call_depth_from_the_engine_to_a_collective_is_bounded(
    transport: str, options: dict[str, Any], differs: bool, bounds: dict[str, int]
) -> None:
    steps = [step for steps in run_ranks(deepest_stacks, 2, transport, options, differs) for step in steps]
    for caller, bound in bounds.items():
        stacks = [step[caller] for step in steps if caller in step]
        assert max(map(len, stacks), default=0) <= bound, max(stacks, key=len)
        if caller != "second hop in a hook":  # not in every step: the first hop may end after the last poll in a hook
            # The bound must be reached, so that one more frame fails. With `options` each step has a collective of each
            # caller.
            assert max(map(len, stacks), default=0) == bound, (caller, bound)
            assert len(stacks) == len(steps) or not options, (caller, len(stacks))
