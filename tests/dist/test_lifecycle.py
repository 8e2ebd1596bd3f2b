"""Tests from plain model to engine and back: first synchronization, refusals, evaluation engines, `destroy`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import windlass
from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_offload import offload_to
from tests.models import Place
from tests.oracle import Recipe, relative_error


def first_values(name: str, setting: Setting) -> dict[str, Any]:
    subject = specimen(name)
    engine = start(subject, ds_config(Recipe(), setting))
    results = {
        "params": whole_params(engine.module),
        "buffers": {key: b.clone() for key, b in engine.module.named_buffers()},
        "names": [key for key, _ in engine.module.named_parameters()],
        "shapes": [tuple(p.shape) for p in engine.module.parameters()],
    }
    engine.destroy()
    return results


@pytest.mark.parametrize("name", ["tied", "buffer_in_forward", "odd_shapes"])
def test_all_ranks_start_from_rank_0(name: str, stage: int) -> None:
    model = oracle.build(specimen(name), 0)
    for result in run_ranks(first_values, 3, name, Setting(stage=stage), transport="shm" if stage % 2 else "gloo"):
        assert result["names"] == [key for key, _ in model.named_parameters()]
        assert result["shapes"] == [tuple(p.shape) for p in model.parameters()]
        for key, value in model.named_parameters():
            assert torch.equal(result["params"][key], value.detach()), key
        for key, value in model.named_buffers():
            assert torch.equal(result["buffers"][key], value), key


def train_once(engine: Any, subject: Any, step: int) -> str:
    """Train a step, and return the error that it raised; empty if none."""
    try:
        subject.train(engine, subject.batch(Place(step, 0, dist.get_rank())), engine.backward)
        engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start_with_hook(subject: Any, setting: Setting, hook: Callable[..., None], *, frozen: int = 0) -> Any:
    """Return an engine whose AdamW runs `hook` before each step. The first `frozen` parameters are not trained."""
    model = oracle.build(subject)
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    optimizer.register_step_pre_hook(hook)
    config = ds_config(Recipe(), setting)
    config.pop("optimizer", None)
    return windlass.initialize(model=model, optimizer=optimizer, config=config)[0]


def failing_update(settings: list[Setting]) -> list[list[str]]:
    """Return this rank's errors of four steps under each setting. Rank 1's optimizer raises in the second step."""
    results = []
    for setting in settings:
        subject, steps = specimen("mlp"), 0

        def unwell(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == 2 and dist.get_rank() == 1:
                raise ValueError("no such rate")

        engine = start_with_hook(subject, setting, unwell)
        results.append([train_once(engine, subject, step) for step in range(4)])
        engine.destroy()
    return results


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_optimizer_error_on_one_rank_raises_on_all_at_the_next_step(transport: str) -> None:
    settings = [Setting(stage=stage) for stage in range(4)]
    for rank, results in enumerate(run_ranks(failing_update, 2, settings, transport=transport)):
        for received in results:
            assert received[0] == ""
            assert received[1] == ("ValueError: no such rate" if rank == 1 else "")
            assert received[2].startswith("UpdateError: this step was skipped"), received
            assert "rank 1: its optimizer raised ValueError: no such rate" in received[2]
            assert received[3].startswith("StorageError: a forward is refused"), received


def loaded_after_failure(setting: Setting, adapters: bool, waits: bool, folder: str) -> tuple[list[str], bool]:
    """Return the errors of a run in which rank 1's optimizer raises in the second step and all ranks then load the
    checkpoint of the first one, and True if it continues as an undisturbed run.

    Args:
        adapters: freeze a part, and save trained parameters only.
        waits: load only after a further step has raised on all ranks.
    """
    subject, found, fails = specimen("mlp"), [], False

    def unwell(*_: Any) -> None:
        if fails and dist.get_rank() == 1:
            raise ValueError("no such rate")

    for disturbed in (False, True):
        engine = start_with_hook(subject, setting, unwell, frozen=2 if adapters else 0)
        errors = [train_once(engine, subject, 0)]
        if disturbed:
            engine.save_checkpoint(folder, exclude_frozen_parameters=adapters)
            fails = True
            errors += [train_once(engine, subject, 1) for _ in range(2 if waits else 1)]
            fails = False
            engine.load_checkpoint(folder)
        errors += [train_once(engine, subject, step) for step in (1, 2)]
        found.append(whole_params(engine.module))
        engine.destroy()
    return errors, all(torch.equal(value, found[0][name]) for name, value in found[1].items())


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    ("stage", "place"),
    [
        (1, "device"),
        (3, "nvme"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [(0, "device"), (3, "device"), (2, "nvme")]),
    ],
)
def test_a_load_replaces_an_update_that_failed_on_one_rank(
    stage: int, place: str, adapters: bool, waits: bool, tmp_path: Path
) -> None:
    zero = () if place == "device" else offload_to("nvme", "none", str(tmp_path / "disk"))
    setting = Setting(stage=stage, zero=zero)
    found = run_ranks(loaded_after_failure, 2, setting, adapters, waits, str(tmp_path / "saved"))
    for rank, ((first, failed, *later), same) in enumerate(found):
        assert first == "" and failed == ("ValueError: no such rate" if rank == 1 else "")
        assert not waits or later.pop(0).startswith("UpdateError: this step was skipped")
        assert later == ["", ""] and same


class FailingLamb(windlass.optim.Lamb):
    """Optimizer that changes a parameter and then raises in the second step, on `rank` or (None) on all ranks."""

    def __init__(self, parameters: Any, rank: int | None) -> None:
        super().__init__(parameters, lr=0.01)
        self.rank = rank

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.rank in (None, dist.get_rank()) and any(self.state[p].get("step", 0) >= 1 for p in parameters):
            parameters[0].data.add_(1.0)
            raise ValueError("no such rate")
        return super().step(closure)


def failing_whole_update(stage: int, cause: str) -> list[str]:
    """Return this rank's errors of four steps, the second of which fails by `cause`."""
    subject = specimen("mlp")
    model = oracle.build(subject)
    optimizer = FailingLamb(model.parameters(), None if cause == "step" else 1 if cause == "step of rank 1" else -1)
    config = ds_config(Recipe(), Setting(stage=stage))
    config.pop("optimizer", None)
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    received: list[str] = []

    def unwell(*_: Any) -> None:
        if len(received) == 1 and (cause == "hook" or dist.get_rank() == 1):
            raise ValueError("no such rate")

    if "hook" in cause:
        optimizer.register_step_pre_hook(unwell)
    for step in range(4):
        received.append(train_once(engine, subject, step))
        assert all(owned.tensor.grad is None for owned in engine._sharded.update.owned), "gradients take memory"
    engine.destroy()
    return received


