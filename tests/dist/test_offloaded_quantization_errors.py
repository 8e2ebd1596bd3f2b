"""Laws of offloaded errors of quantized reductions (LoCo): all tiers give equal bits and load all checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import windlass
from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import Case, batch, build
from tests.dist.parallel_runs import config_of as parallel_config
from tests.dist.test_disk_corruption import Spoiler, attempt
from tests.dist.test_disk_failure import BAD_RANK, Breaker, FailedLate, GoneDevice
from tests.dist.test_one_bit_adam import one_thread  # noqa: F401 - a fixture
from tests.dist.test_quantized_messages import LOCO, HalfUsed
from tests.models import Place
from windlass.comm.quantized_wire import QuantizedReduction
from windlass.config import load_config
from windlass.engine.engine_reporter import memory_report
from windlass.engine.rank_state_checkpoint import rank_states
from windlass.plan.activation_trace import ActivationTrace
from windlass.plan.memory_planner import MemoryPlanner
from windlass.plan.planned_layout import Target, plan_layout
from windlass.storage.slot import Tier
from windlass.zero.update.quantization_errors import ERROR
from windlass.zero.update.rank_state_memory import RankStateMemory

EMULATED = {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"}  # a device with memory of its own


def config_of(tier: Tier, folder: str, **more: Any) -> dict[str, Any]:
    config = LOCO.config
    zero = config["zero_optimization"] | more
    if tier is not Tier.DEVICE:
        offload = {"device": "cpu"} if tier is Tier.HOST else {"device": "nvme", "nvme_path": f"{folder}/disk"}
        zero |= {"offload_optimizer": offload}
    return {**config, "zero_optimization": zero}


def train(engine: Any, steps: range) -> None:
    subject = specimen(LOCO.model)
    for step in steps:
        for micro in range(LOCO.accumulation):
            subject.train(engine, subject.batch(Place(step, micro, dist.get_rank())), engine.backward)
            engine.step()


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return parameters and LoCo's states."""
    states = {f"{one.name}/{one.key}": one.read().cpu().clone() for one in rank_states(engine._sharded)}
    return states | whole_params(engine.module)


def on_tiers(tiers: list[Tier], folder: str) -> list[dict[str, Any]]:
    """Return the result of four steps with errors on each tier, and the tiers where the errors really are."""
    results = []
    for tier in tiers:
        engine = start(specimen(LOCO.model), config_of(tier, folder))
        train(engine, range(4))
        states = [one for one in rank_states(engine._sharded) if one.key == ERROR]
        results.append(
            {
                "values": values_of(engine),
                "tiers": {one.tier for one in states},
                "in memory": {one.is_in_memory for one in states},
                "reported": {Tier(at) for key, at in memory_report(engine._sharded)["slots"] if key == ERROR},
            }
        )
        engine.destroy()
    return results


def test_errors_are_offloaded_with_the_states(tmp_path: Path) -> None:
    # On a CPU, host memory is the memory of the device.
    rows = [(Tier.DEVICE, True), (Tier.DEVICE, True), (Tier.NVME, False)]
    late = [(Tier.HOST, False), (Tier.NVME, False)]
    found = run_ranks(on_tiers, 2, [Tier.DEVICE, Tier.HOST, Tier.NVME], str(tmp_path), timeout=120.0)[1]
    found += run_ranks(on_tiers, 2, [Tier.HOST, Tier.NVME], str(tmp_path), env=EMULATED, timeout=120.0)[1]
    plain = found[0]["values"]
    assert any(value.any() for name, value in plain.items() if name.endswith(ERROR))
    for (tier, in_memory), result in zip(rows + late, found, strict=True):
        assert result["tiers"] == result["reported"] == {tier}
        assert result["in memory"] == {in_memory}, tier
        assert result["values"].keys() == plain.keys()
        for name, value in result["values"].items():
            assert torch.equal(value, plain[name]), (tier, name)


