"""Tests that 1-bit LAMB equals LAMB bit for bit before the freeze, and afterwards a simulation of the algorithm."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import windlass
from tests import oracle
from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_disk_failure import attempt
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
    require_bytes,
    resume,
    run_case,
    save,
    train,
)
from tests.oracle import relative_error

CASE = Case(optimizer="OneBitLamb", accumulation=2, transport="shm")
ZERO_ONE = Case(
    optimizer="ZeroOneAdam",
    params=(("var_freeze_step", 5), ("var_update_scaler", 1), ("local_step_scaler", 1), ("local_step_clipper", 2)),
)
EXCHANGE = "compressed_phase.CompressedPhase.exchange"


def run_lamb(case: Case, folder: str) -> dict[str, Any]:
    """Run a case. Return its results, and its trust ratios at the freeze."""
    engine = start(specimen(case.model), case.config(folder))
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
        self.least, self.most, self.threshold = (
            dict(case.params).get(key, default)
            for key, default in (("factor_min", 0.5), ("factor_max", 4.0), ("factor_threshold", 0.1))
        )
        self.fresh = {name: value.clone() for name, value in self.v.items()}

    def _update_all(self, step: int, gradients: list[dict[str, torch.Tensor]], clip: float) -> None:
        for name in self.x:
            self._receive(name, [one[name] for one in gradients], clip)
        for names in self._parameters():
            self._move(names, step)

    def _root(self, variance: torch.Tensor) -> torch.Tensor:
        if dict(self.case.params).get("eps_inside_sqrt"):
            return (variance + EPS).sqrt()
        return variance.sqrt() + EPS

    def _parameters(self) -> list[list[str]]:
        """Return the names of the parts of each parameter."""
        return [[name] for name in self.x]

    def _receive(self, name: str, gradients: list[torch.Tensor], clip: float) -> None:
        """Exchange the messages of one value, and update its momentum and its current variance."""
        ranks, before = self.case.ranks, self.m[name]
        total = torch.zeros_like(before)
        for rank, gradient in enumerate(gradients):
            sent = gradient * ((1 - BETA1) / (1 / clip))
            if not self.case.stage:
                sent.add_(before, alpha=BETA1)
            if ranks > 1:
                sent += self.worker[rank][name]
            for part in self.pieces[name]:
                message = passed(sent[part], self.case)
                if ranks > 1:
                    self.worker[rank][name][part] = sent[part] - message
                total[part] += message
        mean = total * (1 / ranks)
        for part in self.pieces[name] if ranks > 1 and not self.case.stage else ():
            owed = mean[part] + self.server[name][part]
            mean[part] = passed(owed, self.case)
            self.server[name][part] = owed - mean[part]
        if self.case.stage:
            mean = BETA1 * before + mean
        self.m[name] = mean = self.masked(name, mean)
        rebuilt = (mean - BETA1 * before) / (1 - BETA1)
        self.fresh[name] = BETA2 * self.fresh[name] + (1 - BETA2) * rebuilt * rebuilt

    def _move(self, names: list[str], step: int) -> None:
        """Update a parameter, given its parts."""
        updates, squares, largest = {}, torch.zeros(2, dtype=torch.float64), 0.0
        for name in names:
            frozen = self._root(self.v[name])
            plain = self.m[name] / frozen
            plain[self.v[name] == 0] = 0
            updates[name] = plain + DECAY * self.x[name]
            squares += torch.stack([one.double().square().sum() for one in (plain, updates[name])])
            largest = max(largest, float((frozen / self._root(self.fresh[name])).max()))
        share = min(1.0, float(squares[0] / squares[1]) ** 0.5)
        factor = min(self.most, max(self.least, largest * share + 1 - share))
        last = self.factors[names[0]]
        factor = min(last * (1 + self.threshold), max(last * (1 - self.threshold), factor))
        self.factors[names[0]] = factor
        rate = LR * self.ratios[names[0]] * factor
        if dict(self.case.params).get("bias_correction", True):
            rate *= (1 - BETA2**FREEZE) ** 0.5 / (1 - BETA1**step)
        for name, update in updates.items():
            self.x[name] = self.x[name] - rate * update
            if not self.case.stage or self.case.ranks == 1:
                self.replicas[name] = self.x[name].to(self.case.dtype)
                continue
            for part in self.pieces[name]:
                move = passed(self.x[name][part] - self.replicas[name][part].float(), self.case)
                self.replicas[name][part] = (self.replicas[name][part].float() + move).to(self.case.dtype)


@pytest.mark.parametrize(
    ("ranks", "bf16", "stage", "transport"),
    [
        (2, False, 0, "shm"),
        (2, False, 1, "gloo"),
        (2, False, 2, "shm"),
        pytest.param(2, False, 0, "gloo", marks=pytest.mark.slow),
        pytest.param(2, False, 2, "gloo", marks=pytest.mark.slow),
        *(
            pytest.param(4, bf16, stage, transport, marks=pytest.mark.slow)
            for bf16 in (False, True)
            for stage in (0, 1, 2)
            for transport in ("shm", "gloo")
        ),
    ],
)
def test_the_compressed_phase_equals_its_simulation(
    ranks: int, bf16: bool, stage: int, transport: str, tmp_path: Path
) -> None:
    case = replace(CASE, ranks=ranks, bf16=bf16, stage=stage, transport=transport, clipping=0.1 if stage else 0.0)
    require_law(case, run_ranks(run_lamb, ranks, case, str(tmp_path), timeout=120.0))


def measured_ratios(case: Case, layouts: list[Any]) -> dict[str, float]:
    """Return the averages of the trust ratios at the freeze, from LAMB in one process, in plain PyTorch."""
    options, model = dict(case.params), oracle.build(specimen(case.model))
    params = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    start = {"params": params, "m": zeros, "v": zeros, "layouts": layouts}
    run, average = LambSimulation(case, start, dict.fromkeys(params, 0.0)), dict.fromkeys(params, 0.0)
    for step in range(1, FREEZE + 1):
        run._load(run.x)
        gradients = [run._local(step - 1, rank) for rank in range(case.ranks)]
        rate = LR
        if options.get("bias_correction", True):
            rate *= (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
        for name, x in run.x.items():
            mean = torch.stack([one[name] for one in gradients]).mean(0)
            run.m[name] = BETA1 * run.m[name] + (1 - BETA1) * mean
            run.v[name] = BETA2 * run.v[name] + (1 - BETA2) * mean * mean
            update = run.m[name] / run._root(run.v[name]) + DECAY * x
            ratio = float(x.double().norm() / update.double().norm()) if x.any() and update.any() else 1.0
            ratio = min(options.get("max_coeff", 10.0), max(options.get("min_coeff", 0.01), ratio))
            decay = options.get("coeff_beta", 0.9)
            average[name] = decay * average[name] + (1 - decay) * ratio
            run.x[name] = x - rate * ratio * update
    return average


OPTIONS: list[dict[str, Any]] = [
    {"factor_max": 1.02, "factor_threshold": 0.5},
    {"factor_min": 1.2, "factor_max": 1.5, "factor_threshold": 1.0},
    {"factor_threshold": 0.01},
    {"coeff_beta": 0.5},
    {"bias_correction": False},
    {"min_coeff": 0.5, "max_coeff": 2.0},
    {"eps_inside_sqrt": True},
]


@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, OPTIONS[3:5]), *(pytest.param(stage, OPTIONS, marks=pytest.mark.slow) for stage in (0, 1, 2))],
    ids=lambda value: f"{len(value)}" if isinstance(value, list) else f"{value}",
)
def test_options_of_lamb_equal_their_simulation(stage: int, options: list[dict[str, Any]], tmp_path: Path) -> None:
    """The simulation computes the average trust ratios itself."""
    first = replace(CASE, ranks=2, stage=stage, accumulation=1)
    cases = [first, *(replace(first, params=(*CASE.params, *more.items())) for more in options)]
    by_rank = run_ranks(run_all, 2, cases, str(tmp_path), timeout=120.0)
    for number, case in enumerate(cases):
        results = [found[number] for found in by_rank]
        ratios = measured_ratios(case, results[0]["frozen"]["layouts"])
        assert results[0]["ratios"] == pytest.approx(ratios, rel=1e-6), case
        require_law(case, [{**found, "ratios": ratios} for found in results])
        plain = by_rank[0][0]["params"]
        assert not number or any(not torch.equal(value, plain[name]) for name, value in results[0]["params"].items())


def run_all(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    return [run_lamb(case, folder) for case in cases]


def require_law(case: Case, by_rank: list[dict[str, Any]]) -> None:
    """Check parameters against the simulation, and that all messages are compressed unless a step syncs."""
    simulation = LambSimulation(case, by_rank[0]["frozen"], by_rank[0]["ratios"])
    simulation.run(FREEZE, case.steps)
    shaped = {name: value.view(simulation.shapes[name]) for name, value in simulation.x.items()}
    for rank, found in enumerate(by_rank):
        error, where = relative_error(found["params"], shaped)
        assert error <= 1e-6, f"{case} rank {rank}: {where} is off by {error:.2e}"
        assert all(torch.equal(value, by_rank[0]["params"][name]) for name, value in found["params"].items())
        error, where = relative_error(
            {name: found["errors"][f"{name}/worker_error"] for name in simulation.x}, simulation.worker[rank]
        )
        assert error <= 1e-6, f"{case} rank {rank}: the error of {where} is off by {error:.2e}"
    require_bytes(case, by_rank, case.steps - FREEZE)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_become_equal_to_the_master_weights_every_few_steps(stage: int, tmp_path: Path) -> None:
    case = replace(CASE, ranks=2, stage=stage, params=(*CASE.params, ("sync_interval", 2)))
    require_law(case, run_ranks(run_lamb, 2, case, str(tmp_path), timeout=120.0))
    last = replace(case, steps=4)
    for found in run_ranks(run_lamb, 2, last, str(tmp_path), timeout=120.0):
        assert all(torch.equal(value, found["params"][name]) for name, value in found["replicas"].items())


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_offloaded_states_are_read_twice_and_change_nothing(tier: str, tmp_path: Path) -> None:
    env = {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"} if tier == "host" else {}
    plain = run_ranks(run_lamb, 2, replace(CASE, stage=2), str(tmp_path), timeout=120.0)
    case = replace(CASE, stage=2, host=tier == "host", nvme=tier == "nvme")
    offloaded = run_ranks(run_lamb, 2, case, str(tmp_path), env=env, timeout=120.0)
    error, where = relative_error(offloaded[0]["params"], plain[0]["params"])
    assert error <= 2e-6, f"{where} is off by {error:.2e}"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_before_the_freeze_it_is_lamb_bit_for_bit(stage: int, tmp_path: Path) -> None:
    case = replace(CASE, stage=stage, begin=4, params=(("freeze_step", 4),))
    for pairs in run_ranks(both, 2, [case, replace(case, bf16=True)], str(tmp_path), "Lamb", timeout=120.0):
        for one, other in pairs:
            for key in ("params", "m", "v"):
                assert all(torch.equal(value, other[key][name]) for name, value in one[key].items()), key


@pytest.mark.parametrize("stage", [0, 2])
def test_a_resumed_run_is_exact(stage: int, tmp_path: Path) -> None:
    case = replace(CASE, stage=stage)
    straight = run_ranks(save, 2, case, str(tmp_path), FREEZE + 2)
    resumed = run_ranks(resume, 2, case, str(tmp_path), FREEZE + 2)
    for here, there in zip(straight, resumed, strict=True):
        for what in ("params", "errors"):
            assert all(torch.equal(value, there[what][name]) for name, value in here[what].items()), what


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
def test_a_checkpoint_loads_at_another_stage(before: int, after: int, tmp_path: Path) -> None:
    case = replace(CASE, model="odd_shapes")  # has parameters without dimensions, with one element and without elements
    straight = run_ranks(save, 2, replace(case, stage=before), str(tmp_path), FREEZE + 1)
    resumed = run_ranks(resume, 2, replace(case, stage=after), str(tmp_path), FREEZE + 1)
    assert straight[0]["params"].keys() == resumed[0]["params"].keys()
    for name, value in straight[0]["momenta"].items():
        assert torch.equal(resumed[0]["momenta"][name], value), name
    assert all(torch.isfinite(value).all() for value in resumed[0]["params"].values())


def continued_from_lamb(case: Case, folder: str) -> dict[str, Any]:
    """Save two steps of `Lamb`, load them into 1-bit LAMB, and return its parameters after steps 5 and 8."""
    engine = start(specimen(case.model), replace(case, optimizer="Lamb", params=()).config(folder))
    train(engine, case, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(specimen(case.model), case.config(folder))
    engine.load_checkpoint(folder, load_optimizer_strict=False)
    train(engine, case, 2, 5)
    before = whole_params(engine.module)
    train(engine, case, 5, 8)
    after = whole_params(engine.module)
    engine.destroy()
    return {"before": before, "after": after}


@pytest.mark.parametrize("stage", [1, 2])
def test_states_of_lamb_are_continued_at_each_stage(stage: int, tmp_path: Path) -> None:
    case = replace(CASE, params=(("freeze_step", 5),))
    wanted = run_ranks(continued_from_lamb, 2, case, str(tmp_path / "0"))[0]
    found = run_ranks(continued_from_lamb, 2, replace(case, stage=stage), str(tmp_path / "1"))[0]
    error, where = relative_error(found["before"], wanted["before"])
    assert error <= 2e-6, f"{where} is off by {error:.2e}"
    assert all(torch.isfinite(value).all() for value in found["after"].values())
    assert any(not torch.equal(value, found["before"][name]) for name, value in found["after"].items())


def failed_part_way(case: Case, steps: int, place: str) -> list[str]:
    """Return the errors of a compressed step that all ranks fail after states have changed, and of the next step."""
    engine, found = start(specimen(case.model), case.config()), []
    train(engine, case, 0, steps)
    with patch(place, side_effect=ValueError("no memory")):
        found.append(attempt(lambda: train(engine, case, steps, steps + 1)))
    found.append(attempt(lambda: train(engine, case, steps + 1, steps + 2)))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("case", "steps", "place"),
    [
        (replace(CASE, ranks=1), FREEZE + 1, "one_bit_lamb_update.move_lamb_values"),
        (replace(CASE, stage=1), FREEZE + 1, "sharded_one_bit_lamb_update.ShardedOneBitLambUpdate._squares"),
        (replace(CASE, stage=1), FREEZE + 1, EXCHANGE),
        (Case(stage=1), FREEZE + 1, EXCHANGE),
        (replace(ZERO_ONE, stage=1), 2, EXCHANGE),
        (replace(ZERO_ONE, stage=1), 6, "zero_one_adam_update.ZeroOneAdamUpdate._added"),
        (replace(ZERO_ONE, ranks=1), 6, "zero_one_adam_update.ZeroOneAdamUpdate._moved"),
    ],
    ids=str,
)
def test_a_step_that_all_ranks_fail_part_way_counts_as_applied_in_part(case: Case, steps: int, place: str) -> None:
    for failed, after in run_ranks(failed_part_way, case.ranks, case, steps, f"windlass.zero.update.{place}"):
        assert failed == "ValueError: no memory"
        assert after.startswith("UpdateError: ") and "applied in part" in after


def warnings_of_a_late_parameter(case: Case) -> list[str]:
    """Unfreeze the head after the freeze of the variance, and return the warnings of the next steps."""
    model, texts = oracle.build(specimen(case.model)), list[str]()
    head = [parameter.requires_grad_(False) for name, parameter in model.named_parameters() if name.startswith("head.")]
    engine: Any = windlass.initialize(model=model, config=case.config())[0]
    train(engine, case, 0, FREEZE + 1)
    for parameter in head:
        parameter.requires_grad_(True)
    engine.optimizer.add_param_group({"params": head})
    with patch.object(logging.getLogger("windlass"), "warning", texts.append):
        train(engine, case, FREEZE + 1, FREEZE + 3)
    engine.destroy()
    return texts


@pytest.mark.parametrize("optimizer", ["OneBitAdam", "OneBitLamb"])
def test_a_parameter_without_a_gradient_before_the_freeze_is_named(optimizer: str) -> None:
    (texts,) = run_ranks(warnings_of_a_late_parameter, 1, Case(optimizer=optimizer))
    assert [text.split("'")[1] for text in texts] == ["head.weight", "head.bias"]
    assert all("its variance is 0 and it is not trained; unfreeze it before freeze_step" in text for text in texts)
