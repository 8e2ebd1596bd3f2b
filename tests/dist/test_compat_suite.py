"""Tests of engine behaviors that DeepSpeed's own tests check, such as skipped steps and views of optimizer states."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import pickle
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dist.harness import run_ranks
from tests.dist.test_compat_engine import _net
from windlass.base.errors import LossScalingError


def _config(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **others,
    }


def _bad_step(stages: list[int]) -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.zero import full_param

    for stage in stages:
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
        engine, optimizer, _, scheduler = initialize(model=_net(), config=_config(stage, scheduler=schedule))
        x = torch.ones(2, 6)
        before = [full_param(parameter).clone() for parameter in engine.module.parameters()]
        engine.backward(engine(x * (math.nan if engine.global_rank else 1.0)).mean())
        engine.step()  # one rank's batch has NaNs: all ranks skip the step, and none raises
        assert not engine.was_step_applied() and optimizer.overflow
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert engine.get_global_grad_norm() == math.inf and scheduler.last_batch_iteration == -1
        after = [full_param(parameter) for parameter in engine.module.parameters()]
        assert all(map(torch.equal, before, after))
        engine.backward(engine(x).mean())
        engine.step()
        assert engine.was_step_applied() and not optimizer.overflow and scheduler.last_batch_iteration == 0
        assert math.isfinite(engine.get_global_grad_norm())
        engine.destroy()


def test_step_with_nonfinite_gradient_is_skipped() -> None:
    """A non-finite gradient on one rank skips the step on all ranks, as in DeepSpeed."""
    run_ranks(_bad_step, 2, [0, 3])


def _applied_bad_step(stages: list[int]) -> None:
    from windlass.compat.deepspeed_initialize import initialize

    for stage in stages:
        bf16 = {"enabled": True, "check_grad_overflow": False}
        engine, optimizer, _, _ = initialize(model=_net(), config=_config(stage, bf16=bf16))
        x = torch.ones(2, 6, dtype=torch.bfloat16)
        engine.backward(engine(x * (math.nan if engine.global_rank else 1.0)).mean())
        engine.step()
        applied = stage < 3
        assert engine.was_step_applied() == applied and optimizer.overflow != applied
        assert (engine.skipped_steps, engine.global_steps) == (int(not applied), 1)
        if applied:
            assert bool(next(engine.module.parameters()).isnan().all())
        engine.destroy()


def test_unchecked_gradients_are_applied() -> None:
    """`bf16.check_grad_overflow: false` updates with non-finite gradients at stages 1 and 2, as in DeepSpeed."""
    run_ranks(_applied_bad_step, 2, [1, 2, 3])


def _states_by_group(stages: list[int]) -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.optimizer_group_views import MASTER_ATTRIBUTES
    from windlass.compat.tensor_fragment_api import safe_get_local_optimizer_state

    for stage in stages:
        engine, optimizer, _, _ = initialize(model=_net(), config=_config(stage))
        below = optimizer.optimizer
        for step in (1, 2):
            engine.backward(engine(torch.ones(2, 6)).square().mean())
            engine.step()
            flat = getattr(optimizer, MASTER_ATTRIBUTES[stage])[0]
            of_group, parameters = below.state[flat], list(engine.module.parameters())
            assert of_group["step"] == step == engine.global_steps and optimizer.state[flat]["step"] == step
            for name in ("exp_avg", "exp_avg_sq"):
                pieces = [safe_get_local_optimizer_state(parameter, name) for parameter in parameters]
                pieces = [piece for piece in pieces if piece is not None]
                torch.testing.assert_close(of_group[name], torch.cat([piece.view(-1) for piece in pieces]))
                assert of_group[name].numel() == flat.numel()
            own = next(p for p in parameters if safe_get_local_optimizer_state(p, "exp_avg") is not None)
            assert set(below.state[own]) == {"step", "exp_avg", "exp_avg_sq"} and len(below.state[own]) == 3
            with pytest.raises(KeyError, match="momentum"):
                below.state[own]["momentum"]
        assert not below.state and below.state["other"] == {}  # torch's own behavior for any other key
        if stage < 3:
            assert optimizer.nccl_start_alignment_factor == 2
            (parts,), (whole,) = optimizer.parallel_partitioned_bit16_groups, optimizer.bit16_groups_flat
            assert len(parts) == dist.get_world_size() and all(part.data_ptr() % 4 == 0 for part in parts)
            assert torch.equal(torch.cat(parts)[: whole.numel()], whole)
        engine.destroy()


def test_states_are_found_by_flat_master_weights() -> None:
    """`optimizer.optimizer.state` maps flat master weights to the states of a group, and a parameter to its states."""
    run_ranks(_states_by_group, 2, [1, 2, 3])


def _nothing_to_train() -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.unwrap_for_generation import unwrap_model_for_generation

    config = _config(3)
    del config["optimizer"]
    engine, optimizer, _, _ = initialize(model=_net(), config=config)
    assert optimizer is engine.optimizer and not hasattr(optimizer, "parameter_offload")  # trl checks this attribute
    assert optimizer.module is engine.module and optimizer.forward_hooks
    x = torch.ones(2, 6)
    before = engine(x)
    assert not optimizer.param_coordinator.is_invalid_trace()
    with unwrap_model_for_generation(engine) as plain:
        assert not optimizer.forward_hooks and torch.equal(plain(x), before)
    assert optimizer.forward_hooks and optimizer.get_param_coordinator().is_invalid_trace()
    assert engine.get_lr() == [] and engine.basic_optimizer is None and torch.equal(engine(x), before)
    engine.destroy()


def test_stage_3_engine_without_optimizer_has_parameter_offload() -> None:
    """Without an optimizer, `initialize` at stage 3 returns an object with the parameters' hooks in its place.

    trl unwraps reference models with it, and refuses an engine whose optimizer is None.
    """
    run_ranks(_nothing_to_train, 2)


def _born_alone() -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.partition_parameters import Init
    from windlass.compat.zero_param_status import ZeroParamStatus
    from windlass.zero import GatheredParameters

    plain = _net()
    with Init(config_dict_or_path=_config(3)), Init(config_dict_or_path=_config(3)):
        net = _net()
    with Init(config_dict_or_path=_config(3)):
        with Init(config_dict_or_path=_config(3)):
            inner = _net()
        assert inner[0].weight.ds_numel == plain[0].weight.numel()  # the inner context has sharded the model
        alone = initialize(model=inner, model_parameters=inner.parameters(), config=_config(3))[0]
        second = _net()
    assert torch.equal(alone(torch.ones(2, 6)), plain(torch.ones(2, 6))) and hasattr(second[0].weight, "ds_id")
    alone.destroy()
    for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE and parameter.ds_numel == other.numel()
        assert torch.equal(parameter.ds_tensor.clone(), other.detach().view(-1))
    net[0].weight.all_gather()
    assert net[0].weight.ds_status == ZeroParamStatus.AVAILABLE and torch.equal(net[0].weight, plain[0].weight)
    net[0].weight.partition()
    with GatheredParameters(net[2].bias, modifier_rank=0), torch.no_grad():
        net[2].bias.fill_(2.0)
        plain[2].bias.fill_(2.0)
    engine = initialize(model=net, model_parameters=net.parameters(), config=_config(3))[0]
    x = torch.ones(2, 6)
    assert torch.equal(engine(x), plain(x)) and all(hasattr(p, "ds_id") for p in net.parameters())
    engine.destroy()
    assert torch.equal(net(x), plain(x))


def test_zero_init_on_one_rank_shards_parameters() -> None:
    """`zero.Init` shards on one rank too, since a script may read `ds_numel` on any number of ranks."""
    run_ranks(_born_alone, 1)


def _scales() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    # torch_adam is at the wrong place, where DeepSpeed does not read it
    adam = {"type": "Adam", "params": {"lr": 1e-2}, "torch_adam": True}
    for scale, dynamic in ((138.0, False), (0, True)):
        fp16 = {"enabled": True, "loss_scale": scale, "initial_scale_power": 4, "loss_scale_window": 1}
        engine, optimizer, _, _ = initialize(model=_net(), config=_config(1, fp16=fp16, optimizer=adam))
        first = scale or 16
        assert (optimizer.dynamic_loss_scale, optimizer.scale_window) == (dynamic, 1)
        assert optimizer.loss_scaler.loss_scale == optimizer.loss_scale == optimizer.cur_scale == first
        assert optimizer.unscale_and_clip_grads([], 0.0, apply_scale=False) == first
        assert optimizer.needs_scaler() and optimizer.loss_scaler.cur_iter == 0
        # as in DeepSpeed, the scale grows only after `window + 1` good steps
        for steps, factor in ((1, 1), (2, 2 if dynamic else 1)):
            engine.backward(engine(torch.ones(2, 6).half()).mean())
            engine.step()
            assert optimizer.loss_scaler.cur_scale == optimizer.cur_scale == first * factor
            assert optimizer.loss_scaler.cur_iter == steps
        for owner, name in ((optimizer, "loss_scale"), (optimizer, "cur_scale"), (optimizer.loss_scaler, "cur_scale")):
            setattr(owner, name, 4.0)
            assert engine.loss_scale() == optimizer.loss_scaler.loss_scale == optimizer.loss_scale == 4.0
            optimizer.loss_scale = 8
        for value in (0, -1.0, float("nan"), float("inf"), *([0.5] if dynamic else [])):
            with pytest.raises(LossScalingError, match="loss scale cannot be set to"):
                optimizer.loss_scale = value
        engine.backward(engine(torch.ones(2, 6).half()).mean())
        with pytest.raises(LossScalingError, match="in the middle of a step"):
            optimizer.loss_scale = 4.0
        with pytest.raises(LossScalingError, match="in the middle of a step"):
            optimizer.override_loss_scale(4.0)
        assert engine.dynamic_loss_scale() == dynamic
        optimizer.loss_scale = 8  # setting the current value is allowed
        assert engine.loss_scale() == 8
        engine.step()
        optimizer.override_loss_scale(0.5)  # min_loss_scale, 1 here, limits only dynamic scales
        assert engine.loss_scale() == optimizer.loss_scaler.loss_scale == 0.5
        assert optimizer.offload_states() is None
        optimizer.reload_states()
        engine.destroy()


def test_optimizer_shows_the_loss_scale() -> None:
    run_ranks(_scales, 1)


def _own_scale_and_clip() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    engine, optimizer, _, _ = initialize(
        model=_net(), config=_config(1, fp16=fp16, optimizer=sgd, gradient_clipping=5.0)
    )
    assert (optimizer.clip_grad, optimizer.custom_loss_scaler, optimizer.external_loss_scale) == (5.0, False, None)
    norms = []
    for call in (optimizer.loss_scaler.backward, engine.backward, optimizer.loss_scaler.backward):
        before = [p.detach().float().clone() for p in engine.module.parameters()]
        call(engine(torch.ones(2, 6).half()).float().square().mean())
        engine.step()
        moved = [p.detach().float() - q for p, q in zip(engine.module.parameters(), before, strict=True)]
        norms.append(torch.stack([one.norm() for one in moved]).norm().item())
        optimizer.override_loss_scale(32.0)
        assert engine.loss_scale() == optimizer.loss_scale == optimizer.external_loss_scale == 32.0
        optimizer.clip_grad = 0.01
    assert engine.global_steps == 3 and norms[0] > 0.1 and norms[1:] == pytest.approx([0.01, 0.01], rel=0.05)
    call(engine(torch.ones(2, 6).half()).float().square().mean())
    optimizer.override_loss_scale(32.0)  # the current scale may be set in the middle of a step
    with pytest.raises(LossScalingError, match="in the middle of a step"):
        optimizer.override_loss_scale(0.25)
    engine.optimizer = SimpleNamespace(wrapped=optimizer)  # an optimizer without clip_grad
    engine.step()
    optimizer.loss_scaler.cur_scale *= 2
    assert engine.loss_scale() == optimizer.loss_scaler.loss_scale == 64.0
    engine.destroy()


def test_a_script_sets_the_scale_and_the_clipping() -> None:
    """Gradients are divided by the scale of `override_loss_scale` and clipped to `clip_grad`."""
    run_ranks(_own_scale_and_clip, 1)


def _masters_by_group(stages: list[int]) -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.zero import full_param

    for stage in stages:
        net = _net()
        parallel_groups = [{"params": [p for p in net.parameters() if p.dim() == dim]} for dim in (2, 1)]
        config = _config(stage, bf16={"enabled": True})
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine, optimizer, _, _ = initialize(model=net, model_parameters=parallel_groups, config=config)
        engine.backward(engine(torch.ones(2, 6).bfloat16()).float().square().mean())
        engine.step()
        assert hasattr(optimizer, "single_partition_of_fp32_groups") == (stage < 3)
        name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        masters = getattr(optimizer, name)
        assert len(masters) == 2 and masters[-1].equal(masters[1]) and len(masters[:]) == 2
        for flat, group in zip(masters, optimizer.param_groups, strict=True):
            assert flat.dtype == torch.float32 and flat.dim() == 1
            have = torch.stack([torch.tensor(flat.numel() * 1.0), flat.square().sum()])
            dist.all_reduce(have)
            wholes = [full_param(parameter) for parameter in group["params"]]
            assert have[0] == sum(full.numel() for full in wholes)
            assert torch.isclose(have[1], sum(full.square().sum() for full in wholes))
        engine.destroy()


def test_optimizer_shows_master_weights_by_group() -> None:
    run_ranks(_masters_by_group, 2, [1, 2, 3])


def _read_apart() -> None:
    import windlass
    from windlass.base.errors import ShardedParameterError
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.partition_parameters import Init

    for under_init in (False, True):
        with Init(config_dict_or_path=_config(3), enabled=under_init):
            net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        engine = initialize(model=net, config=_config(3))[0] if not under_init else None
        result = net.state_dict()
        with pytest.raises(ShardedParameterError, match=r"rank 0: .*, rank 1: .*; save"):
            result[f"{dist.get_rank()}.weight"].sum()
        # afterwards, reading the same parameter on all ranks works
        assert result["0.weight"].sum() == windlass.zero.full_param(net[0].weight).sum()
        if engine is not None:
            engine.destroy()
    own = windlass.initialize(model=_net(), config=_config(3))[0]
    with pytest.raises(ShardedParameterError):  # a windlass engine does not provide the names
        own.module.state_dict()
    own.destroy()


def test_ranks_that_read_different_parameters_raise() -> None:
    """Ranks that read different parameters raise.

    transformers iterates over sets of names while saving, and shards of two weights must not be joined.
    """
    run_ranks(_read_apart, 2)


def _built_beside_names() -> dict[str, list[str]]:
    from tests.dist.test_sharded_init import AWKWARD, all_differences
    from windlass.compat import parameter_attributes

    parameter_attributes.install_parameter_attributes()
    return all_differences([*AWKWARD, "weight_norm"], True)


def test_models_under_init_equal_those_without_the_stand_in() -> None:
    """Only `state_dict()` returns names without values.

    Code that detaches a weight to write to it, or makes another weight of it, gets values.
    """
    assert run_ranks(_built_beside_names, 2) == [{}, {}]


def _coalesced(stages: list[int]) -> None:
    from windlass.compat import optimizer_classes as kinds
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.not_built import NotBuiltError
    from windlass.compat.rank_logging import logger
    from windlass.compat.z3_leaf_modules import get_z3_leaf_modules
    from windlass.zero import full_param

    batches = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    for stage in stages:
        ends = []
        for coalesces in (False, True):
            engine, optimizer, _, _ = initialize(model=_net(), config=_config(stage))
            context = engine.coalesce_grad_reduction() if coalesces else contextlib.nullcontext()
            with context:
                for number, batch in enumerate(batches):
                    engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
                    engine.backward(engine(batch).square().mean())
                if coalesces:
                    with pytest.raises(AssertionError, match="no_sync"):
                        engine.step()
                    with pytest.raises(AssertionError, match="nested"), engine.coalesce_grad_reduction():
                        pass
            engine.step()
            assert engine.global_steps == 1
            ends.append([full_param(parameter).clone() for parameter in engine.module.parameters()])
            parallel_groups = optimizer.fp16_groups if stage == 3 else optimizer.bit16_groups
            assert [list(map(id, group)) for group in parallel_groups] == [list(map(id, engine.module.parameters()))]
            assert list(optimizer.averaged_gradients) == [0] and len(optimizer.averaged_gradients[0]) == 4
            assert isinstance(optimizer, kinds.ZeROOptimizer) and not isinstance(optimizer, kinds.BF16_Optimizer)
            assert isinstance(optimizer, kinds.DeepSpeedZeroOptimizer_Stage3) == (stage == 3)
            assert isinstance(optimizer, kinds.DeepSpeedZeroOptimizer) == (stage < 3)
            engine.destroy()
        for full, coalesced in zip(*ends, strict=True):
            torch.testing.assert_close(coalesced, full)
    marked = _config(3, log_level="error")
    marked["zero_optimization"]["leaf_module"] = {"classes": "Tanh", "names": ["2", "nobody"]}
    before, own = logger.level, logging.getLogger("windlass").level
    engine = initialize(model=_net(), config=marked)[0]
    assert get_z3_leaf_modules(engine.module) == [engine.module[1], engine.module[2]]
    assert logger.level == logging.ERROR
    logger.setLevel(before)
    logging.getLogger("windlass").setLevel(own)
    engine.destroy()
    engine, optimizer, _, _ = initialize(model=_net(), config=_config(0, bf16={"enabled": True}))
    assert isinstance(optimizer, kinds.FP16_Optimizer) and not isinstance(optimizer, kinds.ZeROOptimizer)
    assert engine._get_ckpt_name("dir", "tag") == "dir/tag/mp_rank_00_model_states.pt"
    assert engine._get_optimizer_ckpt_name("dir", "tag", 1) == "dir/tag/expp_rank_1_mp_rank_00_optim_states.pt"
    with pytest.raises(AssertionError, match="scalar"):
        engine.scale(torch.ones(2))
    with pytest.raises(NotBuiltError, match="stage 1, 2 or 3"), engine.coalesce_grad_reduction():
        pass
    engine.destroy()
    wide = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine = initialize(model=_net(), config=_config(1, **wide))[0]
    with pytest.raises(NotBuiltError, match="optimizer wrapper"), engine.coalesce_grad_reduction():
        pass
    engine.destroy()
    engine = initialize(model=_net(), config=_config(2, managed_gradient_accumulation=False))[0]
    with pytest.raises(AssertionError, match="managed"), engine.coalesce_grad_reduction():
        pass
    engine.pipeline_parallelism = True  # as scripts set it
    with pytest.raises(NotBuiltError, match="pipeline"), engine.coalesce_grad_reduction():
        pass
    engine.destroy()


def test_coalesced_backwards_equal_single_backwards() -> None:
    """Gradients reduced once after several backwards give the same step as separate reductions."""
    run_ranks(_coalesced, 2, [1, 2, 3])


def _scattered() -> None:
    from windlass.compat.coalesced_collectives import reduce_scatter_coalesced

    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = [torch.arange(size, dtype=torch.float32).view(shape) for size, shape in ((6, (2, 3)), (3, (3,)), (1, ()))]
    parts = reduce_scatter_coalesced([tensor * (rank + 1) for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        size = -(-tensor.numel() // ranks)
        mean = tensor.view(-1) * (ranks + 1) / 2
        torch.testing.assert_close(part, mean[rank * size : (rank + 1) * size])


def test_reduce_scatter_of_several_tensors() -> None:
    """Each rank gets its part of the mean; the last parts are shorter or empty."""
    run_ranks(_scattered, 2)


def _group_views(stages: list[int]) -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.tensor_fragment_api import safe_get_local_grad, safe_set_local_grad

    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(ranks, 2, 2, 6, generator=torch.Generator().manual_seed(3))
    plain = _net()
    for batch in batches.flatten(0, 1):
        (plain(batch).square().mean() / 2 / ranks).backward()
    grads = [parameter.grad for parameter in plain.parameters()]
    norm_functions = [torch.cat([g.reshape(-1) for g in part]).norm() for part in (grads[:2], grads[2:])]
    for stage in stages:
        net = _net()
        layers = list(net.children())
        parallel_groups = [{"params": list(layer.parameters())} for layer in (layers[0], layers[2])]
        config = _config(stage, gradient_accumulation_steps=2)
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine, optimizer, _, _ = initialize(model=net, model_parameters=parallel_groups, config=config)
        for number, batch in enumerate(batches[rank]):
            engine.backward(engine(batch).square().mean())
            if number == 0:
                engine.step()
        torch.testing.assert_close(optimizer._get_norm_groups(), norm_functions)
        if stage < 3:
            held = optimizer.accumulated_grads_in_cpu
            assert list(held) == [0, 1, 2, 3] and all(held[number].device.type == "cpu" for number in held)
            flats = optimizer.bit16_groups_flat
            assert [flat.grad_fn for flat in flats] == [None, None]
            torch.testing.assert_close(flats[1], torch.cat([p.detach().reshape(-1) for p in layers[2].parameters()]))
        pieces = optimizer.get_fp32_grad_partitions()
        for group, layer in enumerate((layers[0], layers[2]) if stage < 3 else ()):
            for index, parameter in enumerate(layer.parameters()):
                assert torch.equal(pieces[group][index], safe_get_local_grad(parameter).float())
        for parameter in layers[2].parameters():
            safe_set_local_grad(parameter, safe_get_local_grad(parameter) / 2)
        expected = [norm_functions[0], norm_functions[1] / 2]
        torch.testing.assert_close(optimizer._get_norm_groups(), expected)
        engine.step()
        assert float(optimizer._global_grad_norm) == pytest.approx(float(torch.stack(expected).norm()), rel=1e-5)
        if stage < 3:
            assert len(optimizer.accumulated_grads_in_cpu) == 0
        engine.destroy()


def test_the_optimizer_shows_gradients_and_their_norms_by_group() -> None:
    """Norms of groups equal those of plain torch's gradients, before and after a script changes them."""
    run_ranks(_group_views, 2, [1, 2, 3])


