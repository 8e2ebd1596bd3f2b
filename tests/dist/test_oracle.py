"""Tests of the oracle and its bounds: torch's DistributedDataParallel passes the laws for the engine."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests import oracle
from tests.dist.equivalence_runs import FP32_BOUND, SGD, RankTrace, adamw, complaints, expected, specimen
from tests.dist.harness import run_ranks
from tests.models import Place
from tests.oracle import Recipe, relative_error


def ddp_rank(name: str, recipe: Recipe) -> RankTrace:
    """Train a specimen under DDP, and read gradients before clipping, as for the engine."""
    subject, rank = specimen(name), dist.get_rank()
    wrapped = DistributedDataParallel(oracle.build(subject, rank), find_unused_parameters="moving" in subject.traits)
    named = [(n, p) for n, p in wrapped.module.named_parameters() if p.requires_grad]
    optimizer = oracle.make_optimizer(recipe, [p for _, p in named])
    trace = RankTrace()

    def backward(loss: Tensor, retain_graph: bool = False) -> None:
        (loss / recipe.accumulation).backward(retain_graph=retain_graph)

    for step in range(recipe.steps):
        losses = []
        for micro in range(recipe.accumulation):
            last = micro == recipe.accumulation - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                losses.append(float(subject.train(wrapped, subject.batch(Place(step, micro, rank)), backward)))
        trace.losses.append(losses)
        trace.grads[step] = {n: None if p.grad is None else p.grad.clone() for n, p in named}
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in named], recipe.clipping)))
        optimizer.step()
        optimizer.zero_grad()
    trace.params = {n: p.detach().clone() for n, p in named}
    trace.model = {n: p.detach().clone() for n, p in wrapped.module.named_parameters()}
    trace.buffers = {n: b.clone() for n, b in wrapped.module.named_buffers()}
    return trace


SPECIMENS = [
    ("mlp", 4, 3),
    ("four_blocks", 2, 1),
    ("tied", 3, 3),
    ("batch_norm", 2, 1),
    ("buffer_in_forward", 3, 1),
    ("attention", 2, 3),
    ("odd_shapes", 4, 1),
    ("cross_attention", 3, 1),
]


# `make test` runs each specimen with one optimizer, in turn; the other rows are slow
@pytest.mark.parametrize(
    ("name", "ranks", "accumulation", "optimizer"),
    [
        pytest.param(*specimen, optimizer, marks=[pytest.mark.slow] if (number + turn) % 2 else [])
        for number, specimen in enumerate(SPECIMENS)
        for turn, optimizer in enumerate(("SGD", "AdamW"))
    ],
)
def test_ddp_equals_the_oracle(name: str, ranks: int, accumulation: int, optimizer: str) -> None:
    params = SGD if optimizer == "SGD" else adamw(specimen(name))
    recipe = Recipe(ranks=ranks, accumulation=accumulation, optimizer=optimizer, optimizer_params=params)
    actual = run_ranks(ddp_rank, ranks, name, recipe)
    text = complaints(actual, expected(name, recipe), recipe)
    assert not text, "\n".join(text)


def test_oracle_detects_a_wrong_scale_a_lost_rank_and_a_lost_tensor() -> None:
    recipe = Recipe(ranks=2)
    right = expected("mlp", recipe)
    grads = right.grads[0]
    halved = {n: None if g is None else g * (1 + 3 * FP32_BOUND) for n, g in grads.items()}
    assert relative_error(halved, grads)[0] > FP32_BOUND
    one_rank = expected("mlp", Recipe(ranks=1))
    assert relative_error(one_rank.grads[0], grads)[0] > 0.1
    name = next(iter(grads))
    assert relative_error({**grads, name: None}, grads)[0] == float("inf")
    assert relative_error({**grads, name: torch.full_like(grads[name], torch.nan)}, grads)[1] == f"{name}: NaN"  # type: ignore[arg-type]


def test_summation_order_tolerance_hides_no_other_error() -> None:
    recipe = Recipe(ranks=3, accumulation=3, clipping=0.0)
    one, other = (expected("mlp", recipe, by_rank=by_rank).grads[4] for by_rank in (False, True))
    assert 0.0 < relative_error(other, one)[0] < FP32_BOUND
    assert relative_error(other, one, other)[0] == 0.0
    for name, gradient in one.items():
        assert gradient is not None
        wrong = {**one, name: gradient * (1 + 5 * FP32_BOUND)}
        error, where = relative_error(wrong, one, other)
        assert where == name and error > (FP32_BOUND if gradient.norm() >= gradient.numel() ** 0.5 else 0)
    assert relative_error({**one, name: None}, one, other)[0] == float("inf")
