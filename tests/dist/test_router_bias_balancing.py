"""Tests of routers balanced without a loss: each step moves their biases equally on all ranks, by all ranks' loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.harness import run_ranks
from tests.hf_experts import FAMILIES, language
from windlass.base.errors import ModelError, PeerError
from windlass.parallel.experts import MixtureOfExperts, StackedMLP, enable_router_bias_updates, update_router_biases
from windlass.parallel.pipeline.layer_specs import LayerSpec
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential

STEPS, MICROS, RATE, LR = 3, 2, 0.01, 0.1
BOUND = 1e-5


class Own(nn.Module):
    """User-defined model of two mixtures of experts: one is balanced by a bias, the other by a loss."""

    def __init__(self) -> None:
        super().__init__()
        words: dict[str, Any] = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
        self.balanced = MixtureOfExperts(32, StackedMLP(32, 8, 5), 5, expert_bias_update_rate=RATE, **words)
        self.plain = MixtureOfExperts(32, StackedMLP(32, 8, 4), 4, **words)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _, _ = self.balanced(x)
        hidden, extra, _ = self.plain(hidden)
        return (x + hidden).square().mean() + 0.01 * extra


def own() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    torch.manual_seed(0)
    return Own(), lambda model, seed: model(torch.randn(7, 32, generator=torch.Generator().manual_seed(seed)))


def deepseek() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    model = FAMILIES["deepseek_v3"].build().train()
    return model, lambda model, seed: model(**language(seed)).loss


KINDS = {"own": own, "deepseek": deepseek}


def seed_of(rank: int, step: int, micro: int) -> int:
    return 100 * rank + 10 * step + micro


def biases(model: nn.Module) -> list[Tensor]:
    names = ("balance_bias", "e_score_correction_bias")
    return [buffer.detach().clone() for name, buffer in model.named_buffers() if name.endswith(names)]


def train(kind: str, config: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    """Return the losses of this rank and the final biases."""
    import windlass

    model, loss_of = KINDS[kind]()
    engine: Any = windlass.initialize(model=model, config=config)[0]
    losses = []
    for step in range(STEPS):
        for micro in range(MICROS):
            loss = loss_of(engine, seed_of(engine.data_loading_ranks[1], step, micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            loss_of(engine, 99)  # loads of experts in evaluation do not count
        engine.train()
    result = biases(engine.module)
    engine.destroy()
    return losses, result


def plain(kind: str, ranks: int) -> tuple[list[list[float]], list[Tensor]]:
    model, loss_of = KINDS[kind]()
    if kind == "deepseek":
        enable_router_bias_updates(model, RATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for micro in range(MICROS):
            for rank in range(ranks):
                loss = loss_of(model, seed_of(rank, step, micro))
                (loss / (ranks * MICROS)).backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        update_router_biases(model, [])
    return losses, biases(model)


def configuration(kind: str, stage: int, **more: Any) -> dict[str, Any]:
    rate = {"expert_bias_update_rate": RATE} if kind == "deepseek" else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
        "parallel": {**more.get("parallel", {}), **rate},
    }


@pytest.mark.parametrize(
    ("kind", "stage", "parallel", "ranks"),
    [
        ("own", 0, {}, 2),
        ("own", 3, {"ep": 2}, 4),
        ("deepseek", 2, {"ep": 2}, 2),
        ("deepseek", 3, {}, 2),
        ("deepseek", 1, {"tp": 2}, 2),
    ],
)
def test_biases_are_updated_as_in_one_process(kind: str, stage: int, parallel: dict[str, int], ranks: int) -> None:
    seen = run_ranks(train, ranks, kind, configuration(kind, stage, parallel=parallel), transport="gloo", timeout=120)
    readers = ranks // parallel.get("tp", 1)
    losses, moved = plain(kind, readers)
    assert not all(torch.equal(*pair) for pair in zip(moved, biases(KINDS[kind]()[0]), strict=True))
    for rank, (result, here) in enumerate(seen):
        torch.testing.assert_close(result, losses[rank % readers], rtol=BOUND, atol=0)
        torch.testing.assert_close(here, moved, rtol=0, atol=1e-7)


def sixteen_bits(kind: str) -> list[Tensor]:
    return train(kind, configuration(kind, 2, bf16={"enabled": True}, parallel={"ep": 2}))[1]


@pytest.mark.parametrize("kind", KINDS)
def test_biases_keep_their_precision(kind: str) -> None:
    """Biases move by exact steps of 0.01, which bf16 could not represent."""
    begun = biases(KINDS[kind]()[0])
    for moved in run_ranks(sixteen_bits, 2, kind):
        for bias, before in zip(moved, begun, strict=True):
            assert bias.dtype == torch.float32
            steps = (bias - before) / RATE
            torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
            assert steps.round().abs().max() <= STEPS
        assert not all(torch.equal(*pair) for pair in zip(moved, begun, strict=True))


def skipped() -> list[Tensor]:
    import windlass

    model, loss_of = own()
    config = {**configuration("own", 1), "fp16": {"enabled": True, "initial_scale_power": 40}}
    engine: Any = windlass.initialize(model=model, config=config)[0]
    for micro in range(MICROS):
        engine.backward(loss_of(engine, micro))
        engine.step()
    assert not engine.was_step_applied()
    return biases(engine.module)


def test_skipped_step_updates_no_bias() -> None:
    (moved,) = run_ranks(skipped, 1)
    assert all(bool((bias == 0).all()) for bias in moved)


def biases_of_one_step(drops_a_step: bool) -> list[Tensor]:
    """Return the biases after one step, which may follow a step that raised."""
    import windlass

    model, loss_of = own()
    engine: Any = windlass.initialize(model=model, config=configuration("own", 1))[0]
    if drops_a_step:
        with pytest.raises(windlass.WindlassError, match="the parameters are unchanged"):
            for _ in range(MICROS):
                engine.backward(engine(torch.ones(500, 32)) * torch.inf)
                engine.step()
    for micro in range(MICROS):
        engine.backward(loss_of(engine, micro))
        engine.step()
    result = biases(engine.module)
    engine.destroy()
    return result


def test_tokens_of_a_dropped_step_do_not_count() -> None:
    ((expected, *_),), ((actual, *_),) = (run_ranks(biases_of_one_step, 1, drops) for drops in (False, True))
    assert torch.equal(expected, actual) and expected.any()


def refused() -> str:
    import windlass
    from windlass.base.errors import ModelError

    try:
        windlass.initialize(model=nn.Linear(2, 2), config=configuration("deepseek", 0))
    except ModelError as error:
        return str(error)
    return ""


class Routed(nn.Module):
    """Layer of a pipeline with a balanced router."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = MixtureOfExperts(
            *(8, StackedMLP(8, 4, 4), 4), k=1, drop_tokens=False, expert_bias_update_rate=RATE
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(x)[0]


