"""Copies of tensors inside plain data for `torch.save`, which would otherwise write their full storages."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` with each tensor in it (in lists, tuples and dictionaries) replaced by a copy on `device`.

    A tensor with two names (tied weights) has one copy for both, so that it is saved once.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, known: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        here = item.detach()
        key = (here.device, here.data_ptr(), here.shape, here.stride(), here.dtype) if here.numel() else id(item)
        if key not in known:
            known[key] = here.to(device, copy=True)  # always copy: `cuda` != `cuda:0`, although they may be one device
        return known[key]
    if isinstance(item, dict):
        made = {key: _clone(value, device, known) for key, value in item.items()}
        return made if type(item) is dict else type(item)(made)
    if isinstance(item, (list, tuple)):
        items = [_clone(value, device, known) for value in item]
        return items if isinstance(item, list) else tuple(items)
    return item
