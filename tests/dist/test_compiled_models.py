"""Tests of models that the script compiles: parameters equal plain PyTorch's, with dropped gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.harness import run_ranks
from tests.oracle import relative_error

BACKEND = "aot_eager"


class Small(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def script(backward: Callable[[int, int], None], drop: Callable[[], Any], step: Callable[[], Any]) -> None:
    """Drop the gradients of the first backward of each step."""
    for number in range(2):
        backward(number, 0)
        drop()
        backward(number, 1)
        step()


def plain(ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward(step: int, micro: int) -> None:
        for rank in range(ranks):
            (model(batch(step, micro, rank)) / ranks).backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    script(backward, optimizer.zero_grad, step)
    return {name: value.detach() for name, value in model.named_parameters()}


def compiled(ways: list[str], stage: int) -> list[dict[str, Tensor]]:
    results = []
    for way in ways:
        torch._dynamo.reset()
        torch.manual_seed(dist.get_rank())
        model: Any = Small()
        if way == "wrapped":
            model = torch.compile(model, backend=BACKEND)
        elif way == "in place":
            model.compile(backend=BACKEND)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        if way == "by configuration":
            config["compile"] = {"enabled": True, "backend": BACKEND, "kwargs": {"dynamic": False}}
        engine, optimizer = windlass.initialize(model=model, config=config)[:2]
        assert engine.is_compiled == (way == "by configuration")
        if way == "after initialize":
            engine.module.compile(backend=BACKEND)
        doors = {
            "by configuration": model.zero_grad,
            "wrapped": model.zero_grad,
            "in place": optimizer.zero_grad,
            "after initialize": engine.zero_grad,
        }

        def backward(step: int, micro: int, engine: Any = engine) -> None:
            engine.backward(engine(batch(step, micro, dist.get_rank())))

        script(backward, doors[way], engine.step)
        results.append({name.removeprefix("_orig_mod."): value for name, value in engine.full_state_dict().items()})
        engine.destroy()
        assert not engine.is_compiled and (way == "wrapped" or "forward" not in model.__dict__)
    return results


@pytest.mark.parametrize(
    ("stage", "ways"),
    [
        pytest.param(1, ["in place", "by configuration"], marks=pytest.mark.slow),
        (3, ["wrapped", "in place", "after initialize", "by configuration"]),
    ],
    ids=str,
)
def test_a_compiled_model_trains_as_plain(stage: int, ways: list[str]) -> None:
    expected = plain(2)
    for way, actual in zip(ways, run_ranks(compiled, 2, ways, stage, timeout=240.0)[0], strict=True):
        error, where = relative_error(actual, expected)
        assert error < 1e-5, (way, where, error)