def biases_of_stages(drops_a_batch: bool) -> Tensor:
    """Return this stage's bias after one step, which may follow a batch that was dropped."""
    import windlass

    torch.manual_seed(0)
    layers = [LayerSpec(Routed) for _ in range(2)]
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "parallel": {"pp": 2}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    model: Any = PipelineSequential(layers, loss_fn=lambda out, y: out.square().mean(), num_stages=2)
    engine: Any = windlass.initialize(model=model, config=config)[0]
    if drops_a_batch:
        loss_fn, engine.module.loss_fn = engine.module.loss_fn, lambda out, y: out  # raises: the loss is not a scalar
        lopsided = torch.ones(1, 500, 8)
        with pytest.raises((ModelError, PeerError), match="his batch is dropped on all ranks"):
            engine.train_batch(iter([(lopsided, lopsided)] * 2))
        engine.module.loss_fn = loss_fn
    x = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(1))
    engine.train_batch(iter([(x, x)] * 2))
    (bias,) = biases(engine.module)
    engine.destroy()
    return bias


def test_tokens_of_a_dropped_pipeline_batch_do_not_count() -> None:
    for expected, actual in zip(
        run_ranks(biases_of_stages, 2, False), run_ranks(biases_of_stages, 2, True), strict=True
    ):
        assert torch.equal(expected, actual) and expected.any()


def test_update_rate_without_a_router_bias_is_refused() -> None:
    (text,) = run_ranks(refused, 1)
    assert "Linear has no router with a buffer e_score_correction_bias" in text