def across_tiers(before: Tier, after: Tier, folder: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Return values at a save on one tier, after a load on another, and of both runs two steps later."""
    found = []
    engine = start(specimen(LOCO.model), config_of(before, folder))
    train(engine, range(2))
    engine.save_checkpoint(f"{folder}/saved")
    found.append(values_of(engine))
    train(engine, range(2, 4))
    straight = values_of(engine)
    engine.destroy()
    engine = start(specimen(LOCO.model), config_of(after, folder))
    train(engine, range(1))  # errors that the load replaces
    engine.load_checkpoint(f"{folder}/saved")
    found.append(values_of(engine))
    train(engine, range(2, 4))
    resumed = values_of(engine)
    engine.destroy()
    return (*found, straight, resumed)


@pytest.mark.parametrize(("before", "after"), [(Tier.DEVICE, Tier.NVME), (Tier.NVME, Tier.DEVICE)])
def test_a_checkpoint_moves_between_tiers(before: Tier, after: Tier, tmp_path: Path) -> None:
    for saved, loaded, straight, resumed in run_ranks(across_tiers, 2, before, after, str(tmp_path), timeout=120.0):
        assert any(value.any() for name, value in saved.items() if name.endswith(ERROR))
        assert saved.keys() == loaded.keys() and straight.keys() == resumed.keys()
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
        assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


def interrupted(tier: Tier, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Load a checkpoint after a backward without a step. Return the values at the save and after the load."""
    subject = specimen(LOCO.model)
    engine = start(subject, config_of(tier, folder))
    train(engine, range(2))
    engine.save_checkpoint(f"{folder}/saved")
    saved = values_of(engine)
    with patch.object(QuantizedReduction, "poll", lambda _: False):  # only `wait` starts the second messages
        subject.train(engine, subject.batch(Place(2, 0, dist.get_rank())), engine.backward)
        engine.load_checkpoint(f"{folder}/saved")
    loaded = values_of(engine)
    engine.destroy()
    return saved, loaded


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.NVME])
def test_reductions_in_flight_do_not_replace_loaded_errors(tier: Tier, tmp_path: Path) -> None:
    for saved, loaded in run_ranks(interrupted, 2, tier, str(tmp_path), timeout=120.0):
        assert any(value.any() for name, value in saved.items() if name.endswith(ERROR))
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items())


