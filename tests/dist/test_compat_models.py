"""Tests of client operations on the model of a stage-3 engine under the compat layer.

Clients read names and values of `state_dict`, move the model, and create a second engine for it.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.harness import run_ranks

RANKS = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def config(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "gradient_clipping": 0.0}


def engine_of(net: nn.Module, stage: int, **others: Any) -> Any:
    from windlass.compat.deepspeed_initialize import initialize

    return initialize(model=net, config={**config(stage), **others})[0]


ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


def reads(under_init: bool) -> dict[str, Any]:
    """Read names of `state_dict` on one rank and values on all. Return them, and the number of refused changes."""
    from windlass.base.errors import ShardedParameterError
    from windlass.compat.partition_parameters import Init

    with Init(config_dict_or_path={**config(3), "strange": 1, "aio": {"odd": 2}}, enabled=under_init):
        net = model()
    if not under_init:
        engine_of(net, 3, optimizer=ADAM, aio={"odd": 2})
    results: dict[str, Any] = {}
    if dist.get_rank() == 0:  # on one rank, as peft does while saving
        results["names"] = [(name, tuple(value.shape), value.dtype) for name, value in net.state_dict().items()]
    states = net.state_dict()
    results["values"] = {name: value.cpu().clone() for name, value in states.items()}
    results["equal"] = [torch.equal(value, results["values"][name]) for name, value in states.items()]
    results["plain"] = {type(value) for value in results["values"].values()} == {Tensor}
    first, results["refused"] = next(iter(states.values())), 0
    for change in (lambda: first.zero_(), lambda: first.__setitem__(0, 1.0), lambda: pickle.dumps(first)):
        with pytest.raises(ShardedParameterError, match="GatheredParameters"):
            change()
        results["refused"] += 1
    return results


@pytest.mark.parametrize("under_init", [False, True])
def test_state_dict_has_names_for_one_rank_and_values_for_all(under_init: bool) -> None:
    """Names, shapes, dtypes need no other rank; values are the plain model's; changing or pickling an entry raises."""
    plain = model().state_dict()
    first, second = run_ranks(reads, RANKS, under_init)
    assert first["names"] == [(name, tuple(value.shape), value.dtype) for name, value in plain.items()]
    for rank in (first, second):
        assert all(torch.equal(rank["values"][name], value) for name, value in plain.items())
        assert all(rank["equal"]) and rank["plain"] and rank["refused"] == 3


def nested() -> bool:
    """Nest contexts over one parameter and over all. The outer context stays intact."""
    from windlass.zero import GatheredParameters

    net = model()
    engine = engine_of(net, 3, optimizer=ADAM)
    with GatheredParameters(net[0].weight):
        with (
            pytest.raises(RuntimeError, match="inside another GatheredParameters"),
            GatheredParameters(net.parameters()),
        ):
            raise AssertionError("not reached")
        full = torch.equal(net[0].weight, model()[0].weight)
    engine.destroy()
    return full


def test_nested_gather_is_a_runtime_error() -> None:
    """Gathering gathered parameters raises RuntimeError, as in DeepSpeed."""
    assert run_ranks(nested, RANKS) == [True, True]


def init_on_one_rank() -> None:
    """Construct a model on one rank under a 16-bit configuration."""
    from windlass.compat.partition_parameters import Init
    from windlass.compat.zero_param_status import ZeroParamStatus
    from windlass.zero import GatheredParameters

    with Init(config_dict_or_path={**config(3), "bf16": {"enabled": True}}):
        net = model()
    assert all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE and p.dtype == torch.bfloat16 for p in net.parameters())
    with GatheredParameters(list(net.parameters())):
        torch.testing.assert_close(net[0].weight.detach(), model()[0].weight.detach().bfloat16())
    engine = engine_of(net, 3, optimizer=ADAM, bf16={"enabled": True})
    loss = engine(batch().bfloat16()).float().square().mean()
    engine.backward(loss)
    engine.step()
    assert loss.item() == pytest.approx(expected(1)[0], rel=2e-2)
    engine.destroy()


def test_zero_init_on_one_rank_equals_deepspeed() -> None:
    """On one rank `zero.Init` shards too: parameters have `ds_id` and the configuration's dtype."""
    run_ranks(init_on_one_rank, 1)


