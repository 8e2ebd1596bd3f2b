"""Tests of a backward that raises an error that the script catches: the result equals plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.equivalence_runs import whole_params
from tests.dist.harness import run_ranks
from windlass.base.log import logger
from windlass.zero.core.gradient_reducer import GradientReducer

STEPS = 4
# Stage, contiguous_gradients, and the drop of gradients after the error: by the script (True), by the engine, or none
# (False). "one rank": only rank 1 has an error, and no gradient is dropped.
SETTINGS: dict[str, tuple[int, bool, bool | str]] = {
    "contiguous": (1, True, True),
    "gradients in .grad": (1, False, True),
    "gradients in .grad stay": (0, False, False),
    "gradients in .grad, dropped by the engine": (1, False, "engine"),
    "sharded gradients": (2, True, True),
    "sharded gradients, dropped by the engine": (2, True, "engine"),
    "sharded gradients, one rank fails": (2, False, "one rank"),
    "sharded parameters": (3, True, True),
    "sharded parameters, one rank fails": (3, True, "one rank"),
    "sharded parameters, gradients stay": (3, True, False),
}


class Failing(torch.autograd.Function):
    """Identity whose backward raises while `fails` is set."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.fails:
            raise torch.OutOfMemoryError("no memory for this gradient")
        return gradient


class Chain(nn.Module):
    """Four layers. The backward fails after the last two have their gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = Failing.apply(x) if number == 1 else x
        return (x**2).mean()


def _batch(step: int, attempt: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * attempt + rank))


def trained(stage: int, contiguous: bool, drops: bool | str, forward_again: bool) -> tuple[dict[str, Tensor], int]:
    """Return the final parameters, and the largest number of unsharded elements after a forward that follows an error.

    Every second step begins with a backward that fails.
    """
    import windlass

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": contiguous,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    engine = windlass.initialize(model=Chain(), config=config)[0]
    rank, live = dist.get_rank(), 0
    for step in range(STEPS):
        loss = engine(_batch(step, 0, rank))
        if step % 2:
            again = engine(_batch(step, 1, rank))
            Failing.fails = drops != "one rank" or rank == 1
            with pytest.raises(torch.OutOfMemoryError) if Failing.fails else nullcontext():
                engine.backward(loss)
            Failing.fails = False
            if drops == "engine":
                with patch.object(GradientReducer, "_copy_unreduced", side_effect=torch.OutOfMemoryError):
                    engine._sharded.drop_gradients()
            elif drops is True:
                engine.zero_grad()
            loss = engine(_batch(step, 1, rank)) if forward_again else again
            live = max(live, engine._sharded.runtime.live_numel() if forward_again else 0)
        engine.backward(loss)
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result, live


def _plain(drops: bool | str, world: int) -> dict[str, Tensor]:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        if step % 2:
            for rank in range(world):
                Failing.fails = drops != "one rank" or rank == 1
                with pytest.raises(torch.OutOfMemoryError) if Failing.fails else nullcontext():
                    (model(_batch(step, 0, rank)) / world).backward()
            Failing.fails = False
            if drops not in (False, "one rank"):
                optimizer.zero_grad()
        for rank in range(world):
            (model(_batch(step, step % 2, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("forward_again", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_continues_after_a_backward_that_raised(setting: str, forward_again: bool) -> None:
    stage, contiguous, drops = SETTINGS[setting]
    expected = _plain(drops, 2)
    for result, live in run_ranks(trained, 2, stage, contiguous, drops, forward_again):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value)
        assert live == 0


def stepped_after_an_error(contiguous: bool, reads: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters after a step under the compat layer, and with `reads` the gradients before the step.

    The backward of the second micro-batch fails.
    """
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.zero import full_grad

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 0, "contiguous_gradients": contiguous},
    }
    engine = initialize(model=Chain(), config=config)[0]
    grads: dict[str, Tensor] = {}
    for micro in range(2):
        loss = engine(_batch(0, micro, dist.get_rank()))
        Failing.fails = micro == 1
        with pytest.raises(torch.OutOfMemoryError) if Failing.fails else nullcontext():
            engine.backward(loss)
        Failing.fails = False
        if micro and reads:
            grads = {name: full_grad(parameter).clone() for name, parameter in engine.module.named_parameters()}
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result, grads


@pytest.mark.parametrize(("contiguous", "reads"), [(True, False), (False, False), (False, True)])
def test_a_step_after_a_backward_that_raised_uses_all_gradients_that_arrived(contiguous: bool, reads: bool) -> None:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for micro in range(2):
        for rank in range(2):
            Failing.fails = micro == 1
            with pytest.raises(torch.OutOfMemoryError) if Failing.fails else nullcontext():
                (model(_batch(0, micro, rank)) / 4).backward()
            Failing.fails = False
    optimizer.step()
    for result, grads in run_ranks(stepped_after_an_error, 2, contiguous, reads):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result[name], parameter.detach())
            assert not reads or parameter.grad is not None
            torch.testing.assert_close(grads.get(name), parameter.grad if reads else None)


def changed_after_an_error(stage: int, folder: str) -> list[str]:
    """Save and add a layer after the gradients of a failed backward were dropped. Return the warnings of both."""
    import windlass

    model = Chain()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(3):
        Failing.fails = step == 2
        try:
            engine.backward(engine(_batch(step, 0, dist.get_rank())))
            engine.step()
        except torch.OutOfMemoryError:
            engine.zero_grad()
        finally:
            Failing.fails = False
    with patch.object(logger, "warning") as warned:
        engine.save_checkpoint(folder)
        model.layers.append(nn.Linear(8, 8))
        engine.optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
    engine.backward(engine(_batch(3, 0, dist.get_rank())))
    engine.step()
    engine.destroy()
    return [str(call.args[0]) for call in warned.call_args_list]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dropped_gradients_of_a_failed_backward_begin_no_step(stage: int, tmp_path: Any) -> None:
    for warnings in run_ranks(changed_after_an_error, 2, stage, str(tmp_path)):
        assert not warnings
