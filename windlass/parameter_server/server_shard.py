"""Parameters and optimizer states that one server owns, and their snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.base.atomic_file import make_directory
from windlass.base.errors import CheckpointError, ConfigError
from windlass.parameter_server.parameter_cut import CutParameter, Fragment
from windlass.parameter_server.snapshot import read_snapshot, write_snapshot

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class ShardGradient:
    """Gradient of one shard.

    Attributes:
        dense: `[n]`, the elements of all dense fragments, one after the other.
        rows: for each sparse fragment, the indices of its rows `[k]` and their gradients `[k, row]`.
    """

    dense: Tensor
    rows: list[tuple[Tensor, Tensor]]


class ServerShard:
    """Fragments as flat parameters of an optimizer of the user's class, whose rule must be elementwise.

    Args:
        parameters: all parameters of the model, for the cut.
        fragments: the fragments of this server.
        values: `[n]`, their elements.
        make_optimizer: builds the optimizer from a list of parameters.
        cuts: some parameter of the model is cut, so that no server has all of it.

    Raises:
        ConfigError: the rule of the optimizer is not elementwise.
    """

    def __init__(
        self,
        parameters: Sequence[CutParameter],
        fragments: Sequence[Fragment],
        values: Tensor,
        make_optimizer: MakeOptimizer,
        *,
        cuts: bool = False,
    ) -> None:
        self.fragments = list(fragments)
        self.rows = [parameters[fragment.parameter].row for fragment in fragments]
        parts = values.split([fragment.numel for fragment in fragments]) if fragments else []
        self._parameters = [
            nn.Parameter(part.clone().view(-1, row) if row > 1 else part.clone())
            for part, row in zip(parts, self.rows, strict=True)
        ]
        # An optimizer of torch refuses an empty list, which a server has if there are more servers than elements.
        self._optimizer = make_optimizer(self._parameters) if self._parameters else None
        if self._optimizer is not None:
            require_elementwise(self._optimizer, cuts)

    def values(self) -> Tensor:
        """Return a copy of all elements, `[n]`."""
        if not self._parameters:
            return torch.empty(0)
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])

    def update(self, gradients: Sequence[ShardGradient]) -> None:
        """Make one update with the mean of the gradients, added in the given order."""
        if self._optimizer is None:
            return
        count = len(gradients)
        total = gradients[0].dense.clone()
        for gradient in gradients[1:]:
            total.add_(gradient.dense)
        total /= count
        begin, sparse = 0, 0
        for parameter, row in zip(self._parameters, self.rows, strict=True):
            if row == 1:
                parameter.grad = total[begin : begin + parameter.numel()]
                begin += parameter.numel()
                continue
            indices = torch.cat([gradient.rows[sparse][0] for gradient in gradients])
            rows = torch.cat([gradient.rows[sparse][1] for gradient in gradients]) / count
            sparse += 1
            if indices.numel():
                grad = torch.sparse_coo_tensor(indices[None], rows, parameter.shape, check_invariants=True)
                parameter.grad = grad.coalesce()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, path: Path, version: int) -> None:
        """Write parameters and states to `path`, by one rename, and return when they are on the disk."""
        make_directory(path.parent)
        stored = {
            "version": version,
            "fragments": [(one.parameter, one.begin, one.end) for one in self.fragments],
            "values": self.values(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
        }
        write_snapshot(path, stored)
        _sync_directory(path.parent)

    def load(self, path: Path) -> int:
        """Restore from `path`, and return the version.

        Raises:
            CheckpointError: the snapshot is of another model or number of servers, or damaged.
        """
        try:
            found = read_snapshot(path)
            same = found["fragments"] == [(one.parameter, one.begin, one.end) for one in self.fragments]
        except Exception as error:  # a damaged file raises many kinds
            raise CheckpointError(f"{path} is no snapshot of a parameter server: {error}; remove it") from error
        if not same:
            raise CheckpointError(
                f"{path} is of another model or number of servers; start as many servers as before, or remove it"
            )
        parts = found["values"].split([fragment.numel for fragment in self.fragments]) if self.fragments else []
        with torch.no_grad():
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))
        if self._optimizer is not None:
            self._optimizer.load_state_dict(found["optimizer"])
        return int(found["version"])


_WHOLE_NORMS = ("Lamb", "CPULamb", "OneBitLamb", "LARS")
_WHOLE_SHAPES = ("Muon", "Adafactor", "LBFGS", "SparseAdam")


def require_elementwise(optimizer: torch.optim.Optimizer, cuts: bool) -> None:
    """Check that the rule of an optimizer is the same on the flat fragments that a server has.

    Args:
        cuts: some parameter is cut.

    Raises:
        ConfigError: it is not.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if found := next((name for name in names if name in _WHOLE_SHAPES), ""):
        raise ConfigError(
            f"parameter server: {found} reads the shape of a parameter or calls the model again, and a server has flat "
            "fragments; write AdamW or SGD"
        )
    if cuts and (found := next((name for name in names if name in _WHOLE_NORMS), "")):
        raise ConfigError(
            f"parameter server: the step of {found} is scaled by the norm of a whole parameter, and a server has a "
            "fragment of one that is cut; write AdamW, or start one server"
        )


def _sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
