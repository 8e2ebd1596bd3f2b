"""Laws of DiLoCo: a simulation of its inner and outer steps in one process, bytes of outer steps, resumed runs."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import windlass
from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import RankError, run_ranks
from tests.dist.test_compressed_lists import decoded
from tests.dist.test_one_bit_adam import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    Case,
    Simulation,
    errors_of,
    fragments,
    one_thread,  # noqa: F401 - a fixture
    received_bytes,
    resume,
    save,
    train,
)
from tests.models import ROWS
from tests.oracle import relative_error
from tests.toy_codecs import BlockInt8Codec
from windlass.comm import codec as codecs
from windlass.comm.byte_channel import ProcessGroupChannel
from windlass.comm.codec import get_codec, register_codec
from windlass.comm.traffic import set_traffic_observer
from windlass.optim.diloco import fragment_due
from windlass.parallel.placement import PlacementKey
from windlass.zero.update.diloco_update import outer_step_due

GROUP = {
    "inner_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 1, "codec": "int8", "start_step": 0,
}  # fmt: skip
CASE = Case(optimizer="DiLoCo", params=tuple(GROUP.items()), begin=0, steps=10)


def with_params(case: Case, **more: Any) -> Case:
    return replace(case, params=tuple({**dict(case.params), **more}.items()))


def test_fragments_take_turns() -> None:
    group = {"inner_steps": 8, "fragments": 3, "start_step": 0}
    due = [[step for step in range(1, 25) if fragment_due(step, unit, group)] for unit in range(4)]
    assert due == [[8, 16, 24], [6, 14, 22], [3, 11, 19], [8, 16, 24]]
    group["start_step"] = 3  # the first steps send no changes
    later = [[step for step in range(1, 28) if fragment_due(step, unit, group)] for unit in range(4)]
    assert later == [[step + 3 for step in steps] for steps in due]


def test_a_parameter_of_several_stages_belongs_to_part_0() -> None:
    units: list[Any] = [
        SimpleNamespace(index=index, kind=PlacementKey(shared_stages=stages))
        for index, stages in ((0, ()), (1, ()), (3, (0, 1)), (0, (0, 1)))  # the last two units are on two stages
    ]
    due = [[step for step in range(1, 9) if outer_step_due(step, unit, {**GROUP, "fragments": 2})] for unit in units]
    assert due == [[4, 8], [2, 6], [4, 8], [4, 8]]


def run(case: Case) -> dict[str, Any]:
    engine = start(specimen(case.model), case.config())
    layouts = [(list(unit.names), unit.layout) for unit in engine._sharded.units if unit.trainable]
    index = {name: unit.index for unit in engine._sharded.units for name in unit.names}
    params = whole_params(engine.module)
    by_step = []
    for step in range(case.steps):
        moved: Counter[str] = Counter()
        set_traffic_observer(lambda operation, nbytes, moved=moved: moved.update({operation: nbytes}))
        train(engine, case, step, step + 1)
        set_traffic_observer(None)
        by_step.append(sum(moved.values()))
    replicas = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}
    found = {"layouts": layouts, "unit": index, "first": params, "bytes": by_step, "replicas": replicas}
    found["params"] = whole_params(engine.module)
    engine.destroy()
    return found


def run_all(cases: list[Case]) -> list[dict[str, Any]]:
    register_codec(BlockInt8Codec())
    return [run(case) for case in cases]


class DiLoCoSimulation(Simulation):
    """Inner and outer steps of all ranks in one process, in plain PyTorch."""

    def __init__(self, case: Case, found: dict[str, Any]) -> None:
        zeros = {name: torch.zeros_like(value) for name, value in found["first"].items()}
        super().__init__(case, {"params": found["first"], "m": zeros, "v": zeros, "layouts": found["layouts"]})
        self.group, self.unit = {**GROUP, **dict(case.params)}, found["unit"]
        self.codec = get_codec(self.group["codec"])
        flat = [{name: torch.zeros_like(value) for name, value in self.x.items()} for _ in range(3 * case.ranks)]
        self.moments, self.variances, self.changes = (flat[i * case.ranks : (i + 1) * case.ranks] for i in range(3))
        self.outer = {name: torch.zeros_like(value) for name, value in self.x.items()}
        self.pieces = fragments(found["layouts"], case.ranks)
        self.sent: dict[str, torch.Tensor] = {}
        self.steps: list[dict[str, int]] = [{} for _ in range(case.ranks)]

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            for rank in range(self.case.ranks):
                with torch.no_grad():
                    for name, parameter in self.named:
                        parameter.copy_((self.x[name] - self.changes[rank][name]).view(parameter.shape))
                if step >= self.group["start_step"]:
                    for name, gradient in self._local(step, rank).items():
                        self._inner(rank, name, step + 1, gradient)
            if step < self.group["start_step"]:
                self._averaged(step)
            overlap = self.group.get("overlap_steps", 0)
            for name in self.x:
                if name in self.sent and fragment_due(step + 1 - overlap, self.unit[name], self.group):
                    self._late(name)
                if fragment_due(step + 1, self.unit[name], self.group):
                    if overlap:
                        self.sent[name] = self._mean(name)
                    else:
                        self._outer(name)

    def _averaged(self, step: int) -> None:
        """Take a step of AdamW with the mean of the gradients of all ranks."""
        mean = {name: torch.zeros_like(value) for name, value in self.x.items()}
        for rank in range(self.case.ranks):
            for name, gradient in self._local(step, rank).items():
                mean[name] += gradient / self.case.ranks
        for name, gradient in mean.items():
            for rank in range(self.case.ranks):
                self._inner(rank, name, step + 1, gradient)
            self.x[name] = self.x[name] - self.changes[0][name]
            for changes in self.changes:
                changes[name] = torch.zeros_like(gradient)

    def _inner(self, rank: int, name: str, step: int, gradient: torch.Tensor) -> None:
        step = self.steps[rank][name] = self.steps[rank].get(name, 0) + 1  # steps with a gradient
        # the operations of the update, because another rounding of a change can give it another code
        m = self.moments[rank][name] = self.moments[rank][name].lerp(gradient, 1 - BETA1)
        v = self.variances[rank][name].mul(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        self.variances[rank][name] = v
        decayed = self.changes[rank][name].lerp(self.x[name], LR * DECAY)
        root = (v / (1 - BETA2**step)).sqrt() + EPS
        self.changes[rank][name] = decayed.addcdiv_(m, root, value=LR / (1 - BETA1**step))

    def _outer(self, name: str) -> None:
        mean = self._mean(name)
        for rank in range(self.case.ranks):
            self.changes[rank][name] = torch.zeros_like(mean)
        self._step(name, mean)

    def _late(self, name: str) -> None:
        """Take an outer step with the changes sent earlier, and mix the result with the ranks' present values."""
        local = [self.x[name] - changes[name] for changes in self.changes]
        self._step(name, self.sent.pop(name))
        for changes, own in zip(self.changes, local, strict=True):
            mixed = self.group["mixing"] * own + (1 - self.group["mixing"]) * self.x[name]
            changes[name] = self.x[name] - mixed

    def _mean(self, name: str) -> torch.Tensor:
        """Return the mean of the changes, as all ranks receive it."""
        ranks, mean = self.case.ranks, torch.zeros_like(self.x[name])
        for rank in range(ranks):
            sent = self.changes[rank][name] + self.worker[rank][name]
            for piece in self.pieces[name]:
                message = decoded(self.codec, sent[piece])
                self.worker[rank][name][piece] = sent[piece] - message
                mean[piece] += message
        mean *= 1 / ranks
        for piece in self.pieces[name]:
            owed = mean[piece] + self.server[name][piece]
            mean[piece] = decoded(self.codec, owed)
            self.server[name][piece] = owed - mean[piece]
        return mean

    def _step(self, name: str, mean: torch.Tensor) -> None:
        self.outer[name] = self.group["outer_momentum"] * self.outer[name] + mean
        move = mean + self.group["outer_momentum"] * self.outer[name]
        self.x[name] = self.x[name].sub(move, alpha=self.group["outer_lr"])


