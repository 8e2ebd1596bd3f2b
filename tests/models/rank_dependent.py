"""Models of which each rank runs other modules than its peers, or more often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.plain import Block
from tests.models.specimen import WIDTH, Batch, Place, Specimen, mse, one_loss, rows


class Towers(nn.Module):
    """Two towers that share a weight, of which a batch may have no input for one, or for either.

    Args:
        recompute: under activation checkpointing, reentrant or not; None: none.
    """

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.image = nn.ModuleList(Block() for _ in range(2))
        self.sound = nn.ModuleList(Block() for _ in range(2))
        self.sound[1].up.weight = self.image[0].up.weight
        self.common = nn.ModuleList(Block() for _ in range(1))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, image: bool, sound: bool) -> Tensor:
        h = self.inward(x)
        if sound:
            h = self._through(self.sound, h)
        if image:
            h = self._through(self.image, h)
        return mse(self.head(self._through(self.common, h)), y)

    def _through(self, blocks: nn.ModuleList, h: Tensor) -> Tensor:
        for block in blocks:
            h = block(h) if self.recompute is None else checkpoint(block, h, use_reentrant=self.recompute)
        return h


def towers_by_place(place: Place) -> Batch:
    """The towers in use change with the step, the micro-batch and the rank; in step 2 no rank has sound."""
    chosen = int(torch.randint(0, 4, (), generator=place.generator()))
    return {**rows(place), "image": bool(chosen & 1), "sound": bool(chosen & 2) and place.step != 2}


class Experts(nn.Module):
    """Two layers of experts, of which each forward runs one; ranks choose each for itself."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Block() for _ in range(experts)) for _ in range(2))
        self.between = Block()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, first: int, second: int) -> Tensor:
        h = self.between(self.layers[0][first](x))
        return mse(self.head(self.layers[1][second](h)), y)


def experts_by_place(place: Place) -> Batch:
    """Ranks choose apart, except in step 1; the third expert of the second layer is never chosen."""
    generator = place.generator() if place.step != 1 else torch.Generator().manual_seed(place.micro)
    first, second = torch.randint(0, 6, (2,), generator=generator).tolist()
    return {**rows(place), "first": first % 3, "second": second % 2}


class EarlyExit(nn.Module):
    """A loop that ends sooner on some ranks, and goes through a block twice on others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, path: list[int]) -> Tensor:
        for index in path:
            x = self.blocks[index](x)
        return mse(self.head(x), y)


def path_by_place(place: Place) -> Batch:
    """Up to four blocks from the first on."""
    depth = int(torch.randint(0, 5, (), generator=place.generator()))
    return {**rows(place), "path": list(range(depth))}


def random_path(place: Place) -> Batch:
    """Any blocks in any order, any number of times."""
    generator = place.generator()
    length = int(torch.randint(0, 6, (), generator=generator))
    return {**rows(place), "path": torch.randint(0, 4, (length,), generator=generator).tolist()}


class Plain(nn.Module):
    """Blocks and a head, for batches that are not there on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(self.head(x), y)


def batch_or_none(place: Place) -> Batch:
    """Rank 0 has all micro-batches, others run out of them; in step 3 some have none at all."""
    left = int(torch.randint(0, 4, (), generator=Place(place.step, 0, place.rank).generator()))
    here = place.rank == 0 or (place.micro < left and place.step != 3)
    return {"batch": rows(place) if here else None}


def if_there(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Train on a batch, if there is one."""
    return torch.zeros(()) if batch["batch"] is None else one_loss(call, batch["batch"], backward)


_MOVING = frozenset({"moving", "divergent"})
DIFFERING: dict[str, Specimen] = {
    specimen.name: specimen
    for specimen in (
        Specimen("towers", Towers, towers_by_place, traits=_MOVING),
        Specimen("towers_checkpoint", lambda: Towers(False), towers_by_place, traits=_MOVING),
        Specimen("towers_reentrant", lambda: Towers(True), towers_by_place, traits=_MOVING),
        Specimen("experts", Experts, experts_by_place, traits=_MOVING),
        Specimen("early_exit", EarlyExit, path_by_place, traits=_MOVING),
        Specimen("random_path", EarlyExit, random_path, traits=_MOVING),
        Specimen("uneven", Plain, batch_or_none, if_there, _MOVING),
    )
}
