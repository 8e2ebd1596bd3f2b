"""Laws of 0/1 Adam: its schedule, AdamW bitwise at first, then a simulation of each kind of step; resumed runs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import windlass
from tests.dist.equivalence_runs import specimen, start
from tests.dist.harness import run_ranks
from tests.dist.test_one_bit_adam import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    Case,
    Simulation,
    both,
    errors_of,
    one_thread,  # noqa: F401 - a fixture
    passed,
    require_bytes,
    require_offloaded_errors,
    resume,
    run_cases,
    save,
    snapshot,
    train,
)
from tests.models import ROWS
from tests.oracle import relative_error
from windlass.optim.zero_one_adam import StepKind, kind_of_step, steps_since_sync

GROUP = {"var_freeze_step": 5, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2}
CASE = Case(optimizer="ZeroOneAdam", params=tuple(GROUP.items()), begin=1, steps=9)


def test_the_schedule_is_that_of_the_paper() -> None:
    kinds = [kind_of_step(step, GROUP).name for step in range(1, 11)]
    assert kinds == [
        "EXACT",
        "VARIANCE",
        "COMPRESSED",
        "VARIANCE",
        "COMPRESSED",
        "SYNC",
        "LOCAL",
        "SYNC",
        "LOCAL",
        "SYNC",
    ]
    assert [steps_since_sync(step, GROUP) for step in (6, 8, 10)] == [1, 2, 2]
    long = {"var_freeze_step": 10_000, "var_update_scaler": 16, "local_step_scaler": 1000, "local_step_clipper": 16}
    exact = [step for step in range(1, 10_001) if kind_of_step(step, long) is not StepKind.COMPRESSED]
    assert exact[:18] == [*range(1, 17), 18, 20] and exact[32:34] == [52, 56]
    local = [step for step in range(10_001, 16_001) if kind_of_step(step, long) is StepKind.SYNC]
    assert local[:3] == [10_001, 10_002, 10_003] and local[-2:] == [15_984, 16_000]
    assert steps_since_sync(15_984, long) == 16
    assert kind_of_step(10**9, {**long, "var_freeze_step": 10**10}) in (StepKind.VARIANCE, StepKind.COMPRESSED)


class ZeroOneSimulation(Simulation):
    """Simulation of all kinds of steps in one process of plain PyTorch, on the data of all ranks."""

    def __init__(self, case: Case, frozen: dict[str, Any]) -> None:
        super().__init__(case, frozen)
        zeros = [{name: torch.zeros_like(value) for name, value in self.x.items()} for _ in range(2 * case.ranks)]
        self.change, self.summed = zeros[: case.ranks], zeros[case.ranks :]
        self.own = [dict(self.m) for _ in range(case.ranks)]
        self.seen, self.rates, self.decayed = case.begin, 0.0, 0.0
        self.group = dict(case.params)
        self.of_rank = [dict(self.replicas) for _ in range(case.ranks)]

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            gradients = []
            for rank in range(self.case.ranks):
                self._load(self.of_rank[rank])
                gradients.append(self._local(step, rank))
            kind = kind_of_step(step + 1, self.group)
            if kind is StepKind.VARIANCE:  # the engine reduces the gradients of the step before it computes their norm
                mean = {n: torch.stack([one[n] for one in gradients]).sum(0) * (1 / len(gradients)) for n in self.x}
                gradients = [mean]
            clip = self._clip(gradients)
            self.seen += kind is StepKind.VARIANCE
            if kind in (StepKind.LOCAL, StepKind.SYNC):
                if step == self.group["var_freeze_step"]:
                    for error in (*self.worker, self.server):
                        for value in error.values():
                            value.zero_()
                self.rates = self.rates * (1 - LR * DECAY) + LR / self.case.corrected(BETA1, step + 1)
                self.decayed = 1 - (1 - self.decayed) * (1 - LR * DECAY)
            for name in self.x:
                self._take(kind, name, step + 1, [one[name] for one in gradients], clip)
            if kind is StepKind.SYNC:
                self.rates = self.decayed = 0.0
            if self.case.syncs_at(step + 1):
                for one in self.of_rank:
                    one.update({name: value.to(self.case.dtype) for name, value in self.x.items()})

    def _take(self, kind: StepKind, name: str, step: int, gradients: list[torch.Tensor], clip: float) -> None:
        case, ranks = self.case, self.case.ranks
        if kind is StepKind.VARIANCE:
            mean = gradients[0] / (1 / clip)
            self.m[name] = self.m[name] * BETA1 + mean * (1 - BETA1)
            self.v[name] = self.v[name] * BETA2 + (1 - BETA2) * mean * mean
            self._move(name, step, bounded=False)
            self._copy(name)
            return
        parts = [gradient * ((1 - BETA1) / (1 / clip)) for gradient in gradients]
        if kind is StepKind.COMPRESSED:
            self.m[name] = self.masked(name, self.m[name] * BETA1 + self._two_phases(name, parts))
            self._move(name, step)
        elif case.stage:
            for rank, part in enumerate(parts):
                self.summed[rank][name] = self.summed[rank][name] + part
            if kind is StepKind.LOCAL:
                return
            steps = steps_since_sync(step, self.group)
            received = self._two_phases(name, [one[name] / steps for one in self.summed])
            for one in self.summed:
                one[name] = torch.zeros_like(received)
            for number in range(steps):
                self.m[name] = self.masked(name, self.m[name] * BETA1 + received)
                self._move(name, step - steps + 1 + number)
        else:
            self._gather(kind, name, step, parts)
            return
        if case.stage and ranks > 1:
            self._send_change(name)
        else:
            self._copy(name)

    def _gather(self, kind: StepKind, name: str, step: int, parts: list[torch.Tensor]) -> None:
        """Simulate a local step of every rank at stage 0, and in a SYNC step also the synchronization."""
        root, case = self._root(name), self.case
        for rank, part in enumerate(parts):
            self.own[rank][name] = self.masked(name, self.own[rank][name] * BETA1 + part)
            move = self.own[rank][name] / root * (LR / case.corrected(BETA1, step))
            move[self.v[name] == 0] = 0
            self.change[rank][name] = self.change[rank][name] * (1 - LR * DECAY) + move
        decay = self.decayed * self.x[name]
        if kind is StepKind.SYNC:
            mean = self.masked(name, self._two_phases(name, [one[name] * root for one in self.change]))
            move = mean / root
            move[self.v[name] == 0] = 0
            self.x[name] = self.x[name] - (decay + case.bounded(move, case.corrected(BETA1, step) * self.rates))
            self.m[name], decay = mean / self.rates, torch.zeros_like(mean)
            for rank in range(len(parts)):
                self.change[rank][name] = torch.zeros_like(mean)
                self.own[rank][name] = self.m[name]
        for rank in range(len(parts)):
            moved = decay + case.bounded(self.change[rank][name], case.corrected(BETA1, step) * self.rates)
            self.of_rank[rank][name] = (self.x[name] - moved).to(self.case.dtype)

    def _two_phases(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Compress each rank's part. Return the mean, which stage 0 compresses again."""
        ranks, total = self.case.ranks, torch.zeros_like(self.x[name])
        for rank, part in enumerate(parts):
            sent = part + self.worker[rank][name] if ranks > 1 else part
            for piece in self.pieces[name]:
                message = passed(sent[piece], self.case)
                if ranks > 1:
                    self.worker[rank][name][piece] = sent[piece] - message
                total[piece] += message
        mean = total * (1 / ranks)
        for piece in self.pieces[name] if self.case.stage == 0 and ranks > 1 else ():
            owed = mean[piece] + self.server[name][piece]
            mean[piece] = passed(owed, self.case)
            self.server[name][piece] = owed - mean[piece]
        return mean

    def _root(self, name: str) -> torch.Tensor:
        return (self.v[name] / self.case.corrected(BETA2, self.seen)).sqrt() + EPS

    def _move(self, name: str, step: int, *, bounded: bool = True) -> None:
        change = self.m[name] / self._root(name)
        change[self.v[name] == 0] = 0
        if bounded:
            change = self.case.bounded(change, self.case.corrected(BETA1, step))
        self.x[name] = self.x[name] * (1 - LR * DECAY) - change * (LR / self.case.corrected(BETA1, step))

    def _copy(self, name: str) -> None:
        for one in self.of_rank:
            one[name] = self.x[name].to(self.case.dtype)
        for own in self.own:
            own[name] = self.m[name]

    def _send_change(self, name: str) -> None:
        replica = self.of_rank[0][name].clone()
        for piece in self.pieces[name]:
            move = passed(self.x[name][piece] - replica[piece].float(), self.case)
            replica[piece] = (replica[piece].float() + move).to(self.case.dtype)
        for one in self.of_rank:
            one[name] = replica