def _flat_gradients() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    config = _config(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    config["gradient_accumulation_steps"] = 2
    engine, optimizer, *_ = initialize(model=torch.nn.Linear(4, 1, bias=False), config=config)
    for number in range(2):
        engine.set_gradient_accumulation_boundary(number == 1)
        rows = torch.arange(4.0).bfloat16() + 10 * number + 4 * dist.get_rank()
        engine.backward(engine(rows).sum())
    gradient = optimizer.fp32_groups_gradients_flat[0]
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, torch.arange(4.0) + 5 + 2 * (dist.get_world_size() - 1))
    engine.destroy()
    unmanaged = _config(1, managed_gradient_accumulation=False)
    engine = initialize(model=torch.nn.Linear(4, 1), config=unmanaged)[0]
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)
    engine.destroy()


def test_the_optimizer_of_bf16_shows_flat_reduced_gradients() -> None:
    run_ranks(_flat_gradients, 2)


def _dtypes_kept() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    for stage in (0, 3):
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        net.register_buffer("inv_freq", torch.full((6,), 1 + 2**-9))
        config = _config(stage, bf16={"enabled": True})
        engine, _, _, _ = initialize(model=net, model_parameters=net.parameters(), config=config)
        assert engine._config.param_dtype is engine._config.buffer_dtype is None
        assert engine._config.zero_enabled == (stage > 0) and engine._config.optimizer_name == "adam"
        assert engine._mixed_precision_dtypes() == (torch.bfloat16, None)
        assert torch.equal(engine.module.inv_freq, torch.full((6,), 1 + 2**-9))
        assert {buffer.dtype for buffer in net[1].buffers()} == {torch.bfloat16, torch.long}
        engine.backward(engine(torch.randn(4, 6).bfloat16()).square().mean())
        engine.step()
        engine.destroy()


