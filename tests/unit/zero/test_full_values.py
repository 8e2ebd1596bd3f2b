"""Tests that full parameter values are on the model's device, whatever tier their shards are on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from windlass.zero.access.shard_values import assemble
from windlass.zero.core.unit_layout import layout_of


def test_full_weight_is_on_the_device_of_the_model() -> None:
    """A full weight is on the model's device, here `meta` in place of a GPU.

    The shards of master weights may be in host memory; a loss on the device needs the full weight on the device.
    """
    shapes = [torch.Size([2, 3]), torch.Size([4])]
    dp_group = SimpleNamespace(group=SimpleNamespace(size=1, index=0))
    unit = SimpleNamespace(layout=layout_of(shapes, 1), shapes=shapes, dp_group=dp_group)
    model = SimpleNamespace(device=torch.device("meta"))
    place: Any = SimpleNamespace(model=model, unit=unit, index=1)
    full = assemble(place, torch.ones(unit.layout.padded))
    assert full.device.type == "meta" and full.shape == shapes[1]