CASES = [
    CASE,  # int8, the default codec
    with_params(replace(CASE, transport="shm"), codec="int8", fragments=2, overlap_steps=2, mixing=0.5),
    with_params(replace(CASE, transport="shm", accumulation=2), codec="identity", fragments=2),
    with_params(CASE, codec="bf16"),
    with_params(CASE, codec="toy-int8"),  # a user's codec
    with_params(replace(CASE, transport="shm"), codec="topk", fragments=2),
    with_params(replace(CASE, accumulation=2), codec="identity", fragments=2, overlap_steps=2, mixing=0.25),
    with_params(replace(CASE, transport="shm"), codec="bf16", overlap_steps=3, mixing=0.5),
    with_params(CASE, codec="identity", fragments=4, overlap_steps=1, mixing=0.0),
    with_params(replace(CASE, accumulation=2), codec="identity", start_step=3),
    with_params(
        replace(CASE, transport="shm"), codec="identity", fragments=2, overlap_steps=2, mixing=0.5, start_step=3
    ),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_inner_and_outer_steps_equal_their_simulation(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs._codecs, "toy-int8", BlockInt8Codec())  # the simulation needs the codec too
    cases = [replace(case, ranks=ranks) for case in CASES]
    by_rank = run_ranks(run_all, ranks, cases, timeout=120.0)
    for number, case in enumerate(cases):
        require_law(case, [found[number] for found in by_rank])


def require_law(case: Case, results: list[dict[str, Any]]) -> None:
    """Compare parameters, replicas and the steps that send bytes with the simulation, on all ranks."""
    simulation = DiLoCoSimulation(case, results[0])
    simulation.run(0, case.steps)
    shaped = {name: value.view(simulation.shapes[name]) for name, value in simulation.x.items()}
    for rank, found in enumerate(results):
        error, where = relative_error(found["params"], shaped)
        assert error <= 1e-6, f"{case} rank {rank}: {where} is off by {error:.2e}"
        own = {
            name: (value - simulation.changes[rank][name]).view(simulation.shapes[name])
            for name, value in simulation.x.items()
        }
        error, where = relative_error(found["replicas"], own)
        assert error <= 1e-6, f"{case} rank {rank}: replica {where} is off by {error:.2e}"
        assert found["bytes"] == [bytes_of_step(simulation, found, step, rank) for step in range(1, case.steps + 1)], (
            case
        )


def bytes_of_step(simulation: DiLoCoSimulation, found: dict[str, Any], step: int, rank: int) -> int:
    """Return the bytes that a rank receives in a step, counted from 1."""
    group, ranks, total = simulation.group, simulation.case.ranks, 0
    if step <= group["start_step"]:  # an all-reduce of the gradients in fp32
        total += 2 * 4 * sum(layout.padded for _, layout in found["layouts"]) * (ranks - 1) // ranks
    overlap = group.get("overlap_steps", 0)
    answered = step - (overlap // 2 if overlap > 1 else overlap)  # the step whose means are sent now
    for names, layout in found["layouts"]:
        inwards, answers = received_bytes(simulation.codec, [(names, layout)], rank, ranks)
        unit = found["unit"][names[0]]
        total += inwards if fragment_due(step, unit, group) else 0
        total += answers if fragment_due(answered, unit, group) else 0
    return total


def run_in_small_units(cases: list[Case]) -> list[dict[str, Any]]:
    with patch("windlass.zero.setup.unit_partition._PERSISTENT_BUCKET", 1):
        return run_all(cases)


IDLE = [  # two units have no gradient in some of the steps after which their outer steps are due
    with_params(replace(CASE, model="unused_by_step", steps=6), codec="identity", **more)
    for more in ({"inner_steps": 3}, {"inner_steps": 2, "overlap_steps": 1, "mixing": 0.5})
]


def test_a_unit_without_a_gradient_takes_its_outer_steps() -> None:
    by_rank = run_ranks(run_in_small_units, 2, IDLE, timeout=120.0)
    for number, case in enumerate(IDLE):
        assert len(set(by_rank[0][number]["unit"].values())) > 2
        simulation = DiLoCoSimulation(case, by_rank[0][number])
        simulation.run(0, case.steps)
        for rank, found in enumerate(results[number] for results in by_rank):
            own = {n: (x - simulation.changes[rank][n]).view_as(found["params"][n]) for n, x in simulation.x.items()}
            masters = {n: x.view_as(found["params"][n]) for n, x in simulation.x.items()}
            for values, wanted in ((found["params"], masters), (found["replicas"], own)):
                error, where = relative_error(values, wanted)
                assert error <= 1e-6, f"{case} rank {rank}: {where} is off by {error:.2e}"


OVERLAPPED = with_params(CASE, overlap_steps=3, fragments=2, mixing=0.25)
HELD = with_params(CASE, codec="identity", inner_steps=5, overlap_steps=4)


def train_beside_a_slow_message(case: Case) -> list[bool]:
    """Send a message that needs a quarter of a minute. Return whether it has arrived after the next step, and after
    `finish_update` on a link of unlimited rate."""
    with patch.object(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path]):
        from rig.link import pace
    torch.manual_seed(0)
    model, arrived, start_exchange = torch.nn.Linear(1024, 1024), Event(), ProcessGroupChannel.start_exchange

    def watched(channel: ProcessGroupChannel, *messages: Any) -> Any:
        wait = start_exchange(channel, *messages)
        thread = Thread(target=lambda: (wait(), arrived.set()))
        thread.start()
        return thread.join

    engine: Any = windlass.initialize(model=model, config=case.config())[0]

    def step() -> None:
        engine.backward(engine(torch.ones(ROWS, 1024)).square().mean())
        engine.step()

    for _ in range(4):
        step()
    try:
        pace(128 << 10)
        with patch.object(ProcessGroupChannel, "start_exchange", watched):
            step()  # this step sends 2 MiB
        step()
        found = [arrived.is_set()]
    finally:
        pace(0)
    engine.finish_update()
    found.append(arrived.is_set())
    engine.destroy()
    return found


def test_a_step_does_not_wait_behind_an_overlapped_message() -> None:
    assert run_ranks(train_beside_a_slow_message, 2, HELD, timeout=120.0) == [[False, True]] * 2


AVERAGED = with_params(CASE, start_step=8)  # the resumed run changes to local steps


@pytest.mark.parametrize("case", [CASE, OVERLAPPED, AVERAGED], ids=["plain", "overlapped", "averaged"])
def test_a_run_resumed_between_outer_steps_is_exact(case: Case, tmp_path: Path) -> None:
    at = 6  # an overlapped message is on its way
    straight = run_ranks(save, 2, case, str(tmp_path), at)
    resumed = run_ranks(resume, 2, case, str(tmp_path), at)
    for here, there in zip(straight, resumed, strict=True):
        for what in ("params", "errors"):
            assert here[what].keys() == there[what].keys()
            assert all(torch.equal(value, there[what][name]) for name, value in here[what].items()), what


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (OVERLAPPED, with_params(CASE, inner_steps=1, codec="sign")),  # `other` sends a message before the load
        (CASE, with_params(OVERLAPPED, codec="identity")),
    ],
    ids=["overlapped", "plain"],
)
def test_a_load_takes_overlap_and_codec_of_the_checkpoint(case: Case, other: Case, tmp_path: Path) -> None:
    """A load restores the saved hyper-parameters, so that no message in flight is lost."""
    straight = run_ranks(save, 2, case, str(tmp_path), 6)
    resumed = run_ranks(resume, 2, other, str(tmp_path), 6)
    for here, there in zip(straight, resumed, strict=True):
        for what in ("params", "errors"):
            assert here[what].keys() == there[what].keys()
            assert all(torch.equal(value, there[what][name]) for name, value in here[what].items()), what