def test_buffers_keep_their_dtype_beside_16_bit_parameters() -> None:
    """Buffers keep their dtype, as in DeepSpeed since 0.19.

    The statistics of a norm follow the dtype of its weights, because torch supports no other pair.
    """
    run_ranks(_dtypes_kept, 1)


def _set_by_hand() -> list[tuple[float, list[torch.Tensor]]]:
    from windlass.compat.deepspeed_initialize import initialize

    ends = []
    for fp16 in (False, True):
        config = _config(0, optimizer={"type": "SGD", "params": {"lr": 0.5}}, gradient_accumulation_steps=2)
        if fp16:
            config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 2}
        engine, optimizer, _, _ = initialize(model=_net(), config={**config, "gradient_clipping": 0.0})
        scale = 16.0 if fp16 else 1.0
        for value in (math.inf, 0.25):
            for number in range(2):
                x = torch.ones(2, 6, dtype=torch.float16 if fp16 else torch.float32)
                engine.backward(engine(x).mean())
                if number:
                    for parameter in engine.module[0].parameters():
                        parameter.grad = torch.empty_like(parameter)
                        parameter.grad.fill_(value * scale)
                engine.step()
            if value == math.inf:
                assert optimizer.overflow and engine.skipped_steps == 1
                if fp16:
                    scale /= 2
                    facts = optimizer.loss_scale_config
                    assert facts.dynamic_loss_scale and facts.cur_iter == 1 and facts.cur_scale == scale
        ends.append((optimizer.cur_scale, [parameter.detach().float() for parameter in engine.module.parameters()]))
        engine.destroy()
    return ends


