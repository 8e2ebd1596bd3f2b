"""Parameters, gradients and master weights by parameter group, as DeepSpeed's optimizers show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from windlass.compat.tensor_fragment_api import safe_get_full_grad, safe_get_local_fp32_param, safe_get_local_grad

MASTER_ATTRIBUTES = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_partitioned_groups_flat",
}  # by stage; 0 has none
PARAMETER_ATTRIBUTES = {1: "bit16_groups", 2: "bit16_groups", 3: "fp16_groups"}


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


class MasterWeightGroups(_ByGroup[torch.Tensor]):
    """A flat tensor `[elements of this rank]` for each group, of master weights, which may rest on the host or on disk.
    A view where the group has one parameter at hand, else a copy."""

    def _view(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        found = [safe_get_local_fp32_param(parameter) for parameter in parameters]
        pieces = [piece.detach().reshape(-1) for piece in found if piece is not None]
        if not pieces:
            return torch.empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class GradientGroups(Mapping[int, list[torch.Tensor | None]]):
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


class FlatParameters(_ByGroup[torch.Tensor]):
    """The parameters of each group in the dtype of the forward, as one flat tensor outside the graph: a copy."""

    def _view(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        if not parameters:
            return torch.empty(0)
        return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


class HostGradients(Mapping[int, torch.Tensor]):
    """This rank's gradients that wait in host memory for the step, by the number of their parameter in the groups;
    empty between a step and the next backward. Looked up when asked for.

    Args:
        optimizer: whose groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def _held(self) -> dict[int, torch.Tensor]:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        found = [(number, safe_get_local_grad(parameter)) for number, parameter in enumerate(parameters)]
        return {number: piece for number, piece in found if piece is not None}

    def __len__(self) -> int:
        return len(self._held())

    def __iter__(self) -> Iterator[int]:
        return iter(self._held())

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._held()[number]


def norms_of_groups(optimizer: Any) -> list[torch.Tensor]:
    """Return the norm of the reduced gradient of each parameter group, loss scale included. Collective: gradients are
    gathered one by one."""
    norms = []
    for group in optimizer.param_groups:
        total = torch.zeros((), dtype=torch.float64)
        for parameter in group["params"]:
            if (gradient := safe_get_full_grad(parameter)) is not None:
                total += gradient.double().square().sum().cpu()
        norms.append((total.sqrt() * optimizer.loss_scale).float())
    return norms


def gradients_in_fp32(optimizer: torch.optim.Optimizer) -> dict[int, dict[int, torch.Tensor]]:
    """Return this rank's pieces of the reduced gradients in fp32, by the number of the group and of the parameter in
    it; those without a gradient are left out."""
    found = {}
    for number, pieces in GradientGroups(optimizer).items():
        found[number] = {index: piece.float() for index, piece in enumerate(pieces) if piece is not None}
    return found
