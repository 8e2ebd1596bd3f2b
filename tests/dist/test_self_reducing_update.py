"""Law: an update that reduces local gradients itself equals a plain simulation of its rule on the data of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.dist.sign_sgd import NAME, SignSGD, SimulatedSignSGD
from tests.models import ROWS, Place, cast
from tests.oracle import relative_error
from windlass import read_checkpoint

BOUND = 1e-6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as the ranks do: another order of a sum can flip the sign of an element near zero."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """One training run. `overflows`: steps in which the gradient of the last rank is infinite."""

    model: str = "mlp"
    stage: int = 0
    ranks: int = 2
    accumulation: int = 1
    clipping: float = 0.0
    precision: str = "fp32"
    transport: str = "gloo"
    steps: int = 3
    overflows: tuple[int, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": NAME, "params": {"lr": 0.02, "momentum": 0.9}},
            "zero_optimization": {"stage": self.stage},
            "comm": {"transport": self.transport},
        }
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1, "loss_scale_window": 1000}
        return config

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]


def steps(engine: Any, case: Case, first: int, last: int) -> list[float]:
    """Train steps `[first, last)` on this rank. Return the gradient norms."""
    subject, rank, norms = specimen(case.model), dist.get_rank(), []
    for step in range(first, last):
        for micro in range(case.accumulation):
            batch = cast(subject.batch(Place(step, micro, rank)), case.dtype)
            bad = step in case.overflows and rank == dist.get_world_size() - 1

            def backward(loss: torch.Tensor, retain_graph: bool = False, bad: bool = bad) -> None:
                engine.backward(loss * float("inf") if bad else loss, retain_graph=retain_graph)

            subject.train(engine, batch, backward)
            engine.step()
        norms.append(float(engine.grad_norm()))
    return norms


def errors_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return this rank's error feedback by parameter."""
    return {state.name: state.values.clone() for state in engine._sharded.update.rank_states()}


def result(engine: Any, norms: list[float]) -> dict[str, Any]:
    results = {
        "params": whole_params(engine.module),
        "norms": norms,
        "errors": errors_of(engine),
        "fingerprint": str(engine.fingerprint()),
        "scale": engine.optimizer.loss_scale,
    }
    engine.destroy()
    return results


def train(case: Case) -> dict[str, Any]:
    engine = start(specimen(case.model), case.config)
    return result(engine, steps(engine, case, 0, case.steps))


def train_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [train(case) for case in cases]


class Simulation:
    """Simulated run of a case in one process."""

    def __init__(self, case: Case) -> None:
        self.case, self.subject = case, specimen(case.model)
        model = oracle.build(self.subject)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.masters = {name: p.detach().float().clone() for name, p in trained}
        self.model = model.to(case.dtype)
        self.named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.rule = SimulatedSignSGD(list(self.masters.values()), case.ranks, 0.02, 0.9, case.clipping)
        self.scale = 2.0**6 if case.precision == "fp16" else 1.0
        self.norms: list[float] = []

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            gradients = [self._local(step, rank) for rank in range(len(self.rule.errors))]
            if step in self.case.overflows:
                self.scale /= 2
                continue
            self.norms.append(self.rule.step(gradients))
            with torch.no_grad():
                for name, parameter in self.named:
                    parameter.copy_(self.masters[name])

    def _local(self, step: int, rank: int) -> list[torch.Tensor | None]:
        """Return the gradient of one rank: the mean over its micro-batches."""
        sums: list[torch.Tensor | None] = [None] * len(self.named)

        def backward(loss: torch.Tensor, retain_graph: bool = False) -> None:
            (loss * self.scale).backward(retain_graph=retain_graph)

        for micro in range(self.case.accumulation):
            batch = cast(self.subject.batch(Place(step, micro, rank)), self.case.dtype)
            self.subject.train(self.model, batch, backward)
            for index, (_, parameter) in enumerate(self.named):
                if parameter.grad is not None:
                    share = parameter.grad.float() / self.case.accumulation / self.scale
                    before = sums[index]
                    sums[index] = share if before is None else before + share
                    parameter.grad = None
        return sums


