"""Test that tensors inside plain values of optimizer states are loaded to the device of the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from windlass.engine.optimizer_state_loading import plan_state_loading


def test_tensors_in_lists_go_to_the_device_of_the_step() -> None:
    entry = SimpleNamespace(name="w", parameter=object(), chunk=SimpleNamespace(device=torch.device("meta")))
    update = SimpleNamespace(formats=dict, state_entries=lambda: [entry])
    factors = {"Q": [torch.ones(2, 2), None], "plan": {"step": 3, "pair": (torch.ones(1), "a")}}
    metadata = {"values": {"w": factors}, "states": {"w": {"Q": "value", "plan": "value"}}}
    planned: list[dict[str, Any]] = []
    handle = SimpleNamespace(expect_states=lambda entry, scalars: planned.append(scalars))
    model: Any = SimpleNamespace(update=update)
    plan_state_loading(model, metadata, {}, lambda chunk: handle, {})  # type: ignore[arg-type, return-value]
    (scalars,) = planned
    assert scalars["Q"][0].device.type == scalars["plan"]["pair"][0].device.type == "meta"
    assert scalars["Q"][1] is None and scalars["plan"]["step"] == 3 and scalars["plan"]["pair"][1] == "a"
