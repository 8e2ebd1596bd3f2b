"""Units of structured pruning: heads, feed-forward features, experts and channels.

[Note: coupled tensors] A unit is computed by some rows of tensors and read by some columns of other tensors. To remove
a unit, its elements are removed from all of these tensors. A `UnitGroup` lists the elements of the units of a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class CoupledTensor:
    """Elements of each unit along one dimension of a parameter or buffer.

    Attributes:
        name: name in the model.
        dim: dimension along which each unit has its elements.
        index: positions of each unit's elements along `dim`, `[units, elements]`.
        reads: True if the outputs of the units are multiplied by these elements; False if these elements compute the
            outputs.
        part: number of the expert that has these elements, in a tensor with all experts along its first dimension;
            None: the full tensor.
    """

    name: str
    dim: int
    index: Tensor
    reads: bool = False
    part: int | None = None


@dataclass(frozen=True)
class UnitGroup:
    """Units of one module, some of which can be removed.

    Attributes:
        name: name of the module that computes the units.
        kind: heads, groups (key heads with their query heads), ffn, experts or channels.
        units: number of units.
        tensors: all elements that belong to the units.
        sections: number of consecutive sections of equal size, each of which loses the same number of units, e.g. the
            query heads of each key head.
        heads: numbers of query and key heads, for the kinds heads and groups.
        least: minimum number of units that stay, e.g. the number of experts of a token.
    """

    name: str
    kind: str
    units: int
    tensors: tuple[CoupledTensor, ...]
    sections: int = 1
    heads: tuple[int, int] = (0, 0)
    least: int = 1

    @property
    def has_own_keys(self) -> bool:
        """True if each query head has a key head of its own, so that heads and groups are the same units."""
        return self.heads[0] == self.heads[1] > 0

    @property
    def parts(self) -> tuple[int | None, ...]:
        """Values of `CoupledTensor.part`: experts, whose units are chosen independently; `(None,)` without experts."""
        return tuple(dict.fromkeys(tensor.part for tensor in self.tensors))


Kept = Mapping[int | None, Tensor]
"""Indices of the units that stay, ascending, for each of `UnitGroup.parts`."""


def choose_units(group: UnitGroup, scores: Mapping[int | None, Tensor], keep: int) -> Kept:
    """Return the units with the largest scores, the same number in each section.

    Args:
        scores: `[units]` for each part.
        keep: number of units to keep in each part, a multiple of the number of sections.
    """
    found = {}
    each, size = keep // group.sections, group.units // group.sections
    for part in group.parts:
        rows = scores[part].view(group.sections, size)
        best = rows.argsort(dim=1, descending=True, stable=True)[:, :each].sort(1).values
        found[part] = (best + torch.arange(group.sections)[:, None] * size).flatten()
    return found


def count_kept(group: UnitGroup, share: float) -> int:
    """Return the number of units that stay.

    If `share` is below 1, the feed-forward size that stays is a multiple of the largest power of two from 8 to 128 that
    divides the size and is at most a sixteenth of it, for fast kernels. Sizes of experts that are multiples of 8 stay
    multiples of 8, which grouped matrix products need.

    Args:
        share: fraction of the units to remove, below 1; or number of units to remove in each section.

    Raises:
        ConfigError: more units would be removed than there are, fewer would stay than `least`, or `share` is a number
            that leaves experts of a size that is no longer a multiple of 8.
    """
    size = group.units // group.sections
    removed = share * size if share < 1 else share
    if share < 0 or removed > size:
        raise ConfigError(
            f"prune {group.kind} = {share:g}, but {group.name} has {size} of them"
            f"{' for each key head' if group.sections > 1 else ''}; remove fewer"
        )
    grain = 1
    if group.kind == "ffn" and share < 1:
        grain = next((one for one in (128, 64, 32, 16, 8) if size % one == 0 and one <= size / 16), 1)
    if group.kind == "ffn" and any(part is not None for part in group.parts) and size % 8 == 0:
        grain = max(grain, 8)
        if share >= 1 and removed % grain:
            raise ConfigError(
                f"prune {group.kind} = {share:g} leaves {size - removed:g} features of the experts {group.name}, which "
                f"their products need in multiples of {grain}; remove a multiple of it"
            )
    kept = round((size - removed) / grain) * grain
    least = -(-group.least // group.sections)
    if kept < least:
        raise ConfigError(
            f"prune {group.kind} = {share:g} leaves {kept} of the {size} of {group.name}, which needs {least}; "
            "remove fewer"
        )
    return min(kept, size) * group.sections


def mask_units(model: nn.Module, group: UnitGroup, kept: Kept) -> None:
    """Set all elements of the removed units to 0, in place. The model keeps its shapes.

    Raises:
        ConfigError: the units are experts, which a router whose rows are 0 still chooses.
    """
    if group.kind == "experts":
        raise ConfigError("experts are removed, not masked: a router whose rows are 0 still chooses them")
    with torch.no_grad():
        for tensor in group.tensors:
            value = _get(model, tensor.name)
            value = value if tensor.part is None else value[tensor.part]
            gone = torch.ones(group.units, dtype=torch.bool)
            gone[kept[tensor.part]] = False
            dim = tensor.dim if tensor.part is None else tensor.dim - 1
            value.index_fill_(dim, tensor.index[gone].flatten().to(value.device), 0)


def remove_units(model: nn.Module, groups: Sequence[tuple[UnitGroup, Kept]]) -> None:
    """Remove all units except the chosen ones (`Kept`) from all tensors, in place; see [Note: coupled tensors]. Tensors
    that modules share stay shared."""
    found: dict[int, tuple[Tensor, list[tuple[CoupledTensor, Tensor]]]] = {}  # entries by id of the tensor
    for group, kept in groups:
        for tensor in group.tensors:
            before = _get(model, tensor.name)
            found.setdefault(id(before), (before, []))[1].append((tensor, kept[tensor.part]))
    with torch.no_grad():
        for before, entries in found.values():
            for module in replace_everywhere(model, before, _select(before, entries)):
                fit_leaf(module)


def _select(value: Tensor, found: Sequence[tuple[CoupledTensor, Tensor]]) -> Tensor:
    """Return a tensor without the elements that any of the groups removes along each dimension."""
    for dim in dict.fromkeys(tensor.dim for tensor, _ in found):
        stays: dict[int | None, Tensor] = {}  # mask by part; positions are those before any removal
        for tensor, kept in found:
            if tensor.dim == dim:
                one = _staying(tensor, kept, value.shape[dim])
                stays[tensor.part] = stays[tensor.part] & one if tensor.part in stays else one
        if None in stays:
            value = value.index_select(dim, _positions(stays[None], value))
        else:
            parts = sorted(stays.items(), key=lambda item: item[0] or 0)
            value = torch.stack([value[part].index_select(dim - 1, _positions(one, value)) for part, one in parts])
    return value


def _staying(tensor: CoupledTensor, kept: Tensor, size: int) -> Tensor:
    """Return a mask of the elements that stay."""
    stays = torch.ones(size, dtype=torch.bool)
    stays[tensor.index.flatten()] = False
    stays[tensor.index[kept].flatten()] = True
    return stays


def _positions(stays: Tensor, value: Tensor) -> Tensor:
    return stays.nonzero().flatten().to(value.device)


def _get(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    found: Tensor | None = module._parameters.get(leaf)
    found = module._buffers.get(leaf) if found is None else found
    assert found is not None
    return found


def replace_everywhere(model: nn.Module, before: Tensor, after: Tensor) -> list[nn.Module]:
    """Replace a tensor by another one in all modules that hold it, and return these modules."""
    holders = []
    if isinstance(before, nn.Parameter):
        after = nn.Parameter(after, requires_grad=before.requires_grad)
    for module in model.modules():
        places: dict[str, Tensor | None]
        for places in (module._parameters, module._buffers):  # type: ignore[assignment]
            for leaf, value in places.items():
                if value is before:
                    places[leaf] = after
                    holders.append(module)
    return holders


_SIZES = {
    "Linear": (("out_features", 0), ("in_features", 1)),
    "Conv1D": (("nx", 0), ("nf", 1)),  # transformers' class, whose weight is transposed
    "Embedding": (("num_embeddings", 0), ("embedding_dim", 1)),
}


def fit_leaf(module: nn.Module) -> None:
    """Set the size attributes of a layer, e.g. `in_features`, to the sizes of its weight."""
    weight = module._parameters.get("weight")
    if weight is None:
        return
    names = next((_SIZES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _SIZES), ())
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if module.groups > 1:
            module.groups = module.in_channels = module.out_channels = int(weight.shape[0])
        else:
            module.out_channels, module.in_channels = int(weight.shape[0]), int(weight.shape[1])
    elif isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        module.num_features = int(weight.shape[0])
    for name, dim in names:
        module.__dict__[name] = int(weight.shape[dim])