def masters(under_init: bool) -> list[tuple[Tensor, torch.dtype]]:
    """Return master weights and compute dtypes of a bf16 model whose head is constructed outside of `zero.Init`."""
    from windlass.compat.partition_parameters import Init
    from windlass.compat.tensor_fragment_api import safe_get_full_fp32_param

    low = {"bf16": {"enabled": True}}
    torch.manual_seed(0)
    with Init(config_dict_or_path={**config(3), **low}, enabled=under_init):
        body = nn.Linear(6, 10)
    net = nn.Sequential(body, nn.Linear(10, 3))
    engine = engine_of(net, 3 if under_init else 2, optimizer=ADAM, **low)
    results = []
    for parameter in net.parameters():
        master = safe_get_full_fp32_param(parameter)
        assert master is not None
        results.append((master.clone(), parameter.dtype))
    engine.destroy()
    return results


@pytest.mark.parametrize("under_init", [False, True])
def test_master_weights_start_from_values_of_zero_init(under_init: bool) -> None:
    """Master weights start from the script's full-precision values, or from values that `zero.Init` rounded to bf16.

    DeepSpeed does the same.
    """
    torch.manual_seed(0)
    plain = [p.detach() for layer in (nn.Linear(6, 10), nn.Linear(10, 3)) for p in layer.parameters()]
    assert not any(torch.equal(value, value.bfloat16().float()) for value in plain)
    expected = [value.bfloat16().float() if under_init and n < 2 else value for n, value in enumerate(plain)]
    for rank in run_ranks(masters, RANKS, under_init):
        assert [dtype for _, dtype in rank] == [torch.bfloat16] * 4
        assert all(map(torch.equal, [value for value, _ in rank], expected))


def moved() -> dict[str, Any]:
    """Call `cpu()` and `to` between steps. Return the losses, and the errors of a cast and of a copy."""
    from windlass.base.errors import ShardedParameterError

    net = model()
    engine = engine_of(net, 3, optimizer=ADAM)
    losses = []
    for _ in range(3):
        loss = engine(batch()).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        net.cpu()
        net.to("cpu", non_blocking=True)
        net.to(torch.float32)
    errors = []
    for change in (lambda: net.to(torch.float64), lambda: net[0].weight.to("cpu", copy=True)):
        with pytest.raises(ShardedParameterError) as caught:
            change()
        errors.append(str(caught.value))
    engine.destroy()
    return {"losses": losses, "errors": errors}


def expected(steps: int) -> list[float]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)  # DeepSpeed's default decay
    losses = []
    for _ in range(steps):
        loss = net(batch()).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_moving_a_model_does_not_move_sharded_parameters() -> None:
    """lightning's `module.cpu()` and a script's `module.to(device)` change nothing; a cast or a copy raises."""
    for rank in run_ranks(moved, RANKS):
        assert rank["losses"] == pytest.approx(expected(3), abs=1e-6)
        assert all("GatheredParameters" in error for error in rank["errors"])


def again(stage: int) -> dict[str, Any]:
    """Train, evaluate with a second engine of the same model, and train with a third.

    lightning's fit, validate, fit does this.
    """
    net = model()
    losses = []
    engine = engine_of(net, stage, optimizer=ADAM)
    for _ in range(2):
        loss = engine(batch()).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    with torch.no_grad():
        evaluated = engine_of(net, stage if stage == 3 else 0)(batch()).square().mean().item()
    third = engine_of(net, stage, optimizer=ADAM)
    result = third(batch()).square().mean().item()
    third.destroy()
    return {"losses": losses, "evaluated": evaluated, "third": result}


@pytest.mark.parametrize("stage", [2, 3])
def test_model_can_be_initialized_again(stage: int) -> None:
    """The weights stay those of the previous engine."""
    plain = expected(3)
    for rank in run_ranks(again, RANKS, stage):
        assert rank["losses"] == pytest.approx(plain[:2], abs=1e-6)
        assert rank["evaluated"] == pytest.approx(plain[2], abs=1e-6)
        assert rank["third"] == pytest.approx(plain[2], abs=1e-6)