def test_gradients_that_a_script_sets_at_stage_0_are_stepped() -> None:
    """As in DeepSpeed, a value set in `.grad` replaces the parameter's gradients of the backward passes."""
    for result in run_ranks(_set_by_hand, 2):
        for fp16, (_, after) in enumerate(result):
            plain = _net()
            plain(torch.ones(2, 6)).mean().backward()
            for parameter in plain[0].parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
            for item, other in zip(after, plain.parameters(), strict=True):
                torch.testing.assert_close(item, other.detach(), rtol=0, atol=2e-3 if fp16 else 1e-6)


def _basic_optimizer() -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.optimizers.fused_optimizers import FusedAdam, FusedLion
    from windlass.engine.sharded_optimizer import ShardedOptimizer

    x = torch.ones(2, 6)
    for kind, given in (("own", None), ("made", torch.optim.AdamW), ("named", "adam"), ("named", "lion")):
        model = _net()
        config = _config(0)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1) if given is None else given
        if kind == "named":
            config["optimizer"], own = {"type": given, "params": {"lr": 0.1}}, None
        else:
            del config["optimizer"]
        engine, optimizer, _, _ = initialize(
            model=model, model_parameters=model.parameters(), config=config, optimizer=own
        )
        rule = {"own": torch.optim.SGD, "made": torch.optim.AdamW}.get(
            kind, FusedLion if given == "lion" else FusedAdam
        )
        assert isinstance(optimizer, rule) and isinstance(optimizer, ShardedOptimizer)
        assert (optimizer == own) == (kind == "own") and optimizer == optimizer != object()
        assert torch.optim.lr_scheduler.StepLR(optimizer, 1).optimizer is optimizer
        before = next(engine.module.parameters()).detach().clone()
        engine.backward(engine(x).square().mean())
        optimizer.step()
        assert engine.global_steps == 1 and not torch.equal(before, next(engine.module.parameters()))
        engine.destroy()
    engine, optimizer, _, _ = initialize(model=_net(), config=_config(1))
    assert not isinstance(optimizer, FusedAdam), "from stage 1 on DeepSpeed wraps it, and so does the stand-in"
    engine.destroy()


