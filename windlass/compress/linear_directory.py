"""Directory of a model with `Conv1D` layers, read as one with linear layers, whose weights formats pack."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.conv1d_layers import conv1d_layers
from windlass.compress.model_directory import ModelDirectory, build_empty

_MARK = ".c_"  # in names of such layers


class LinearDirectory(ModelDirectory):
    """Directory whose weights of `Conv1D` layers are those of linear ones.

    Args:
        transposed: names of these weights in the files.
    """

    def __init__(self, source: ModelDirectory, transposed: Collection[str]) -> None:
        self.path, self.config = source.path, source.config
        self._source, self._transposed = source, frozenset(transposed)
        self.places = {
            name: replace(place, shape=place.shape[::-1]) if name in self._transposed else place
            for name, place in source.places.items()
        }

    @property
    def has_linear_layers(self) -> bool:
        """True."""
        return True

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor; of a `Conv1D` layer as a linear layer has it."""
        tensor = self._source.read(name)
        return tensor.t().contiguous() if name in self._transposed else tensor

    def can_map(self, name: str) -> bool:
        """Return True if a tensor is better mapped than copied."""
        return name not in self._transposed and self._source.can_map(name)


def as_linear_directory(directory: ModelDirectory, *, trust_remote_code: bool = False) -> ModelDirectory:
    """Return the directory of a wide model with linear layers alone: the same one, or a `LinearDirectory` of it."""
    if directory.has_linear_layers or not any(_MARK in name for name in directory.places):
        return directory
    return linear_view(directory, build_empty(directory, trust_remote_code=trust_remote_code))


def linear_view(directory: ModelDirectory, model: nn.Module) -> ModelDirectory:
    """Return the directory of a wide model as `as_linear_directory` does, for the empty model that was built of it."""
    sources = CheckpointNames(model, directory.places).source_of
    names = [f"{name}.weight" for name in conv1d_layers(model)]
    found = [sources[name] for name in names if name in sources]
    return LinearDirectory(directory, found) if found else directory
