"""Checkpoint formats of other libraries: the protocol of a format, and the registry of all formats.

[Note: foreign formats] A checkpoint directory that another library wrote is read through an index made in memory. Each
entry of the index describes a rectangular part of a tensor and its place in that library's files. Code that reads
through the index (loading in any layout, listing, export) is the same for all formats. `windlass.compat` implements
DeepSpeed's format; it imports this package, so the registry holds the dotted name of the class and imports it on first
use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from windlass.base.errors import ConfigError

if TYPE_CHECKING:
    from windlass.checkpoint.checkpoint_index import CheckpointIndex
    from windlass.checkpoint.safetensors_file import TensorFile
    from windlass.config import Config
    from windlass.optim.loss_scale import LossScale
    from windlass.zero.sharded_model import ShardedModel

ParameterOrder = Sequence[Sequence[str]]
"""Names of the parameters of each optimizer group, in the optimizer's order."""


@dataclass(frozen=True)
class ExportSource:
    """Parts of an engine that determine the files of another format.

    Attributes:
        optimizer: the optimizer that the caller passed or the configuration names; None without one.
        raw_config: the configuration as the script gave it.
    """

    model: ShardedModel
    optimizer: torch.optim.Optimizer | None
    config: Config
    raw_config: Any
    loss_scale: LossScale


class ForeignFormat(Protocol):
    """Checkpoint format of another library.

    Attributes:
        name: name in the registry; also the value of `checkpoint.format` with which a save adds files of this format.
    """

    @property
    def name(self) -> str: ...

    def recognizes(self, path: Path) -> bool:
        """Return True if the directory `path`, which has no index of windlass, is a checkpoint of this format."""
        ...

    def read_index(self, path: Path, parameter_order: ParameterOrder | None) -> CheckpointIndex:
        """Return an index of the files in `path`, checked as `checkpoint_index.read_index` checks windlass's own.

        Args:
            parameter_order: parameter order of the optimizer that loads the states, for formats that store them by
                number. Without it such states are left out.

        Raises:
            CheckpointError: a file is damaged, or of an unsupported kind.
        """
        ...

    def open_file(self, path: Path) -> TensorFile:
        """Return a reader of the entries that the index names in the data file `path`."""
        ...

    def find_damage(self, path: Path, indexed_files: Collection[str]) -> str:
        """Check all bytes of this format's files in `path` against the files' checksums. Return the damage as text, or
        "".

        Args:
            indexed_files: names of the files that the index refers to. A load needs no other files.
        """
        ...

    def plan_export(self, source: ExportSource) -> Callable[[Path, int], None]:
        """Return a function that adds one rank's files of this format to a save. Called before the save, on every rank.

        The function gets the directory of a complete staging checkpoint, and the rank. It may run on another thread.
        """
        ...

    def write_tools(self, directory: Path) -> None:
        """Write the scripts that users of this format expect in a checkpoint directory, unless they are there.

        Raises:
            CheckpointError: the scripts cannot be written.
        """
        ...


_formats: dict[str, ForeignFormat | str] = {"deepspeed": "windlass.compat.checkpoint.deepspeed_format:DeepSpeedFormat"}


def register_foreign_format(added: ForeignFormat) -> None:
    """Add a format; directories that it recognizes can then be listed, loaded and exported.

    Raises:
        ConfigError: a format of this name is registered already.
    """
    if added.name in _formats:
        raise ConfigError(f"a checkpoint format {added.name!r} is registered already; use another name")
    _formats[added.name] = added


def foreign_format(name: str) -> ForeignFormat:
    """Return the registered format of this name, importing it if needed."""
    known = _formats[name]
    if isinstance(known, str):
        module, _, attribute = known.partition(":")
        known = getattr(importlib.import_module(module), attribute)()
        _formats[name] = known
    return known


def foreign_formats() -> list[ForeignFormat]:
    """Return all registered formats, in the order of their registration."""
    return [foreign_format(name) for name in list(_formats)]


def optimizer_parameter_order(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the `ParameterOrder` of an optimizer over a model's parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
