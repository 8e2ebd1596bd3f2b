"""Laws of 1-bit LAMB at stage 0: LAMB bit for bit before the freeze, afterwards a simulation of the algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import windlass
from tests.dist.equivalence_runs import specimen, start
from tests.dist.harness import RankError, run_ranks
from tests.dist.test_one_bit_adam import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    FREEZE,
    LR,
    Case,
    Simulation,
    both,
    one_thread,  # noqa: F401 - a fixture
    passed,
    resume,
    run_case,
    save,
)
from tests.oracle import relative_error

CASE = Case(optimizer="OneBitLamb", accumulation=2, transport="shm")
LEAST, MOST, THRESHOLD = 0.5, 4.0, 0.1


def run_lamb(case: Case, folder: str) -> dict[str, Any]:
    """Run a case, and return its trust ratios at the freeze too."""
    engine = start(specimen(case.model), case.config())
    from tests.dist.test_one_bit_adam import train

    train(engine, case, 0, FREEZE)
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    ratios = {name: float(windlass.zero.full_state(p, "coeff_freeze")) for name, p in named}  # type: ignore[arg-type]
    engine.destroy()
    return {**run_case(case, folder), "ratios": ratios}


class LambSimulation(Simulation):
    """The compressed phase of 1-bit LAMB on the data of all ranks in one process, in plain PyTorch."""

    def __init__(self, case: Case, frozen: dict[str, Any], ratios: dict[str, float]) -> None:
        super().__init__(case, frozen)
        self.ratios, self.factors = ratios, dict.fromkeys(ratios, 1.0)
        self.fresh = {name: value.clone() for name, value in self.v.items()}

    def _update(self, name: str, step: int, gradients: list[torch.Tensor], clip: float) -> None:
        ranks, before = self.case.ranks, self.m[name]
        total = torch.zeros_like(before)
        for rank, gradient in enumerate(gradients):
            sent = gradient * (1 - BETA1) + BETA1 * before
            if ranks > 1:
                sent += self.worker[rank][name]
            for part in self.pieces[name]:
                message = passed(sent[part], ranks)
                if ranks > 1:
                    self.worker[rank][name][part] = sent[part] - message
                total[part] += message
        mean = total * (1 / ranks)
        for part in self.pieces[name] if ranks > 1 else ():
            owed = mean[part] + self.server[name][part]
            mean[part] = passed(owed, ranks)
            self.server[name][part] = owed - mean[part]
        self.m[name] = mean
        rebuilt = (mean - BETA1 * before) / (1 - BETA1)
        self.fresh[name] = BETA2 * self.fresh[name] + (1 - BETA2) * rebuilt * rebuilt
        frozen = self.v[name].sqrt() + EPS
        plain = mean / frozen
        plain[self.v[name] == 0] = 0
        update = plain + DECAY * self.x[name]
        factor = float((frozen / (self.fresh[name].sqrt() + EPS)).max())
        share = min(1.0, float(plain.norm() / update.norm()))
        factor = min(MOST, max(LEAST, factor * share + 1 - share))
        last = self.factors[name]
        factor = min(last * (1 + THRESHOLD), max(last * (1 - THRESHOLD), factor))
        self.factors[name] = factor
        correction = (1 - BETA2**FREEZE) ** 0.5 / (1 - BETA1**step)
        self.x[name] = self.x[name] - LR * correction * self.ratios[name] * factor * update
        self.replicas[name] = self.x[name].to(self.case.dtype)


@pytest.mark.parametrize(("ranks", "bf16"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_the_compressed_phase_equals_its_simulation(ranks: int, bf16: bool, tmp_path: Path) -> None:
    case = replace(CASE, ranks=ranks, bf16=bf16)
    by_rank = run_ranks(run_lamb, ranks, case, str(tmp_path), timeout=120.0)
    simulation = LambSimulation(case, by_rank[0]["frozen"], by_rank[0]["ratios"])
    simulation.run(FREEZE, case.steps)
    shaped = {name: value.view(simulation.shapes[name]) for name, value in simulation.x.items()}
    for rank, found in enumerate(by_rank):
        error, where = relative_error(found["params"], shaped)
        assert error <= 2e-6, f"{case} rank {rank}: {where} is off by {error:.2e}"
        assert all(torch.equal(value, by_rank[0]["params"][name]) for name, value in found["params"].items())
        assert not any(n for key, n in found["moved"].items() if not key.startswith("compressed"))


def test_before_the_freeze_it_is_lamb_bit_for_bit(tmp_path: Path) -> None:
    for pairs in run_ranks(both, 2, [CASE, replace(CASE, bf16=True)], str(tmp_path), "Lamb", timeout=120.0):
        for one, other in pairs:
            for key in ("params", "m", "v"):
                assert all(torch.equal(value, other[key][name]) for name, value in one[key].items()), key


def test_a_resumed_run_is_exact(tmp_path: Path) -> None:
    straight = run_ranks(save, 2, CASE, str(tmp_path), FREEZE + 2)
    resumed = run_ranks(resume, 2, CASE, str(tmp_path), FREEZE + 2)
    for here, there in zip(straight, resumed, strict=True):
        for what in ("params", "errors"):
            assert all(torch.equal(value, there[what][name]) for name, value in here[what].items()), what


def refused(stage: int) -> None:
    start(specimen("mlp"), replace(CASE, stage=stage).config())


def test_sharded_states_are_refused() -> None:
    with pytest.raises(RankError, match=r"OneBitLamb.* at zero_optimization.stage 2.*write stage 0"):
        run_ranks(refused, 2, 2)
