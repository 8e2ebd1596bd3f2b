"""Tests of parameters that differ between ranks: changes by scripts, evaluations, saves; overflows under fp16."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_one_bit_adam import Case, errors_of, train
from tests.models import Place, cast
from windlass.base.errors import ModelError
from windlass.comm.traffic import set_traffic_observer

DILOCO = Case(optimizer="DiLoCo", params=(("inner_steps", 4), ("codec", "int8")))
ZERO_ONE = Case(
    optimizer="ZeroOneAdam",
    params=(("var_freeze_step", 2), ("var_update_scaler", 1), ("local_step_scaler", 1), ("local_step_clipper", 4)),
)
ONE_BIT = Case(2)
BETWEEN = 5  # steps after which the ranks differ in each case


def replicas(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}


def require_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def change(parameter: torch.nn.Parameter, how: str) -> None:
    if how == "data":
        parameter.data.add_(100.0)
    elif how == "assigned":
        parameter.data = parameter.detach() + 100.0
    else:
        with torch.no_grad():
            parameter.add_(100.0)


def refused_edits(cases: list[Case], how: str) -> list[list[str]]:
    """Return for each case the errors of a change on rank 1 alone: at a step, and at `finish_update`."""
    found = []
    for case in cases:
        engine = start(specimen(case.model), case.config())
        train(engine, case, 0, BETWEEN)
        parameter = next(p for p in engine.module.parameters() if p.requires_grad)
        parameter.data.norm()  # a read is not a change
        train(engine, case, BETWEEN, BETWEEN + 1)
        texts: list[str] = []
        for act in (lambda: train(engine, case, BETWEEN + 1, BETWEEN + 2), engine.finish_update):  # noqa: B023
            if dist.get_rank() == 1:
                change(parameter, how)
            with pytest.raises(ModelError) as error:
                act()
            texts.append(str(error.value))
            train(engine, case, BETWEEN + 2, BETWEEN + 3)
        params = whole_params(engine.module)
        require_equal(params, replicas(engine))
        for name, value in params.items():
            both = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(both, value)
            assert torch.equal(both[0], both[1]), f"{case}: {name} differs between ranks"
            assert float(value.abs().max()) < 50.0, f"{case}: the change of {name} was not undone"
        engine.destroy()
        found.append(texts)
    return found


@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
def test_a_change_while_replicas_differ_is_refused_on_all_ranks(how: str) -> None:
    cases = [DILOCO, ZERO_ONE, ONE_BIT]
    for by_case in run_ranks(refused_edits, 2, cases, how):
        for case, texts in zip(cases, by_case, strict=True):
            for text in texts:
                assert case.optimizer in text and "changed in place" in text and "finish_update" in text, text
            assert "this step was skipped" in texts[0] and "skipped" not in texts[1]


def edits_after_finishing(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights before all ranks change all parameters by 100, and after this change and one more step."""
    engine = start(specimen(case.model), case.config())
    train(engine, case, 0, BETWEEN)
    engine.finish_update()
    before = replicas(engine)
    for parameter in engine.module.parameters():
        change(parameter, "in place")
    train(engine, case, BETWEEN, BETWEEN + 1)
    after = whole_params(engine.module)
    engine.destroy()
    return before, after


@pytest.mark.parametrize("case", [DILOCO, ZERO_ONE], ids=lambda case: case.optimizer)
def test_a_change_after_finish_update_reaches_the_master_weights(case: Case) -> None:
    for before, after in run_ranks(edits_after_finishing, 2, case):
        for name, value in before.items():
            # no synchronization follows within the step
            torch.testing.assert_close(after[name], value + 100.0, rtol=0, atol=1e-4)