def require_law(case: Case, found: list[dict[str, Any]], bound: float = BOUND) -> None:
    """Check parameters, norms and errors of all ranks against the simulation."""
    plain = Simulation(case)
    plain.run(0, case.steps)
    for rank, item in enumerate(found):
        error, where = relative_error(item["params"], plain.masters)
        assert error <= bound, f"{case} rank {rank}: {where} is off by {error:.2e}"
        norms = [norm for step, norm in enumerate(item["norms"]) if step not in case.overflows]
        assert norms == pytest.approx(plain.norms, rel=max(bound, 1e-6)), f"{case} rank {rank}"
        expected = dict(zip(plain.masters, plain.rule.errors[rank], strict=True))
        error, where = relative_error(item["errors"], expected)
        assert error <= 100 * bound, f"{case} rank {rank}: the error of {where} is off by {error:.2e}"
    if case.ranks > 1:
        distinct = {name: (value - found[1]["errors"][name]).norm() for name, value in found[0]["errors"].items()}
        assert max(distinct.values()) > 0, "ranks have equal errors, so that the law would hold of a shared state"


MODELS = ["mlp", "tied", "frozen", "unused_by_rank", "unused_by_step"]


# each model runs on two ranks, and on one or three in turn; the other rows are slow
@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param(model, ranks, marks=() if ranks in (2, (1, 3)[number % 2]) else pytest.mark.slow)
        for number, model in enumerate(MODELS)
        for ranks in (1, 2, 3)
    ],
)
@in_shares
def test_training_equals_the_simulation(model: str, ranks: int, every: bool) -> None:
    cases = [
        Case(model, 0, ranks),
        Case(model, 1, ranks, accumulation=2, transport="shm"),
        Case(model, 0, ranks, accumulation=2, clipping=0.1, transport="shm"),
        Case(model, 1, ranks, clipping=0.1),
    ]
    cases = share(cases, list(MODELS).index(model) + (ranks == 2), 2, every)
    by_rank = run_ranks(train_all, ranks, cases, timeout=120.0)
    for number, case in enumerate(cases):
        require_law(case, [result[number] for result in by_rank])


