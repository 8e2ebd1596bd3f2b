"""Law: on one CUDA GPU, one rank over NCCL trains as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen, whole_grads, whole_params
from tests.models import ZOO, Batch, Place, Specimen, cast
from tests.oracle import Recipe, Trace, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

MODELS = [
    "four_blocks",
    "tied",
    "lora",
    "checkpoint",
    "checkpoint_reentrant",
    "cross_attention",
    "two_losses",
    "stashed",
]


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a process group of one rank over NCCL, and turn TF32 off."""
    patch = pytest.MonkeyPatch()
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        patch.setenv(name, value)
    precise = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_float32_matmul_precision(precise)
    patch.undo()


def to_cuda(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.cuda()
    return {key: to_cuda(value) for key, value in batch.items()} if isinstance(batch, dict) else batch


def on_cuda(subject: Specimen) -> Specimen:
    """Return the specimen with its micro-batches on the GPU."""

    def batch(place: Place) -> Batch:
        moved: Batch = to_cuda(subject.batch(place))
        return moved

    return Specimen(subject.name, subject.build, batch, subject.train, subject.traits)


def trained(subject: Specimen, recipe: Recipe, setting: Setting) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return losses, the last full gradients and the parameters, all on the CPU."""
    import windlass

    engine = windlass.initialize(model=oracle.build(subject).cuda(), config=ds_config(recipe, setting))[0]
    losses, grads = [], {}
    for step in range(recipe.steps):
        for micro in range(recipe.accumulation):
            batch = cast(subject.batch(Place(step, micro, 0)), recipe.dtype)

            def backward(loss: torch.Tensor, retain_graph: bool = False) -> None:
                if setting.plain_backward:
                    loss.backward(retain_graph=retain_graph)
                else:
                    engine.backward(loss, retain_graph=retain_graph)

            losses.append(float(subject.train(engine, batch, backward)))
            if micro == recipe.accumulation - 1:
                grads = whole_grads(engine.module)
            engine.step()
    params = whole_params(engine.module)
    engine.destroy()
    return losses, _cpu(grads), _cpu(params)


def _cpu(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value is None else value.float().cpu() for name, value in values.items()}


def on_gpu(subject: Specimen, recipe: Recipe) -> Trace:
    """Train in plain PyTorch on the GPU."""
    return oracle.train(subject, recipe, model=oracle.build(subject).cuda())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_equals_plain_torch(stage: int, name: str, plain: bool, precision: str) -> None:
    subject = on_cuda(specimen(name))
    recipe = Recipe(
        ranks=1,
        accumulation=2,
        precision=precision,
        optimizer="AdamW",
        optimizer_params=(("lr", 1e-3), ("eps", 1e-6)),
    )
    losses, grads, params = trained(subject, recipe, Setting(stage=stage, plain_backward=plain))
    expected = on_gpu(subject, recipe)
    # GPU kernels sum in another order, and atomics (embedding gradients) in no fixed order
    loss_bound, bound = (1e-5, 1e-5) if precision == "fp32" else (2e-2, 2e-2)
    flat = [loss for step in expected.losses for loss in step[0]]
    assert losses == pytest.approx(flat, rel=loss_bound)
    error, where = relative_error(grads, _cpu(expected.grads[-1]))
    assert error < bound, where
    error, where = relative_error(params, _cpu(expected.params))
    assert error < (1e-5 if precision == "fp32" else 1e-3), where


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_freed_after_destroy(stage: int) -> None:
    subject = on_cuda(ZOO["four_blocks"])
    torch.cuda.synchronize()
    trained(subject, Recipe(ranks=1, steps=1), Setting(stage=stage))  # allocates memory that CUDA libraries keep
    before = torch.cuda.memory_allocated()
    trained(subject, Recipe(ranks=1, steps=2), Setting(stage=stage))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_language_model_learns_on_one_gpu(tmp_path: Path) -> None:
    """Train in bf16 with a schedule on a periodic text: the loss must fall to less than half."""
    import windlass

    torch.manual_seed(0)
    model = specimen("cross_attention").build()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    engine = windlass.initialize(model=copy.deepcopy(model).cuda(), config=config)[0]
    pattern = torch.arange(16).repeat(2)
    losses = []
    for step in range(120):
        starts = torch.randint(0, 16, (16,), generator=Place(step, 0, 0).generator())
        ids = torch.stack([pattern[s : s + 12] for s in starts.tolist()]).cuda()
        loss = engine(ids=ids)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