def after_adamw(case: Case, folder: str, at: int) -> list[dict[str, torch.Tensor]]:
    """Return parameters and errors of a run, and of one that continues a checkpoint of AdamW after `at` steps."""
    found = []
    for first in (case, replace(case, optimizer="Adam", params=())):
        engine = start(specimen(case.model), first.config())
        train(engine, first, 0, at)
        if first is not case:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = start(specimen(case.model), case.config())
            engine.load_checkpoint(folder)
            engine.save_checkpoint(f"{folder}/again")
            engine.load_checkpoint(f"{folder}/again")
        train(engine, case, at, at + 5)
        found.append({**errors_of(engine), **whole_params(engine.module)})
        engine.destroy()
    return found


@pytest.mark.parametrize("start_step", [3, 5])
def test_a_checkpoint_of_adamw_is_continued(start_step: int, tmp_path: Path) -> None:
    case = with_params(CASE, codec="identity", inner_steps=2, start_step=start_step)
    for straight, continued in run_ranks(after_adamw, 2, case, str(tmp_path), 3):
        error, where = relative_error(continued, straight)
        assert error <= 1e-6, f"{where} is off by {error:.2e}"


def refused(stage: int, more: dict[str, Any]) -> None:
    start(specimen("mlp"), with_params(replace(CASE, stage=stage), **more).config())