def require_law(case: Case, results: list[dict[str, Any]]) -> None:
    """Check parameters and replicas of all ranks against the simulation."""
    simulation = ZeroOneSimulation(case, results[0]["frozen"])
    simulation.run(case.begin, case.steps)
    shaped = {name: value.view(simulation.shapes[name]) for name, value in simulation.x.items()}
    for rank, found in enumerate(results):
        error, where = relative_error(found["params"], shaped)
        assert error <= 1e-6, f"{case} rank {rank}: {where} is off by {error:.2e}"
        local = {name: value.view(simulation.shapes[name]).float() for name, value in simulation.of_rank[rank].items()}
        error, where = relative_error({n: v.float() for n, v in found["replicas"].items()}, local)
        assert error <= (1e-2 if case.bf16 else 1e-6), f"{case} rank {rank}: replica {where} is off by {error:.2e}"
        if case.ranks > 1:
            owed = {name: found["errors"][f"{name}/worker_error"] for name in simulation.x}
            error, where = relative_error(owed, simulation.worker[rank])
            assert error <= 1e-6, f"{case} rank {rank}: the error of {where} is off by {error:.2e}"
    if case.ranks > 1:
        kinds = [kind_of_step(step, simulation.group) for step in range(case.begin + 1, case.steps + 1)]
        first = case.begin + 1 + kinds.index(StepKind.COMPRESSED)
        exchanges = kinds.count(StepKind.COMPRESSED) + kinds.count(StepKind.SYNC)
        require_bytes(case, results, exchanges, kinds.count(StepKind.VARIANCE), first)
    if case.stage == 0 and case.ranks > 1:
        one, other = (found["replicas"] for found in results[:2])
        assert any(not torch.equal(value, other[name]) for name, value in one.items()), "no step was local"


