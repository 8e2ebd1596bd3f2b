"""Whole values are where the model computes, wherever their parts rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from windlass.zero.layout import layout_of
from windlass.zero.values import assemble


def test_a_whole_weight_is_where_the_model_computes() -> None:
    """`meta` stands for a GPU: masters that rest in host memory would give a weight that no loss there can use."""
    shapes = [torch.Size([2, 3]), torch.Size([4])]
    family = SimpleNamespace(group=SimpleNamespace(size=1, index=0))
    unit = SimpleNamespace(layout=layout_of(shapes, 1), shapes=shapes, family=family)
    model = SimpleNamespace(device=torch.device("meta"))
    place: Any = SimpleNamespace(model=model, unit=unit, index=1)
    whole = assemble(place, torch.ones(unit.layout.padded))
    assert whole.device.type == "meta" and whole.shape == shapes[1]
