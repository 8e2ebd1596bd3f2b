"""Tests that ranks with different modules or more micro-batches than others train as one process."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import windlass
from tests import oracle
from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import RankError, run_ranks
from tests.dist.quick_rows import in_shares
from tests.dist.test_offload import LATE, hold, offload_to
from tests.models import DIFFERING, WIDTH, Place, Specimen, rows
from tests.models.rank_dependent import EarlyExit
from tests.oracle import Recipe, relative_error

RECIPE = Recipe(ranks=2, accumulation=2, steps=4, optimizer="AdamW", optimizer_params=ADAMW)
FROZEN_KNOBS = (
    ("stage3_prefetch_bucket_size", 0),
    ("stage3_max_live_parameters", 0),
    ("stage3_max_reuse_distance", 0),
)


def settings(transport: str, tier: str, *zero: tuple[str, Any]) -> list[Setting]:
    """Return the settings of stages 1 to 3, with their shards on the tier `tier`."""
    away = {s: offload_to("cpu", "cpu" if s == 3 else "none", "") if tier == "host" else () for s in (1, 2, 3)}
    return [Setting(stage=s, transport=transport, zero=(*away[s], *zero)) for s in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "number"), [("towers_reentrant", 3), ("experts", 1), ("early_exit", 3), ("uneven", 2)]
)
@in_shares
def test_ranks_that_run_different_modules_equal_one_process(
    name: str, number: int, transport: str, every: bool
) -> None:
    stages = settings(transport, "host")
    hold(name, RECIPE if every else replace(RECIPE, steps=2), stages if every else [stages[number - 1]], LATE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [(), FROZEN_KNOBS, (("unit_merge_threshold", 3000),)], ids=["default", "frozen", "merged"]
)
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", DIFFERING)
def test_all_rank_dependent_models_equal_one_process(
    name: str, ranks: int, tier: str, transport: str, knobs: Any
) -> None:
    recipe = Recipe(ranks=ranks, accumulation=3, steps=6)
    hold(name, recipe, [Setting(stage=0, transport=transport), *settings(transport, tier, *knobs)], LATE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [(("zero_hpz_partition_size", 2),), (("mics_shard_size", 2),)], ids=["hpz", "mics"]
)
@pytest.mark.parametrize("name", ["towers_reentrant", "experts", "random_path", "uneven"])
def test_ranks_that_differ_in_smaller_groups(name: str, transport: str, sections: Any) -> None:
    recipe = Recipe(ranks=4, accumulation=2, steps=5)
    hold(name, recipe, [Setting(stage=3, transport=transport, zero=sections)], LATE)


def test_mics_groups_with_different_reduce_orders_equal_one_process() -> None:
    recipe = Recipe(ranks=4, accumulation=2, steps=2)
    hold("uneven", recipe, [Setting(stage=3, transport="shm", zero=(("mics_shard_size", 2),))], LATE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["towers_reentrant", "uneven"])
def test_ranks_that_differ_in_smaller_groups_on_disk(name: str, transport: str, tmp_path: Any) -> None:
    zero = (("mics_shard_size", 2), *offload_to("nvme", "nvme", tmp_path))
    hold(name, Recipe(ranks=4, accumulation=2, steps=4), [Setting(stage=3, transport=transport, zero=zero)], LATE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["towers", "uneven"])
def test_ranks_that_differ_in_sixteen_bits(name: str, precision: str, transport: str) -> None:
    recipe = Recipe(ranks=2, accumulation=2, steps=4, precision=precision)
    hold(name, recipe, settings(transport, "host"), LATE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["towers_reentrant", "random_path"])
def test_ranks_that_differ_in_sixteen_bits_with_a_second_copy(name: str, precision: str) -> None:
    recipe = Recipe(ranks=4, accumulation=2, steps=4, precision=precision)
    hold(name, recipe, [Setting(stage=3, zero=(("zero_hpz_partition_size", 2),))], LATE)


def beside_ddp(transport: str, stage: int) -> tuple[float, str]:
    """Return the difference of the engine's parameters from DDP's after the same steps."""
    subject, rank = specimen("experts"), dist.get_rank()
    recipe = Recipe(steps=3, clipping=0.0)
    theirs = DistributedDataParallel(oracle.build(subject, 0), find_unused_parameters=True)
    optimizer = oracle.make_optimizer(recipe, list(theirs.parameters()))
    engine = start(subject, ds_config(recipe, Setting(stage=stage, transport=transport)))
    for step in range(recipe.steps):
        batch = subject.batch(Place(step, 0, rank))
        subject.train(theirs, batch, lambda loss: loss.backward())
        optimizer.step()
        optimizer.zero_grad()
        subject.train(engine, batch, engine.backward)
        engine.step()
    result = relative_error(whole_params(engine.module), dict(theirs.module.named_parameters()))
    engine.destroy()
    return result


def test_ranks_that_differ_equal_ddp_with_unused_parameters(transport: str) -> None:
    for error, where in run_ranks(beside_ddp, 2, transport, 3, transport=transport):
        assert error < 1e-6, where


class Reads(EarlyExit):
    """Model that reads a full weight during its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(self.read)

    def read(self, *_: Any) -> None:
        with windlass.zero.GatheredParameters([self.head.weight]):
            assert self.head.weight.shape == (WIDTH, WIDTH)


