"""Tests of the engine of `deepspeed.initialize`: members that clients use, and behaviors that are easy to miss."""

from __future__ import annotations

import inspect
import io
import json
import logging
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.harness import RankError, run_ranks
from windlass.base.errors import ModelError

MEMBERS = Path(__file__).parents[1] / "data" / "deepspeed_members.json"


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **others,
    }


def _engine(stage: int, **others: Any) -> Any:
    from windlass.compat.deepspeed_initialize import initialize

    net = _net()
    return initialize(model=net, model_parameters=net.parameters(), config=_config(stage, **others))[0]


def _step(engine: Any) -> torch.Tensor:
    x = torch.arange(12.0, device=engine.device).view(2, 6) / 12
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()


def _members(stages: list[int]) -> dict[str, list[str]]:
    """Return deviations from DeepSpeed's members by owner and stage: missing, of another kind, unexpected `ds_*`."""
    expected = json.loads(MEMBERS.read_text())
    missing: dict[str, list[str]] = {}
    attributes = defaultdict(list, expected["attributes"])
    for stage in stages:
        engine = _engine(stage)
        _step(engine)
        owners = {
            "engine": engine,
            "optimizer": engine.optimizer,
            "scheduler": engine.lr_scheduler,
            "param": next(engine.module.parameters()),
            "module": engine.module,
        }
        for owner, names in expected["at_every_stage"].items():
            missing[f"{owner} {stage}"] = [name for name in names if not hasattr(owners[owner], name)]
            missing[f"kinds of {owner} {stage}"] = _other_kinds(owners[owner], names, attributes[owner])
        if stage == 3:
            for owner, names in expected["at_stage_3"].items():
                missing.setdefault(f"{owner} {stage}", []).extend(
                    name for name in names if not hasattr(owners[owner], name)
                )
                missing[f"kinds of {owner} at stage 3"] = _other_kinds(owners[owner], names, attributes[owner])
        else:
            missing[f"param {stage}"] = [name for name in ("ds_id", "ds_status") if hasattr(owners["param"], name)]
        engine.destroy()
        missing[f"destroyed {stage}"] = [name for name in ("ds_id",) if hasattr(owners["param"], name)]
    return missing


def _other_kinds(owner: Any, names: list[str], attributes: list[str]) -> list[str]:
    """Return the names of `attributes` that are bound methods, and the other names that can't be called."""
    known = [name for name in names if hasattr(owner, name)]
    wrong = [name for name in known if name in attributes and inspect.ismethod(getattr(owner, name))]
    return wrong + [name for name in known if name not in attributes and not callable(getattr(owner, name))]


def test_every_member_that_clients_use_exists() -> None:
    """Every member exists at every stage, as a method or as an attribute like DeepSpeed's.

    Parameters have `ds_*` at stage 3 only, until the engine is destroyed.
    """
    assert {key: names for key, names in run_ranks(_members, 2, [0, 1, 2, 3])[0].items() if names} == {}


def _manners(stage: int) -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.not_built import NotBuiltError

    net = _net()
    config = _config(stage, gradient_accumulation_steps=2, steps_per_print=float("inf"), **{"my.dotted": 1})
    engine, optimizer, loader, schedule = initialize(model=net, model_parameters=net.parameters(), config=config)
    assert engine.config is config and optimizer is engine.optimizer and loader is None
    assert engine.get_global_grad_norm() is None and engine.gradient_clipping() == 1.0
    substitute: Any = SimpleNamespace(_config=SimpleNamespace(gradient_clipping=0.5))
    assert type(engine).gradient_clipping(substitute) == 0.5
    assert engine.train() is None and engine.module.training and engine.eval() is None and not engine.module.training
    assert list(inspect.signature(engine.save_checkpoint).parameters)[:5] == [
        "save_dir",
        "tag",
        "client_state",
        "save_latest",
        "exclude_frozen_parameters",
    ]
    x = torch.ones(2, 6)
    loss = engine(x).mean()
    assert torch.equal(engine.backward(loss), loss * 0.5) and engine.step() is None  # one of two micro-batches
    assert engine.micro_steps == 1 and engine.global_steps == 0 and not engine.was_step_applied()
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(x).mean()
    assert engine.backward(loss, scale_wrt_gas=False) is loss
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    assert engine.get_global_grad_norm().item() > 0
    engine.set_gradient_accumulation_boundary(False)
    assert not engine.is_gradient_accumulation_boundary()
    engine.progress.boundary_override = None
    if stage >= 2:
        with pytest.raises(AssertionError, match="no_sync"), engine.no_sync():
            raise RuntimeError("not reached")
    else:
        with engine.no_sync(), pytest.raises(AssertionError, match="no_sync"):
            engine.step()
    with pytest.raises(NotBuiltError, match="DeepCompile"):
        engine.register_compile_pass("x", None)
    assert engine.get_batch_info() == (2 * 2 * engine.world_size, 2, 2)
    engine.destroy()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_conventions(stage: int) -> None:
    """Accumulation, boundaries, signatures and `no_sync` are those of DeepSpeed, on which clients rely."""
    run_ranks(_manners, 2, stage)