def test_stage_0_optimizer_is_an_instance_of_the_scripts_class() -> None:
    run_ranks(_basic_optimizer, 1)


class _ModeSGD(torch.optim.SGD):
    """SGD with members of its own, as schedule-free optimizers have them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor, self.steps, self.training = 1.0, 0, False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.training, "train() was not called"
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] * self.factor)


def _members_of_the_scripts_class() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    x = torch.ones(2, 6)
    model, plain = _net(), _net()
    config = _config(0, gradient_clipping=0.0)
    del config["optimizer"]
    own, reference = _ModeSGD(model.parameters()), _ModeSGD(plain.parameters())
    engine, optimizer, _, _ = initialize(model=model, optimizer=own, config=config)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(3):
        for each, net in ((optimizer, engine.module), (reference, plain)):
            each.train()
            each.factor = 2.0 + number
            net.train()
        engine.backward(engine(x).square().mean())
        engine.step()
        schedule.step()
        plain(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
        reference.param_groups[0]["lr"] *= 0.5
        assert (optimizer.steps, optimizer.factor) == (own.steps, own.factor) == (number + 1, 2.0 + number)
    for item, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(item.detach(), other.detach())
    optimizer.label = "first"
    assert optimizer.label == "first" and not hasattr(optimizer, "eval") and not hasattr(own, "label")
    engine.destroy()


def test_stage_0_optimizer_has_the_members_of_the_scripts_class() -> None:
    """At stage 0 in fp32 DeepSpeed returns the script's own object, with its methods and attributes."""
    run_ranks(_members_of_the_scripts_class, 1)


_COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: _saved_and_loaded(value),
}


def _saved_and_loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _copied_optimizer(offload: str) -> None:
    from transformers.optimization import Adafactor

    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.optimizers.fused_optimizers import FusedAdam

    x = torch.ones(2, 6)
    rules: dict[str, Any] = {
        "AdamW": torch.optim.AdamW,
        "Adafactor": torch.optim.Adafactor,
        "rows": partial(Adafactor, relative_step=False, scale_parameter=False),
        "named": None,
    }

    def net() -> nn.Module:
        # A state of shape [6] belongs to the weight [1, 6].
        return nn.Sequential(_net(), nn.Linear(1, 6, bias=False), nn.Linear(6, 1))

    for rule in rules.values():
        model, section = net(), {"stage": 0, "offload_optimizer": {"device": offload}}
        config = _config(0, gradient_clipping=0.0, zero_optimization=section, zero_force_ds_cpu_optimizer=False)
        own = rule(model.parameters(), lr=0.1) if rule is not None else None
        if own is not None:
            del config["optimizer"]
        engine, optimizer, _, _ = initialize(model=model, optimizer=own, config=config)
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
        shallow = copy.copy(optimizer)
        assert shallow.param_groups is optimizer.param_groups
        made = [make(optimizer) for make in _COPIES.values()] if engine.global_rank == 0 else []
        engine.backward(engine(x).square().mean())
        engine.step()
        for copied in made:
            assert type(copied) is type(shallow) is (FusedAdam if own is None else type(own))
            parameters = copied.param_groups[0]["params"]
            names = [name for name, _ in model.named_parameters()]
            output = torch.func.functional_call(net(), dict(zip(names, parameters, strict=True)), (x,))
            output.square().mean().backward()
            copied.step()
            torch.testing.assert_close(parameters, list(engine.module.parameters()))
        engine.destroy()


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_copies_of_the_stage_0_optimizer_are_plain_optimizers(offload: str) -> None:
    """As in DeepSpeed, one rank may copy or pickle it alone; the copy steps as the engine does."""
    run_ranks(_copied_optimizer, 2, offload, transport="gloo")