CASES = [
    replace(CASE, transport="shm", accumulation=2),
    replace(CASE, stage=1),
    replace(CASE, stage=2, transport="shm", accumulation=2, clipping=0.1),
    replace(CASE, stage=2, bf16=True),
    replace(CASE, stage=1, params=(*CASE.params, ("sync_interval", 2))),  # syncs come after compressed and local steps
    replace(CASE, params=(*CASE.params, ("bias_correction", False))),
    replace(CASE, stage=1, params=(*CASE.params, ("bias_correction", False))),
    replace(CASE, params=(*CASE.params, ("max_update", 0.1))),
    replace(CASE, stage=2, params=(*CASE.params, ("max_update", 0.1), ("bias_correction", False))),
]


ON_FOUR = [replace(case, transport=transport) for case in CASES[:4] for transport in ("shm", "gloo")]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind_of_step_equals_its_simulation(ranks: int, tmp_path: Path) -> None:
    chosen = {1: CASES[:1], 2: CASES, 4: ON_FOUR}[ranks]  # with one rank, all stages compute the same
    cases = [replace(case, ranks=ranks) for case in chosen]
    by_rank = run_ranks(run_cases, ranks, cases, str(tmp_path), timeout=120.0)
    for number, case in enumerate(cases):
        require_law(case, [found[number] for found in by_rank])