def _unfinished_steps(stage: int) -> None:
    engine = _engine(
        stage, gradient_accumulation_steps=2, optimizer={"type": "SGD", "params": {"lr": 0.1}}, scheduler=None
    )
    plain = _net()
    for epoch in range(2):
        engine.zero_grad()
        engine.micro_steps = 0
        plain.zero_grad()
        for number in range(3):  # the last micro-batch begins a step that the epoch does not end
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * epoch + number))
            loss, expected = engine(x).square().mean(), plain(x).square().mean()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
            engine.backward(loss)
            engine.step()
            (expected / 2).backward()
            if number == 1:
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # the default of the configuration
                with torch.no_grad():
                    for parameter in plain.parameters():
                        parameter -= 0.1 * parameter.grad
        assert engine.global_steps == epoch + 1 and engine.micro_steps == 3
    engine.set_gradient_accumulation_boundary(False)
    engine._is_gradient_accumulation_boundary = None
    assert engine.is_gradient_accumulation_boundary()  # the fourth micro-batch
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, 7)
        assert getattr(engine, name) == 7
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_counters_can_be_set(stage: int) -> None:
    """A script that sets `micro_steps` to 0 after `zero_grad` begins a new step, without the unfinished one."""
    run_ranks(_unfinished_steps, 2, stage)


def _norms_of_optimizers() -> None:
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        engine = _engine(0, **{name: {"enabled": True}})
        assert engine.optimizer._global_grad_norm == 0.0
        engine.backward(engine(torch.ones(2, 6, dtype=dtype)).mean())
        engine.step()
        assert engine.optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
        engine.backward(engine(torch.full((2, 6), float("nan"), dtype=dtype)).mean())
        engine.step()
        assert engine.optimizer._global_grad_norm == float("inf")
        engine.destroy()
    engine = _engine(0)
    assert not hasattr(engine.optimizer, "_global_grad_norm")  # a torch optimizer in DeepSpeed, too
    engine.destroy()


def test_sixteen_bit_optimizers_of_stage_0_have_the_norm() -> None:
    """Scripts for fp16 without ZeRO log `optimizer._global_grad_norm`."""
    run_ranks(_norms_of_optimizers, 1)


def _stepped(stage: int, by_optimizer: bool) -> list[tuple[float, float]]:
    engine = _engine(stage)
    results = []
    for _ in range(4):
        x = torch.arange(12.0, device=engine.device).view(2, 6) / 12
        loss = engine(x).square().mean()
        engine.backward(loss)
        results.append((loss.item(), engine.get_lr()[0]))
        if by_optimizer:
            engine.optimizer.step()
            engine.lr_scheduler.step()
            engine.optimizer.zero_grad()
        else:
            engine.step()
    engine.destroy()
    return results


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_manual_optimizer_step_does_not_advance_the_schedule(stage: int) -> None:
    """A script that steps optimizer and schedule itself, as Ray Train's example, equals one that steps the engine."""
    (expected,) = run_ranks(_stepped, 1, stage, False)
    (actual,) = run_ranks(_stepped, 1, stage, True)
    assert len({rate for _, rate in expected}) > 2
    assert actual == expected


def _asked_around_a_step(stage: int) -> list[float]:
    from windlass.base.log import logger as own_logger
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.rank_logging import logger

    text, net = io.StringIO(), _net()
    handler, levels = logging.StreamHandler(text), (logger.level, own_logger.level)
    logger.addHandler(handler)
    logger.setLevel("INFO")
    engine, optimizer, _, schedule = initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1.0),
        lr_scheduler=lambda given: torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1 / (1 + step)),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}},
    )
    logger.removeHandler(handler)
    logger.setLevel(levels[0])
    own_logger.setLevel(levels[1])  # setting the level of `logger` changed this level too
    assert ("DeepSpeed info: version=" in text.getvalue()) == (engine.global_rank == 0)
    assert schedule is engine.lr_scheduler and schedule.optimizer is optimizer.optimizer
    results = []
    for _ in range(3):
        optimizer.offload_states(include=["optim_states", "hp_params"], device="cpu", pin_memory=False)
        optimizer.reload_states()
        _step(engine)
        results += engine.get_lr()
    engine.destroy()
    return results


