"""Models that run different modules on different ranks, or the same modules a different number of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.plain import Block
from tests.models.specimen import WIDTH, Batch, Place, Specimen, mse, one_loss, rows


class Towers(nn.Module):
    """Two towers that share a weight. A batch may have no input for one or for both.

    Args:
        recompute: kind of activation checkpointing: reentrant (True) or not (False); None: no checkpointing.
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
    """Return a batch. Its inputs depend on step, micro-batch and rank; in step 2 no rank has sound."""
    chosen = int(torch.randint(0, 4, (), generator=place.generator()))
    return {**rows(place), "image": bool(chosen & 1), "sound": bool(chosen & 2) and place.step != 2}


class Experts(nn.Module):
    """Two layers of experts. Each forward runs one expert per layer, chosen by each rank."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Block() for _ in range(experts)) for _ in range(2))
        self.between = Block()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, first: int, second: int) -> Tensor:
        h = self.between(self.layers[0][first](x))
        return mse(self.head(self.layers[1][second](h)), y)


def experts_by_place(place: Place) -> Batch:
    """Return a batch and its experts. In step 1 all ranks choose the same. Layer 2 never chooses its last expert."""
    generator = place.generator() if place.step != 1 else torch.Generator().manual_seed(place.micro)
    first, second = torch.randint(0, 6, (2,), generator=generator).tolist()
    return {**rows(place), "first": first % 3, "second": second % 2}


class EarlyExit(nn.Module):
    """Model whose loop over blocks ends sooner on some ranks, and repeats a block on others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, path: list[int]) -> Tensor:
        for index in path:
            x = self.blocks[index](x)
        return mse(self.head(x), y)


def path_by_place(place: Place) -> Batch:
    """Return a batch whose path is the first zero to four blocks."""
    depth = int(torch.randint(0, 5, (), generator=place.generator()))
    return {**rows(place), "path": list(range(depth))}


def random_path(place: Place) -> Batch:
    """Return a batch whose path is up to five blocks, in any order and with repetitions."""
    generator = place.generator()
    length = int(torch.randint(0, 6, (), generator=generator))
    return {**rows(place), "path": torch.randint(0, 4, (length,), generator=generator).tolist()}


class Plain(nn.Module):
    """Blocks and a head, for batches that some ranks may not have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(self.head(x), y)


def batch_or_none(place: Place) -> Batch:
    """Return a dict of a batch or None. Rank 0 has all micro-batches, others the first 0 to 3, and none in step 3."""
    left = int(torch.randint(0, 4, (), generator=Place(place.step, 0, place.rank).generator()))
    here = place.rank == 0 or (place.micro < left and place.step != 3)
    return {"batch": rows(place) if here else None}


def if_there(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Train on the batch unless it is None."""
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
