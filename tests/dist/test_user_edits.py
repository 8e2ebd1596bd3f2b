"""Tests of user code: edited weights, hooks, changed rates, penalties, autocast, loaders, and repeated engines."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import SGD, Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error
from windlass.parallel.pipeline.layer_specs import LayerSpec, TiedLayerSpec
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential

STEPS = 3


def with_habit(habit: str, precision: str, setting: Setting) -> dict[str, Any]:
    """Train with the engine and one habit of scripts. `in_one_process` returns the expected result."""
    subject, rank = specimen("tied"), dist.get_rank()
    recipe = Recipe(precision=precision, optimizer_params=SGD)
    model = oracle.build(subject, rank)
    before(habit, model)
    import windlass

    engine = windlass.initialize(model=model, config=ds_config(recipe, setting))[0]
    for step in range(STEPS):
        batch = cast(subject.batch(Place(step, 0, rank)), recipe.dtype)
        loss = engine(**batch)
        if habit == "regularise":
            loss = loss + penalty(engine.module)
        engine.backward(loss)
        if habit == "zero_grad" and step == 1:
            engine.zero_grad()
            engine.backward(engine(**batch))
        engine.step()
        if habit == "edit":
            edit(engine.module)
        if habit == "rate":
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5
    params = whole_params(engine.module)
    engine.destroy()
    return params


def before(habit: str, model: torch.nn.Module) -> None:
    """Apply the habit to the model before training."""
    if habit == "hook":
        model.blocks[0].up.weight.register_hook(lambda grad: grad * 3)
        model.embed.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


def edit(model: torch.nn.Module) -> None:
    """Project weights after a step, equally on every rank."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("up.weight"):
                p.clamp_(-0.125, 0.125)


def penalty(model: torch.nn.Module) -> torch.Tensor:
    """Return a loss of the weights themselves, outside the forward."""
    return 0.01 * sum(p.float().square().sum() for p in model.parameters())


def in_one_process(habit: str, precision: str, ranks: int) -> dict[str, torch.Tensor]:
    subject, dtype = specimen("tied"), Recipe(precision=precision).dtype
    model = oracle.build(subject, 0)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model = model.to(dtype)
    before(habit, model)
    optimizer = torch.optim.SGD(masters, **dict(SGD))
    for step in range(STEPS):
        sums = [torch.zeros_like(m) for m in masters]
        for rank in range(ranks):
            loss = model(**cast(subject.batch(Place(step, 0, rank)), dtype))
            (loss + penalty(model) if habit == "regularise" else loss).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad.float() / ranks
                p.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        _copy(model, masters)
        if habit == "edit":
            edit(model)
            with torch.no_grad():
                for (name, p), master in zip(model.named_parameters(), masters, strict=True):
                    if name.endswith("up.weight"):
                        master.copy_(p)
        if habit == "rate":
            optimizer.param_groups[0]["lr"] *= 0.5
    return {name: m.detach() for (name, _), m in zip(model.named_parameters(), masters, strict=True)}


def _copy(model: torch.nn.Module, masters: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)


OUTSIDE_A_FORWARD = ["edit", "regularise"]  # refused at stage 3, see the next test
HABITS = [(habit, stage) for habit in ("hook", "rate", "zero_grad") for stage in range(4)]
HABITS += [(habit, stage) for habit in OUTSIDE_A_FORWARD for stage in range(3)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("habit", "stage"), HABITS)
def test_user_habits_work_as_in_plain_pytorch(habit: str, stage: int, precision: str) -> None:
    expected = in_one_process(habit, precision, 2)
    setting = Setting(stage=stage)
    transport = "shm" if stage in (1, 3) else "gloo"
    for actual in run_ranks(with_habit, 2, habit, precision, setting, transport=transport):
        error, where = relative_error(actual, expected)
        assert error < (1e-6 if precision == "fp32" else 5e-4), where


def refused_at_stage_3(habit: str) -> str:
    try:
        with_habit(habit, "fp32", Setting(stage=3))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("habit", OUTSIDE_A_FORWARD)
def test_weights_outside_a_forward_are_refused_at_stage_3(habit: str, transport: str) -> None:
    for text in run_ranks(refused_at_stage_3, 2, habit, transport=transport):
        assert text.startswith("ShardedParameterError") and "GatheredParameters" in text