@pytest.mark.parametrize("stage", [0, 3])
def test_schedule_log_line_and_state_offload_as_clients_use_them(stage: int) -> None:
    """The schedule reports the rate of each step, and clients find the log line and the objects that they check.

    transformers' tests search the log line, accelerate checks the owner of the schedule, and OpenRLHF offloads states
    through the optimizer.
    """
    assert run_ranks(_asked_around_a_step, 2, stage) == [pytest.approx([1 / 2, 1 / 3, 1 / 4])] * 2


def _runs_only(folder: str) -> float:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.zero import GatheredParameters

    config = {key: value for key, value in _config(3).items() if key not in ("optimizer", "scheduler")}
    engine, holder, *_ = initialize(model=_net(), config=config)
    assert holder is engine.optimizer and holder.module is engine.module and engine.get_lr() == []
    with GatheredParameters(engine.parameters()):  # as trl does to generate
        for hook in holder.forward_hooks + holder.backward_hooks:
            hook.remove()
        holder.param_coordinator._invalidate_trace()
        holder._register_deepspeed_module(holder.module)
    loss = engine(torch.ones(2, 6)).mean()
    for call in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(AssertionError, match="needs an optimizer"):
            call()
    trained = _engine(3)
    for _ in range(3):  # the rate of the first step is 0
        _step(trained)
    expected = trained(torch.ones(2, 6)).mean().detach()
    assert abs(float(expected - loss.detach())) > 1e-4
    trained.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="again")
    again = engine(torch.ones(2, 6)).mean()
    trained.destroy()
    engine.destroy()
    return abs(float(again.detach() - expected))


def test_evaluation_engine_has_removable_hooks(tmp_path: Path) -> None:
    """The hooks of an engine without optimizer can be removed, as trl does to generate from reference models.

    `backward` and `step` of such an engine raise. It can load a checkpoint of a training engine.
    """
    assert run_ranks(_runs_only, 2, str(tmp_path)) == [0.0, 0.0]


def _refused() -> list[str]:
    from windlass.compat.not_built import NotBuiltError
    from windlass.compat.stand_in_entry import NameStatus
    from windlass.compat.tables.member_notes import MEMBER_NOTES

    engine = _engine(3)
    owners = {"engine": engine, "optimizer": engine.optimizer, "parameter": next(engine.module.parameters())}
    silent = []
    for name, entry in MEMBER_NOTES.items():
        owner, _, own = name.partition(".")
        if entry.status is NameStatus.REFUSED:
            try:
                getattr(owners[owner], own)()
                silent.append(name)
            except NotBuiltError as error:
                assert entry.note in str(error), name
    engine.destroy()
    return silent


def test_refused_members_give_the_reason() -> None:
    """Each refused member raises its sentence in docs/compat.md."""
    assert run_ranks(_refused, 1) == [[]]


def _batch_changes() -> list[float]:
    engine = _engine(2)
    _step(engine)
    engine.set_train_batch_size(3 * 2 * engine.world_size)
    assert engine.gradient_accumulation_steps() == 3 and engine._config.gradient_accumulation_steps == 3
    assert engine.config == _config(2)  # the script's own dict, for further engines, is unchanged
    engine.set_train_micro_batch_size(4)
    assert engine.get_batch_info() == (3 * 4 * engine.world_size, 4, 3)
    assert engine._config.train_batch_size == 3 * 4 * engine.world_size
    assert engine._config.train_micro_batch_size_per_gpu == 4
    for _ in range(3):
        _step(engine)
    assert engine.global_steps == 2
    results = [p.detach().double().sum().item() for p in engine.module.parameters()]
    # Megatron-DeepSpeed calls `step` once for all micro-batches, and sets the batch size before each step.
    engine.set_gradient_accumulation_boundary(True)
    _step(engine)
    engine.set_train_batch_size(2 * 4 * engine.world_size)
    engine.set_gradient_accumulation_boundary(False)
    _step(engine)
    with pytest.raises(ModelError, match="middle of a step"):
        engine.set_train_batch_size(4 * engine.world_size)
    engine.set_gradient_accumulation_boundary(True)
    _step(engine)
    assert engine.global_steps == 4
    # lightning names learning rates by the class of the schedule's optimizer
    assert engine.lr_scheduler.optimizer is engine.optimizer.optimizer
    engine.destroy()
    return results


