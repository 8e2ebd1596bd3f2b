"""This rank's master weights by parameter group, as DeepSpeed's optimizers show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from windlass.compat.whole_values import safe_get_local_fp32_param

NAMES = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_partitioned_groups_flat",
}  # by stage; 0 has none


class MasterGroups(Sequence[torch.Tensor]):
    """A flat tensor `[elements of this rank]` for each group: looked up when it is asked for, since groups may change
    and master weights may rest on the host or on disk. A view where the group has one parameter at hand, else a copy.

    Args:
        optimizer: whose groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __len__(self) -> int:
        return len(self._optimizer.param_groups)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        groups = self._optimizer.param_groups[index]
        return _flat(groups) if isinstance(groups, dict) else [_flat(group) for group in groups]


def _flat(group: dict[str, list[torch.nn.Parameter]]) -> torch.Tensor:
    found = [safe_get_local_fp32_param(parameter) for parameter in group["params"]]
    pieces = [piece.detach().reshape(-1) for piece in found if piece is not None]
    if not pieces:
        return torch.empty(0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