@pytest.mark.parametrize("cause", ["step", "step of rank 1", "hook", "hook of rank 1"])
def test_error_of_an_optimizer_of_whole_parameters_hangs_no_rank(cause: str) -> None:
    for rank, received in enumerate(run_ranks(failing_whole_update, 2, 2, cause, transport="gloo")):
        assert received[0] == ""
        assert received[1] == ("" if cause.endswith("rank 1") and rank == 0 else "ValueError: no such rate")
        if cause == "hook":  # raised on all ranks, before anything changed
            assert received[2:] == ["", ""]
        else:
            assert received[2].startswith("UpdateError: this step was skipped"), received
            assert received[3].startswith("StorageError: a forward is refused"), received


def second_initialize(setting: Setting) -> str:
    import windlass

    subject = specimen("mlp")
    model = oracle.build(subject)
    config = ds_config(Recipe(), setting)
    engine = windlass.initialize(model=model, config=config)[0]
    try:
        windlass.initialize(model=model, config=config)
    except windlass.WindlassError as error:
        subject.train(engine, subject.batch(Place(0, 0, dist.get_rank())), engine.backward)
        engine.step()  # the first engine still works
        return f"{error} | {engine.global_steps}"
    finally:
        engine.destroy()
    return ""


def test_a_second_engine_on_a_model_in_training_is_refused(stage: int) -> None:
    for text in run_ranks(second_initialize, 2, Setting(stage=stage)):
        assert "destroy" in text and text.endswith("| 1")


def modes_after_an_evaluation() -> list[bool]:
    subject = specimen("batch_norm")
    engine = start(subject, ds_config(Recipe(), Setting(stage=3)))
    norm = next(one for one in engine.module.modules() if isinstance(one, torch.nn.BatchNorm1d))
    norm.eval()
    engine.eval_batch(subject.batch(Place(0, 0, dist.get_rank())))
    found = [engine.module.training, norm.training]
    engine.destroy()
    return found


def test_an_evaluation_keeps_the_mode_of_each_module() -> None:
    assert run_ranks(modes_after_an_evaluation, 2) == [[True, False]] * 2


def evaluated_then_trained(setting: Setting) -> list[float]:
    """Evaluate with an engine without optimizer, then pass the model to a training engine."""
    import windlass

    subject = specimen("mlp")
    model = oracle.build(subject, dist.get_rank())
    config = ds_config(Recipe(), setting)
    bare = {key: value for key, value in config.items() if key != "optimizer"}
    batch = subject.batch(Place(0, 0, dist.get_rank()))
    evaluator = windlass.initialize(model=model, config=bare)[0]
    evaluator.eval()
    with torch.no_grad():
        losses = [float(evaluator(**batch))]
    engine = windlass.initialize(model=model, config=config)[0]
    engine.train()
    losses.append(float(subject.train(engine, batch, engine.backward)))
    engine.step()
    losses.append(float(engine(**batch).detach()))
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_engine_is_replaced(stage: int, transport: str) -> None:
    setting = Setting(stage=stage, transport=transport)
    expected = oracle.build(specimen("mlp"), 0)
    for rank, (first, second, third) in enumerate(run_ranks(evaluated_then_trained, 2, setting, transport=transport)):
        want = float(expected(**specimen("mlp").batch(Place(0, 0, rank))).detach())
        assert first == second == pytest.approx(want, rel=1e-6)
        assert third < second