def test_batch_size_can_change_between_steps() -> None:
    """After the change a step has three micro-batches, each weighted by a third."""
    net = _net()
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.arange(12.0).view(2, 6) / 12
    from windlass.optim import scheduler_factory

    schedule = scheduler_factory.build_scheduler("WarmupLR", {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}, optimizer)
    for _ in range(2):
        net(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    expected = [p.detach().double().sum().item() for p in net.parameters()]
    assert run_ranks(_batch_changes, 2)[0] == pytest.approx(expected, abs=1e-5)


def _engine_configs() -> None:
    from windlass.compat.not_built import NotBuiltError

    engine = _engine(1, fp16={"enabled": True}, gradient_accumulation_steps=3)
    known = engine._config
    assert (known.train_batch_size, known.gradient_accumulation_steps) == (6, 3)  # 6 = 3 * 2 rows
    assert engine.communication_data_type == torch.float16
    known.zero_enabled = False  # as Megatron-DeepSpeed sets it to load a checkpoint
    assert known.zero_enabled is False and engine.zero_optimization_stage() == 1
    with pytest.raises(NotBuiltError, match="set_train_batch_size"):
        known.train_batch_size = 12
    with pytest.raises(NotBuiltError, match="gradient_clipping = 0.5"):
        known.gradient_clipping = 0.5
    engine.communication_data_type = torch.float16  # some scripts assign the value that is in use
    with pytest.raises(NotBuiltError, match="communication_data_type in the configuration"):
        engine.communication_data_type = torch.float32
    section = known.zero_config
    assert section is known.zero_optimization and section.stage == 1
    assert section.param_persistence_threshold == section.stage3_param_persistence_threshold == 0
    assert not engine.zero_gather_16bit_weights_on_model_save()
    section.gather_16bit_weights_on_model_save = True  # as scripts set it to save a model that was trained without
    assert engine.zero_gather_16bit_weights_on_model_save()
    with pytest.raises(NotBuiltError, match="zero_config.reduce_bucket_size = 7.*write it in the configuration"):
        section.reduce_bucket_size = 7
    engine.destroy()
    engine = _engine(1, fp16={"enabled": True}, communication_data_type="bf16")
    assert engine.communication_data_type == torch.bfloat16
    engine.destroy()


def test_configuration_of_an_engine() -> None:
    """`engine._config` has the batch sizes in use. A value that can't take effect any more is refused."""
    run_ranks(_engine_configs, 1)


def _compiled(stage: int) -> tuple[list[float], list[float], bool]:
    plain = _engine(stage)
    expected = [_step(plain).item() for _ in range(3)]
    plain.destroy()
    engine = _engine(stage)
    engine.compile(backend="eager")
    results = [_step(engine).item() for _ in range(3)]
    was = engine.is_compiled
    engine.destroy()
    return expected, results, was


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_compile_in_place(stage: int) -> None:
    """Losses of a compiled model equal those of the model without `compile`."""
    expected, actual, was = run_ranks(_compiled, 2, stage, timeout=240)[0]
    assert actual == pytest.approx(expected, abs=1e-6) and was


def _compile_calls() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    net = nn.Linear(6, 1)  # the only block of its model
    engine = initialize(model=net, model_parameters=net.parameters(), config=_config(3))[0]
    own = net.forward = partial(nn.Linear.forward, net)
    with pytest.raises(Exception, match="unknown"):
        engine.compile(backend="unknown")
    assert not engine.is_compiled and net.forward is own
    engine.compile(backend="eager", compile_kwargs={"backend": "unknown"})
    compiled = net.forward
    assert engine.is_compiled and compiled is not own
    engine.compile(backend="eager")
    assert net.forward is compiled
    assert _step(engine).isfinite()
    engine.destroy()
    assert net.forward is own


def test_compile_takes_effect_once_and_destroy_restores_forward() -> None:
    """The argument `backend` wins, a second call does nothing, and `destroy` restores a `forward` of the script."""
    run_ranks(_compile_calls, 1)


def _gathered_by_hand() -> None:
    from windlass.compat.zero_param_status import ZeroParamStatus

    engine = _engine(3)
    weight = engine.module[0].weight
    full = _net()[0].weight.detach()
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and weight.ds_shape == full.shape
    assert weight.ds_numel == full.numel() and weight.ds_process_group is not None
    weight.all_gather()
    assert weight.ds_status is ZeroParamStatus.AVAILABLE
    torch.testing.assert_close(weight.detach(), full)
    with torch.no_grad():
        weight.mul_(2)
    weight.partition(has_been_updated=True)
    torch.testing.assert_close(weight.get_full_hp_param(), full * 2)
    others = list(engine.module.parameters())[2:]
    handles = [weight.all_gather_coalesced(others), weight.all_gather(async_op=True)]
    for handle in handles:
        handle.wait()
    for item in [weight, *others]:
        assert item.ds_status is ZeroParamStatus.AVAILABLE
    weight.partition([weight, *others])
    ids = [p.ds_id for p in engine.module.parameters()]
    assert len(set(ids)) == len(ids)
    weight.ds_active_sub_modules.add(1)
    weight.ds_active_sub_modules.clear()
    assert weight.ds_active_sub_modules == set()
    assert list(engine.module.ds_external_parameters()) == []
    engine.destroy()


def test_manual_all_gather_of_parameters() -> None:
    """`all_gather` and `partition` of a parameter work, and its attributes report its state."""
    run_ranks(_gathered_by_hand, 2)


def _ids_read_on_one_rank() -> list[int]:
    from windlass.compat.partition_parameters import Init

    first = _engine(3)
    with Init(config_dict_or_path=_config(3)):
        made = nn.Linear(6, 1)
    if first.global_rank == 0:
        assert first.module[0].weight.ds_id == first.module[0].weight.ds_id
        assert made.weight.ds_id == made.weight.ds_id != made.bias.ds_id
    second = _engine(3)
    ids = [p.ds_id for engine in (first, second) for p in engine.module.parameters()]
    for engine in (first, second):
        engine.destroy()
    return [number - ids[0] for number in ids]  # the process of a rank may have run other tests


def test_ids_are_equal_on_all_ranks() -> None:
    """Reading `ds_id` on one rank only does not change the ids of other parameters."""
    assert run_ranks(_ids_read_on_one_rank, 2) == [list(range(8))] * 2


def _wrong(what: str) -> None:
    from windlass.compat.deepspeed_initialize import initialize

    net = _net()
    if what == "two":
        initialize(args=SimpleNamespace(deepspeed_config="x.json"), model=net, config={"train_batch_size": 2})
    if what == "none":
        initialize(model=net)
    if what == "rank":
        initialize(args=SimpleNamespace(local_rank=7), model=net, config={"train_batch_size": 2})
    if what == "key":
        initialize(model=net, config=_config(2, zero_optimization={"stage": 2, "no_such_key": 1}))


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("two", "AssertionError", "two configurations"),
        ("none", "AssertionError", "no configuration"),
        ("rank", "AssertionError", "local_rank is 7"),
        ("key", "ConfigError", "zero_optimization.no_such_key"),
    ],
)
def test_bad_arguments_are_named(what: str, kind: str, text: str) -> None:
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(_wrong, 1, what)
    assert kind in caught.value.kinds


