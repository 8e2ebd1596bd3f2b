"""Tests that activation checkpointing under the engine changes no bit of losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dist.equivalence_runs import Setting, bitwise_difference, train_rank
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.models import ZOO, Batch, Place, Specimen
from tests.oracle import Recipe
from tests.unit.parallel.checkpointed_models import NETS, differences, plainly, trained

# every parameter is resharded, no unit is prefetched, and none is kept for a later use
STRICT = (
    ("stage3_prefetch_bucket_size", 0),
    ("stage3_max_live_parameters", 0),
    ("stage3_max_reuse_distance", 0),
)


def words(place: Place) -> Batch:
    return {"ids": torch.randint(0, 24, (3, 10), generator=place.generator())}


def through(tier: str) -> Callable[..., Any]:
    """Return the function that calls a layer under `tier`: plainly, checkpointed, or with saved tensors on NVMe."""
    from windlass import checkpointing

    def regional(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        with checkpointing.offload_saved_tensors("nvme", min_offload_bytes=0):
            return function(*args, **kwargs)

    return {"plain": plainly, "region": regional}.get(tier, checkpointing.checkpoint)


@contextmanager
def configured(tier: str, folder: str) -> Iterator[None]:
    """Configure the tier of saved activations temporarily."""
    from windlass import checkpointing

    options: dict[str, dict[str, Any]] = {
        "buffer": {"contiguous_memory_optimization": True, "number_checkpoints": 6},
        "nvme": {"nvme_path": folder},
        "region": {"nvme_path": folder},
    }
    checkpointing.configure(min_offload_bytes=0, **options.get(tier, {}))
    yield
    counts = checkpointing.get_offload_counters()
    assert (counts is not None and counts.offloaded_bytes > 0) == (tier in ("buffer", "nvme"))
    checkpointing.configure()
    checkpointing.reset()


def train(name: str, tier: str, recipe: Recipe, setting: Setting, folder: str) -> Any:
    def build() -> nn.Module:
        return NETS[name](through(tier))

    with configured(tier, folder), patch.dict(ZOO, {name: Specimen(name, build, words)}):
        return train_rank(name, recipe, setting)


def train_all(name: str, tiers: list[str], recipe: Recipe, settings: list[Setting], folder: str) -> list[list[Any]]:
    """Return traces by setting and activation tier on this rank."""
    torch.use_deterministic_algorithms(True)
    try:
        return [[train(name, tier, recipe, setting, folder) for tier in tiers] for setting in settings]
    finally:
        torch.use_deterministic_algorithms(False)


def hold(name: str, tiers: list[str], recipe: Recipe, settings: list[Setting], folder: Path) -> None:
    """Assert that every tier gives the result of the first one, in each setting."""
    by_rank = run_ranks(train_all, recipe.ranks, name, tiers, recipe, settings, str(folder), timeout=180)
    for place, setting in enumerate(settings):
        for index, tier in enumerate(tiers[1:], start=1):
            plain, other = ([traces[place][number] for traces in by_rank] for number in (0, index))
            text = bitwise_difference(plain, other)
            assert not text, (name, tier, setting, text[:5])


def settings(transport: str) -> list[Setting]:
    """Return a setting for each stage, and a second one for stage 3 with the options `STRICT`."""
    comm = (("comm", {"transport": transport}),)
    strict = Setting(stage=3, transport=transport, zero=STRICT, config=comm)
    return [Setting(stage=stage, transport=transport, config=comm) for stage in range(4)] + [strict]


def recipe_for(ranks: int, accumulation: int = 2) -> Recipe:
    return Recipe(ranks=ranks, steps=2, accumulation=accumulation, optimizer="AdamW", optimizer_params=(("lr", 1e-3),))


def tiers_for(name: str, transport: str) -> list[str]:
    """Return the tiers to compare: the plain run, checkpoints in memory, and other tiers of saved activations."""
    others = {("Net", "gloo"): ["buffer", "nvme", "region"], ("Twice", "shm"): ["nvme", "region"]}
    return ["plain", "kept", *others.get((name, transport), ["buffer" if transport == "shm" else "nvme"])]


@pytest.mark.filterwarnings("ignore:.*tmpfs.*")
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    ("ranks", "transport"),
    [(2, "gloo"), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((2, "shm"), (1, "gloo")))],
)
@in_shares
def test_checkpointing_under_the_engine_equals_plain_pytorch(
    name: str, ranks: int, transport: str, every: bool, tmp_path: Path
) -> None:
    """Two ranks over gloo run only stage 3, because its recomputed forward unshards parameters.

    In `make test` each net runs one of the two settings of stage 3, and every third net accumulates. In `make parity`
    each net runs both settings and accumulates.
    """
    stages, number = settings(transport), list(NETS).index(name)
    if (ranks, transport) == (2, "gloo"):
        stages = share(stages[3:], number, 2, every)
    recipe = recipe_for(ranks, 2 if every or number % 3 == 0 else 1)
    hold(name, tiers_for(name, transport), recipe, stages, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tmpfs.*")
@pytest.mark.parametrize("name", NETS)
def test_checkpointing_at_stages_0_to_2_over_gloo(name: str, tmp_path: Path) -> None:
    hold(name, tiers_for(name, "gloo"), recipe_for(2), settings("gloo")[:3], tmp_path)


@in_shares
def test_checkpointed_bf16_training_is_bitwise_equal(transport: str, every: bool, tmp_path: Path) -> None:
    recipe = Recipe(ranks=2, steps=2, precision="bf16", optimizer_params=(("lr", 0.05),))
    stages = share(settings(transport)[1:], transport == "gloo", 2, every)
    hold("Nested", ["plain", "kept", "buffer"], recipe, stages, tmp_path)


# ----------------------------------------------------------- saved activations sharded over the model-parallel ranks


class Unit:
    """Model-parallel unit with Megatron's interface."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group