def autocast(setting: Setting) -> dict[str, Any]:
    subject, rank = specimen("mlp"), dist.get_rank()
    config = {**ds_config(Recipe(), setting), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine = start(subject, config)
    losses, dtypes = [], {p.dtype for p in engine.module.parameters()}
    for step in range(STEPS):
        losses.append(float(subject.train(engine, subject.batch(Place(step, 0, rank)), engine.backward)))
        engine.step()
    params = whole_params(engine.module)
    engine.destroy()
    return {"losses": losses, "params": params, "dtypes": dtypes}


def test_autocast_equals_torch_autocast(stage: int) -> None:
    subject = specimen("mlp")
    model = oracle.build(subject)
    forward = model.forward

    def lowered(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = lowered  # type: ignore[method-assign]
    expected = oracle.train(subject, Recipe(ranks=2, steps=STEPS), model=model)
    plain = oracle.train(subject, Recipe(ranks=2, steps=1))
    for rank, actual in enumerate(run_ranks(autocast, 2, Setting(stage=stage))):
        assert actual["dtypes"] == {torch.float32}
        assert actual["losses"][0] == pytest.approx(expected.losses[0][rank][0], rel=1e-6)
        assert actual["losses"][0] != pytest.approx(plain.losses[0][rank][0], rel=1e-6), "it did run in 16 bits"
        assert relative_error(actual["params"], expected.params)[0] < 1e-4


def double(setting: Setting) -> dict[str, torch.Tensor]:
    import windlass

    subject, rank = specimen("mlp"), dist.get_rank()
    engine = windlass.initialize(model=oracle.build(subject, rank).double(), config=ds_config(Recipe(), setting))[0]
    for step in range(STEPS):
        batch = cast(subject.batch(Place(step, 0, rank)), torch.float64)
        subject.train(engine, batch, engine.backward)
        engine.step()
    params = whole_params(engine.module)
    engine.destroy()
    return params


def test_double_precision_stays_double(stage: int) -> None:
    subject, recipe = specimen("mlp"), Recipe()
    model = oracle.build(subject).double()
    optimizer = oracle.make_optimizer(recipe, list(model.parameters()))
    for step in range(STEPS):
        for rank in range(2):
            batch = cast(subject.batch(Place(step, 0, rank)), torch.float64)
            subject.train(model, batch, lambda loss: (loss / 2).backward())
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clipping)
        optimizer.step()
        optimizer.zero_grad()
    for result in run_ranks(double, 2, Setting(stage=stage)):
        assert {value.dtype for value in result.values()} == {torch.float64}
        for name, value in model.named_parameters():
            torch.testing.assert_close(result[name], value.detach(), rtol=1e-9, atol=1e-12)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """The numbers 0 to 22, each as a tensor."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def loaded() -> list[list[float]]:
    import windlass

    config = ds_config(Recipe(), Setting(stage=1))
    engine, _, loader, _ = windlass.initialize(
        model=oracle.build(specimen("mlp")), config=config, training_data=Numbers()
    )
    assert engine.training_dataloader is loader
    batches = [batch.flatten().tolist() for batch in loader]
    engine.destroy()
    return batches


def test_loader_distributes_data_over_ranks() -> None:
    by_rank = run_ranks(loaded, 2)
    assert len(by_rank[0]) == len(by_rank[1]), "as many micro-batches on every rank"
    assert all(len(batch) == 3 for batches in by_rank for batch in batches[:-1])
    seen = [number for batches in by_rank for batch in batches for number in batch]
    assert set(seen) == set(range(23)), len(set(seen))
    assert len(seen) - len(set(seen)) <= 1, "only what evens the ranks out comes twice"


def open_things() -> tuple[int, int]:
    """Return this process's numbers of file descriptors and of shared mappings."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        shared = sum("memfd" in line or "/dev/shm" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), shared


def cycles(setting: Setting) -> list[tuple[int, int]]:
    """Create, train and destroy engines. Return the open resources after each."""
    subject, counts = specimen("tied"), []
    for _ in range(4):
        engine = start(subject, ds_config(Recipe(), setting))
        subject.train(engine, subject.batch(Place(0, 0, dist.get_rank())), engine.backward)
        engine.step()
        engine.destroy()
        del engine
        counts.append(open_things())
    return counts


def test_engines_leave_no_resources(stage: int, transport: str) -> None:
    for counts in run_ranks(cycles, 2, Setting(stage=stage), transport=transport):
        assert counts[-1] == counts[1], counts


def dropped(setting: Setting) -> list[tuple[int, int]]:
    """Create engines and drop them without `destroy`. Return the open resources after each."""
    subject, counts = specimen("tied"), []
    for _ in range(4):
        engine = start(subject, ds_config(Recipe(), setting))
        subject.train(engine, subject.batch(Place(0, 0, dist.get_rank())), engine.backward)
        engine.step()
        del engine
        counts.append(open_things())
    return counts


def test_unreferenced_engines_are_collected(transport: str) -> None:
    for counts in run_ranks(dropped, 2, Setting(stage=2), transport=transport):
        assert counts[-1] == counts[1], counts


class Renormalized(torch.nn.Module):
    """Model whose forward changes a parameter: the embedding scales the rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8, max_norm=0.5)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embed(rows)).square().mean()
        return result


def train_renormalized(frozen: bool) -> dict[str, torch.Tensor] | str:
    """Return the parameters after training, or the error of `initialize`."""
    import windlass

    torch.manual_seed(7)
    model = Renormalized()
    model.embed.requires_grad_(not frozen)
    try:
        engine = windlass.initialize(model=model, config=ds_config(Recipe(optimizer_params=SGD), Setting(stage=1)))[0]
    except windlass.WindlassError as error:
        return str(error)
    for step in range(STEPS):
        engine.backward(engine(torch.arange(step, step + 4)))
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize(("ranks", "frozen"), [(1, False), (2, False), (2, True)])
def test_an_embedding_with_max_norm_trains_as_in_plain_pytorch_or_is_refused(ranks: int, frozen: bool) -> None:
    torch.manual_seed(7)
    model = Renormalized()
    model.embed.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), **dict(SGD))
    for step in range(STEPS):
        model(torch.arange(step, step + 4)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for result in run_ranks(train_renormalized, ranks, frozen):
        if ranks > 1 and not frozen:
            assert "'embed' has max_norm = 0.5" in result and "max_norm=None" in result, result
        else:
            assert relative_error(result, expected)[0] < 1e-6


def train_renormalized_stages(trains: bool) -> str:
    """Return the error of `initialize` for an embedding with `max_norm` that is tied to a layer of another stage."""
    import windlass

    layers = [
        TiedLayerSpec("embed", torch.nn.Embedding, 16, 8, max_norm=0.5),
        LayerSpec(torch.nn.Linear, 8, 8),
        TiedLayerSpec("embed", torch.nn.Embedding, 16, 8, max_norm=0.5, forward_fn=_scored),
    ]
    model = PipelineSequential(layers, num_stages=2, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2}
    with pytest.raises(windlass.WindlassError) as caught:
        windlass.initialize(model=model, config=config | ({"optimizer": {"type": "AdamW"}} if trains else {}))
    return str(caught.value)


def _scored(module: torch.nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ module.weight.t()


@pytest.mark.parametrize("trains", [True, False])
def test_an_embedding_with_max_norm_that_stages_share_is_refused(trains: bool) -> None:
    for text in run_ranks(train_renormalized_stages, 2, trains):
        assert "'tied_modules.embed' has max_norm = 0.5" in text and "on another pipeline stage would differ" in text


def unfreeze_renormalized(stage: int) -> list[str]:
    """Unfreeze the embedding and continue. Return the errors of a forward and of an optimizer step before it."""
    import windlass

    torch.manual_seed(7)
    model = Renormalized()
    model.embed.requires_grad_(False)
    config = ds_config(Recipe(optimizer_params=SGD), Setting(stage=stage))
    del config["optimizer"]
    optimizer = torch.optim.SGD(model.parameters(), **dict(SGD))
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    errors = []
    engine.backward(engine(torch.arange(4)))
    try:
        engine.step()
    except windlass.WindlassError as error:
        errors.append(str(error))
    engine.module.embed.requires_grad_(True)
    with pytest.raises(windlass.WindlassError) as caught:
        engine(torch.arange(4))
    engine.destroy()
    return [*errors, str(caught.value)]


@pytest.mark.parametrize("stage", [1, 3])
def test_unfreezing_an_embedding_with_max_norm_is_refused(stage: int) -> None:
    for *before, refused in run_ranks(unfreeze_renormalized, 2, stage):
        assert "'embed' has max_norm = 0.5" in refused and "max_norm=None" in refused, refused
        assert len(before) == (stage == 3)  # freed values of a sharded parameter lose what the forward wrote
        assert all("'embed.weight' was changed in place" in text and "max_norm=None" in text for text in before)