@pytest.mark.parametrize("stage", [0, 1])
def test_16_bit_models_have_master_weights_and_errors_in_float32(stage: int) -> None:
    case = Case("mlp", stage, precision="bf16", clipping=0.1)
    require_law(case, run_ranks(train, 2, case), bound=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    case = Case("mlp", stage, precision="fp16", accumulation=2, overflows=(1, 3), steps=5)
    result = run_ranks(train, 2, case)
    require_law(case, result, bound=1e-6)
    assert [item["scale"] for item in result] == [16.0, 16.0]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_local_gradient_that_is_not_finite_is_named(stage: int) -> None:
    # no gradient of the last rank is finite: the error names the first parameter
    with pytest.raises(
        RankError, match=r"(?s)LossError.*step 1: the gradient norm is nan, first in 'blocks.0.norm.weight'"
    ):
        run_ranks(train, 2, Case("mlp", stage, overflows=(1,)))


def save(case: Case, folder: str, more: int) -> dict[str, Any]:
    """Train, save, and train some more."""
    engine = start(specimen(case.model), case.config)
    steps(engine, case, 0, case.steps)
    engine.save_checkpoint(folder)
    saved = errors_of(engine)
    return {"saved": saved, **result(engine, steps(engine, case, case.steps, case.steps + more))}


def resume(case: Case, folder: str, more: int) -> dict[str, Any]:
    engine = start(specimen(case.model), case.config)
    engine.load_checkpoint(folder)
    loaded = errors_of(engine)
    return {"loaded": loaded, **result(engine, steps(engine, case, case.steps, case.steps + more))}


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_a_resumed_run_on_the_same_ranks_is_exact(first: int, second: int, tmp_path: Path) -> None:
    case = Case("tied", first, clipping=0.1, accumulation=2)
    straight = run_ranks(save, 2, case, str(tmp_path), 3)
    assert read_checkpoint(tmp_path).model_state_dict(), "tools read such a checkpoint"
    resumed = run_ranks(resume, 2, replace(case, stage=second), str(tmp_path), 3)
    for here, there in zip(straight, resumed, strict=True):
        for what, where in (("saved", "loaded"), ("errors", "errors"), ("params", "params")):
            assert here[what].keys() == there[where].keys()
            assert all(torch.equal(value, there[where][name]) for name, value in here[what].items()), what
        assert here["fingerprint"] == there["fingerprint"]
        assert here["norms"] == there["norms"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("stage", [0, 1])
def test_errors_are_converted_for_another_number_of_ranks(stage: int, before: int, after: int, tmp_path: Path) -> None:
    case = Case("mlp", stage, before)
    run_ranks(save, before, case, str(tmp_path), 0)
    result = run_ranks(resume, after, replace(case, ranks=after), str(tmp_path), 3)
    plain = Simulation(case)
    plain.run(0, case.steps)
    plain.rule.relay(after)
    relaid = [dict(zip(plain.masters, errors, strict=True)) for errors in plain.rule.errors]
    plain.run(case.steps, case.steps + 3)
    for rank, item in enumerate(result):
        error, where = relative_error(item["loaded"], relaid[rank])
        assert error <= BOUND, f"rank {rank}: the error of {where} is off by {error:.2e}"
        error, where = relative_error(item["params"], plain.masters)
        assert error <= BOUND, f"rank {rank}: {where} is off by {error:.2e}"


def load_weights(case: Case, folder: str) -> list[float]:
    """Return the largest error feedback of a parameter after training, and after each load without optimizer states."""
    engine = start(specimen(case.model), case.config)
    largest = []

    def train_and_measure(load: Callable[[], Any] = lambda: None) -> None:
        steps(engine, case, 0, 1)
        load()
        largest.append(max(float(error.abs().max()) for error in errors_of(engine).values()))

    train_and_measure()
    engine.save_checkpoint(folder)
    weights = engine.full_state_dict()
    train_and_measure(lambda: engine.load_checkpoint(folder, load_optimizer_states=False))
    train_and_measure(lambda: engine.load_checkpoint(folder, load_module_only=True))
    train_and_measure(lambda: engine.load_module_state_dict(weights))
    engine.destroy()
    return largest


def test_a_load_of_weights_alone_resets_the_errors(tmp_path: Path) -> None:
    ((trained, *loaded),) = run_ranks(load_weights, 1, Case(stage=1), str(tmp_path))
    assert trained > 0 and loaded == [0.0, 0.0, 0.0]


def refreshed_run(case: Case) -> list[dict[str, Any]]:
    """Train without and with a refresh of the model's layout in the middle."""
    results = []
    for refreshes in (False, True):
        engine = start(specimen(case.model), case.config)
        norms = steps(engine, case, 0, 2)
        if refreshes:
            engine.refresh()
        results.append(result(engine, norms + steps(engine, case, 2, case.steps)))
    return results


@pytest.mark.parametrize("stage", [0, 1])
def test_refresh_keeps_the_states_of_each_rank(stage: int) -> None:
    for straight, refreshed in run_ranks(refreshed_run, 2, Case(stage=stage)):
        assert straight["fingerprint"] == refreshed["fingerprint"]
        assert all(torch.equal(value, refreshed["errors"][name]) for name, value in straight["errors"].items())


def changed_fingerprints(case: Case) -> list[str]:
    """Return the fingerprints before and after one element of the last rank's error feedback changes."""
    engine = start(specimen(case.model), case.config)
    steps(engine, case, 0, 1)
    results = [str(engine.fingerprint())]
    if dist.get_rank() == dist.get_world_size() - 1:
        next(engine._sharded.update.rank_states()).values[0] += 1.0
    results.append(str(engine.fingerprint()))
    engine.destroy()
    return results


def test_the_fingerprint_covers_every_rank_and_no_stage() -> None:
    by_stage = [run_ranks(changed_fingerprints, 2, Case(stage=stage))[0] for stage in (0, 1)]
    assert by_stage[0] == by_stage[1]
    (parameters, states), (same, other) = (item.split("-") for item in by_stage[0])
    assert parameters == same and states != other


def gradients_and_traffic(stage: int) -> dict[str, Any]:
    case = Case("mlp", stage, clipping=0.1)
    engine = start(specimen(case.model), case.config)
    subject, rank = specimen(case.model), dist.get_rank()
    traffic = engine._sharded.transport.traffic
    traffic.reset()
    subject.train(engine, subject.batch(Place(0, 0, rank)), engine.backward)
    moved = dict(traffic.bytes_moved)
    name, parameter = next(iter(engine.module.named_parameters()))
    mean = windlass.zero.full_grad(parameter)
    text = ""
    try:
        windlass.zero.local_grad(parameter)
    except windlass.WindlassError as error:
        text = str(error)
    windlass.zero.set_full_grad(parameter, torch.ones_like(mean))
    ones = windlass.zero.full_grad(parameter)
    engine.destroy()
    return {"name": name, "mean": mean, "said": text, "ones": ones, "moved": moved}


@pytest.mark.parametrize("stage", [0, 1])
def test_full_gradient_is_the_mean_of_local_gradients(stage: int) -> None:
    plain = Simulation(Case("mlp"))
    local = [plain._local(0, rank)[0] for rank in range(2)]
    assert local[0] is not None and local[1] is not None
    for result in run_ranks(gradients_and_traffic, 2, stage):
        torch.testing.assert_close(result["mean"], (local[0] + local[1]) / 2)
        assert torch.equal(result["ones"], torch.ones_like(result["ones"]))
        assert (
            f"{result['name']!r} has no shard of a reduced gradient" in result["said"] and "full_grad" in result["said"]
        )
        assert not any(result["moved"].values()), "a gradient was communicated in the backward"


def unfrozen_run(case: Case) -> dict[str, Any]:
    """Train two steps with a frozen parameter, then unfreeze it and train on."""
    model = oracle.build(specimen(case.model), dist.get_rank())
    late = dict(model.named_parameters())[LATE]
    late.requires_grad_(False)
    config = {key: value for key, value in case.config.items() if key != "optimizer"}
    engine = windlass.initialize(model=model, optimizer=SignSGD(model.parameters(), lr=0.02), config=config)[0]
    norms = steps(engine, case, 0, 2)
    late.requires_grad_(True)
    return result(engine, norms + steps(engine, case, 2, case.steps))


LATE = "blocks.0.up.weight"


@pytest.mark.parametrize("stage", [0, 1])
def test_unfrozen_parameters_start_with_zero_error(stage: int) -> None:
    case = Case("mlp", stage)
    plain = Simulation(case)
    names = [name for name, _ in plain.named]
    assert LATE in names
    local = plain._local

    def without(step: int, rank: int) -> list[torch.Tensor | None]:
        return [None if step < 2 and name == LATE else g for name, g in zip(names, local(step, rank), strict=True)]

    plain._local = without  # type: ignore[method-assign]
    plain.run(0, case.steps)
    for rank, actual in enumerate(run_ranks(unfrozen_run, 2, case)):
        error, where = relative_error(actual["params"], plain.masters)
        assert error <= BOUND, f"rank {rank}: {where} is off by {error:.2e}"
        expected = dict(zip(plain.masters, plain.rule.errors[rank], strict=True))
        assert relative_error(actual["errors"], expected)[0] <= 100 * BOUND


def initialize(config: dict[str, Any]) -> None:
    start(specimen("mlp"), config)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "stage 2": ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2.*SignSGD.*set it to 0 or 1"),
    "stage 3": ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3.*SignSGD.*set it to 0 or 1"),
    "offload": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device is 'cpu'.*SignSGD.*set it to 'none'",
    ),
    "checkpoints for DeepSpeed": (
        {"checkpoint": {"format": "deepspeed"}},
        "checkpoint.format is 'deepspeed'.*SignSGD.*set it to 'windlass'",
    ),
    "tensor parallel": (
        {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
        "parallel axes tp = 2.*SignSGD.*parallel sizes to 1",
    ),
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in REFUSALS for ranks in (1, 2) if (name, ranks) != ("tensor parallel", 1)],
)
def test_settings_without_local_gradients_are_refused(name: str, ranks: int) -> None:
    section, message = REFUSALS[name]
    with pytest.raises(RankError, match=f"(?s)ConfigError.*{message}"):
        run_ranks(initialize, ranks, {**Case().config, **section})


def fail_inside_the_update() -> None:
    engine = start(specimen("mlp"), Case(stage=1).config)
    if dist.get_rank() == 1:

        def broken(parameters: Any) -> None:
            raise ValueError("a broken rule")

        engine._sharded.update.step_parameters = broken
    steps(engine, Case(stage=1), 0, 1)


def fail_part_way() -> list[str]:
    """Make a step that fails after the update has changed a per-rank state, and another step. Return both errors."""
    engine, texts = start(specimen("mlp"), Case(stage=1).config), []
    for place in ("tests.dist.sign_sgd.sign_step", "time.tzset"):
        with patch(place, side_effect=ValueError("a broken rule")):
            try:
                steps(engine, Case(stage=1), 0, 1)
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
    engine.destroy()
    return texts


def test_a_step_that_fails_part_way_counts_as_applied_in_part() -> None:
    ((failed, after),) = run_ranks(fail_part_way, 1)
    assert failed == "ValueError: a broken rule"
    assert after.startswith("UpdateError: ") and "applied in part" in after


def test_a_rank_that_fails_inside_the_update_raises_although_the_others_wait_there() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*a broken rule"):
        run_ranks(fail_inside_the_update, 2)