def train_partitioned(name: str, by_unit: bool, options: dict[str, Any]) -> tuple[list[str], int]:
    """Train on equal data on all ranks with sharded saved activations.

    Return the differences from plain training, and the bytes that this rank offloaded.
    """
    from windlass import checkpointing
    from windlass.compat import activation_names

    group = dist.new_group(list(range(dist.get_world_size())))
    torch.use_deterministic_algorithms(True)
    try:
        want = trained(name, plainly)
        text = {"partition_activations": True, "min_offload_bytes": 0, **options}
        if by_unit:
            names = {
                "contiguous_memory_optimization": "contiguous_checkpointing",
                "number_checkpoints": "num_checkpoints",
            }
            activation_names.configure(Unit(group), **{names.get(key, key): value for key, value in text.items()})
        else:
            checkpointing.configure(group=group, **text)
        result = trained(name, checkpointing.checkpoint)
        counts = checkpointing.get_offload_counters()
        assert counts is not None and counts.prefetched_bytes == 0
    finally:
        torch.use_deterministic_algorithms(False)
    own = counts.offloaded_bytes
    checkpointing.configure()
    return differences(result, want), own


NAMES = ["Net", "Nested", "Arguments", "Shapes"]


@pytest.mark.filterwarnings("ignore:.*tmpfs.*")
@pytest.mark.parametrize("name", NAMES)
@in_shares
def test_sharded_activations_are_restored(name: str, every: bool, tmp_path: Path) -> None:
    buffer = {"contiguous_memory_optimization": True, "number_checkpoints": 6}
    tiers: list[dict[str, Any]] = [{}, {"cpu_checkpointing": True}, buffer, {"nvme_path": str(tmp_path)}]
    for options in share(tiers, NAMES.index(name), 2, every):
        for text, moved in run_ranks(train_partitioned, 3, name, options == buffer, options):
            assert not text, (name, options, text)
            assert moved > 0


def kept_on_each(ranks: int) -> int:
    """Return the number of saved elements in this rank's memory after a forward."""
    from tests.unit.parallel.fake_activation_store import FarPlace
    from windlass.comm.rank_group import RankGroup
    from windlass.parallel.checkpoint_profiler import CheckpointProfiler
    from windlass.parallel.recompute import RecomputeSettings, recompute
    from windlass.parallel.saved_tensor_offload import SavedTensorOffloader
    from windlass.parallel.sharded_activation_store import ShardedStore

    own = FarPlace()
    group = RankGroup(dist.group.WORLD, tuple(range(ranks)), dist.get_rank())  # type: ignore[arg-type]
    manner = RecomputeSettings(
        SavedTensorOffloader(ShardedStore(group, own), min_offload_bytes=0),
        CheckpointProfiler(log_times=False, synchronize=False),
    )
    x = torch.randn(7, 31, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y = recompute(manner, torch.sin, (x * 1.0,), {})
    before = list(own.put_there)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())
    assert len(before) == 1
    return before[0]


def test_each_rank_stores_its_shard() -> None:
    assert run_ranks(kept_on_each, 4, 4) == [55, 55, 55, 52]