def destroyed(setting: Setting) -> dict[str, Any]:
    """Train two steps, destroy, and continue in plain PyTorch with the same model object."""
    subject = specimen("tied")
    model = oracle.build(subject, dist.get_rank())
    import windlass

    types = [type(p) for p in model.parameters()]
    engine = windlass.initialize(model=model, config=ds_config(Recipe(), setting))[0]
    for step in range(2):
        subject.train(engine, subject.batch(Place(step, 0, dist.get_rank())), engine.backward)
        engine.step()
    expected = whole_params(engine.module)
    engine.destroy()
    engine.destroy()  # a second call has no effect
    hooks = [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ]
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    tied = model.head.weight is model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**subject.batch(Place(2, 0, 0)))
    loss.backward()
    optimizer.step()
    after = float(model(**subject.batch(Place(2, 0, 0))))
    return {
        "wanted": expected,
        "values": values,
        "hooks": hooks,
        "tied": tied,
        "types": types == [type(p) for p in model.parameters()],
        "losses": (float(loss), after),
        "contiguous": all(p.is_contiguous() for p in model.parameters()),
    }


def test_destroy_restores_the_plain_model(stage: int, transport: str) -> None:
    for result in run_ranks(destroyed, 2, Setting(stage=stage, transport=transport), transport=transport):
        assert relative_error(result["values"], result["wanted"])[0] == 0.0
        assert not result["hooks"]
        assert result["tied"] and result["types"] and result["contiguous"]
        assert result["losses"][1] < result["losses"][0]


def evaluation_between_steps(name: str, setting: Setting) -> dict[str, Any]:
    subject = specimen(name)
    engine = start(subject, ds_config(Recipe(), setting))
    rank = dist.get_rank()
    losses = []
    for step in range(3):
        losses.append(float(subject.train(engine, subject.batch(Place(step, 0, rank)), engine.backward)))
        if step == 1:  # an evaluation between backward and step must not change gradients
            engine.eval()
            with torch.no_grad():
                engine(**subject.batch(Place(9, 0, rank)))
            engine.train()
        engine.step()
        engine.eval()
        with torch.no_grad():
            engine(**subject.batch(Place(9, 1, rank)))
        with torch.inference_mode():
            engine(**subject.batch(Place(9, 2, rank)))
        engine.train()
    params = whole_params(engine.module)
    engine.destroy()
    return {"losses": losses, "params": params}


@pytest.mark.parametrize("name", ["tied", "cross_attention"])
def test_evaluation_in_between_changes_nothing(name: str, stage: int, transport: str) -> None:
    recipe = Recipe(ranks=2, steps=3)
    expected = oracle.train(specimen(name), recipe)
    setting = Setting(stage=stage, transport=transport)
    for rank, actual in enumerate(run_ranks(evaluation_between_steps, 2, name, setting, transport=transport)):
        want = [step[rank][0] for step in expected.losses]
        assert actual["losses"] == pytest.approx(want, rel=1e-6)
        assert relative_error(actual["params"], expected.params)[0] < 1e-6


def patience(timeout_s: float) -> list[float]:
    config = {**ds_config(Recipe(), Setting(1)), "watchdog": {"timeout_s": timeout_s}}
    engine = start(specimen("mlp"), config)
    sharded = engine._sharded
    backend = sharded.mesh.dense.data.process_group._get_backend(torch.device("cpu"))
    results = [sharded.settings.timeout.total_seconds(), backend.options._timeout.total_seconds()]
    engine.destroy()
    return results


def test_collective_timeout_exceeds_the_watchdog_timeout() -> None:
    assert run_ranks(patience, 2, 7200.0)[0] == [10800.0, 10800.0]
    assert run_ranks(patience, 2, 60.0)[0] == [1800.0, 1800.0]


def destroyed_with_failing_monitor() -> tuple[list[str], bool]:
    engine = start(specimen("mlp"), ds_config(Recipe(), Setting(stage=3)))
    model, closed = engine.module, list[str]()
    engine._async_save.close = lambda: closed.append("save")

    def fail() -> None:
        raise RuntimeError("the service went away")

    engine._reporter.close = fail
    with pytest.raises(RuntimeError, match="the service went away"):
        engine.destroy()
    return closed, all(parameter.numel() for parameter in model.parameters())


def test_destroy_finishes_the_save_and_restores_the_model_although_a_monitor_fails() -> None:
    assert run_ranks(destroyed_with_failing_monitor, 1) == [(["save"], True)]
