"""Whole tensors of a checkpoint, one after the other, in one process, by the shortest names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.deepspeed_index import ParameterOrder
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint, missing_names


def read_full(
    directory: str | os.PathLike[str], tag: str | None = None, names: Iterable[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole CPU tensor) for each of `names`, all where None. No process group, no collective.

    Memory: one whole tensor at a time; a caller who drops each before it takes the next needs no more.

    Args:
        tag: None for the one that `latest` names.

    Raises:
        CheckpointError: no such checkpoint or name, or a damaged file.
    """
    stored = StoredCheckpoint(directory, tag)
    wanted = stored.names() if names is None else list(names)
    if unknown := missing_names(stored, wanted):
        raise CheckpointError(f"{stored.path} holds no tensor named {', '.join(map(repr, unknown[:8]))}")
    return _whole_tensors(stored, wanted)


def read_plain(directory: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """The plain data that all ranks share, with the tensors in it. Raises CheckpointError as `read_full` does."""
    return StoredCheckpoint(directory, tag).plain


def read_meta_tensors(
    directory: str | os.PathLike[str], tag: str | None = None, parameter_order: ParameterOrder | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The plain data, and every named tensor as one without memory (on the device `meta`) that has its shape and
    dtype. `order` is that of `load`. Raises CheckpointError as `read_full` does."""
    stored = StoredCheckpoint(directory, tag, parameter_order)
    return stored.plain, stored.outline()


def _whole_tensors(stored: StoredCheckpoint, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with stored:
        for name in names:
            yield name, stored.read_full(name)
