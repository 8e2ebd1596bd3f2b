"""Tests of a sharded parameter's interface for scripts: `ds_tensor`, gradient parts, shapes in strict mode, experts."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.dist.harness import run_ranks
from tests.dist.test_compat_engine import _net
from tests.dist.test_compat_suite import _config


def _part(full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor: equal parts in rank order, the last one padded with zeros."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = -(-full.numel() // ranks)
    return torch.cat([full.reshape(-1), torch.zeros(size * ranks - full.numel(), dtype=full.dtype)]).split(size)[rank]


def _parts(dtypes: list[str]) -> None:
    from windlass.base.errors import ModelError
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.not_built import NotBuiltError
    from windlass.zero import full_param

    for precision in dtypes:
        net = _net()
        net.odd = nn.Parameter(torch.arange(15.0).view(3, 5))  # 15 elements on 2 ranks: 8 and 7
        wide = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        engine = initialize(model=net, config=_config(3, **wide))[0]
        for parameter in net.parameters():
            full = full_param(parameter).detach().to(parameter.dtype)
            shard = parameter.ds_tensor
            assert shard.shape == shard.data.shape == _part(full).shape and shard.ds_numel == shard.numel()
            assert shard.dtype == parameter.dtype and shard.is_contiguous()
            assert torch.equal(shard.clone(), _part(full)) and type(shard.clone()) is torch.Tensor
            assert torch.equal(pickle.loads(pickle.dumps(shard)), _part(full))
        odd = net.odd
        value = torch.full_like(odd.ds_tensor.data, 2.0 + dist.get_rank())
        odd.ds_tensor.data = value
        expected = torch.tensor([2.0] * 8 + [3.0] * 7).view(3, 5)
        assert torch.equal(full_param(odd).detach(), expected)
        # In-place functions, operators and views of the part write to the parameter.
        odd.ds_tensor.data.mul_(2)
        part = odd.ds_tensor
        part += 1
        part[1:3] = 9
        part.view(2, -1)[1].zero_()
        torch._foreach_neg_([odd.ds_tensor])
        flat = expected.reshape(-1) * 2 + 1
        for start, stop in ((0, 8), (8, 15)):
            own = flat[start:stop]
            own[1:3], own[4:] = 9, 0
        assert torch.equal(full_param(odd).detach().reshape(-1), -flat)
        assert torch.equal((odd.ds_tensor + 1).float(), _part(-flat) + 1)
        assert torch.equal(torch.zeros(8).copy_(odd.ds_tensor), _part(-flat))
        with pytest.raises(ModelError, match="has 3 elements, this rank's part of the parameter of shape"):
            odd.ds_tensor.data = torch.zeros(3)
        with pytest.raises(NotBuiltError, match="clone"):
            odd.ds_tensor.data_ptr()
        with pytest.raises(NotBuiltError, match="t of parameter"):
            odd.ds_tensor.view(2, 4).t()
        engine.destroy()
        assert torch.equal(net.odd.detach().float().reshape(-1), -flat)


def test_ds_tensor_reads_and_writes_this_ranks_part() -> None:
    """The ranks' parts of a parameter have equal sizes and follow its memory order. The last part is zero-padded."""
    run_ranks(_parts, 2, ["fp32", "bf16"])


def _other_parameter() -> str:
    from windlass.base.errors import ShardedParameterError
    from windlass.compat.deepspeed_initialize import initialize

    engine = initialize(model=_net(), config=_config(3))[0]
    try:
        engine.module[0 if dist.get_rank() else 2].weight.ds_tensor.clone()
    except ShardedParameterError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_ranks_that_read_parts_of_different_parameters_raise() -> None:
    found = run_ranks(_other_parameter, 2)
    assert all("rank 0: '2.weight', rank 1: '0.weight'" in message for message in found)


def _before_initialize() -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.partition_parameters import Init

    plain = _net()
    with Init(config_dict_or_path=_config(3)):
        net = _net()
        inside = net[0].weight.ds_tensor  # sharded before the context ends, as in DeepSpeed
        assert torch.equal(inside.clone(), _part(plain[0].weight.detach()))
    for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.ds_tensor.clone(), _part(other.detach()))
    if dist.get_rank() == 1:  # one rank may write alone: nothing is exchanged yet
        net[2].weight.ds_tensor.data.fill_(5)
    engine = initialize(model=net, config=_config(3))[0]
    with torch.no_grad():
        plain[2].weight[0, 4:] = 5
    assert torch.equal(engine(torch.ones(2, 6)), plain(torch.ones(2, 6)))
    engine.destroy()
    with Init():
        layer = nn.Linear(4, 4)
        assert layer.weight.ds_tensor.dtype == torch.float32


