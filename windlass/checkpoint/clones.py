"""Copies of tensors inside of plain data, for `torch.save`: without the larger storages that they are parts of."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with each tensor in it (in lists, tuples and dictionaries) replaced by a copy of its own on `device`. What
    was one tensor under two names (tied weights) is one copy under both, so that it is saved once."""
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, known: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        here = item.detach()
        key = (here.device, here.data_ptr(), here.shape, here.stride(), here.dtype) if here.numel() else id(item)
        if key not in known:
            known[key] = here.clone() if here.device == device else here.to(device)
        return known[key]
    if isinstance(item, dict):
        made = {key: _clone(value, device, known) for key, value in item.items()}
        return made if type(item) is dict else type(item)(made)
    if isinstance(item, (list, tuple)):
        items = [_clone(value, device, known) for value in item]
        return items if isinstance(item, list) else tuple(items)
    return item
