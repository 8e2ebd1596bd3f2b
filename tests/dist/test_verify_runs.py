"""Tests of `windlass verify` on scripts with dropout, checkpoints, edits and several engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen
from tests.dist.harness import RankError
from tests.dist.test_multiple_engines import built, joint_loss
from tests.dist.test_verify import ADAMW, assert_equal
from tests.dist.verified_runs import verify_training
from tests.models import Place, mse, rows
from tests.models.plain import Regressor
from tests.models.specimen import WIDTH

pytestmark = pytest.mark.slow


class Dropped(nn.Module):
    """Model that draws from the generators of torch, Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = Regressor(), nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        import random

        import numpy

        scale = 1.0 + random.random() + float(numpy.random.rand())
        return mse(self.body.head(self.drop(self.body.hidden(x)) * scale), y)


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    import windlass

    return windlass.initialize(model=model, config=ds_config(ADAMW, Setting(stage, **more)))[0]


def train(engine: Any, step: int) -> None:
    for micro in range(ADAMW.accumulation):
        engine.backward(engine(**rows(Place(step, micro, dist.get_rank()))))
        engine.step()


def with_dropout(stage: int) -> None:
    torch.manual_seed(dist.get_rank())  # ranks draw different numbers and start with different weights
    engine = engine_of(Dropped(), stage)
    for step in range(3):
        train(engine, step)


@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_is_replayed_with_the_same_numbers(stage: int) -> None:
    (result,) = verify_training(with_dropout, stage)
    assert_equal(result)


def with_a_checkpoint(folder: str, stage: int) -> None:
    engine = engine_of(oracle.build(specimen("mlp")), stage)
    train(engine, 0)
    engine.save_checkpoint(folder)
    train(engine, 1)
    engine.load_checkpoint(folder)
    train(engine, 2)
    train(engine, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_run_resumes_from_a_loaded_checkpoint(stage: int, tmp_path: Path) -> None:
    (result,) = verify_training(with_a_checkpoint, str(tmp_path), stage, steps=4)
    assert_equal(result, steps=4)


def with_edits(stage: int) -> None:
    import windlass

    engine = engine_of(oracle.build(specimen("mlp")), stage)
    parameters = list(engine.module.parameters())
    for step in range(3):
        with windlass.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.5)
        train(engine, step)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_edits_in_gathered_parameters_apply_to_both_runs(stage: int) -> None:
    (result,) = verify_training(with_edits, stage)
    assert_equal(result)


def with_changed_clipping() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "optimizer": sgd}
    engine, optimizer, _, _ = initialize(model=model, config={**config, "gradient_clipping": 100.0})
    for step in range(3):
        optimizer.clip_grad = 0.1 / (step + 1)
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()


def test_plain_run_clips_to_the_norm_that_a_script_sets() -> None:
    (result,) = verify_training(with_changed_clipping)
    assert_equal(result)


def with_evaluation(stage: int) -> None:
    engine = engine_of(oracle.build(specimen("batch_norm")), stage)
    for step in range(3):
        with torch.no_grad():
            engine(**rows(Place(9, step, 0)))  # training mode, which updates running statistics
        engine.eval_batch(rows(Place(8, step, 0)))
        train(engine, step)


def test_forwards_without_backward_are_ignored() -> None:
    (result,) = verify_training(with_evaluation, 2)
    assert_equal(result)


def joint(stages: tuple[int, int, int]) -> None:
    import windlass

    rank = dist.get_rank()
    models = [built(offset, rank) for offset in (0, 10, 20)]
    config = ds_config(ADAMW, Setting(stages[0]))
    actor, critic = (windlass.initialize(model=model, config=config)[0] for model in models[:2])
    still = {key: value for key, value in config.items() if key != "optimizer"}
    reference = windlass.initialize(model=models[2], config=still)[0]
    for step in range(3):
        for micro in range(ADAMW.accumulation):
            actor.backward(joint_loss(actor, critic, reference, rows(Place(step, micro, rank))))
            critic.step()
            actor.step()


def test_engines_with_a_joint_backward_are_equal() -> None:
    actor, critic = verify_training(joint, (2, 2, 2))
    assert_equal(actor)
    assert_equal(critic)


