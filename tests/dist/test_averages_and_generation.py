"""Tests that a sharded model equals plain training: weights used in the loss, averages of parameters, generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, whole_params
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import ADAMW, CLIP, Case, batch, build, config_of
from tests.models import LossOutside, Place, mse, rows
from tests.oracle import SEED, Recipe, relative_error

STEPS, DECAY = 4, 0.9
SHARDED = ("q_proj.weight", "down_proj.weight", "embed_tokens.weight", "norm.weight")
TIERS = {
    "device": (),
    "host": (("offload_param", {"device": "cpu"}), ("offload_optimizer", {"device": "cpu"})),
    "disk": (("offload_param", {"device": "nvme"}), ("offload_optimizer", {"device": "nvme"})),
}
PLACES = [
    (2, 1, "gloo", "device"),
    (2, 3, "shm", "host"),
    (2, 3, "gloo", "disk"),
    pytest.param(1, 0, "gloo", "device", marks=pytest.mark.slow),
    pytest.param(2, 2, "shm", "device", marks=pytest.mark.slow),
    pytest.param(2, 3, "gloo", "device", marks=pytest.mark.slow),
    pytest.param(3, 3, "shm", "disk", marks=pytest.mark.slow),
]
SPREAD = [(2, 3, "gloo", "device"), (2, 3, "shm", "host"), pytest.param(3, 3, "gloo", "disk", marks=pytest.mark.slow)]


def env_of(tier: str) -> dict[str, str]:
    """Return environment variables for a tier. Host memory is a separate tier only if device memory is emulated."""
    return {} if tier == "device" else {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"}


def engine_of(model: nn.Module, stage: int, transport: str, tier: str, folder: str) -> Any:
    import windlass

    zero = {key: value | {"nvme_path": folder} for key, value in TIERS[tier]}
    config = ds_config(Recipe(), Setting(stage=stage, transport=transport, zero=tuple(zero.items())))
    return windlass.initialize(model=model, config=config)[0]


def built(rank: int = 0) -> nn.Module:
    torch.manual_seed(SEED + rank)
    return LossOutside()


# tests of losses that use full weights


def penalty(weights: list[Tensor]) -> Tensor:
    return 0.3 * weights[0].square().sum() + 0.1 * (weights[0] * weights[0].detach().flip(0)).sum() + weights[1].sum()


def with_weights_in_the_loss(stage: int, transport: str, tier: str, folder: str, frozen: bool) -> dict[str, Any]:
    import windlass

    rank = dist.get_rank()
    model = built(rank)
    first, second = list(model.parameters())[:2]
    if frozen:
        second.requires_grad_(False)
    engine = engine_of(model, stage, transport, tier, folder)
    losses = []
    for step in range(STEPS):
        batch = rows(Place(step, 0, rank))
        text, _ = engine(batch["x"])
        weights = [windlass.zero.full_param(p) for p in (first, second)]
        weights[0].mul_(2).div_(2)  # allowed: the full weight is the caller's copy
        assert weights[1].requires_grad is not frozen
        loss = mse(text, batch["y"]) + (rank + 1) * penalty(weights)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        assert not windlass.zero.full_param(first).requires_grad
    results = {"losses": losses, "params": whole_params(engine.module)}
    engine.destroy()
    return results


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["trained", "frozen"])
@pytest.mark.parametrize(("ranks", "stage", "transport", "tier"), PLACES)
def test_full_param_in_the_loss(ranks: int, stage: int, transport: str, tier: str, frozen: bool, tmp_path: Any) -> None:
    model = built()
    first, second = list(model.parameters())[:2]
    second.requires_grad_(not frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = oracle.make_optimizer(Recipe(), trained)
    expected: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            batch = rows(Place(step, 0, rank))
            loss = mse(model(batch["x"])[0], batch["y"]) + (rank + 1) * penalty([first, second])
            (loss / ranks).backward()
            expected[rank].append(float(loss.detach()))
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    everywhere = run_ranks(
        with_weights_in_the_loss,
        ranks,
        stage,
        transport,
        tier,
        str(tmp_path),
        frozen,
        transport=transport,
        env=env_of(tier),
    )
    for rank, actual in enumerate(everywhere):
        assert actual["losses"] == pytest.approx(expected[rank], rel=1e-6)
        error, where = relative_error(actual["params"], params)
        assert error < 1e-6, where


def sharded_penalty(full: Any, model: nn.Module) -> Tensor:
    named = dict(model.named_parameters())
    total: Tensor = sum(full(named[name]).square().sum() for name in named if name.endswith(SHARDED))
    return 0.05 * total


def with_sharded_weights_in_the_loss(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    import windlass

    engine, *_ = windlass.initialize(model=build(case.model, tied=False), config=config_of(case))
    losses = []
    for step in range(2):
        loss = engine(**batch(step, 0, engine.data_loading_ranks[1])).loss
        loss = loss + sharded_penalty(windlass.zero.full_param, engine.module)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    params = whole_params(engine.module)
    engine.destroy()
    return losses, params


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_full_param_of_tensor_parallel_weights_in_the_loss(stage: int) -> None:
    case = Case("llama", (("tp", 2),), stage=stage, world=4)
    model = build(case.model, tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    expected: list[list[float]] = [[], []]
    for step in range(2):
        for reader in range(2):
            loss = model(**batch(step, 0, reader)).loss + sharded_penalty(lambda p: p, model)
            (loss / 2).backward()
            expected[reader].append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    for rank, (losses, params) in enumerate(run_ranks(with_sharded_weights_in_the_loss, 4, case, timeout=240)):
        assert losses == pytest.approx(expected[rank // 2], rel=1e-5)
        error, where = relative_error(params, {name: p.detach() for name, p in model.named_parameters()})
        assert error <= 1e-5, where


# tests of parameter averages


def averaging(stage: int, transport: str, tier: str, folder: str) -> dict[str, Any]:
    import windlass

    rank = dist.get_rank()
    engine = engine_of(built(rank), stage, transport, tier, folder)
    average = windlass.zero.ExponentialMovingAverage(engine, DECAY)
    with pytest.raises(windlass.WindlassError, match="no average yet"), average.applied():
        pass
    seen = []
    for step in range(STEPS):
        batch = rows(Place(step, 0, rank))
        engine.backward(mse(engine(batch["x"])[0], batch["y"]))
        engine.step()
        average.update()
        if step == 1:
            before = whole_params(engine.module)
            with average.applied(), torch.no_grad():
                seen.append(engine(batch["x"])[0].clone())
                with pytest.raises(windlass.WindlassError, match="while the averages are applied"):
                    average.update()
            after = whole_params(engine.module)
            assert all(torch.equal(before[name], after[name]) for name in before)
    named = dict(engine.module.named_parameters())
    results = {
        "averages": {name: average.full_param(p) for name, p in named.items()},
        "params": whole_params(engine.module),
        "seen": seen,
    }
    engine.destroy()
    return results


@pytest.mark.parametrize(("ranks", "stage", "transport", "tier"), PLACES)
def test_sharded_average_equals_that_of_one_process(
    ranks: int, stage: int, transport: str, tier: str, tmp_path: Any
) -> None:
    everywhere = run_ranks(
        averaging, ranks, stage, transport, tier, str(tmp_path), transport=transport, env=env_of(tier)
    )
    model = built()
    optimizer = oracle.make_optimizer(Recipe(), list(model.parameters()))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    seen: list[Tensor] = []
    for step in range(STEPS):
        for rank in range(ranks):
            batch = rows(Place(step, 0, rank))
            (mse(model(batch["x"])[0], batch["y"]) / ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step == 1:
            with torch.no_grad():
                seen = [average(rows(Place(step, 0, rank))["x"])[0] for rank in range(ranks)]
    expected = {name: p.detach() for name, p in average.module.named_parameters()}
    for rank, actual in enumerate(everywhere):
        error, where = relative_error(actual["averages"], expected)
        assert error < 1e-6, where
        assert torch.allclose(actual["seen"][0], seen[rank], rtol=1e-5, atol=1e-6)
        largest_difference = max(float((actual["averages"][n] - actual["params"][n]).abs().max()) for n in expected)
        assert largest_difference > 1e-4  # the average lags behind the parameters


def saved_average(stage: int, transport: str, tier: str, folder: str, target: str, save: bool) -> dict[str, Any]:
    import windlass

    rank, world = dist.get_rank(), dist.get_world_size()
    engine = engine_of(built(rank), stage, transport, tier, folder)
    average = windlass.zero.ExponentialMovingAverage(engine, DECAY, "slow")
    if save:
        other = windlass.zero.ExponentialMovingAverage(engine, 0.5)
        with pytest.raises(windlass.WindlassError, match="'slow'"):
            windlass.zero.ExponentialMovingAverage(engine, 0.5, "slow")
    else:
        engine.load_checkpoint(target)
        assert average.updates == 2
    for step in range(2) if save else range(2, STEPS):
        for micro in range(2 // world):  # a step has the same two batches on any number of ranks
            batch = rows(Place(step, 0, rank + micro))
            engine.set_gradient_accumulation_boundary(micro == 2 // world - 1)
            engine.backward(mse(engine(batch["x"])[0], batch["y"]) / (2 // world))
            engine.step()
        average.update()
        if save:
            other.update()
    if save:
        engine.save_checkpoint(target, blocking=stage != 2)
    results = {name: average.full_param(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    return results


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 3, "shm", "host"), (1, 1, "gloo", "device")),
        pytest.param((1, 2, "gloo", "device"), (2, 3, "gloo", "disk"), marks=pytest.mark.slow),
        pytest.param((2, 3, "shm", "disk"), (2, 0, "shm", "device"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_average_resumes_from_a_checkpoint_of_another_layout(before: Any, after: Any, tmp_path: Any) -> None:
    target = str(tmp_path / "run")
    for (ranks, stage, transport, tier), save in ((before, True), (after, False)):
        place = (stage, transport, tier, str(tmp_path))
        everywhere = run_ranks(saved_average, ranks, *place, target, save, transport=transport, env=env_of(tier))
    model = built()
    optimizer = oracle.make_optimizer(Recipe(), list(model.parameters()))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        for rank in range(2):
            batch = rows(Place(step, 0, rank))
            (mse(model(batch["x"])[0], batch["y"]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    expected = {name: p.detach() for name, p in average.module.named_parameters()}
    for actual in everywhere:
        error, where = relative_error(actual, expected)
        assert error < 1e-6, where


def largest_difference(average: Any, engine: Any) -> float:
    """Return the largest difference between an average and the parameters."""
    import windlass

    with torch.no_grad():
        return max(
            float((average.full_param(p) - windlass.zero.full_param(p)).abs().max()) for p in engine.parameters()
        )


def loaded_averages(stage: int, tier: str, folder: str) -> None:
    """Load one average saved before its first update, one of a smaller model. Assert errors of refused calls."""
    import windlass

    def made(layers: int) -> tuple[Any, Any]:
        torch.manual_seed(SEED)
        engine = engine_of(nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers))), stage, "gloo", tier, folder)
        return engine, windlass.zero.ExponentialMovingAverage(engine, DECAY)

    def steps(engine: Any, average: Any, count: int) -> None:
        for _ in range(count):
            engine.backward(engine(torch.ones(2, 6)).square().mean())
            engine.step()
            average.update()

    engine, average = made(2)
    engine.save_checkpoint(f"{folder}/new")
    steps(engine, average, 3)
    engine.save_checkpoint(f"{folder}/three")
    engine.load_checkpoint(f"{folder}/new")
    steps(engine, average, 1)
    assert average.updates == 1 and largest_difference(average, engine) == 0.0
    steps(engine, average, 1)
    with average.applied():
        for refused in (engine.step, lambda: engine.load_checkpoint(f"{folder}/three")):
            with pytest.raises(windlass.WindlassError, match="while the averages are applied"):
                refused()
    engine.destroy()
    with pytest.raises(windlass.WindlassError, match="destroyed"):
        average.update()
    engine, average = made(3)
    with pytest.raises(windlass.WindlassError, match="does not match"):
        engine.load_checkpoint(f"{folder}/three", load_optimizer_states=False)
    engine.load_checkpoint(f"{folder}/three", load_module_only=True, load_module_strict=False)
    assert average.updates == 0
    steps(engine, average, 1)
    assert largest_difference(average, engine) == 0.0  # neither load has set the average
    engine.load_checkpoint(f"{folder}/three", load_module_strict=False, load_optimizer_strict=False)
    assert average.updates == 3 and largest_difference(average, engine) > 1e-4
    assert all(torch.equal(average.full_param(p), windlass.zero.full_param(p)) for p in engine.module[2].parameters())
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "tier"), [(2, "device"), (3, "disk"), pytest.param(3, "host", marks=pytest.mark.slow)]
)
def test_loading_restores_averages(stage: int, tier: str, tmp_path: Any) -> None:
    run_ranks(loaded_averages, 2, stage, tier, str(tmp_path), env=env_of(tier))


# tests of text generation


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def prompt(rank: int) -> Tensor:
    return torch.randint(1, 40, (1 + rank, 3 + 2 * rank), generator=torch.Generator().manual_seed(rank))


def lengths(ranks: int) -> list[int]:
    return [4 + 9 * rank for rank in range(ranks)]


def generating(stage: int, transport: str, tier: str, folder: str, roomy: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    model = llama()
    engine = engine_of(model, stage, transport, tier, folder)
    if not roomy:
        import windlass.zero.access.sharded_generate as generation

        generation._fits, fits = lambda _: False, generation._fits
    try:
        engine._sharded.transport.traffic.reset()
        mine = engine.module.generate(
            prompt(rank), max_new_tokens=lengths(dist.get_world_size())[rank], do_sample=False
        )
    finally:
        if not roomy:
            generation._fits = fits
    gathered = engine._sharded.transport.traffic.payload["gather"]
    tokens = prompt(rank)
    losses = []
    for _ in range(2):
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    again = engine.generate(prompt(rank), max_new_tokens=3 + rank, do_sample=False)
    copied = copy.deepcopy(model) if stage < 3 else None
    engine.destroy()
    own = model.generate(prompt(rank), max_new_tokens=3 + rank, do_sample=False)
    if copied is not None:
        assert torch.equal(copied.generate(prompt(rank), max_new_tokens=3 + rank, do_sample=False), own)
    assert "generate" not in vars(model)
    return {"mine": mine, "again": again, "own": own, "losses": losses, "gathered": gathered}


@pytest.mark.parametrize("roomy", [True, False], ids=["it fits", "it does not"])
@pytest.mark.parametrize(("ranks", "stage", "transport", "tier"), SPREAD)
def test_ranks_generate_texts_of_different_lengths(
    ranks: int, stage: int, transport: str, tier: str, roomy: bool, tmp_path: Any
) -> None:
    everywhere = run_ranks(
        generating, ranks, stage, transport, tier, str(tmp_path), roomy, transport=transport, env=env_of(tier)
    )
    plain = llama().eval()
    for rank, actual in enumerate(everywhere):
        expected = plain.generate(prompt(rank), max_new_tokens=lengths(ranks)[rank], do_sample=False)
        assert actual["mine"].tolist() == expected.tolist()
        assert actual["again"].tolist() == actual["own"].tolist()
        assert actual["losses"][1] < actual["losses"][0]
        if stage == 3:
            full = sum(p.numel() for p in plain.parameters())
            assert (actual["gathered"] == full) == roomy, actual["gathered"]
