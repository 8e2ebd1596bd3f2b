"""Reading of full tensors of a checkpoint, one after the other, in one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.foreign_formats import ParameterOrder
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint, missing_names


def read_full(
    directory: str | os.PathLike[str], tag: str | None = None, names: Iterable[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) for each of `names`, or for all tensors if it is None.

    No process group, not collective.

    Memory: one full tensor at a time, if the caller drops each before taking the next.

    Args:
        tag: None: the tag in `latest`.

    Raises:
        CheckpointError: no such checkpoint or name, or a damaged file.
    """
    stored = StoredCheckpoint(directory, tag)
    requested = stored.names() if names is None else list(names)
    if unknown := missing_names(stored, requested):
        raise CheckpointError(f"{stored.path} holds no tensor named {', '.join(map(repr, unknown[:8]))}")
    return _whole_tensors(stored, requested)


def read_plain(directory: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Return the plain data that all ranks share, with its tensors. Raises CheckpointError as `read_full` does."""
    return StoredCheckpoint(directory, tag).plain


def read_meta_tensors(
    directory: str | os.PathLike[str], tag: str | None = None, parameter_order: ParameterOrder | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the plain data, and every named tensor on the meta device with its shape and dtype.

    `parameter_order` is that of `load`. Raises CheckpointError as `read_full` does.
    """
    stored = StoredCheckpoint(directory, tag, parameter_order)
    return stored.plain, stored.outline()


def _whole_tensors(stored: StoredCheckpoint, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with stored:
        for name in names:
            yield name, stored.read_full(name)