def _dtype_of_lightning_module(stage: int) -> list[torch.dtype]:
    from lightning.pytorch import LightningModule

    from windlass.compat.deepspeed_initialize import initialize

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x.to(self.dtype))

    config = {**_config(stage), "fp16": {"enabled": True, "initial_scale_power": 4}}
    module = Module()
    engine = initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    dtypes = [engine.module.dtype, engine(torch.ones(2, 6)).dtype]
    engine.destroy()
    return dtypes


@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_module_reports_the_dtype_of_fp16(stage: int) -> None:
    """DeepSpeed calls `module.half()`, and lightning's modules set their `dtype` in that call."""
    assert run_ranks(_dtype_of_lightning_module, 1, stage) == [[torch.float16, torch.float16]]


def _saved_and_loaded(stage: int, folder: str) -> list[dict[str, Any]]:
    engine = _engine(stage)
    _step(engine)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.save_checkpoint(folder, tag="own", client_state={"ds_version": "mine"})
    other = _engine(stage, steps_per_print=7)
    states = [other.load_checkpoint(folder, tag)[1] for tag in ("global_step1", "own")]
    import windlass

    native, *_ = windlass.initialize(model=_net(), config=_config(stage))
    states.append(native.load_checkpoint(folder, "global_step1", load_optimizer_states=False)[1])
    return states


@pytest.mark.parametrize("stage", [0, 3])
def test_loaded_client_state_has_the_keys_that_deepspeed_leaves_in_it(stage: int, tmp_path: Path) -> None:
    """`ds_config` is the configuration of the saved run, and a script's key of the same name wins."""
    from windlass.compat.stand_in_version import VERSION

    first, own, native = run_ranks(_saved_and_loaded, 1, stage, str(tmp_path), transport="gloo")[0]
    assert first == {"epoch": 3, "ds_config": _config(stage), "ds_version": VERSION, "global_samples": 2}
    assert own["ds_version"] == "mine" and own["ds_config"] == _config(stage)
    assert native == {"epoch": 3}
