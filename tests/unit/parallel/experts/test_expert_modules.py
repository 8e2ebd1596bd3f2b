"""Tests that expert modules are recognized by their own description and run as their own forward does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hf_experts import FAMILIES
from tests.oracle import relative_error
from windlass.parallel.experts import StackedMLP
from windlass.parallel.experts.expert_modules import ExpertModuleSpec, find_expert_spec, run_interface_rows
from windlass.parallel.experts.grouped_linear import RowGroups

COUNTS = [3, 0, 4, 2, 0, 0, 1, 0]  # rows per expert; a family of fewer experts uses the first ones


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("dbrx", "llama4")])
def test_interface_description_equals_the_module(name: str) -> None:
    """The declared interface equals the module's own loop over experts."""
    model = FAMILIES[name].build(experts_implementation="eager")
    module: Any = next(entry for entry in model.modules() if type(entry).__name__.endswith("Experts"))
    family, counts = find_expert_spec(module), COUNTS[: module.num_experts]
    assert family is not None and family.run_rows is run_interface_rows
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    groups = RowGroups(torch.tensor(counts))
    actual = family.run_rows(module, rows, groups)
    index = groups.expert_of(rows)[:, None]
    expected = module(rows, index, torch.ones(index.shape))
    leaves = [rows, *module.parameters()]
    have = torch.autograd.grad(actual.square().sum(), leaves)
    want = torch.autograd.grad(expected.square().sum(), leaves)
    for item, other in zip([actual, *have], [expected, *want], strict=True):
        assert relative_error({"it": item.detach()}, {"it": other.detach()})[0] < 1e-5


class ByName(nn.Module):
    """Module of an unknown class whose forward arguments have telling names."""

    def __init__(self, experts: int, first: int | None = None) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.empty(first or experts, 3, 3))

    def forward(self, x: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        return x


class ByAnotherName(ByName):
    def forward(self, x: Tensor, mask: Tensor, noise: Tensor) -> Tensor:
        return x


def test_expert_module_is_recognized_by_structure() -> None:
    assert find_expert_spec(ByName(4)) == ExpertModuleSpec()
    assert find_expert_spec(ByName(4, first=8)) is None
    assert find_expert_spec(ByAnotherName(4)) is None
    assert find_expert_spec(nn.Linear(4, 4)) is None
    stacked = find_expert_spec(StackedMLP(4, 8, 3, bias=True))
    assert stacked is not None and stacked.run_rows is run_interface_rows


def _classes() -> list[tuple[str, str]]:
    """Return family and class name of every expert module of transformers that uses its expert interface."""
    import transformers

    results = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)\(", file.read_text(), re.MULTILINE):
            results.append((file.parent.name, name))
    return results


@pytest.mark.slow
def test_every_module_of_the_interface_is_recognized() -> None:
    built, unbuilt = [], []
    for folder, name in _classes():
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        words = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
        configs = [kind for key, kind in vars(words).items() if key.endswith("Config") and isinstance(kind, type)]
        for config in sorted(configs, key=lambda kind: "Text" not in kind.__name__):
            try:
                with torch.device("meta"):
                    one = getattr(module, name)(config())
            except Exception:  # not the configuration that this module takes
                continue
            family = find_expert_spec(one)
            assert family is not None and family.run_rows is run_interface_rows, name
            built.append(name)
            break
        else:
            unbuilt.append(name)
    assert len(built) > 50 and len(unbuilt) < 8, unbuilt