class _Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _Counted.calls += 1
        return super().forward(x)


def _one_stage() -> None:
    from windlass.compat import activation_names
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.deepspeed_pipeline import PipelineModule

    def engine_of(**section: Any) -> Any:
        layers = [torch.relu, torch.tanh, _Counted(6, 6), _Counted(6, 6)]
        model = PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)
        return initialize(model=model, model_parameters=model.parameters(), config=_config(1, pipeline=section))[0]

    batch = torch.ones(2, 6), torch.ones(2, 6)
    engine = engine_of(activation_checkpoint_interval=1)
    assert engine.module.is_checkpointable_results == [False, False, True, True]
    assert engine._reentrant_activation_checkpointing()
    _Counted.calls = 0
    engine.train_batch(iter([batch]))
    assert _Counted.calls == 4, "each layer is computed again, on one stage too"
    engine.module.set_checkpoint_interval(3)
    assert engine.module.is_checkpointable_results == [True, True]
    engine.module.set_checkpoint_interval(0)
    assert not engine._reentrant_activation_checkpointing() and engine.module.is_checkpointable_results == []
    _Counted.calls = 0
    engine.train_batch(iter([batch]))
    assert _Counted.calls == 2
    engine.destroy()
    engine = engine_of(activation_checkpoint_interval=1, use_reentrant=False)
    assert not engine._reentrant_activation_checkpointing()
    assert engine.module.activation_checkpoint_func is activation_names.non_reentrant_checkpoint
    engine.destroy()


def test_pipeline_of_one_stage_recomputes_layers() -> None:
    """`activation_checkpoint_interval` of the configuration applies for any number of stages."""
    run_ranks(_one_stage, 1)


def _experts_of_a_script() -> None:
    from windlass.compat import norm_functions, parallel_groups

    rank, world = dist.get_rank(), dist.get_world_size()
    parallel_groups._create_expert_and_data_parallel(2)
    parallel_groups._create_expert_and_data_parallel(2)  # a second call is not needed, and has no effect
    parallel_groups._create_expert_and_data_parallel(world, use_data_before_expert_parallel_=True)
    assert parallel_groups._get_expert_parallel_group_ranks("ep_size_2") == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert parallel_groups._get_expert_data_parallel_group_ranks("ep_size_2") == list(range(rank % 2, world, 2))
    assert dist.get_process_group_ranks(parallel_groups._get_max_expert_parallel_group()) == list(range(world))
    assert parallel_groups._get_max_expert_size_name() == f"ep_size_{world}"
    with pytest.raises(AssertionError, match="not a multiple"):
        parallel_groups._create_expert_and_data_parallel(3)
    dense, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    dense.grad, expert.grad = torch.ones(1), torch.full((1,), float(rank + 1))
    expert.allreduce, expert.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    norm = norm_functions.clip_grad_norm_(iter([dense, expert]), max_norm=0.1)
    first = rank // 2 * 2 + 1
    expected = math.sqrt(1 + first**2 + (first + 1) ** 2)  # over the experts on both ranks
    assert norm.item() == pytest.approx(expected) and dense.grad.item() == pytest.approx(0.1 / expected)
    dense.grad = torch.ones(1)
    expert.grad = torch.full((1,), float(rank + 1))
    assert norm_functions.clip_grad_norm_([dense, expert], 0.1, math.inf).item() == first + 1
    check, local = norm_functions.CheckOverflow([[dense, expert]]), [-1.0 if rank == 1 else 1.0]
    assert check.check_using_norm(local, reduce_overflow=False), "ranks that share experts skip a step together"
    assert norm_functions.CheckOverflow([[dense]]).check_using_norm(local, reduce_overflow=False) == (rank == 1)


def test_script_creates_expert_groups() -> None:
    run_ranks(_experts_of_a_script, 4)


def _experts_beside_tensor_ranks() -> None:
    from windlass.compat import parallel_groups

    rank = dist.get_rank()
    with pytest.raises(NotImplementedError, match="mp_size = 2"):
        parallel_groups._create_expert_and_data_parallel(2, mp_size=2, use_data_before_expert_parallel_=True)
    parallel_groups._create_expert_and_data_parallel(2, mp_size=2)
    assert parallel_groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    assert parallel_groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank // 2 * 2, rank // 2 * 2 + 1]
    parallel_groups._create_expert_and_data_parallel(1, mp_size=2, pp_size=2, mp_mode="sp")
    assert parallel_groups._get_expert_data_parallel_group_ranks("ep_size_1") == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_script_creates_expert_groups_beside_tensor_ranks() -> None:
    run_ranks(_experts_beside_tensor_ranks, 4)


def _activation_option_of_a_script() -> None:
    from windlass.compat import activation_names
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.parallel.activation_checkpoint_api import set_options

    set_options(None)  # the process of a rank may have run other tests
    activation_names.partition_activations_in_checkpoint(True)
    model, config = nn.Linear(6, 6), _config(1, activation_checkpointing={"profile": True})
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    assert activation_names.PARTITION_ACTIVATIONS and not activation_names.PROFILE_TIME
    assert not activation_names.is_configured(), "a script that asks still passes its mpu to configure"
    engine.destroy()
    set_options(None)