@pytest.mark.parametrize(
    ("stage", "more", "text"),
    [
        (1, {}, r"DiLoCo.* at zero_optimization.stage 1.*write stage 0"),
        (0, {"fragments": 5}, r"fragments: 5 is more than inner_steps 4"),
        (0, {"overlap_steps": 4}, r"overlap_steps: 4 is not less than inner_steps 4"),
        (0, {"start_step": -1}, r"start_step: -1 does not fit"),
    ],
)
def test_unsupported_options_of_diloco_are_refused(stage: int, more: dict[str, Any], text: str) -> None:
    with pytest.raises(RankError, match=f"(?s){text}"):
        run_ranks(refused, 2, stage, more)


def refreshed(case: Case, moments: list[int]) -> list[dict[str, torch.Tensor]]:
    """Return this rank's parameters and states of a run without `refresh`, and of a run for each of `moments`, the
    number of steps before its refresh.
    """
    found = []
    for at in (case.steps, *moments):
        engine = start(specimen(case.model), case.config())
        train(engine, case, 0, at)
        if at < case.steps:
            engine.refresh()
        train(engine, case, at, case.steps)
        found.append({**whole_params(engine.module), **errors_of(engine)})
        engine.destroy()
    return found


ZERO_ONE = {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}


@pytest.mark.parametrize(
    ("case", "moments"),
    [
        (with_params(replace(CASE, steps=5), codec="bf16", start_step=3), [2]),
        (with_params(replace(CASE, steps=8), codec="bf16", overlap_steps=2), [5]),  # a message is in flight
        (Case(optimizer="ZeroOneAdam", params=tuple(ZERO_ONE.items()), begin=0, steps=8), [3, 5]),
    ],
)
def test_a_refresh_keeps_the_states_of_ranks(case: Case, moments: list[int]) -> None:
    for straight, *others in run_ranks(refreshed, 2, case, moments):
        for other in others:
            assert straight.keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in straight.items())
