"""Copies of tensors inside of plain data, for `torch.save`: without the larger storages that they are parts of."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with each tensor in it (in lists, tuples and dictionaries) replaced by a copy of its own on `device`."""
    if isinstance(item, torch.Tensor):
        here = item.detach()
        return here.clone() if here.device == torch.device(device) else here.to(device)
    if isinstance(item, dict):
        made = {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
        return made if type(item) is dict else type(item)(made)
    if isinstance(item, (list, tuple)):
        items = [clone_tensors_for_torch_save(value, device) for value in item]
        return items if isinstance(item, list) else tuple(items)
    return item
