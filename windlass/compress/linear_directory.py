"""View of a model's directory in which weights of `Conv1D` layers have the layout of `nn.Linear`, so that they can be
packed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.conv1d_layers import conv1d_layers
from windlass.compress.model_directory import ModelDirectory, build_empty

_MARK = ".c_"  # part of the names of `Conv1D` layers, e.g. `c_attn`


class LinearDirectory(ModelDirectory):
    """Directory in which weights of `Conv1D` layers are transposed to the layout of `nn.Linear`.

    Args:
        transposed: names of the weights to transpose, as in the files.
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
        """True: in this view all weights have the layout of `nn.Linear`."""
        return True

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor; the weight of a `Conv1D` layer is transposed."""
        tensor = self._source.read(name)
        return tensor.t().contiguous() if name in self._transposed else tensor

    def can_map(self, name: str) -> bool:
        """Return True if a tensor is better memory-mapped than copied. A transposed one is always copied."""
        return name not in self._transposed and self._source.can_map(name)


def as_linear_directory(directory: ModelDirectory, *, trust_remote_code: bool = False) -> ModelDirectory:
    """Return the directory of an unquantized model with all weights in the layout of `nn.Linear`: `directory`
    itself, or a `LinearDirectory`."""
    if directory.has_linear_layers or not any(_MARK in name for name in directory.places):
        return directory
    return linear_view(directory, build_empty(directory, trust_remote_code=trust_remote_code))


def linear_view(directory: ModelDirectory, model: nn.Module) -> ModelDirectory:
    """Return the result of `as_linear_directory`, given the model that was built from the directory on the
    meta device."""
    sources = CheckpointNames(model, directory.places).source_of
    names = [f"{name}.weight" for name in conv1d_layers(model)]
    found = [sources[name] for name in names if name in sources]
    return LinearDirectory(directory, found) if found else directory
