"""Parameters, gradients and master weights of this rank by parameter group, as DeepSpeed's optimizers show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, overload

import torch

from windlass.compat.whole_values import safe_get_local_fp32_param, safe_get_local_grad

NAMES = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_partitioned_groups_flat",
}  # by stage; 0 has none
PARAMETERS = {1: "bit16_groups", 2: "bit16_groups", 3: "fp16_groups"}


Seen = TypeVar("Seen")


class _ByGroup(Sequence[Seen]):
    """One view of each parameter group; looked up when it is asked for, since groups may change.

    Args:
        optimizer: whose groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __len__(self) -> int:
        return len(self._optimizer.param_groups)

    @overload
    def __getitem__(self, index: int) -> Seen: ...
    @overload
    def __getitem__(self, index: slice) -> list[Seen]: ...
    def __getitem__(self, index: int | slice) -> Seen | list[Seen]:
        groups = self._optimizer.param_groups[index]
        if isinstance(groups, dict):
            return self._view(groups["params"])
        return [self._view(group["params"]) for group in groups]

    def _view(self, parameters: list[torch.nn.Parameter]) -> Seen:
        raise NotImplementedError


class ParameterGroups(_ByGroup[list[torch.nn.Parameter]]):
    """The parameters of each group."""

    def _view(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return list(parameters)


class MasterGroups(_ByGroup[torch.Tensor]):
    """A flat tensor `[elements of this rank]` for each group, of master weights, which may rest on the host or on disk.
    A view where the group has one parameter at hand, else a copy."""

    def _view(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        found = [safe_get_local_fp32_param(parameter) for parameter in parameters]
        pieces = [piece.detach().reshape(-1) for piece in found if piece is not None]
        if not pieces:
            return torch.empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class GroupGradients(Mapping[int, list[torch.Tensor | None]]):
    """This rank's reduced gradients by the number of the parameter group, one entry for each parameter.

    Args:
        optimizer: whose groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = ParameterGroups(optimizer)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, index: int) -> list[torch.Tensor | None]:
        if not 0 <= index < len(self):
            raise KeyError(index)
        return [safe_get_local_grad(parameter) for parameter in self._groups[index]]