def unfrozen(tier: Tier, folder: str) -> dict[str, torch.Tensor]:
    """Return the values after steps in which a block is frozen at first, with the loss scale halved between them."""
    model = HalfUsed()
    model.both = True
    model.blocks[0].requires_grad_(False)
    config = config_of(tier, folder) | {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    config |= {"gradient_accumulation_steps": 1}
    del config["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)  # also has the frozen parameters
    engine, *_ = windlass.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(5):
        if step == 1:
            model.blocks[0].requires_grad_(True)
        torch.manual_seed(10 * step + dist.get_rank())
        loss = engine(torch.randn(4, 8).half()).float().square().mean()
        engine.backward(loss * float("inf") if step == 3 else loss)
        engine.step()
    found = values_of(engine)
    engine.destroy()
    return found


def test_errors_of_unfrozen_units_and_of_another_loss_scale_are_offloaded(tmp_path: Path) -> None:
    plain = run_ranks(unfrozen, 2, Tier.DEVICE, str(tmp_path))
    for here, there in zip(plain, run_ranks(unfrozen, 2, Tier.NVME, str(tmp_path)), strict=True):
        assert here["blocks.0.weight/loco_error"].any() and here.keys() == there.keys()
        assert all(torch.equal(value, there[name]) for name, value in here.items())


def damaged(folder: str) -> tuple[str, str, bool]:
    """Return the error of a step whose errors are damaged on disk, that of a load, and True if the run then continues
    as an undamaged one."""
    engine = start(specimen(LOCO.model), config_of(Tier.NVME, folder))
    train(engine, range(2))
    engine.save_checkpoint(f"{folder}/saved")
    train(engine, range(2, 3))
    expected = values_of(engine)
    Spoiler(engine, ERROR, "flip").spoil()
    failed = attempt(lambda: train(engine, range(3, 4)))
    loaded = attempt(lambda: engine.load_checkpoint(f"{folder}/saved"))
    train(engine, range(2, 3))
    same = all(torch.equal(value, expected[name]) for name, value in values_of(engine).items())
    engine.destroy()
    return failed, loaded, same


def test_damaged_errors_fail_the_step_and_a_load_repairs_them(tmp_path: Path) -> None:
    for failed, loaded, same in run_ranks(damaged, 2, str(tmp_path), timeout=120.0):
        assert failed.startswith("StorageError") and f"{ERROR} of " in failed
        assert not loaded and same


def unread_once(folder: str) -> dict[str, Any]:
    """Return the error of a step in which a rank cannot read errors, and the state after it and after a load."""
    subject = specimen(LOCO.model)
    engine = start(subject, config_of(Tier.NVME, folder))
    train(engine, range(2))
    before = values_of(engine)
    breaker = Breaker(engine)
    found: dict[str, Any] = {}
    for micro in range(LOCO.accumulation):
        breaker.smash("read")
        subject.train(engine, subject.batch(Place(2, micro, dist.get_rank())), engine.backward)
        breaker.mend()
        found["step"] = attempt(engine.step)
    after = values_of(engine)
    found["kept"] = {name for name, value in before.items() if torch.equal(value, after[name])}
    read_part = RankStateMemory.read_part

    def read_nothing(*arguments: Any) -> torch.Tensor:
        breaker.smash("read")
        try:
            return read_part(*arguments)
        finally:
            breaker.mend()

    with patch.object(RankStateMemory, "read_part", read_nothing):
        found["save"] = attempt(lambda: engine.save_checkpoint(f"{folder}/unread"))
    found["errors"] = {name for name in before if name.endswith(ERROR)}
    found["next"] = attempt(lambda: train(engine, range(2, 3)))
    engine.destroy()
    return found


def test_errors_that_cannot_be_read_once_stay_on_disk(tmp_path: Path) -> None:
    found = run_ranks(unread_once, 2, str(tmp_path), timeout=120.0)
    for result in found:
        assert f"rank {BAD_RANK}: reading" in result["step"] and "states are unchanged" in result["step"]
        assert result["save"].startswith("StorageError: nothing is saved") and result["next"] == ""
    assert found[BAD_RANK]["errors"] and found[BAD_RANK]["errors"] <= found[BAD_RANK]["kept"]


def lost_late(folder: str) -> tuple[str, str, bool]:
    """Return the error of a step after errors of the last reductions were not written, that of a load, and True if the
    run then continues as an undisturbed one.
    """
    model = HalfUsed()
    model.both = True
    config = config_of(Tier.NVME, folder) | {"gradient_accumulation_steps": 1}
    engine, *_ = windlass.initialize(model=model, config=config)

    def backward(step: int) -> None:
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(4, 8)).square().mean())

    for step in range(2):
        backward(step)
        engine.step()
        if step == 0:
            engine.save_checkpoint(f"{folder}/saved")
    expected = values_of(engine)
    breaker = Breaker(engine)
    if dist.get_rank() == BAD_RANK:
        breaker.disk._transfers._engine = GoneDevice(breaker._whole, [True], FailedLate)
    backward(2)
    engine._sharded.reduce_accumulated()
    breaker.mend()
    stepped = attempt(engine.step)
    loaded = attempt(lambda: engine.load_checkpoint(f"{folder}/saved"))
    backward(1)
    engine.step()
    same = all(torch.equal(value, expected[name]) for name, value in values_of(engine).items())
    engine.destroy()
    return stepped, loaded, same


def test_errors_whose_write_fails_late_fail_the_step_and_a_load_repairs_them(tmp_path: Path) -> None:
    for stepped, loaded, same in run_ranks(lost_late, 2, str(tmp_path), timeout=120.0):
        assert f"rank {BAD_RANK}: writing" in stepped and "load the last checkpoint" in stepped
        assert loaded == "" and same


