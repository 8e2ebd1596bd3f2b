"""Random pictures. The first value of a CIFAR-10 picture encodes its label."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset


class CIFAR10(Dataset[tuple[torch.Tensor, int]]):
    """Dataset of 32 x 32 pixels: `$PICTURES` training pictures, or 20 test pictures."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        generator = torch.Generator().manual_seed(1 if train else 2)
        count = int(os.environ["PICTURES"]) if train else 20
        self.labels = torch.arange(count) % 10  # every label occurs: a script divides by the count of each label
        pictures = torch.rand(count, 3, 32, 32, generator=generator)
        pictures[:, 0, 0, 0] = self.labels / 10
        self.pictures = (pictures - 0.5) / 0.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index], int(self.labels[index])


class FakeData(Dataset[tuple[torch.Tensor, int]]):
    """Dataset of `$PICTURES` pictures of any size, with values within [-1, 1] and label 0."""

    def __init__(self, image_size: tuple[int, ...], transform: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.pictures = torch.rand(int(os.environ["PICTURES"]), *image_size, generator=generator) * 2 - 1

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index], 0