def test_parts_of_parameters_under_construction() -> None:
    run_ranks(_before_initialize, 2)


def _gradient_parts(stages: list[int]) -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.zero import full_grad

    batches = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for stage in stages:
        engine, optimizer, *_ = initialize(model=_net(), config=_config(stage))
        assert optimizer.micro_step_id == 0
        with engine.coalesce_grad_reduction():
            for batch in batches:
                engine.backward(engine(batch).square().mean())
            assert optimizer.micro_step_id == 0
        assert optimizer.micro_step_id == 1  # reduced once, at the end of the context
        grads = [full_grad(parameter) for parameter in engine.module.parameters()]
        if stage == 3:
            parts = optimizer.get_fp32_grad_partitions()
            assert list(parts) == [0] and list(parts[0]) == [0, 1, 2, 3]
            for part, grad in zip(parts[0].values(), grads, strict=True):
                assert torch.equal(part, _part(grad)) and part.dtype == torch.float32
        else:
            ids = optimizer.param_to_partition_ids
            assert list(ids) == [0] and list(ids[0]) == [
                optimizer.get_param_id(parameter) for parameter in engine.module.parameters()
            ]
            assert {rank for ranks in ids[0].values() for rank in ranks} <= {0, 1} and all(ids[0].values())
        engine.backward(engine(batches[0]).square().mean())
        assert optimizer.micro_step_id == 2
        engine.step()
        assert optimizer.micro_step_id == 0
        engine.destroy()


def test_gradient_parts_and_ranks_by_parameter() -> None:
    run_ranks(_gradient_parts, 2, [1, 3])


def _strict() -> None:
    from windlass.compat.accelerator import get_accelerator
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.partition_parameters import Init
    from windlass.compat.zero_linear import InsertPostInitMethodToModuleSubClasses, zero3_linear_wrap
    from windlass.zero import GatheredParameters

    original = F.linear
    try:
        plain = _net()
        with Init(config_dict_or_path=_config(3)):
            net = _net()
            assert net[0].weight.shape == (8, 6)  # initializers read the shape
        assert F.linear is zero3_linear_wrap and InsertPostInitMethodToModuleSubClasses.linear_bk is original
        assert (net[0].weight.shape, net[0].weight.numel(), net[0].weight.dim()) == ((0,), 0, 1)
        assert net[0].weight.ds_shape == (8, 6) and net[0].weight.ds_numel == 48
        with GatheredParameters(net[0].weight):
            assert net[0].weight.shape == (8, 6)
        engine = initialize(model=net, config=_config(3))[0]
        seen = []
        net[2].register_forward_pre_hook(lambda *_: seen.append(net[0].weight.shape))
        x = torch.ones(2, 6)
        loss = engine(x).square().mean()
        assert torch.equal(loss, plain(x).square().mean()) and seen == [(8, 6)]
        assert net[0].weight.numel() == 0
        loss.backward()
        engine.step()
        plain(x).square().mean().backward()
        torch.optim.Adam(plain.parameters(), lr=1e-2).step()
        engine.destroy()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
        for has_fp16, dtype in ((True, torch.float16), (False, torch.bfloat16)):  # the dtype depends on the processor
            with patch.object(type(get_accelerator()), "is_fp16_supported", lambda _, found=has_fp16: found), Init():
                layer = nn.Linear(4, 4)
                assert layer.weight.ds_tensor.dtype == dtype
        engine = initialize(model=_net(), config=_config(0))[0]
        engine.backward(engine(x).mean())
        engine.step()
        with pytest.raises(RuntimeError, match="Direct calls to tensor.backward"):
            engine(x).mean().backward()
        engine.destroy()
    finally:
        F.linear = original
        del InsertPostInitMethodToModuleSubClasses.linear_bk


def test_strict_mode_has_the_limits_of_deepspeed() -> None:
    """See [Note: strict mode]."""
    run_ranks(_strict, 2, env={"WINDLASS_DEEPSPEED_STRICT": "1"})


