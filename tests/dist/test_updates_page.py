"""Law: the update in docs/updates.md trains as the same rule does in plain PyTorch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_self_reducing_update import Case, Simulation, steps
from tests.oracle import relative_error

PAGE = Path(__file__).parents[2] / "docs" / "updates.md"
BOUND = 1e-2  # relative to the change by training: sums in another order can flip the sign of an element near zero


@cache
def register_page() -> None:
    """Run the code of the page, which registers its optimizer, once per process."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "updates_page"})


def train_page(cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    register_page()
    results = []
    for case in cases:
        optimizer: dict[str, Any] = {"type": "SignSGD", "params": {"lr": 0.02}}
        engine = start(specimen(case.model), {**case.config, "optimizer": optimizer})
        steps(engine, case, 0, case.steps)
        results.append(whole_params(engine.module))
        engine.destroy()
    return results


def test_update_of_the_page_trains_as_its_rule() -> None:
    cases = [Case(stage=0, clipping=0.1), Case(stage=1, clipping=0.1)]
    plain = Simulation(cases[0])
    before = {name: value.clone() for name, value in plain.masters.items()}
    plain.run(0, cases[0].steps)
    expected = {name: value - before[name] for name, value in plain.masters.items()}
    for ranks in run_ranks(train_page, 2, cases):
        for actual in ranks:
            moved = {name: value - before[name] for name, value in actual.items()}
            error, where = relative_error(moved, expected)
            assert error <= BOUND, f"{where} is off by {error:.2e}"
