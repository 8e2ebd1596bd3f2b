"""Tests of 1-bit Adam at stages 0 to 2: it equals AdamW bit for bit before the freeze, and afterwards a simulation of
the algorithm in one process. Tests of its bytes and of resumed runs."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import windlass
from tests import oracle
from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import RankError, run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_compressed_lists import decoded
from tests.models import ROWS, Place, cast
from tests.oracle import relative_error
from windlass.base.errors import ConfigError
from windlass.comm.codec import get_codec
from windlass.comm.traffic import set_traffic_observer
from windlass.config import load_config
from windlass.engine.engine_reporter import memory_report
from windlass.optim.one_bit_adam import OneBitAdam
from windlass.storage.slot import Tier
from windlass.zero.core.unit_layout import UnitLayout

LR, BETA1, BETA2, EPS, DECAY = 0.01, 0.8, 0.95, 1e-6, 0.05
FREEZE = 2
SIGN, FINE_SIGN = get_codec("sign"), get_codec("fine_sign")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as the ranks do: another order of a sum can flip the sign of an element near zero."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """One training run of `steps` steps."""

    stage: int = 0
    ranks: int = 2
    accumulation: int = 1
    clipping: float = 0.0
    bf16: bool = False
    nvme: bool = False
    host: bool = False
    model: str = "mlp"
    transport: str = "gloo"
    optimizer: str = "OneBitAdam"
    params: tuple[tuple[str, Any], ...] = (("freeze_step", FREEZE),)
    begin: int = FREEZE  # steps before the simulation begins
    steps: int = 5
    masked: str = ""  # name of a parameter of which every third element has no momentum

    def mask(self, numel: int) -> torch.Tensor:
        """Return the flat mask of the masked parameter."""
        return (torch.arange(numel) % 3 != 0).float()

    def config(self, folder: str = "") -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.nvme:
            zero |= {"offload_optimizer": {"device": "nvme", "nvme_path": folder}, "sub_group_size": 100}
        if self.host:
            zero |= {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 100}
        params = {"lr": LR, "betas": [BETA1, BETA2], "eps": EPS, "weight_decay": DECAY, **dict(self.params)}
        params = {key: value for key, value in params.items() if value is not None}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": zero,
            "comm": {"transport": self.transport},
            "bf16": {"enabled": self.bf16},
        }

    @property
    def codec(self) -> Any:
        return FINE_SIGN if self.stage else SIGN

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def syncs_at(self, step: int) -> bool:
        """Return True if parameters become equal to the master weights after a step, counted from 1."""
        interval = dict(self.params).get("sync_interval")
        return bool(self.stage and interval and step % interval == 0)

    def corrected(self, beta: float, steps: int) -> float:
        """Return the bias correction of a moment, by which it is divided; 1 without bias correction."""
        return 1 - beta**steps if dict(self.params).get("bias_correction", True) else 1.0

    def bounded(self, change: torch.Tensor, factor: float) -> torch.Tensor:
        """Return a change before its scaling by the learning rate, clamped to `max_update` times `factor`."""
        limit = dict(self.params).get("max_update")
        return change if limit is None else change.clamp(-limit * factor, limit * factor)


def train(engine: Any, case: Case, first: int, last: int) -> None:
    subject, rank = specimen(case.model), dist.get_rank()
    for step in range(first, last):
        for micro in range(case.accumulation):
            subject.train(engine, cast(subject.batch(Place(step, micro, rank)), case.dtype), engine.backward)
            engine.step()


def errors_of(engine: Any) -> dict[str, torch.Tensor]:
    return {f"{one.name}/{one.key}": one.read().clone() for one in engine._sharded.update.rank_states()}


def snapshot(engine: Any) -> dict[str, Any]:
    """Return parameters, moments and layouts, from which a simulation continues."""
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {
        "params": whole_params(engine.module),
        "m": {name: windlass.zero.full_state(p, "exp_avg") for name, p in named},
        "v": {name: windlass.zero.full_state(p, "exp_avg_sq") for name, p in named},
        "layouts": [(list(unit.names), unit.layout) for unit in engine._sharded.units if unit.trainable],
    }


def begin(case: Case, folder: str) -> Any:
    """Return an engine for the case. A masked parameter has a group of its own."""
    if not case.masked:
        return start(specimen(case.model), case.config(folder))
    model = oracle.build(specimen(case.model), dist.get_rank())
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masked = named.pop(case.masked)
    groups = [{"params": list(named.values())}, {"params": [masked], "exp_avg_mask": case.mask(masked.numel())}]
    return windlass.initialize(model=model, model_parameters=groups, config=case.config(folder))[0]


def run_case(case: Case, folder: str) -> dict[str, Any]:
    engine = begin(case, folder)
    train(engine, case, 0, case.begin)
    found = {"frozen": snapshot(engine)}
    moved: Counter[str] = Counter()
    set_traffic_observer(lambda operation, nbytes: moved.update({operation: nbytes}))
    train(engine, case, case.begin, case.steps)
    set_traffic_observer(None)
    found["moved"] = moved
    found["replicas"] = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}
    found["errors"], found["norm"] = errors_of(engine), float(engine.grad_norm())
    found["params"] = whole_params(engine.module)  # the call makes the replicas equal to the master weights
    found["equal"] = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}
    engine.destroy()
    return found


def run_cases(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    return [run_case(case, folder) for case in cases]


def passed(values: torch.Tensor, case: Case) -> torch.Tensor:
    """Return values as a receiver decodes them."""
    return values.clone() if case.ranks == 1 else decoded(case.codec, values)


def fragments(layouts: list[tuple[list[str], UnitLayout]], ranks: int) -> dict[str, list[slice]]:
    """Return the slices of each parameter by owning rank. A message has one set of scales per slice."""
    found: dict[str, list[slice]] = {}
    for names, layout in layouts:
        for rank in range(ranks):
            for piece in layout.pieces(*layout.shard_range(rank, ranks)):
                found.setdefault(names[piece.index], []).append(slice(piece.start, piece.stop))
    return found


class Simulation:
    """The compressed phase on the data of all ranks in one process, in plain PyTorch, from the state at the freeze."""

    def __init__(self, case: Case, frozen: dict[str, Any]) -> None:
        self.case, self.model = case, self._build(case)
        self.named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.pieces = self._cut(frozen["layouts"])
        self.shapes = {name: p.shape for name, p in self.named}
        self.x = {name: value.reshape(-1).clone() for name, value in frozen["params"].items()}
        self.m = {name: value.reshape(-1).clone() for name, value in frozen["m"].items()}
        self.v = {name: value.reshape(-1).clone() for name, value in frozen["v"].items()}
        self.replicas = {name: value.to(case.dtype) for name, value in self.x.items()}
        self.worker = [{name: torch.zeros_like(value) for name, value in self.x.items()} for _ in range(case.ranks)]
        self.server = {name: torch.zeros_like(value) for name, value in self.x.items()}

    def _build(self, case: Case) -> torch.nn.Module:
        self.subject = specimen(case.model)
        return oracle.build(self.subject).to(case.dtype)

    def _cut(self, layouts: list[tuple[list[str], UnitLayout]]) -> dict[str, list[slice]]:
        """Return the slices of each value by owning rank."""
        return fragments(layouts, self.case.ranks)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            self._load(self.replicas)
            gradients = [self._local(step, rank) for rank in range(self.case.ranks)]
            self._update_all(step + 1, gradients, self._clip(gradients))
            if self.case.syncs_at(step + 1):
                self.replicas = {name: value.to(self.case.dtype) for name, value in self.x.items()}

    @torch.no_grad()
    def _load(self, values: dict[str, torch.Tensor]) -> None:
        """Copy values to the model."""
        for name, parameter in self.named:
            parameter.copy_(values[name].view(parameter.shape))

    def _clip(self, gradients: list[dict[str, torch.Tensor]]) -> float:
        """Return the factor that clips gradients by the root mean square of their norms."""
        squares = sum(float(g.double().square().sum()) for one in gradients for g in one.values())
        norm = (squares / len(gradients)) ** 0.5
        return min(1.0, self.case.clipping / (norm + 1e-6)) if self.case.clipping else 1.0

    def _update_all(self, step: int, gradients: list[dict[str, torch.Tensor]], clip: float) -> None:
        for name in self.x:
            self._update(name, step, [one[name] for one in gradients], clip)

    def _update(self, name: str, step: int, gradients: list[torch.Tensor], clip: float) -> None:
        case, ranks = self.case, self.case.ranks
        total = torch.zeros_like(self.x[name])
        for rank, gradient in enumerate(gradients):
            sent = gradient * ((1 - BETA1) / (1 / clip))
            if case.stage == 0:
                sent.add_(self.m[name], alpha=BETA1)
            if ranks > 1:
                sent += self.worker[rank][name]
            for part in self.pieces[name]:
                message = passed(sent[part], case)
                if ranks > 1:
                    self.worker[rank][name][part] = sent[part] - message
                total[part] += message
        mean = total * (1 / ranks)
        if case.stage == 0:
            for part in self.pieces[name]:
                owed = mean[part] + self.server[name][part]
                mean[part] = passed(owed, case)
                self.server[name][part] = owed - mean[part]
            self.m[name] = self.masked(name, mean)
        else:
            self.m[name] = self.masked(name, self.m[name] * BETA1 + mean)
        change = self.m[name] / ((self.v[name] / case.corrected(BETA2, FREEZE)).sqrt() + EPS)
        change[self.v[name] == 0] = 0
        change = case.bounded(change, case.corrected(BETA1, step))
        self.x[name] = self.x[name] * (1 - LR * DECAY) - change * (LR / case.corrected(BETA1, step))
        if case.stage == 0 or ranks == 1:
            self.replicas[name] = self.x[name].to(case.dtype)
            return
        for part in self.pieces[name]:
            move = passed(self.x[name][part] - self.replicas[name][part].float(), case)
            self.replicas[name][part] = (self.replicas[name][part].float() + move).to(case.dtype)

    def masked(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        """Return a momentum, or the mean of messages, in which the elements that a mask excludes are zero."""
        return momentum * self.case.mask(momentum.numel()) if name == self.case.masked else momentum

    def _local(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        """Return the gradient of one rank: the mean over its micro-batches."""
        sums: dict[str, torch.Tensor] = {}
        for micro in range(self.case.accumulation):
            batch = cast(self.subject.batch(Place(step, micro, rank)), self.case.dtype)
            self.subject.train(self.model, batch, lambda loss, retain_graph=False: loss.backward())
            for name, parameter in self.named:
                if parameter.grad is not None:
                    part = parameter.grad.float().reshape(-1) / self.case.accumulation
                    sums[name] = sums[name] + part if name in sums else part
                    parameter.grad = None
        return sums


def require_law(case: Case, by_rank: list[dict[str, Any]], bound: float = 1e-6) -> None:
    simulation = Simulation(case, by_rank[0]["frozen"])
    simulation.run(FREEZE, case.steps)
    shaped = {name: value.view(simulation.shapes[name]) for name, value in simulation.x.items()}
    for rank, found in enumerate(by_rank):
        error, where = relative_error(found["params"], shaped)
        assert error <= bound, f"{case} rank {rank}: {where} is off by {error:.2e}"
        for name, value in found["replicas"].items():
            assert torch.equal(value, by_rank[0]["replicas"][name]), f"{case}: replicas of {name} differ"
            assert torch.equal(found["equal"][name], found["params"][name].to(case.dtype)), (case, name)
        replicas = {name: value.view(simulation.shapes[name]) for name, value in simulation.replicas.items()}
        error, where = relative_error({n: v.float() for n, v in found["replicas"].items()}, replicas)
        assert error <= (1e-2 if case.bf16 else bound), f"{case} rank {rank}: replica {where} is off by {error:.2e}"
        if case.ranks > 1:
            owed = {name: found["errors"][f"{name}/worker_error"] for name in simulation.x}
            error, where = relative_error(owed, simulation.worker[rank])
            assert error <= 1e-6, f"{case} rank {rank}: the error of {where} is off by {error:.2e}"
        if case.stage and case.ranks > 1 and not case.bf16:
            assert any(not torch.equal(found["replicas"][name], found["params"][name]) for name in found["params"]), (
                "the replicas equal the master weights, so that the law would hold of wide messages"
            )
    if case.ranks > 1:
        require_bytes(case, by_rank, case.steps - FREEZE)


def received_bytes(codec: Any, layouts: list[tuple[list[str], UnitLayout]], rank: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that a rank receives in an exchange of compressed messages: of other ranks for its shards, and
    the results of the other owners.
    """
    own, others = 0, 0
    for _, layout in layouts:
        for owner in range(ranks):
            for piece in layout.pieces(*layout.shard_range(owner, ranks)):
                size = -(-codec.encoded_size(piece.numel, torch.float32) // 16) * 16
                own, others = own + size * (owner == rank), others + size * (owner != rank)
    return own * (ranks - 1), others


def require_bytes(
    case: Case, by_rank: list[dict[str, Any]], exchanges: int, reduced: int = 0, first: int | None = None
) -> None:
    """Check the bytes of a run after `case.begin`: those of `exchanges`, of the steps that sync, and of `reduced` steps
    with reduced gradients.

    Args:
        first: number of the first compressed step, before which no step has to sync; None: the one after `case.begin`.
    """
    layouts, ranks = by_rank[0]["frozen"]["layouts"], case.ranks
    for rank, found in enumerate(by_rank):
        inwards, answers = received_bytes(case.codec, layouts, rank, ranks)
        assert found["moved"]["compressed_reduce_scatter"] == exchanges * inwards, case
        assert found["moved"]["compressed_all_gather"] == exchanges * answers, case
        wide = sum(n for key, n in found["moved"].items() if not key.startswith("compressed"))
        padded = sum(layout.padded for _, layout in layouts)
        syncs = sum(case.syncs_at(step) for step in range(first or case.begin + 1, case.steps + 1))
        gathers = (reduced + syncs) * padded * case.dtype.itemsize
        reductions = reduced * padded * 4 * (case.accumulation if case.stage == 2 else 1)  # fp32
        assert wide == (gathers + reductions) * (ranks - 1) // ranks, f"{case}: a phase is wide: {found['moved']}"
    # the formula of docs/compressed-communication.md, in each direction, over all ranks
    numel = sum(sum(layout.numels) for _, layout in layouts)
    shards = [layout.pieces(*layout.shard_range(rank, ranks)) for _, layout in layouts for rank in range(ranks)]
    fragments = sum(len(list(pieces)) for pieces in shards)
    formula = (ranks - 1) * (numel / 8 + 4 * numel / (256 if case.stage else 2048))
    for direction in range(2):
        moved = sum(received_bytes(case.codec, layouts, rank, ranks)[direction] for rank in range(ranks))
        assert formula <= moved <= formula + 20 * (ranks - 1) * fragments, (case, formula, moved)


CASES = [
    Case(0, transport="shm", accumulation=2),
    Case(1, clipping=0.1),
    Case(2, transport="shm", accumulation=2, clipping=0.1),
    Case(1, transport="shm", bf16=True),
    Case(2, nvme=True, accumulation=2),
    Case(0, bf16=True, clipping=0.1),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@in_shares
def test_the_compressed_phase_equals_its_simulation(ranks: int, every: bool, tmp_path: Path) -> None:
    shares = {1: (1, 4), 2: (0, 1), 4: (0, 3)}[ranks]
    cases = [replace(case, ranks=ranks) for case in share(CASES, shares[0], shares[1], every)]
    by_rank = run_ranks(run_cases, ranks, cases, str(tmp_path), timeout=120.0)
    for number, case in enumerate(cases):
        require_law(case, [found[number] for found in by_rank])


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_states_in_host_memory_change_nothing(stage: int, tmp_path: Path) -> None:
    case = Case(stage, host=True, accumulation=2, clipping=0.1)
    env = {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"}  # a device with memory of its own
    require_law(case, run_ranks(run_case, 2, case, str(tmp_path), env=env, timeout=120.0))


def both(cases: list[Case], folder: str, plain: str = "Adam") -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the state after the first steps of each case, with its optimizer and with the plain one."""
    found = []
    for case in cases:
        pair = []
        for name in (case.optimizer, plain):
            params = case.params if name == case.optimizer else ()
            engine = start(specimen(case.model), replace(case, optimizer=name, params=params).config(folder))
            train(engine, case, 0, case.begin)
            pair.append({**snapshot(engine), "norm": float(engine.grad_norm())})
            engine.destroy()
        found.append((pair[0], pair[1]))
    return found


@in_shares
def test_before_the_freeze_it_is_adam_bit_for_bit(every: bool, tmp_path: Path) -> None:
    # `make test` has one case of each stage, one on NVMe and one in bf16; the other cases are slow.
    cases = CASES if every else [CASES[0], CASES[3], CASES[4]]
    for pairs in run_ranks(both, 2, cases, str(tmp_path), timeout=120.0):
        for case, (one, other) in zip(cases, pairs, strict=True):
            assert one["norm"] == other["norm"]
            for key in ("params", "m", "v"):
                for name, value in one[key].items():
                    assert torch.equal(value, other[key][name]), (case, key, name)


class UncorrectedAdam(torch.optim.Optimizer):
    """AdamW whose moments are used as they are, as in DeepSpeed's 1-bit optimizers."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            state["m"] = state.get("m", 0) * BETA1 + (1 - BETA1) * grad
            state["v"] = state.get("v", 0) * BETA2 + (1 - BETA2) * grad * grad
            parameter.mul_(1 - LR * DECAY).sub_(LR * state["m"] / (state["v"].sqrt() + EPS))


BOUNDED = (("freeze_step", FREEZE), ("max_update", 0.05))


@pytest.mark.parametrize("stage", [0, 2])
def test_bounded_steps_equal_their_simulation(stage: int, tmp_path: Path) -> None:
    case = Case(stage, transport="shm", accumulation=2, params=BOUNDED)
    free = replace(case, params=CASES[0].params)
    by_rank = run_ranks(run_cases, 2, [case, free], str(tmp_path), timeout=120.0)
    require_law(case, [found[0] for found in by_rank])
    before, bounded, unbounded = by_rank[0][0]["frozen"]["params"], by_rank[0][0]["params"], by_rank[0][1]["params"]
    moved, free_move = (
        max(float((after[name] - before[name]).abs().max()) for name in before) for after in (bounded, unbounded)
    )
    most = (case.steps - FREEZE) * LR * (0.05 + DECAY * max(float(value.abs().max()) for value in before.values()))
    assert moved <= most * 1.001 < free_move


SYNCED = (("freeze_step", FREEZE), ("sync_interval", 2))


def test_parameters_become_equal_to_the_master_weights_every_few_steps(tmp_path: Path) -> None:
    """The last step of `cases` does not sync, so that parameters differ from the master weights in `require_law`."""
    cases = [Case(1, params=SYNCED), Case(2, nvme=True, bf16=True, params=SYNCED)]
    last = [replace(case, steps=4) for case in cases]
    by_rank = run_ranks(run_cases, 2, [*cases, *last], str(tmp_path), timeout=120.0)
    for number, case in enumerate(cases):
        require_law(case, [found[number] for found in by_rank])
    for found in by_rank:
        for case, one in zip(last, found[len(cases) :], strict=True):
            for name, value in one["replicas"].items():
                assert torch.equal(value, one["params"][name].to(case.dtype)), (case, name)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_positive_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="max_update is"):
        OneBitAdam([torch.nn.Parameter(torch.ones(1))], max_update=limit)


UNCORRECTED = (("freeze_step", FREEZE), ("bias_correction", False))


def test_without_bias_correction_moments_are_used_as_they_are(tmp_path: Path) -> None:
    """Without bias correction, as in DeepSpeed's documentation, the first steps differ from torch's AdamW."""
    cases = [Case(stage, params=UNCORRECTED, host=stage == 2, bf16=stage == 1) for stage in (0, 1, 2)]
    by_rank = run_ranks(run_cases, 2, cases, str(tmp_path), timeout=120.0)
    for number, case in enumerate(cases):
        results = [found[number] for found in by_rank]
        recipe = oracle.Recipe(ranks=2, steps=FREEZE, clipping=0.0, precision="bf16" if case.bf16 else "fp32")
        wanted = oracle.train(specimen(case.model), recipe, UncorrectedAdam).params
        error, where = relative_error(results[0]["frozen"]["params"], wanted)
        assert error < (5e-4 if case.bf16 else 1e-6), (case, where, error)
        require_law(case, results)
    with pytest.raises(ConfigError, match="OneBitAdam: bias_correction is false, which only an engine steps"):
        OneBitAdam([torch.nn.Parameter(torch.ones(1))], bias_correction=False).step()


def momenta_of(engine: Any) -> dict[str, torch.Tensor]:
    named = {name: windlass.zero.full_state(p, "exp_avg") for name, p in engine.module.named_parameters()}
    return {name: value for name, value in named.items() if value is not None}


def save(case: Case, folder: str, at: int) -> dict[str, Any]:
    engine = start(specimen(case.model), case.config(folder))
    train(engine, case, 0, at)
    engine.save_checkpoint(folder)
    saved, momenta = errors_of(engine), momenta_of(engine)
    train(engine, case, at, at + 3)
    found = {"params": whole_params(engine.module), "errors": errors_of(engine), "saved": saved, "momenta": momenta}
    engine.destroy()
    return found


def resume(case: Case, folder: str, at: int) -> dict[str, Any]:
    engine = start(specimen(case.model), case.config(folder))
    train(engine, case, 0, 1)
    engine.load_checkpoint(folder)
    loaded, momenta = errors_of(engine), momenta_of(engine)
    train(engine, case, at, at + 3)
    found = {"params": whole_params(engine.module), "errors": errors_of(engine), "loaded": loaded, "momenta": momenta}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "at", "nvme"),
    [
        (0, FREEZE + 2, False),
        (2, FREEZE + 2, False),
        (1, FREEZE + 2, True),
        pytest.param(1, FREEZE - 1, False, marks=pytest.mark.slow),
        pytest.param(2, FREEZE - 1, True, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_exact(stage: int, at: int, nvme: bool, tmp_path: Path) -> None:
    case = Case(stage, clipping=0.1, nvme=nvme)
    require_equal_runs(run_ranks(save, 2, case, str(tmp_path), at), run_ranks(resume, 2, case, str(tmp_path), at))


def require_equal_runs(straight: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """Check that parameters and errors of `save` and `resume` are bitwise equal."""
    for here, there in zip(straight, resumed, strict=True):
        for what in ("params", "errors"):
            assert here[what].keys() == there[what].keys()
            assert all(torch.equal(value, there[what][name]) for name, value in here[what].items()), what


@pytest.mark.parametrize(
    ("before", "after", "nvme"),
    [((0, 2), (1, 3), False), ((2, 3), (0, 2), False), ((0, 2), (0, 3), False), ((1, 3), (2, 2), True)],
)
def test_errors_are_converted_for_another_stage_and_number_of_ranks(
    before: tuple[int, int], after: tuple[int, int], nvme: bool, tmp_path: Path
) -> None:
    first = Case(before[0], before[1], nvme=nvme)
    # Only stage 0, with replicated states, has `server_error`.
    kinds = ("worker_error", "server_error") if before[0] == after[0] == 0 else ("worker_error",)
    require_conversion(first, replace(first, stage=after[0], ranks=after[1]), kinds, str(tmp_path))


def require_conversion(first: Case, other: Case, kinds: tuple[str, ...], folder: str, at: int = FREEZE + 2) -> None:
    """Save a run, and continue it on another number of ranks. Require the rule of each kind of state."""
    straight = run_ranks(save, first.ranks, first, folder, at)
    resumed = run_ranks(resume, other.ranks, other, folder, at)
    assert {name.rpartition("/")[2] for name in straight[0]["saved"]} >= set(kinds)
    for kind in kinds:
        names = [name for name in straight[0]["saved"] if name.endswith(kind)]
        assert any(bool(straight[0]["saved"][name].any()) for name in names), kind
        for name in names:
            saved = torch.stack([found["saved"][name] for found in straight])
            loaded = torch.stack([found["loaded"][name] for found in resumed])
            if kind != "server_error":  # every rank loads the mean of the saved rows
                wanted = saved.mean(0).expand_as(loaded)
            else:  # an element's error goes to its new owner
                loaded, wanted = loaded.sum(0), saved.sum(0)
            torch.testing.assert_close(loaded, wanted, rtol=1e-6, atol=1e-12)
    assert all(torch.isfinite(value).all() for value in resumed[0]["params"].values())
    assert straight[0]["params"].keys() == resumed[0]["params"].keys()


ERRORS = ("worker_error", "server_error")
LOCALS = ("local_change", "local_momentum")
LOCAL_STEPS = {"var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4}
OUTER = (*ERRORS, "local_change", "local_exp_avg", "local_exp_avg_sq")
LOW_RANK = {"lr": 0.05, "momentum": 0.9, "rank": 2, "start_step": 0, "weight_decay": 0.0, "betas": None, "eps": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kinds", "at"),
    [
        (Case(optimizer="OneBitLamb"), ERRORS, 4),
        (Case(2, optimizer="OneBitLamb"), ("worker_error",), 4),
        (Case(optimizer="ZeroOneAdam", params=tuple(LOCAL_STEPS.items())), (*ERRORS, *LOCALS), 6),
        (Case(1, optimizer="ZeroOneAdam", params=tuple(LOCAL_STEPS.items())), ("worker_error", "summed"), 6),
        (Case(optimizer="DiLoCo", params=(("inner_steps", 2),)), OUTER, 5),
        (Case(optimizer="DiLoCo", params=(("inner_steps", 3), ("overlap_steps", 2))), (*OUTER, "mean_change"), 4),
        (Case(optimizer="PowerSGD", params=tuple(LOW_RANK.items())), ("worker_error", "warm_start"), 4),
    ],
    ids=lambda value: f"{value.optimizer}-{value.stage}" if isinstance(value, Case) else "",
)
def test_states_of_ranks_are_converted_for_another_number_of_them(
    case: Case, kinds: tuple[str, ...], at: int, tmp_path: Path
) -> None:
    for before, after in ((2, 3), (3, 2)):
        folder = str(tmp_path / f"{before}")
        require_conversion(replace(case, ranks=before), replace(case, ranks=after), kinds, folder, at)


def with_tiers(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """Return the values of each run, the tiers of its per-rank states, and the warnings of `initialize`."""
    results = []
    for case in cases:
        texts: list[str] = []
        with patch.object(logging.getLogger("windlass"), "warning", texts.append):
            engine = start(specimen(case.model), case.config(folder))
        train(engine, case, 0, case.steps)
        states = list(engine._sharded.update.rank_states())
        found = {
            "values": {**errors_of(engine), **whole_params(engine.module)},
            "tiers": {state.tier for state in states},
            "in memory": sum(state.is_in_memory for state in states),
            "reported": {Tier(tier) for key, tier in memory_report(engine._sharded)["slots"] if key.endswith("_error")},
            "of chunks": {chunk.tier for chunk in engine._sharded.update.chunks},
            "warnings": [text for text in texts if "nothing is offloaded" in text],
        }
        engine.destroy()
        results.append(found)
    return results


def require_offloaded_errors(case: Case, folder: str) -> None:
    """Require bitwise equal results with per-rank states on each tier."""
    emulated = {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"}  # a device with memory of its own
    on_host, on_disk = replace(case, host=True), replace(case, nvme=True)
    # on a CPU, host memory is the memory of the device
    rows = [(case, Tier.DEVICE, True), (on_host, Tier.DEVICE, True), (on_disk, Tier.NVME, False)]
    late = [(on_host, Tier.HOST, False), (on_disk, Tier.NVME, False)]
    found = run_ranks(with_tiers, 2, [row[0] for row in rows], folder, timeout=120.0)[1]
    found += run_ranks(with_tiers, 2, [row[0] for row in late], folder, env=emulated, timeout=120.0)[1]
    plain = found[0]["values"]
    assert any(value.any() for name, value in plain.items() if name.endswith("worker_error"))
    for (subject, tier, in_memory), result in zip(rows + late, found, strict=True):
        assert result["tiers"] == result["reported"] == {tier}, subject
        assert bool(result["in memory"]) is in_memory, subject
        for name, value in result["values"].items():
            assert torch.equal(value, plain[name]), (subject, tier, name)


def test_error_feedback_is_offloaded_with_the_states(tmp_path: Path) -> None:
    require_offloaded_errors(Case(2, accumulation=2, steps=FREEZE + 3), str(tmp_path))


STAGE_0 = [
    Case(accumulation=2),
    *(
        pytest.param(Case(optimizer=name, params=params), marks=pytest.mark.slow)
        for name, params in (
            ("OneBitLamb", (("freeze_step", FREEZE),)),
            ("ZeroOneAdam", (("var_freeze_step", 3), ("var_update_scaler", 1), ("local_step_scaler", 1))),
        )
    ),
]


@pytest.mark.parametrize("case", STAGE_0, ids=lambda case: case.optimizer)
def test_at_stage_0_states_stay_on_the_device_with_a_warning(case: Case, tmp_path: Path) -> None:
    env = {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"}  # a device with memory of its own
    cases = [case, replace(case, host=True), replace(case, nvme=True)]
    for plain, *offloaded in run_ranks(with_tiers, 2, cases, str(tmp_path), env=env, timeout=120.0):
        assert plain["warnings"] == [] and any(value.any() for value in plain["values"].values())
        for device, found in zip(("cpu", "nvme"), offloaded, strict=True):
            (text,) = found["warnings"]
            assert f'offload_optimizer.device is "{device}" at stage 0' in text and "write stage 1, 2 or 3" in text
            assert found["tiers"] == found["reported"] == found["of chunks"] == {Tier.DEVICE}
            assert all(torch.equal(value, plain["values"][name]) for name, value in found["values"].items())


def after_adamw(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Save a checkpoint of AdamW at the freeze, and continue it with the case's optimizer."""
    first = replace(case, optimizer="Adam", params=())
    engine = start(specimen(case.model), first.config())
    train(engine, first, 0, FREEZE)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(specimen(case.model), case.config())
    engine.load_checkpoint(folder)
    train(engine, case, FREEZE, case.steps)
    found = {**errors_of(engine), **whole_params(engine.module)}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_of_adamw_is_continued_without_another_warm_up(stage: int, tmp_path: Path) -> None:
    case = Case(stage)
    straight = run_ranks(run_case, 2, case, str(tmp_path))
    for here, there in zip(straight, run_ranks(after_adamw, 2, case, str(tmp_path)), strict=True):
        for name, value in {**here["errors"], **here["params"]}.items():
            assert torch.equal(there[name], value), name


def moved_over_the_freeze(cases: list[Case]) -> list[dict[str, list[dict[str, torch.Tensor]]]]:
    """Return for each case the parameters after a step in the straight run, and those after the same step of an engine
    whose optimizer got the state before it by `load_state_dict`: back from the compressed phase, and into it.
    """
    found = []
    for case in cases:
        engine, straight, states = start(specimen(case.model), case.config()), {}, {}
        for step in range(FREEZE + 2):
            straight[step] = whole_params(engine.module)
            states[step] = copy.deepcopy(engine.optimizer.state_dict())
            train(engine, case, step, step + 1)
        moved = {}
        for name, at in (("back", FREEZE - 1), ("forth", FREEZE)):
            if name == "forth":
                engine.destroy()
                engine = start(specimen(case.model), case.config())
            for key, value in straight[at].items():
                windlass.zero.set_full_param(engine.module.get_parameter(key), value)
            engine.optimizer.load_state_dict(states[at])
            train(engine, case, at, at + 1)
            moved[name] = [straight[at + 1], whole_params(engine.module)]
        engine.destroy()
        found.append(moved)
    return found


def test_an_optimizer_state_dict_from_before_or_after_the_freeze_is_continued() -> None:
    for by_case in run_ranks(moved_over_the_freeze, 2, [Case(stage) for stage in (0, 1, 2)]):
        for moved in by_case:
            for name, (straight, loaded) in moved.items():
                for key, value in straight.items():
                    assert torch.equal(loaded[key], value), (name, key)


def first_step_alone(case: Case, folder: str, at: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Load on one rank. Return the loaded state with its errors, and momenta and errors after one more step."""
    engine = start(specimen(case.model), case.config())
    engine.load_checkpoint(folder)
    loaded = {**snapshot(engine), "errors": errors_of(engine)}
    train(engine, case, at, at + 1)
    found = {**snapshot(engine)["m"], **errors_of(engine)}
    engine.destroy()
    return loaded, found


@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_adds_the_errors_of_several_once(stage: int, tmp_path: Path) -> None:
    case = Case(stage)
    run_ranks(save, 2, case, str(tmp_path), FREEZE + 2)
    ((loaded, found),) = run_ranks(first_step_alone, 1, replace(case, ranks=1), str(tmp_path), FREEZE + 2)
    simulation = Simulation(replace(case, ranks=1), loaded)
    with torch.no_grad():
        for name, parameter in simulation.named:
            parameter.copy_(loaded["params"][name])
    gradients, owed = simulation._local(FREEZE + 2, 0), loaded["errors"]
    assert any(bool(value.any()) for value in owed.values())
    for name, gradient in gradients.items():
        wanted = BETA1 * simulation.m[name] + (1 - BETA1) * gradient
        wanted += sum(value for key, value in owed.items() if key.startswith(f"{name}/"))
        torch.testing.assert_close(found[name].reshape(-1), wanted, rtol=1e-5, atol=1e-8)
    assert not any(bool(found[key].any()) for key in owed), "an error stays, and would be added again on more ranks"


def refused(stage: int, more: dict[str, Any]) -> None:
    config = Case(stage).config()
    config["optimizer"]["params"].update(more)
    start(specimen("mlp"), config)


def test_an_interval_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ConfigError, match="sync_interval is 0; write a number of steps"):
        OneBitAdam([torch.nn.Parameter(torch.ones(1))], sync_interval=0)


@pytest.mark.parametrize(
    ("stage", "more", "text"),
    [
        (3, {}, r'"OneBitAdam" at zero_optimization.stage 3'),
        (0, {"freeze_step": 0}, "freeze_step"),
        (0, {"max_grad_norm": 1.0}, "gradient_clipping"),
    ],
)
def test_unsupported_stage_and_options_are_refused(stage: int, more: dict[str, Any], text: str) -> None:
    with pytest.raises(RankError, match=f"(?s){text}"):
        run_ranks(refused, 1, stage, more)


@pytest.mark.parametrize("optimizer", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_a_refusal_of_stage_3_has_the_reason_and_alternatives(optimizer: str) -> None:
    reason = f'"{optimizer}" at zero_optimization.stage 3, where every use of a parameter gathers it in full'
    remedy = "write stage 0, 1 or 2, or AdamW with zero_quantized_weights and zero_quantized_gradients"
    with pytest.raises(ConfigError) as caught:
        load_config(Case(3, optimizer=optimizer, params=()).config())
    assert reason in str(caught.value) and remedy in str(caught.value)


def warnings_of(total: int, case: Case) -> list[str]:
    """Return the warnings of `initialize` on a schedule of `total` steps that ends before the freeze."""
    config = case.config()
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": total, "warmup_num_steps": 1}}
    texts: list[str] = []
    with patch.object(logging.getLogger("windlass"), "warning", texts.append):
        start(specimen("mlp"), config).destroy()
    return [text for text in texts if "total_num_steps is" in text]


@pytest.mark.parametrize(
    ("optimizer", "key", "more", "lost"),
    [
        ("OneBitAdam", "freeze_step", (), "nothing will be compressed"),
        ("OneBitLamb", "freeze_step", (), "nothing will be compressed"),
        ("ZeroOneAdam", "var_freeze_step", (), "nothing will be compressed"),
        ("ZeroOneAdam", "var_freeze_step", (("var_update_scaler", 2),), "no step will be without messages"),
        ("DiLoCo", "start_step", (), "nothing will be compressed"),
    ],
)
def test_a_freeze_after_the_end_of_the_schedule_is_a_warning(
    optimizer: str, key: str, more: tuple[tuple[str, Any], ...], lost: str
) -> None:
    case = Case(optimizer=optimizer, params=((key, 8), *more))
    (late,) = run_ranks(warnings_of, 1, 8, case)
    assert len(late) == 1 and f"{key} is 8, and scheduler.params.total_num_steps is 8: {lost} in this run" in late[0]
    assert run_ranks(warnings_of, 1, 100, case) == [[]]


def startup_lines(case: Case) -> list[str]:
    """Return the log lines of `initialize` on the steps before the first compressed one."""
    texts: list[str] = []
    with patch.object(logging.getLogger("windlass"), "info", lambda text, *_: texts.append(text)):
        start(specimen("mlp"), case.config()).destroy()
    return [text for text in texts if "averages uncompressed gradients" in text]


def test_steps_before_the_first_compressed_one_are_logged() -> None:
    assert run_ranks(startup_lines, 1, Case(params=())) == [
        ["OneBitAdam averages uncompressed gradients in its first 100,000 steps (optimizer.params.freeze_step)"]
    ]
    assert run_ranks(startup_lines, 1, Case(optimizer="DiLoCo", params=(("start_step", 0),))) == [[]]


def received(stages: list[int], bf16: bool) -> list[float]:
    """Return for each stage the bytes that a rank receives in DDP's all-reduce in the dtype of the parameters, relative
    to a compressed step.
    """
    found = []
    for stage in stages:
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        numel = sum(p.numel() for p in model.parameters())
        config = replace(Case(stage, bf16=bf16), params=(("freeze_step", 1),)).config()
        engine = windlass.initialize(model=model, config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 256).to(engine.module[0].weight.dtype)).square().mean())
            engine.step()
        moved = engine.report()["bytes_moved"]
        wide = 2 * (2 if bf16 else 4) * numel * (dist.get_world_size() - 1) / dist.get_world_size()
        found.append(wide / sum(moved.values()))
        engine.destroy()
    return found


def test_a_compressed_step_moves_1_of_32_or_16_bits() -> None:
    """DDP receives 32 bits for each element, or 16 with bf16; a message has 1 bit, a scale of 4 bytes for a block, and
    at most 20 bytes more for each of 9 fragments (8 parameters, one of them on both ranks).
    """
    for bits, bf16 in ((32, False), (16, True)):
        for ratios in run_ranks(received, 2, [0, 1, 2], bf16):
            for ratio, block in zip(ratios, (2048, 256, 256), strict=True):
                overhead = 32 / block + 8 * 20 * 9 / (4 * 257 * 256)
                assert bits / (1 + overhead) < ratio <= bits / (1 + 32 / block), (bits, block, ratio)


def received_in_a_run(cases: list[Case]) -> list[float]:
    """Return for each case the bytes of DDP's all-reduces, divided by the bytes that a rank receives in all steps."""
    ratios = []
    for case in cases:
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2)))
        wide = sum(p.numel() for p in model.parameters()) * 2 * 4 * (case.ranks - 1) / case.ranks
        engine, moved = windlass.initialize(model=model, config=case.config())[0], list[int]()
        set_traffic_observer(lambda operation, nbytes, moved=moved: moved.append(nbytes))
        for _ in range(case.steps):
            engine.backward(engine(torch.randn(2, 256)).square().mean())
            engine.step()
        set_traffic_observer(None)
        ratios.append(case.steps * wide / sum(moved))
        engine.destroy()
    return ratios


def test_bytes_of_a_whole_run_with_its_first_steps_in_full() -> None:
    one_bit = [Case(stage, transport="shm", steps=20, params=(("freeze_step", 3), ("lr", 1e-6))) for stage in (0, 1, 2)]
    schedule = {
        "lr": 1e-6,
        "var_freeze_step": 4,
        "var_update_scaler": 1,
        "local_step_scaler": 4,
        "local_step_clipper": 16,
    }
    zero_one = Case(optimizer="ZeroOneAdam", transport="shm", steps=96, params=tuple(schedule.items()))
    for found in run_ranks(received_in_a_run, 2, [*one_bit, zero_one]):
        assert all(5 < ratio < 6 for ratio in found[:3]), found  # 3 of 20 steps are uncompressed
        assert 26 < found[3] < 30, found


_ZERO_ONE = (("var_freeze_step", 2), ("var_update_scaler", 1))
BAD = [
    Case(0),
    Case(1),
    Case(2, transport="shm"),
    *(Case(stage, optimizer="OneBitLamb") for stage in (0, 1, 2)),
    *(Case(stage, optimizer="ZeroOneAdam", params=_ZERO_ONE) for stage in (0, 1, 2)),
    Case(optimizer="DiLoCo", params=(("inner_steps", 2),)),
    Case(optimizer="PowerSGD", params=tuple(LOW_RANK.items())),
]


def errors_around_a_nan(cases: list[Case]) -> list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return the error of a step in which the last rank has a gradient that is NaN, and the states before and after."""
    found = []
    for case in cases:
        engine, subject, rank = start(specimen(case.model), case.config()), specimen(case.model), dist.get_rank()
        train(engine, case, 0, case.begin + 2)
        before, bad = errors_of(engine), float("nan") if rank == case.ranks - 1 else 1.0

        def backward(loss: torch.Tensor, engine: Any = engine, bad: float = bad) -> None:
            engine.backward(loss * bad)

        subject.train(engine, subject.batch(Place(case.begin + 2, 0, rank)), backward)
        with pytest.raises(windlass.WindlassError) as caught:
            engine.step()
        found.append((f"{type(caught.value).__name__} {caught.value}", before, errors_of(engine)))
        engine.destroy()
    return found


def test_a_nan_is_named_and_never_enters_the_error_feedback() -> None:
    require_a_named_nan(BAD, run_ranks(errors_around_a_nan, 2, BAD))


def require_a_named_nan(cases: list[Case], by_rank: list[list[tuple[str, dict[str, Any], dict[str, Any]]]]) -> None:
    """Check the errors and states of `errors_around_a_nan`."""
    for results in by_rank:
        for case, (text, before, after) in zip(cases, results, strict=True):
            assert text.startswith("LossError") and "first in 'blocks.0.norm.weight'" in text, (case, text)
            assert any(bool(value.any()) for value in before.values()) and before.keys() == after.keys(), case
            assert all(torch.equal(value, after[name]) for name, value in before.items()), case