OFFLOADED = [
    replace(CASE, host=True),
    replace(CASE, stage=2, host=True, accumulation=2),
    replace(CASE, stage=1, nvme=True),
]


def test_every_kind_of_step_with_offloaded_states_equals_its_simulation(tmp_path: Path) -> None:
    env = {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"}  # emulates a device with its own memory
    by_rank = run_ranks(run_cases, 2, OFFLOADED[:2], str(tmp_path), env=env, timeout=120.0)
    on_disk = run_ranks(run_cases, 2, OFFLOADED[2:], str(tmp_path), timeout=120.0)
    for number, case in enumerate(OFFLOADED):
        require_law(case, [(found + more)[number] for found, more in zip(by_rank, on_disk, strict=True)])


@pytest.mark.slow  # `test_every_kind_of_step_with_offloaded_states_equals_its_simulation` offloads all states.
def test_sums_and_errors_are_offloaded_with_the_states(tmp_path: Path) -> None:
    require_offloaded_errors(replace(CASE, stage=2), str(tmp_path))


class FrozenAdamW(ZeroOneSimulation):
    """AdamW with decoupled decay and, after `var_freeze_step`, a constant variance."""

    def _gather(self, kind: StepKind, name: str, step: int, parts: list[torch.Tensor]) -> None:
        self.m[name] = self.m[name] * BETA1 + parts[0]
        self._move(name, step)
        self._copy(name)


def test_without_errors_and_local_steps_it_is_adamw_with_a_constant_variance(tmp_path: Path) -> None:
    """A single rank sends nothing, so every step after the freeze is AdamW's, and the momentum has no decay."""
    case = replace(CASE, ranks=1, steps=20, params=(*CASE.params, ("local_step_clipper", 1)))
    found = run_ranks(run_cases, 1, [case], str(tmp_path))[0][0]
    simulation = FrozenAdamW(case, found["frozen"])
    simulation.run(case.begin, case.steps)
    shaped = {name: value.view(simulation.shapes[name]) for name, value in simulation.x.items()}
    error, where = relative_error(found["params"], shaped)
    assert error <= 1e-5, f"{where} is off by {error:.2e}"


def weights_without_variance(case: Case) -> list[torch.Tensor]:
    """Train one of two outputs. Return this rank's weights of the untrained output after each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, bias=False)
    engine, *_ = windlass.initialize(model=model, config=case.config())
    found = []
    for step in range(case.steps):
        inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.backward(engine(inputs)[:, 0].square().mean())
        engine.step()
        found.append(model.weight.detach()[1].clone())
    engine.destroy()
    return found


def test_elements_without_variance_decay_in_every_step() -> None:
    case = replace(CASE, steps=12, params=(*CASE.params, ("local_step_clipper", 4)))
    for found in run_ranks(weights_without_variance, 2, case, timeout=120.0):
        for step, value in enumerate(found[1:], 1):
            wanted = found[0] * (1 - LR * DECAY) ** step
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=0.0, msg=lambda text, at=step: f"{at}: {text}")


def test_at_first_it_is_adam_bit_for_bit(tmp_path: Path) -> None:
    cases = [replace(case, begin=2, params=(("var_update_scaler", 2),)) for case in CASES[:4]]
    for pairs in run_ranks(both, 2, cases, str(tmp_path), timeout=120.0):
        for case, (one, other) in zip(cases, pairs, strict=True):
            for key in ("params", "m", "v"):
                assert all(torch.equal(value, other[key][name]) for name, value in one[key].items()), (case, key)


def test_a_learning_rate_of_zero_changes_nothing(tmp_path: Path) -> None:
    """The rate is 0 in a group that is not trained, or at the end of a schedule. The update must not divide by it."""
    case = replace(CASE, params=(*CASE.params, ("lr", 0.0)), steps=10)
    for found in run_ranks(run_cases, 2, [case], str(tmp_path), timeout=120.0):
        for name, value in found[0]["params"].items():
            assert torch.equal(value, found[0]["frozen"]["params"][name]), name


def edited_before_a_local_step(cases: list[Case], through_data: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Double a weight before a step without messages. Return its wanted and its final value in the master weights."""
    found = []
    for case in cases:
        engine = start(specimen(case.model), case.config())
        train(engine, case, 0, 2)
        engine.finish_update()
        parameter = next(engine.module.parameters())
        with torch.no_grad():
            (parameter.data if through_data else parameter).mul_(2)
        wanted = parameter.detach().clone()
        train(engine, case, 2, 3)
        found.append((wanted, windlass.zero.full_param(parameter).detach().clone()))
        engine.destroy()
    return found


@pytest.mark.parametrize("through_data", [False, True])
def test_a_weight_that_is_changed_before_a_local_step_keeps_its_value(through_data: bool) -> None:
    """At stages 1 and 2 a step without messages changes no weight, so the change must be all that is left."""
    assert kind_of_step(3, {**GROUP, "var_freeze_step": 1}) is StepKind.LOCAL
    params = (*CASE.params, ("var_freeze_step", 1))
    cases = [replace(CASE, stage=1, params=params), replace(CASE, stage=2, host=True, params=params)]
    for found in run_ranks(edited_before_a_local_step, 2, cases, through_data, timeout=120.0):
        for case, (wanted, value) in zip(cases, found, strict=True):
            assert torch.equal(value, wanted), case


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumed_between_synchronizations_is_exact(stage: int, tmp_path: Path) -> None:
    case = replace(CASE, stage=stage)
    straight = run_ranks(save, 2, case, str(tmp_path), 7)
    resumed = run_ranks(resume, 2, case, str(tmp_path), 7)
    for here, there in zip(straight, resumed, strict=True):
        for what in ("params", "errors"):
            assert here[what].keys() == there[what].keys()
            assert all(torch.equal(value, there[what][name]) for name, value in here[what].items()), what


def continued(case: Case, folder: str, at: int, into: str = "") -> dict[str, Any]:
    """Continue from a checkpoint, also at another stage. Return warnings, the loaded state, and errors after a step."""
    engine, texts = start(specimen(case.model), case.config()), list[str]()
    with patch.object(logging.getLogger("windlass"), "warning", lambda text, *more: texts.append(str(text))):
        engine.load_checkpoint(folder)
    if into:
        engine.save_checkpoint(into)
    found = {**snapshot(engine), "warnings": texts}
    train(engine, case, at, at + 1)
    found["errors"] = errors_of(engine)
    engine.destroy()
    return found


def test_stage_change_warns_of_dropped_local_states(tmp_path: Path) -> None:
    """Save a checkpoint at stage 0 between two synchronizations. Load and save it at stage 1, and load that at stage 0.

    Local steps then begin with the momentum that all ranks share.
    """
    case = replace(CASE, params=(*CASE.params[:3], ("local_step_clipper", 4)))
    run_ranks(save, 2, case, str(tmp_path / "0"), 9)
    straight = run_ranks(continued, 2, case, str(tmp_path / "0"), 9)
    sharded = run_ranks(continued, 2, replace(case, stage=1), str(tmp_path / "0"), 9, str(tmp_path / "1"))
    back = run_ranks(continued, 2, case, str(tmp_path / "1"), 9)
    assert not straight[0]["warnings"] and not back[0]["warnings"]
    assert "at stage 1 on 2 ranks are dropped: local_change, local_momentum, server_error" in sharded[0]["warnings"][0]
    simulation = Simulation(case, back[0])
    with torch.no_grad():
        for name, parameter in simulation.named:
            parameter.copy_(back[0]["params"][name])
    for rank, found in enumerate(back):
        for name, gradient in simulation._local(9, rank).items():
            wanted = BETA1 * simulation.m[name] + (1 - BETA1) * gradient
            torch.testing.assert_close(found["errors"][f"{name}/local_momentum"], wanted, rtol=1e-5, atol=1e-8)
