"""Each rank reads its part of a model from files, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from windlass.base.errors import CheckpointError
from windlass.parallel.placement import Placement, is_placed, place, placement_of


class Slice(Protocol):
    """A tensor of a file that is read in parts, as `safetensors.safe_open(...).get_slice(name)` gives it."""

    def get_shape(self) -> Iterable[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


def load_part(
    model: nn.Module,
    read: Callable[[str], Slice],
    *,
    device: torch.device | str = "cpu",
    names: Callable[[str], str] = lambda name: name,
) -> list[str]:
    """Fill the parameters of a model with their parts of the tensors that `read` finds, and its buffers.

    The model is cut already (`apply_tensor_parallel`). Parameters on the meta device come to lie on `device`, as other
    objects that are placed as those before. Ones that modules share stay shared, and are looked for by all their names.

    Args:
        read: by the name of a parameter in the whole model. Raises KeyError where there is none of that name.
        device: for what lies on the meta device.
        names: the name in the files of a parameter or buffer.

    Returns:
        The names of parameters and buffers for which `read` found nothing. Such parameters lie on `device` and have no
        values yet; buffers on the meta device, which files rarely have, are left there.

    Raises:
        CheckpointError: a tensor has another shape than the parameter has as a whole.
    """
    missing: list[str] = []
    holders: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str, str]]]] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{leaf}" if prefix else leaf
                holders.setdefault(id(parameter), (parameter, []))[1].append((module, leaf, name))
    for parameter, held in holders.values():
        filled = _materialized(parameter, torch.device(device))
        if not any(_fill(name, filled.data, placement_of(filled), read, names) for _, _, name in held):
            missing.append(held[0][2])
        for module, leaf, _ in held:
            module._parameters[leaf] = filled
    for name, buffer in model.named_buffers():
        if buffer.is_meta or not _fill(name, buffer, None, read, names):
            missing.append(name)
    return missing


def _materialized(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not parameter.is_meta:
        return parameter
    made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    if is_placed(parameter):
        place(made, placement_of(parameter))
    return made


def _fill(
    name: str,
    target: torch.Tensor,
    placement: Placement | None,
    read: Callable[[str], Slice],
    names: Callable[[str], str],
) -> bool:
    try:
        source = read(names(name))
    except KeyError:
        return False
    shape = tuple(target.shape) if placement is None else placement.shape
    found = tuple(source.get_shape())
    if found != shape:
        raise CheckpointError(f"tensor {names(name)!r} has shape {found}, and the model's {name} {shape} as a whole")
    with torch.no_grad():
        if placement is None or not shape:
            target.copy_(source[...])
            return True
        for box in placement.boxes():
            here = tuple(slice(start, start + size) for start, size in zip(box.local, box.sizes, strict=True))
            there = tuple(slice(start, start + size) for start, size in zip(box.whole, box.sizes, strict=True))
            target[here].copy_(source[there])
    return True