def rescaled(tier: Tier, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return the errors before and after a change of their scale and one step, and the bytes that the change moved."""
    engine = start(specimen(LOCO.model), config_of(tier, folder))
    train(engine, range(2))
    disk, errors = engine._sharded.tiers.disk, engine._sharded.quantization_errors

    def moved() -> int:
        rates = disk.io_rates()
        return int(rates.read_bytes + rates.write_bytes)

    before, nbytes = values_of(engine), moved() if disk is not None else 0
    errors.rescale(4.0)
    errors.rescale(0.125)
    nbytes = moved() - nbytes if disk is not None else 0
    after = values_of(engine)
    train(engine, range(2, 3))
    result = values_of(engine)
    engine.destroy()
    for name, value in after.items():
        assert torch.equal(value, before[name] * (0.5 if name.endswith(ERROR) else 1)), name
    return before, result, nbytes


def test_a_change_of_scale_moves_no_data(tmp_path: Path) -> None:
    plain = run_ranks(rescaled, 2, Tier.DEVICE, str(tmp_path), timeout=120.0)
    for (_, wanted, _), (before, found, nbytes) in zip(
        plain, run_ranks(rescaled, 2, Tier.NVME, str(tmp_path), timeout=120.0), strict=True
    ):
        assert nbytes == 0
        assert any(value.any() for name, value in before.items() if name.endswith(ERROR))
        assert all(torch.equal(value, found[name]) for name, value in wanted.items())


def reported_units() -> tuple[set[str], set[str]]:
    """Return the names of the units with errors in a report before the second block is reduced, and after it."""
    engine, *_ = windlass.initialize(model=HalfUsed(), config={**LOCO.config, "gradient_accumulation_steps": 1})
    found = []
    for both in (False, True):
        engine.module.both = both
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
        report = memory_report(engine._sharded)
        found.append({name for unit in report["units"] if ERROR in unit for name in unit["names"]})
        flats = [errors._flat is not None for _, errors in engine._sharded.quantization_errors._lanes]
        assert sum(flats) == sum(ERROR in unit for unit in report["units"])
    engine.destroy()
    return found[0], found[1]


def test_a_report_allocates_no_errors() -> None:
    for half, whole in run_ranks(reported_units, 2):
        assert half == {"blocks.0.weight", "blocks.0.bias"}
        assert whole == half | {"blocks.1.weight", "blocks.1.bias"}


def planned_and_real(tier: Tier, folder: str) -> tuple[int, int, int, int]:
    """Return the planned and the real bytes of errors, and the reserved and the used bytes on disk."""
    config, subject = config_of(tier, folder), specimen(LOCO.model)
    layout = plan_layout(subject.build(), load_config(config), 2, Target("cpu", "gloo"), rank=dist.get_rank())
    planned = MemoryPlanner(subject.build(), load_config(config), layout, ActivationTrace()).slot_bytes()
    engine = start(subject, config)
    train(engine, range(1))
    real = sum(nbytes for (key, _), nbytes in engine.report()["slots"].items() if key == ERROR)
    disk = engine._sharded.tiers.disk
    reserved, used = (disk._reserved, disk._allocator.end) if disk is not None else (0, 0)
    engine.destroy()
    return planned["per-rank states"], real, reserved, used


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.NVME])
def test_planned_bytes_of_errors_are_exact(tier: Tier, tmp_path: Path) -> None:
    for planned, real, reserved, used in run_ranks(planned_and_real, 2, tier, str(tmp_path)):
        assert planned == real > 0
        assert reserved == used


def bytes_with_single_experts(folder: str) -> tuple[int, int, set[str]]:
    """Return the reserved and the used bytes on disk, and the parameters with errors, of a model whose experts have one
    data rank and therefore no errors.
    """
    config = parallel_config(Case("mixtral", (("ep", 2),), stage=3))
    config["zero_optimization"] |= config_of(Tier.NVME, folder)["zero_optimization"]
    engine, *_ = windlass.initialize(model=build("mixtral", tied=False), config=config)
    engine.backward(engine(**batch(0, 0, 0)).loss)
    engine.step()
    disk = engine._sharded.tiers.disk
    found = disk._reserved, disk._allocator.end, {one.name for one in rank_states(engine._sharded) if one.key == ERROR}
    engine.destroy()
    return found


def test_no_space_is_reserved_for_units_of_one_data_rank(tmp_path: Path) -> None:
    for reserved, used, names in run_ranks(bytes_with_single_experts, 2, str(tmp_path), timeout=120.0):
        assert reserved == used
        assert names and not any("experts" in name for name in names)