def weights_after_loads(case: Case, folder: str) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return, for each way to load only weights, the loaded weights and those after the next training forward."""
    subject, found = specimen(case.model), []
    engine = start(subject, case.config())
    loaded = whole_params(engine.module)
    engine.save_checkpoint(folder)
    for load in (
        lambda: engine.load_checkpoint(folder, load_module_only=True),
        lambda: engine.load_module_state_dict({**engine.module.state_dict(), **loaded}),
    ):
        train(engine, case, 0, BETWEEN)
        load()
        engine(**subject.batch(Place(0, 0, dist.get_rank())))
        assert not any(bool(value.any()) for key, value in errors_of(engine).items() if key.endswith("_error"))
        found.append((loaded, replicas(engine)))
    engine.destroy()
    return found


@pytest.mark.parametrize("case", [DILOCO, ZERO_ONE, ONE_BIT], ids=lambda case: case.optimizer)
def test_loaded_weights_have_no_local_changes_of_others(case: Case, tmp_path: Path) -> None:
    for by_load in run_ranks(weights_after_loads, 2, case, str(tmp_path)):
        for loaded, used in by_load:
            require_equal(used, loaded)


def evaluations(case: Case) -> dict[str, Any]:
    """Return outputs of evaluations between two synchronizations, and the final state with and without evaluations."""
    found: dict[str, Any] = {}
    subject = specimen(case.model)
    batch = cast(subject.batch(Place(0, 0, 0)), case.dtype)
    for evaluates in (False, True):
        engine = start(subject, case.config())
        train(engine, case, 0, BETWEEN)
        if evaluates:
            local, moved = replicas(engine), Counter[str]()
            set_traffic_observer(lambda operation, nbytes, moved=moved: moved.update({operation: nbytes}))
            engine.eval()
            if dist.get_rank() == 0:  # a forward may run on one rank alone
                with torch.inference_mode():
                    engine(**batch)
            with torch.no_grad():
                found["output"] = engine(**batch)
            common = replicas(engine)
            with torch.enable_grad():  # with autograd, a forward is not an evaluation
                engine(**batch)
            require_equal(replicas(engine), local)
            set_traffic_observer(None)
            assert not moved, moved
            assert any(not torch.equal(value, local[name]) for name, value in common.items())
            engine.train()
            masters = whole_params(engine.module)  # finishes the update, as a save does
            require_equal({name: value.to(case.dtype) for name, value in masters.items()}, common)
        train(engine, case, BETWEEN, BETWEEN + 2)
        found[f"replicas {evaluates}"] = replicas(engine)
        found[f"params {evaluates}"] = whole_params(engine.module)
        engine.destroy()
    return found


@pytest.mark.parametrize("case", [DILOCO, ZERO_ONE, replace(DILOCO, bf16=True)], ids=["DiLoCo", "0/1", "bf16"])
def test_an_evaluation_uses_common_weights_and_changes_no_training(case: Case) -> None:
    by_rank = run_ranks(evaluations, 2, case)
    assert torch.equal(by_rank[0]["output"], by_rank[1]["output"])
    for found in by_rank:
        for what in ("replicas", "params"):
            require_equal(found[f"{what} True"], found[f"{what} False"])


def averages_between(cases: list[Case]) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return for each case the parameters of a run with and without evaluations of an average."""
    import windlass

    found = []
    for case in cases:
        subject, ends = specimen(case.model), {}
        batch = cast(subject.batch(Place(0, 0, 0)), case.dtype)
        for evaluates in (False, True):
            engine = start(subject, case.config())
            average = windlass.zero.ExponentialMovingAverage(engine, 0.5)
            for step in range(BETWEEN):
                train(engine, case, step, step + 1)
                average.update()
            if evaluates:
                named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
                averages = {name: average.full_param(p).to(case.dtype) for name, p in named}
                with average.applied():
                    for trains, grad in ((False, True), (True, False)):  # a script may forget `no_grad` or `eval`
                        engine.train(trains)
                        with torch.set_grad_enabled(grad):
                            engine(**batch)
                        require_equal(replicas(engine), averages)
            engine.train()
            train(engine, case, BETWEEN, BETWEEN + 2)
            ends[f"replicas {evaluates}"] = replicas(engine)
            ends[f"params {evaluates}"] = whole_params(engine.module)
            engine.destroy()
        found.append(ends)
    return found


def test_applied_averages_have_no_local_changes() -> None:
    for by_case in run_ranks(averages_between, 2, [DILOCO, ZERO_ONE]):
        for ends in by_case:
            for what in ("replicas", "params"):
                require_equal(ends[f"{what} True"], ends[f"{what} False"])


def overflows(cases: list[Case]) -> list[list[dict[str, torch.Tensor]]]:
    """Return the final states of a run, and of one with additional steps that overflow on rank 1 alone."""
    found = []
    for case in cases:
        ends = []
        for overflowing in (False, True):
            config = case.config() | {"fp16": {"enabled": True, "loss_scale": 128}, "bf16": {"enabled": False}}
            subject, rank = specimen(case.model), dist.get_rank()
            engine = start(subject, config)
            for step in range(BETWEEN + 2):
                if overflowing and step in (2, BETWEEN):
                    before = {**errors_of(engine), **replicas(engine)}
                    batch = cast(subject.batch(Place(step, 0, rank)), torch.float16)
                    engine.backward(engine(**batch) * (1e30 if rank == 1 else 1.0))
                    engine.step()
                    assert not engine.was_step_applied()
                    require_equal({**errors_of(engine), **replicas(engine)}, before)
                batch = cast(subject.batch(Place(step, 0, rank)), torch.float16)
                engine.backward(engine(**batch))
                engine.step()
                assert engine.was_step_applied()
            ends.append({**errors_of(engine), **replicas(engine)})
            assert all(bool(value.isfinite().all()) for value in ends[-1].values())
            engine.destroy()
        found.append(ends)
    return found


def test_a_step_that_overflows_leaves_error_feedback_as_it_is() -> None:
    """An infinite gradient on one rank reaches no message: the run continues as if the step had not run."""
    cases = [Case(0), Case(2), ZERO_ONE, replace(ZERO_ONE, stage=1), DILOCO]
    cases += [replace(Case(0), optimizer="OneBitLamb")]
    for ends in run_ranks(overflows, 2, cases):
        for without, with_overflow in ends:
            require_equal(with_overflow, without)