def _strict_pipeline() -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.deepspeed_pipeline import PipelineModule

    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    plain = deepcopy(nn.Sequential(*layers))
    stages = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = initialize(model=stages, config=config, model_parameters=stages.parameters())[0]
    batches = [(torch.rand(2, 3), torch.rand(2, 3)) for _ in range(2)]
    engine.train_batch(iter(batches))
    sum(F.mse_loss(plain(x), y) / 2 for x, y in batches).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for mine, other in zip(engine.module.parameters(), plain[dist.get_rank()].parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    engine.destroy()


def test_strict_mode_lets_a_pipeline_run_its_own_backward() -> None:
    """See [Note: strict mode]."""
    run_ranks(_strict_pipeline, 2, env={"WINDLASS_DEEPSPEED_STRICT": "1"})


class _ReturnsBias(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


class _UsesBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = _ReturnsBias(6, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, bias = self.inner(x)
        return self.last(hidden + bias)


def _returned() -> None:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.partition_parameters import register_external_parameter, unregister_external_parameter

    net, x = _UsesBias(), torch.ones(2, 6)
    expected = _UsesBias()(x)
    engine = initialize(model=net, config=_config(3))[0]
    assert not net.inner.bias.is_external_param
    hooks = len(net.inner._forward_hooks)
    assert torch.equal(engine(x), expected)
    assert net.inner.bias.is_external_param and not net.inner.weight.is_external_param
    assert [parameter is net.inner.bias for _, parameter in net.ds_external_parameters()] == [True]
    assert (len(net._external_params), len(net.inner._external_params)) == (1, 0)
    assert len(net.inner._forward_hooks) == hooks and torch.equal(engine(x), expected)
    engine.destroy()
    outer = _UsesBias()
    outer.inner = nn.Sequential(outer.inner)  # returns the bias of its inner module
    engine = initialize(model=outer, config=_config(3))[0]
    assert torch.equal(engine(x), expected)
    assert [parameter is outer.inner[0].bias for _, parameter in outer.ds_external_parameters()] == [True]
    assert list(outer.inner.ds_external_parameters()) == []
    engine.destroy()
    first, *others = nn.Linear(2, 2).weight, nn.Linear(2, 2).weight, nn.Linear(2, 2).weight
    user = nn.Identity()
    register_external_parameter(user, first)
    register_external_parameter(user, others[0])
    unregister_external_parameter(user, first)
    register_external_parameter(user, others[1])
    assert [id(parameter) for _, parameter in user.ds_external_parameters()] == list(map(id, others))
    compiled = _UsesBias()
    compiled.inner._compiled_call_impl = (
        compiled.inner._call_impl
    )  # as `compile()` sets it; a compiled call would include hooks
    engine = initialize(model=compiled, config=_config(3))[0]
    assert torch.equal(engine(x), expected) and not compiled.inner.bias.is_external_param
    engine.destroy()


def test_returned_parameters_are_external() -> None:
    run_ranks(_returned, 2)


def _expert_states() -> list[Any]:
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.moe_layer import MoE
    from windlass.zero import full_param

    torch.manual_seed(0)
    whole = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=1, k=1)
    with torch.no_grad():
        for number in range(4):
            whole.deepspeed_moe["experts"].deepspeed_experts[number].weight.fill_(number)
    spread = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2, k=1)
    own = {}
    for name, value in whole.state_dict().items():
        head, middle, rest = name.partition("deepspeed_experts.")
        number, _, inner = rest.partition(".")
        if not middle:
            own[name] = value
        elif int(number) // 2 == dist.get_rank():  # DeepSpeed numbers each rank's own experts from 0
            own[f"{head}{middle}{int(number) % 2}.{inner}"] = value
    before = dict(own)
    spread.load_state_dict(own)
    assert own.keys() == before.keys() and all(value is before[name] for name, value in own.items())
    engine = initialize(model=spread, config=_config(1))[0]
    held = {
        name: float(full_param(expert.weight).mean())
        for name, expert in spread.deepspeed_moe["experts"].deepspeed_experts.named_children()
    }
    engine.destroy()
    spread = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2, k=1)
    spread.load_state_dict(whole.state_dict())  # a state dict with all experts, by global number, loads too
    experts = spread.deepspeed_moe["experts"].deepspeed_experts
    return [held, [float(expert.weight.mean()) for expert in experts.children()]]


def test_moe_layer_loads_the_experts_of_one_rank() -> None:
    everywhere = [0.0, 1.0, 2.0, 3.0]
    assert run_ranks(_expert_states, 2) == [
        [{"0": 0.0, "1": 1.0}, everywhere],
        [{"2": 2.0, "3": 3.0}, everywhere],
    ]