def under_sharded_init(stage: int) -> None:
    import windlass

    with windlass.zero.Init():
        model = oracle.build(specimen("tied"))
    engine = engine_of(model, stage)
    for step in range(3):
        for micro in range(ADAMW.accumulation):
            engine.backward(engine(**specimen("tied").batch(Place(step, micro, dist.get_rank()))))
            engine.step()


def test_model_with_sharded_init_is_equal() -> None:
    (result,) = verify_training(under_sharded_init, 3)
    assert_equal(result)


def unfrozen_in_mid_run() -> None:
    model = oracle.build(specimen("frozen"))
    engine = engine_of(model, 2)
    train(engine, 0)
    model.requires_grad_(True)
    engine.refresh()
    train(engine, 1)


def test_refreshed_model_is_refused() -> None:
    with pytest.raises(RankError, match="layout changed during the run"):
        verify_training(unfrozen_in_mid_run)


def with_weights_in_the_loss(stage: int, precision: str) -> None:
    import windlass

    scale = {"initial_scale_power": 2} if precision == "fp16" else {}  # the default scale would overflow
    engine = engine_of(oracle.build(specimen("tied")), stage, config=((precision, {"enabled": True, **scale}),))
    for step in range(3):
        for micro in range(ADAMW.accumulation):
            loss = engine(**specimen("tied").batch(Place(step, micro, dist.get_rank())))
            weights = [windlass.zero.full_param(p) for p in engine.module.parameters()]
            loss = loss + sum(weight.square().mean() for weight in weights)
            if stage < 3:  # the parameter itself, which is full below stage 3
                loss = loss * engine.module.embed.weight.float().square().mean().exp()
            engine.backward(loss)
            engine.step()


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16")])
def test_parameters_in_the_loss_are_supported(stage: int, precision: str) -> None:
    (result,) = verify_training(with_weights_in_the_loss, stage, precision)
    assert_equal(result)
    assert all(step["applied"] for step in result["steps"])
    (result,) = verify_training(with_weights_in_the_loss, stage, precision, fault="missing_reduce")
    assert result["deviations"][0]["phase"] == "reduce"


def with_a_tensor_that_a_hook_kept(stage: int) -> None:
    kept: list[Tensor] = []
    model = oracle.build(specimen("mlp"))
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, args, output: kept.append(output))
    engine = engine_of(model, stage)
    for micro in range(ADAMW.accumulation):
        loss = engine(**rows(Place(0, micro, dist.get_rank())))
        engine.backward(loss + kept[-1].square().mean())
        engine.step()


def test_loss_of_an_internal_tensor_is_refused_and_not_reported_as_wrong() -> None:
    with pytest.raises(RankError, match="depends on a tensor inside the model by another path"):
        verify_training(with_a_tensor_that_a_hook_kept, 1)


class Ranked(nn.Module):
    """Model with a different expert on each rank; with `mean` the ranks also communicate in the forward."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.experts, self.mean = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), mean

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.experts[dist.get_rank()](x)
        if self.mean:
            total = result.detach().mean()
            dist.all_reduce(total)
            result = result - total
        return mse(result, y)


def with_ranked(mean: bool, stage: int) -> None:
    model = Ranked(mean)
    # a hook as in scripts that train one weight more slowly
    model.experts[0].weight.register_hook(lambda gradient: gradient * 0.5)
    engine = engine_of(model, stage)
    for step in range(3):
        train(engine, step)


@pytest.mark.parametrize("stage", [1, 3])
def test_forward_that_reads_its_rank_and_a_gradient_hook_are_supported(stage: int) -> None:
    (result,) = verify_training(with_ranked, False, stage)
    assert_equal(result)


def test_forward_that_communicates_is_refused() -> None:
    with pytest.raises(RankError, match="forward calls torch.distributed.all_reduce"):
        verify_training(with_ranked, True, 1)


class Unlike(nn.Module):
    """Model that scales its output by the number of calls, so that no forward can be repeated."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        Unlike.calls += 1
        return mse(self.layer(x) * Unlike.calls, y)


def with_a_global(stage: int) -> None:
    engine = engine_of(Unlike(), stage)
    for step in range(3):
        train(engine, step)


def test_unrepeatable_forward_is_reported() -> None:
    (result,) = verify_training(with_a_global, 1)
    first = result["deviations"][0]
    assert (first["step"], first["phase"], first["tensor"]) == (1, "forward", "output of the model")