def test_an_activation_option_that_a_script_sets_stays() -> None:
    run_ranks(_activation_option_of_a_script, 1)


def _norms_of_parts() -> None:
    from windlass.compat import norm_functions
    from windlass.compat.pipeline_grid import PipelineParallelGrid
    from windlass.compat.process_topology import PipeModelDataParallelTopology

    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    rank = dist.get_rank()
    replicated, part, tied = own = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    part.tensor_model_parallel = True  # type: ignore[attr-defined]
    tied.ds_pipe_replicated = grid.get_stage_id() == 1  # type: ignore[attr-defined]
    replicated.grad, part.grad, tied.grad = torch.full((1,), 3.0), torch.full((1,), rank + 1.0), torch.full((1,), 5.0)
    norm = math.sqrt(2 * 9 + 30 + 25)  # `replicated` counts once a stage, `part` on each rank, `tied` once
    assert norm_functions.get_grad_norm(own, mpu=grid) == pytest.approx(norm)
    assert norm_functions.get_weight_norm(own, mpu=grid) == pytest.approx(math.sqrt(2 + 4 + 1))
    assert norm_functions.clip_gradients(iter(own), norm / 2, mpu=grid) == pytest.approx(norm)
    assert [p.grad.item() for p in own] == pytest.approx([1.5, (rank + 1) / 2, 2.5])
    flat = nn.Parameter(torch.ones(1))
    flat.grad = torch.full((1,), rank + 1.0)
    assert norm_functions.get_flattened_grad_norm([flat], mpu=grid) == pytest.approx(math.sqrt(30))
    for parameter in own:
        parameter.grad = torch.zeros(1)
    assert norm_functions.get_grad_zeros(own, mpu=grid) == 2 + 4 + 1
    experts, pair = [torch.tensor([rank + 1.0])], grid.get_slice_parallel_group()
    of_pair = math.hypot(rank // 2 * 2 + 1, rank // 2 * 2 + 2)
    assert norm_functions.get_global_norm_of_tensors(experts, moe_ep_group=pair).item() == pytest.approx(of_pair)
    assert norm_functions.get_global_norm_of_tensors(experts, math.inf, None, False, pair).item() == rank // 2 * 2 + 2
    of_stages = math.hypot(rank % 2 + 1, rank % 2 + 3)  # without the other rank of this rank's stage
    alone = grid.get_data_parallel_group()
    assert norm_functions.get_global_norm_of_tensors(experts, 2, grid, False, alone).item() == pytest.approx(of_stages)


def test_norms_count_each_part_of_a_model_once() -> None:
    run_ranks(_norms_of_parts, 4)


def test_a_norm_that_is_not_finite_scales_nothing() -> None:
    from windlass.compat import norm_functions

    tensors = [torch.tensor([1.0, math.nan]), torch.ones(1)]
    assert norm_functions.clip_tensors_by_global_norm(tensors, 0.5).item() == -1.0  # type: ignore[union-attr]
    assert tensors[1].item() == 1.0


def _exchanged() -> None:
    from windlass.compat.sequence_exchange import SequenceAllToAll

    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = dist.group.WORLD
    assert everybody is not None
    for heads in (4, 3):  # 3 heads do not divide: the first rank has one more
        full = torch.randn(2, 6, heads, 5, generator=torch.Generator().manual_seed(0))
        own = full.chunk(world, 1)[rank].clone().requires_grad_()
        result = SequenceAllToAll.apply(everybody, own, 2, 1, 0)
        assert torch.equal(result, full.tensor_split(world, 2)[rank])
        back = SequenceAllToAll.apply(everybody, result, 1, 2, 0)
        assert torch.equal(back, own)
        weights = torch.randn(full.shape, generator=torch.Generator().manual_seed(1))
        (result * weights.tensor_split(world, 2)[rank]).sum().backward()
        assert torch.equal(own.grad, weights.chunk(world, 1)[rank])  # type: ignore[arg-type]


def test_tokens_are_swapped_for_heads_and_back() -> None:
    run_ranks(_exchanged, 2)


def _copies_of_sharded_layers() -> None:
    from peft.utils.other import ModulesToSaveWrapper

    from windlass.compat.partition_parameters import Init
    from windlass.zero import GatheredParameters

    torch.manual_seed(dist.get_rank())
    with Init(config_dict_or_path=_config(3)):
        layer = nn.Embedding(6, 4)
    imported = SimpleNamespace(zero=SimpleNamespace(GatheredParameters=GatheredParameters))
    with patch.dict(sys.modules, {"deepspeed": imported}):  # peft imports it for the gather
        copied = ModulesToSaveWrapper(layer, "default").modules_to_save["default"]  # type: ignore[no-untyped-call]
    assert layer.weight.numel() == 24, "other readers see the shape of the whole"
    with GatheredParameters([layer.weight]):
        torch.testing.assert_close(copied.weight, layer.weight, rtol=0, atol=0)
    assert copied.weight.requires_grad and not layer.weight.requires_grad


@pytest.mark.parametrize("ranks", [1, 2])
def test_peft_copies_layers_that_zero_init_sharded(ranks: int) -> None:
    """peft copies the layers of `modules_to_save`, after a gather of parameters that have no elements."""
    pytest.importorskip("peft")
    run_ranks(_copies_of_sharded_layers, ranks)