def rounds_of(name: str, transport: str) -> list[int]:
    """Return the number of agreement rounds in each step."""
    rank = dist.get_rank()
    subject = Specimen("", Reads, lambda place: {**rows(place), "path": range(4)}) if name == "" else specimen(name)
    recipe = Recipe(steps=5)
    engine = start(subject, ds_config(recipe, Setting(stage=3, transport=transport)))
    board, results = engine._sharded.scheduler._board, []
    post = board.post

    def counted(*args: Any) -> Any:
        results[-1] += 1
        return post(*args)

    board.post = counted
    for step in range(recipe.steps):
        results.append(0)
        subject.train(engine, subject.batch(Place(step, 0, rank)), engine.backward)
        engine.step()
    board.post = post
    engine.destroy()
    return results


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_agreeing_ranks_exchange_at_most_three_messages_per_step(name: str) -> None:
    """After the first step, ranks with equal modules have one agreement round each in forward, backward and step.

    With shared memory a forward needs no agreement.
    """
    for transport, often in (("gloo", 3), ("shm", 2)):
        for results in run_ranks(rounds_of, 2, name, transport, transport=transport):
            assert results[0] > often and results[1:] == 4 * [often], results


def test_order_after_a_sync_point_in_a_forward_needs_no_requests() -> None:
    """A sync point inside a forward adds two rounds, one for itself and one for all following blocks together."""
    for results in run_ranks(rounds_of, 2, "", "gloo", transport="gloo"):
        assert results[1:] == 4 * [5], results


def meets_elsewhere() -> None:
    engine = start(specimen("mlp"), ds_config(Recipe(), Setting(stage=3)))
    batch = specimen("mlp").batch(Place(0, 0, dist.get_rank()))
    engine.backward(engine(**batch))
    if dist.get_rank() == 0:
        engine.step()
    else:
        windlass.zero.full_grad(next(engine.module.parameters()))


def test_ranks_that_wait_in_different_calls_raise_with_the_calls() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(meets_elsewhere, 2, transport="gloo")
    assert "rank 0 is at a step, rank 1 is at the reading of a gradient" in str(caught.value)
    assert "CommunicationError" in caught.value.kinds


def meets_elsewhere_and_goes_on() -> list[int]:
    subject, rank = specimen("mlp"), dist.get_rank()
    engine = start(subject, ds_config(Recipe(), Setting(stage=3)))
    engine.backward(engine(**subject.batch(Place(0, 0, rank))))
    with pytest.raises(windlass.WindlassError, match="different calls"):
        if rank == 0:
            engine.step()
        else:
            engine.full_state_dict()
    held = engine._sharded.runtime.unsharded(engine._sharded.units) if rank else contextlib.nullcontext()
    with pytest.raises(windlass.WindlassError, match="different calls"), held:
        engine.step()
    engine.step()
    users = [unit.users for unit in engine._sharded.units]
    engine.destroy()
    return users


def test_units_to_be_kept_are_resharded_if_ranks_sync_elsewhere() -> None:
    for users in run_ranks(meets_elsewhere_and_goes_on, 2, transport="gloo"):
        assert not any(users)


def alone_in_a_forward(transport: str) -> list[torch.Tensor]:
    """Evaluate twice on rank 1 while rank 0, which is already in its step, joins the all-gathers of rank 1."""
    subject, rank = specimen("mlp"), dist.get_rank()
    engine = start(subject, ds_config(Recipe(), Setting(stage=3, transport=transport)))
    batch = subject.batch(Place(0, 0, rank))
    engine.backward(engine(**batch))
    results = []
    with torch.no_grad():
        for _ in range(2 * rank):
            results.append(engine(**subject.batch(Place(7, 0, 0))))
    engine.step()
    engine.destroy()
    return results


def test_rank_at_a_step_joins_the_evaluation_of_another(transport: str) -> None:
    model = oracle.build(specimen("mlp"), 0)
    expected = model(**specimen("mlp").batch(Place(7, 0, 0)))
    none, both = run_ranks(alone_in_a_forward, 2, transport, transport=transport)
    assert not none and len(both) == 2
    for loss in both:
        torch.testing.assert_close(loss, expected.detach())


def alone_before_a_step(transport: str) -> float:
    """Evaluate on rank 0 while rank 1, in its next forward, waits for the running statistics of rank 0."""
    subject, rank = specimen("batch_norm"), dist.get_rank()
    engine = start(subject, ds_config(Recipe(), Setting(stage=3, transport=transport)))
    for step in range(3):
        if rank == 0:
            engine.eval_batch(subject.batch(Place(9, 0, 0)))
        loss = engine(**subject.batch(Place(step, 0, 0)))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return float(loss.detach())


def test_rank_that_waits_for_buffers_joins_the_evaluation_of_another() -> None:
    first, second = run_ranks(alone_before_a_step, 2, "gloo", transport="gloo")
    assert first == second


def most_kept_back(transport: str) -> list[int]:
    """Return for each step the highest number of gradients copied out of the buffer ring. Rank 0 skips a block."""
    subject, rank = specimen("early_exit"), dist.get_rank()
    engine = start(subject, ds_config(Recipe(), Setting(stage=2, transport=transport)))
    gradients, most = engine._sharded.reducer, []

    def count(*_: Any) -> None:
        most[-1] = max(most[-1], sum(slot.unreduced_copy is not None for slot in gradients.slots))

    gradients.watch = count
    for step in range(3):
        most.append(0)
        batch = subject.batch(Place(step, 0, rank)) | {"path": [0, 1, 2] if rank == 0 else [0, 1, 2, 3]}
        engine.backward(engine(**batch))
        engine.step()
    engine.destroy()
    return most


def test_skipped_block_delays_no_gradient(transport: str) -> None:
    assert run_ranks(most_kept_back, 2, transport, transport=transport) == 2 * [[0, 0, 0]]
