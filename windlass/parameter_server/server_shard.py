"""Parameters and optimizer states that one server owns, and their snapshot."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.atomic_file import make_directory
from windlass.base.errors import CheckpointError, ConfigError
from windlass.base.log import logger
from windlass.parameter_server.parameter_partition import Fragment, PartitionedParameter
from windlass.parameter_server.snapshot import plain_number, read_data, read_snapshot, write_snapshot
from windlass.parameter_server.update_clock import UpdateClock

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class ShardGradient:
    """Gradient of one shard.

    Attributes:
        dense: for each fragment with a dense gradient, this gradient `[n]`; None if the parameter has no gradient.
        rows: for each fragment with a sparse gradient, the indices of its rows `[k]` and their gradients `[k, row]`;
            None if the parameter has no gradient. With k = 0 the optimizer counts a step and decays its momentum.
    """

    dense: list[Tensor | None]
    rows: list[tuple[Tensor, Tensor] | None]


def mean_gradient(gradients: Sequence[ShardGradient]) -> ShardGradient:
    """Return the mean of gradients of one shard, added in the given order.

    As in DDP, a parameter without a gradient counts as zeros, unless none of the gradients has one.
    """
    count = len(gradients)
    if count == 1:
        return gradients[0]
    dense: list[Tensor | None] = []
    for fragments in zip(*(gradient.dense for gradient in gradients), strict=True):
        found = [fragment for fragment in fragments if fragment is not None]
        total = found[0].clone() if found else None
        for fragment in found[1:]:
            assert total is not None
            total.add_(fragment)
        dense.append(None if total is None else total.div_(count))
    rows: list[tuple[Tensor, Tensor] | None] = []
    for sparse in zip(*(gradient.rows for gradient in gradients), strict=True):
        parts = [part for part in sparse if part is not None]
        if not parts:
            rows.append(None)
            continue
        indices, places = torch.unique(torch.cat([numbers for numbers, _ in parts]), return_inverse=True)
        values = torch.cat([values for _, values in parts])
        summed = values.new_zeros(indices.numel(), values.shape[1]).index_add_(0, places, values)
        rows.append((indices, summed.div_(count)))
    return ShardGradient(dense, rows)


class ServerShard:
    """Parts of parameters (fragments) that one server updates with an optimizer of the user's class. The rule of the
    optimizer must be elementwise. Fragments are flat, those with sparse gradients `[rows, elements per row]`.

    Args:
        parameters: all trainable parameters of the model, which `Fragment.parameter` indexes.
        fragments: the fragments of this server.
        values: initial elements of the fragments, `[n]`.
        make_optimizer: function that builds the optimizer from a list of parameters.
        splits_parameters: True if some parameter is split over several servers.

    Raises:
        ConfigError: the rule of the optimizer is not elementwise.
    """

    def __init__(
        self,
        parameters: Sequence[PartitionedParameter],
        fragments: Sequence[Fragment],
        values: Tensor,
        make_optimizer: MakeOptimizer,
        *,
        splits_parameters: bool = False,
    ) -> None:
        self.fragments = list(fragments)
        own_parameters = [parameters[fragment.parameter] for fragment in fragments]
        self._sparse = [parameter.is_sparse for parameter in own_parameters]
        parts = values.split([fragment.numel for fragment in fragments]) if fragments else []
        self._parameters = [
            nn.Parameter(part.clone().view(-1, parameter.row) if parameter.is_sparse else part.clone())
            for part, parameter in zip(parts, own_parameters, strict=True)
        ]
        # Torch's optimizers refuse an empty list. A server's list is empty if there are more servers than elements.
        self._optimizer = make_optimizer(self._parameters) if self._parameters else None
        if self._optimizer is not None:
            require_elementwise(
                self._optimizer, splits_parameters, next((one.name for one in own_parameters if not one.is_sparse), "")
            )
        self._class = _class_name(self._optimizer)
        # hyper-parameters as the script gives them; an optimizer may change those in its groups while it runs
        self._stated = [] if self._optimizer is None else copy.deepcopy(_hyper_parameters(self._optimizer))

    def values(self) -> Tensor:
        """Return a copy of all elements, `[n]`."""
        if not self._parameters:
            return torch.empty(0)
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])

    def update(self, gradient: ShardGradient) -> None:
        """Make one update. A parameter without a gradient, and its states, stay unchanged."""
        if self._optimizer is None:
            return
        dense, rows = iter(gradient.dense), iter(gradient.rows)
        for parameter, is_sparse in zip(self._parameters, self._sparse, strict=True):
            if is_sparse:
                if (part := next(rows)) is not None:
                    indices, values = part
                    found = torch.sparse_coo_tensor(indices[None], values, parameter.shape, check_invariants=True)
                    parameter.grad = found.coalesce()
            else:
                parameter.grad = next(dense)  # None: the optimizer skips the parameter
        self._optimizer.step()
        self._optimizer.zero_grad()

    def content(self, clock: UpdateClock) -> dict[str, Any]:
        """Return the data from which another process can continue: versions, elements, optimizer state and class."""
        return {
            "version": clock.version,
            "counted": clock.counted,
            "steps": clock.steps,
            "fragments": [(one.parameter, one.begin, one.end) for one in self.fragments],
            "values": self.values(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "class": self._class,
            "stated": self._stated,
        }

    def has_fragments_of(self, content: dict[str, Any]) -> bool:
        """Return True if `content` is that of a shard with the same fragments."""
        return bool(content["fragments"] == [(one.parameter, one.begin, one.end) for one in self.fragments])

    @torch.no_grad()
    def restore(self, content: dict[str, Any], clock: UpdateClock) -> None:
        """Continue from the content of a shard of the same fragments.

        A hyper-parameter that the script has changed since the content was written has the script's value. All others
        have the content's values, which the optimizer may have changed while it ran.
        """
        parts = content["values"].split([fragment.numel for fragment in self.fragments]) if self.fragments else []
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))
        if self._optimizer is not None:
            self._optimizer.load_state_dict(content["optimizer"])
            # content that an earlier release of windlass wrote has no `stated`: then nothing counts as changed
            for group, new, old in zip(
                self._optimizer.param_groups, self._stated, content.get("stated", ()), strict=False
            ):
                changed = {key: value for key, value in new.items() if key not in old or not _is_equal(value, old[key])}
                if changed:
                    logger.info("parameter server: the script has changed %s since the snapshot", changed)
                group.update(copy.deepcopy(changed))
        clock.version = int(content["version"])
        clock.counted, clock.steps = dict(content["counted"]), dict(content["steps"])

    def save(self, path: Path, clock: UpdateClock) -> None:
        """Write parameters and states to `path`, by one rename, and return when they are on the disk."""
        make_directory(path.parent)
        write_snapshot(path, self.content(clock))
        _sync_directory(path.parent)

    def load(self, path: Path, clock: UpdateClock) -> None:
        """Restore from `path`.

        Raises:
            CheckpointError: the snapshot is damaged, or of another model, optimizer or number of servers. The shard and
                the file are unchanged.
        """
        try:
            found = read_snapshot(path)
            same = self.has_fragments_of(found)
        except Exception as error:  # a damaged file raises exceptions of many kinds
            raise _not_a_snapshot(path, error) from error
        if not same:
            raise CheckpointError(
                f"{path} is of another model or number of servers; start as many servers as before, or remove it"
            )
        stored = found.get("class", self._class)
        if stored != self._class:
            raise CheckpointError(
                f"{path} has the states of optimizer {stored}, and the script makes {self._class}; make {stored}, or "
                "set another `snapshot` folder to begin anew"
            )
        if self._optimizer is not None:
            groups = [[len(group["params"]) for group in found["optimizer"]["param_groups"]]]
            groups.append([len(group["params"]) for group in self._optimizer.param_groups])
            if groups[0] != groups[1]:
                raise CheckpointError(
                    f"{path} has the states of {self._class} with groups of {groups[0]} parameters, and the script "
                    f"makes groups of {groups[1]}; make the same groups, or set another `snapshot` folder"
                )
        self.restore(found, clock)


def _class_name(optimizer: torch.optim.Optimizer | None) -> str:
    return "" if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    one, other = plain_number(one), plain_number(other)  # a snapshot holds Python's numbers
    return type(one) is type(other) and bool(one == other)


def read_version(path: Path) -> int:
    """Return the number of updates in a snapshot.

    Raises:
        CheckpointError: the snapshot is damaged.
    """
    try:
        return int(read_data(path)["version"])
    except Exception as error:  # a damaged file raises exceptions of many kinds
        raise _not_a_snapshot(path, error) from error


def _not_a_snapshot(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is not a snapshot of a parameter server: {error}; remove it")


def check_versions(versions: Sequence[int], folder: str | Path, snapshot_every: int) -> None:
    """Check that the snapshots from which the servers of a new run continue belong together.

    Args:
        versions: for each server, the version of its snapshot; -1: no snapshot.

    Raises:
        CheckpointError: some servers have a snapshot with updates, and others have no snapshot.
    """
    missing = ", ".join(str(server) for server, version in enumerate(versions) if version < 0)
    if missing and max(versions) > 0:
        trained = versions.index(max(versions))
        raise CheckpointError(
            f"{folder} has a snapshot of version {max(versions)} of server {trained} and none of server {missing}, "
            "which would begin with untrained parameters; restore the missing file, or remove all snapshots in the "
            "folder"
        )
    if max(versions) - min(versions) > snapshot_every:  # more than the loss of one server explains
        logger.warning(
            "%s: the snapshots of the servers are of versions %s, which differ by more than snapshot_every = %d: "
            "servers were lost in the run that wrote them, or the files are of several runs",
            folder,
            ", ".join(map(str, versions)),
            snapshot_every,
        )


_WHOLE_NORMS = ("Lamb", "CPULamb", "OneBitLamb", "LARS")
_WHOLE_SHAPES = ("Muon", "Adafactor", "LBFGS")


def require_elementwise(optimizer: torch.optim.Optimizer, splits_parameters: bool, dense: str = "") -> None:
    """Check that an optimizer gives the same result on the flat fragments of a server as on full parameters.

    Args:
        splits_parameters: True if some parameter is split over several servers.
        dense: name of a parameter with dense gradients; empty if there is none.

    Raises:
        ConfigError: the rule differs on fragments, or the optimizer does not take the dense gradients.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if dense and "SparseAdam" in names:
        raise ConfigError(
            f"parameter server: SparseAdam takes sparse gradients only, and that of {dense} is dense; write SGD or "
            "Adagrad, which take both"
        )
    if found := next((name for name in names if name in _WHOLE_SHAPES), ""):
        raise ConfigError(
            f"parameter server: {found} reads the shape of a parameter or calls the model again, and a server has flat "
            "fragments; write AdamW or SGD"
        )
    if splits_parameters and (found := next((name for name in names if name in _WHOLE_NORMS), "")):
        raise ConfigError(
            f"parameter server: the step of {found} is scaled by the norm of a whole parameter, and a server has a "
            "fragment of one that is split; write AdamW, or start one server"
        )


def _sync_directory(directory: Path) -> None:
    """Make new and renamed entries of a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
