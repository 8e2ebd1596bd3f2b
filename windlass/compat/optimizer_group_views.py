"""Views of parameters, gradients and master weights by parameter group, as attributes of DeepSpeed's optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.utils.weak import WeakIdKeyDictionary

from windlass.base.errors import ModelError
from windlass.compat.config_assertions import NCCL_START_ALIGNMENT_FACTOR
from windlass.compat.parameter_shard import padded_part_of, shard_group
from windlass.compat.tensor_fragment_api import safe_get_full_grad, safe_get_local_fp32_param, safe_get_local_grad
from windlass.zero import parameter_registry
from windlass.zero.access import shard_values

# Name of the optimizer's attribute with the master weights at each stage; stage 0 has none.
MASTER_ATTRIBUTES = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_partitioned_groups_flat",
}
PARAMETER_ATTRIBUTES = {1: "bit16_groups", 2: "bit16_groups", 3: "fp16_groups"}


Seen = TypeVar("Seen")
_parameters_of_flat = WeakIdKeyDictionary()  # parameters of each flat tensor of master weights


class _ByGroup(Sequence[Seen]):
    """Sequence with one view per parameter group, computed at each access because groups may change.

    Args:
        optimizer: optimizer with the parameter groups.
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
    """Parameters of each group."""

    def _view(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return list(parameters)


class MasterWeightGroups(_ByGroup[torch.Tensor]):
    """Master weights of each group: one flat tensor `[elements of this rank]`, whichever tier holds them.

    The tensor is a copy if parts of several parameters are joined, or if the master weights are on NVMe or updated in
    several chunks; else a view.
    """

    def _view(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        found = [safe_get_local_fp32_param(parameter) for parameter in parameters]
        pieces = [piece.detach().reshape(-1) for piece in found if piece is not None]
        if not pieces:
            return torch.empty(0)
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        _parameters_of_flat[flat] = parameters
        return flat


class LocalStates(Mapping[str, torch.Tensor]):
    """This rank's optimizer states by state name: scalars, or flat tensors `[elements of this rank]`.

    Read-only, and computed at each access. Flat states of several parameters are concatenated.

    Args:
        parameters: parameters whose optimizer states have the same names.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = [shard_values.local_state(parameter, name) for parameter in self._parameters]
        pieces = [piece for piece in found if piece is not None]
        if not pieces:
            raise KeyError(name)
        return pieces[0] if len(pieces) == 1 or not pieces[0].dim() else torch.cat([one.reshape(-1) for one in pieces])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for one in self._parameters for name in shard_values.local_state_names(one)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class TrainedStates(defaultdict[Any, Any]):
    """Attribute `state` of an engine's optimizer and of the optimizer that it wraps.

    It has no items for trained parameters, because the engine holds their states.

    `state[key]` returns the `LocalStates` if the key is a parameter that an engine trains, or a flat tensor of
    `MasterWeightGroups`. Any other key works as in torch.

    Args:
        others: states that the engine did not take over.
    """

    def __init__(self, others: Mapping[Any, Any] | None = None) -> None:
        super().__init__(dict, others or {})

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, torch.nn.Parameter) and key.requires_grad and parameter_registry.find(key) is not None:
            return LocalStates([key])
        if isinstance(key, torch.Tensor) and key in _parameters_of_flat:
            return LocalStates(_parameters_of_flat[key])
        return super().__missing__(key)

    def __reduce__(self) -> Any:
        return (TrainedStates, (), None, None, iter(self.items()))


class GradientGroups(Mapping[int, list[torch.Tensor | None]]):
    """This rank's reduced gradients by group index: a list with one entry per parameter.

    Args:
        optimizer: optimizer with the parameter groups.
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
    """Parameters of each group in their compute dtype, as one flat detached copy."""

    def _view(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        if not parameters:
            return torch.empty(0)
        return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


class ParameterPartitions(_ByGroup[list[torch.Tensor]]):
    """Parameters of each group in their compute dtype, as one flat copy divided into a part per data rank.

    The copy is padded so that every part begins at a multiple of `NCCL_START_ALIGNMENT_FACTOR` elements. windlass's own
    shards follow the units of its model instead.

    Args:
        optimizer: optimizer with the parameter groups.
        num_parts: number of data ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_parts: int) -> None:
        super().__init__(optimizer)
        self._flat, self._num_parts = FlatParameters(optimizer), num_parts

    def _view(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        flat = self._flat._view(parameters)
        padding = -flat.numel() % (self._num_parts * NCCL_START_ALIGNMENT_FACTOR)
        return list(torch.cat([flat, flat.new_zeros(padding)]).chunk(self._num_parts))


class FlatGradients(_ByGroup[torch.Tensor]):
    """Reduced gradients of each group in fp32, as one flat copy `[elements of the group]`. Collective at each access.

    Parameters without a gradient have zeros.
    """

    def _view(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        found = [(parameter, safe_get_full_grad(parameter)) for parameter in parameters]
        if not found:
            return torch.empty(0)
        return torch.cat(
            [
                torch.zeros(parameter.numel(), device=parameter.device) if grad is None else grad.float().reshape(-1)
                for parameter, grad in found
            ]
        )


class HostGradients(Mapping[int, torch.Tensor]):
    """This rank's gradients that are offloaded to host memory until the step, by parameter index over all groups.

    Empty between a step and the next backward. Computed at each access.

    Args:
        optimizer: optimizer with the parameter groups.
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
    """Return the norm of each group's reduced gradient, including the loss scale.

    Collective: full gradients are gathered one parameter at a time.
    """
    norms = []
    for group in optimizer.param_groups:
        total = torch.zeros((), dtype=torch.float64)
        for parameter in group["params"]:
            if (gradient := safe_get_full_grad(parameter)) is not None:
                total += gradient.double().square().sum().cpu()
        norms.append((total.sqrt() * optimizer.loss_scale).float())
    return norms


def gradients_in_fp32(optimizer: torch.optim.Optimizer) -> dict[int, dict[int, torch.Tensor]]:
    """Return this rank's shards of the reduced gradients in fp32, by group index and parameter index.

    Parameters without a gradient are left out.
    """
    found = {}
    for number, pieces in GradientGroups(optimizer).items():
        found[number] = {index: piece.float() for index, piece in enumerate(pieces) if piece is not None}
    return found


def padded_gradients_in_fp32(optimizer: Any) -> dict[int, dict[int, torch.Tensor]]:
    """Return this rank's parts of the reduced gradients at stage 3, divided as in `ds_tensor` of the parameters.

    Collective. The parts are in fp32, include the loss scale and are padded with zeros; see [Note: padded parts].
    Parameters without a gradient are left out.
    """
    found: dict[int, dict[int, torch.Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        found[number] = {}
        for index, parameter in enumerate(group["params"]):
            if (gradient := safe_get_full_grad(parameter)) is not None:
                scaled = gradient.float() * optimizer.loss_scale
                found[number][index] = padded_part_of(scaled, shard_group(parameter))
    return found


def index_of_parameter(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> int:
    """Return the index of a parameter over all groups of an optimizer.

    Raises:
        ModelError: the parameter is in no group.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    found = next((number for number, one in enumerate(parameters) if one is parameter), None)
    if found is None:
        raise ModelError(
            f"get_param_id: a parameter of shape {tuple(parameter.shape)} is in no group of this optimizer; pass one "
            "of optimizer.param_groups"
        )
    return found


class ParameterRanks(Mapping[int, dict[int, list[int]]]):
    """Indices of the data ranks that own a part of each parameter's states, by group index and parameter index.

    The parameter index counts over all groups, as `index_of_parameter` does. Computed at each access.

    Args:
        optimizer: optimizer with the parameter groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = ParameterGroups(optimizer)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, index: int) -> dict[int, list[int]]:
        if not 0 <= index < len(self):
            raise KeyError(index)
        first = sum(len(group) for group in self._groups[:index])
        return {first + number: _ranks_of(parameter) for number, parameter in enumerate(self._groups[index])}


def _ranks_of(parameter: torch.nn.Parameter) -> list[int]:
    place = parameter_registry.find(parameter)
    if place is None:
        return []
    layout, ranks = place.unit.layout, place.unit.dp_group.group.size
    owned = ({piece.index for piece in layout.pieces(*layout.shard_range(rank, ranks))} for rank in range(ranks))
    return [rank for rank, indices in enumerate(owned) if place.index in indices]
