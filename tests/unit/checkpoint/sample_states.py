"""States for the checkpoint tests: tensors of awkward shapes, sharded over any number of ranks."""

from __future__ import annotations

import math

import torch

from windlass.checkpoint import FlatShard, SavedState

SHAPES: dict[str, tuple[int, ...]] = {
    "param/embed.weight": (7, 5),
    "param/conv": (3, 2, 4, 1),
    "param/bias": (11,),
    "param/scale": (),
    "param/empty": (0, 3),
    "param/one": (1, 1),
    "state/embed.weight/exp_avg": (7, 5),
    "master/conv": (3, 2, 4, 1),
}


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name.startswith("param/") else torch.float32


def whole(name: str, offset: int = 0) -> torch.Tensor:
    """Return the full tensor of a name. Only param/embed.weight and master/conv share values; all are exact in bf16."""
    shape = SHAPES[name]
    begin = 36 * (list(SHAPES).index(name) % 7) + offset
    return (torch.arange(math.prod(shape)).view(shape) + begin).to(dtype_of(name))


def cut(numel: int, rank: int, world: int) -> tuple[int, int]:
    """Return the rank's range when the elements are split into equal runs, the last ones shorter or empty."""
    run = -(-numel // world)
    return min(rank * run, numel), min((rank + 1) * run, numel)


def shards(rank: int, world: int, *, fill: bool, offset: int = 0) -> list[FlatShard]:
    """Return this rank's range of every tensor, with its values or (fill=False) with memory to load into."""
    results = []
    for name, shape in SHAPES.items():
        start, stop = cut(math.prod(shape), rank, world)
        part = whole(name, offset).reshape(-1)[start:stop].clone()
        results.append(FlatShard(name, shape, start, part if fill else torch.full_like(part, -1)))
    return results


def state(rank: int, world: int, *, offset: int = 0) -> SavedState:
    """Return one rank's part of the state, with plain data."""
    return SavedState(
        shards=shards(rank, world, fill=True, offset=offset),
        tensors={"buffer/running_mean": torch.arange(4.0), "buffer/count": torch.tensor(3)},
        plain={"step": 12 + offset, "steps": {"embed.weight": 12}, "schedule": {"best": math.inf, 5: (1, 2)}},
        rank_plain={"rank": rank, "rng": torch.full((3,), rank, dtype=torch.uint8)},
    )


def empty(rank: int = 0, world: int = 1) -> SavedState:
    """Return a state with the names that `state` returns, and memory to load their tensors into."""
    return SavedState(
        shards=shards(rank, world, fill=False),
        tensors={"buffer/running_mean": torch.zeros(4), "buffer/count": torch.tensor(0)},
    )


def assert_loaded(into: SavedState, *, offset: int = 0) -> None:
    """Assert that every tensor of `into` holds the values that `state` saved."""
    for shard in into.shards:
        expected = whole(shard.name, offset).reshape(-1)[shard.start : shard.stop]
        assert torch.equal(shard.tensor, expected), shard.name
    assert torch.equal(into.tensors["buffer/running_mean"], torch.arange(4.0))
    assert into.tensors["buffer/count"].item() == 3
