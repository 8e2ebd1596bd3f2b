"""Tests of models with packed, frozen layers and trainable ones under the engine: results equal plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import windlass
from tests import oracle
from tests.dist.equivalence_runs import (
    BF16_GRAD_BOUND,
    FP32_BOUND,
    RankTrace,
    Setting,
    backward_of,
    complaints,
    ds_config,
    finished,
    reads_gradients,
    start,
    whole_grads,
)
from tests.dist.harness import run_ranks
from tests.models import Place, Specimen, cast
from tests.models.specimen import Batch, mse
from tests.oracle import Recipe, relative_error
from windlass.checkpoint.safetensors_export import export_safetensors
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format
from windlass.zero.core.sharded_parameter import raw_data

WIDTH, HIDDEN, LOW = 37, 53, 4  # scales of 53 rows begin at offsets where float32 would not be aligned
ROWS = 3


class AdaptedLinear(nn.Module):
    """Packed layer with a trainable low-rank adapter, as in QLoRA (Dettmers et al. 2023)."""

    def __init__(self, width: int, out: int, weight_format: str) -> None:
        super().__init__()
        base = nn.Linear(width, out)
        base.weight.requires_grad_(False)
        self.base = PackedLinear.from_linear(base, weight_format)
        self.down, self.up = nn.Linear(width, LOW, bias=False), nn.Linear(LOW, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaptedBlock(nn.Module):
    """Packed layers of two formats, one without adapter and bias, and a norm."""

    def __init__(self, formats: tuple[str, str]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = AdaptedLinear(WIDTH, HIDDEN, formats[0])
        self.fall = PackedLinear.from_linear(nn.Linear(HIDDEN, WIDTH, bias=False), formats[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(torch.tanh(self.rise(self.norm(x))))


class AdaptedModel(nn.Module):
    """Blocks with packed layers and trainable adapters, and a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            AdaptedBlock(formats) for formats in (("int8", "bf16"), ("int4_g32_zp", "int3_g32"))
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(self.head(x), y)


def micro_batch(place: Place) -> Batch:
    x = torch.randn(ROWS, WIDTH, generator=place.generator())
    return {"x": x, "y": torch.tanh(x.roll(1, -1))}


input_gradients: list[Tensor] = []  # one for each micro-batch, in training order


def with_input_gradient(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    loss = call(x, batch["y"])
    backward(loss)
    input_gradients.append(x.grad.detach().float().clone())
    return loss.detach()


ADAPTED = Specimen("packed layers with adapters", AdaptedModel, micro_batch, with_input_gradient)


def packed_bytes(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if value.dtype == torch.uint8}


# ----------------------------------------------------------------------------------------------------------- the law


def train_rank(recipe: Recipe, setting: Setting) -> tuple[RankTrace, list[Tensor]]:
    """Train on this rank. Return the trace and the gradients of the micro-batches' inputs."""
    input_gradients.clear()
    engine = start(ADAPTED, ds_config(recipe, setting))
    trace, backward = RankTrace(), backward_of(engine, setting.plain_backward)
    for step in range(recipe.steps):
        losses = []
        for micro in range(recipe.accumulation):
            batch = cast(micro_batch(Place(step, micro, dist.get_rank())), recipe.dtype)
            losses.append(float(ADAPTED.train(engine, batch, backward)))
            if micro == recipe.accumulation - 1 and reads_gradients(recipe, step):
                trace.grads[step] = whole_grads(engine.module)
            engine.step()
        trace.losses.append(losses)
        trace.norms.append(float(engine.grad_norm()))
    return finished(engine, trace), list(input_gradients)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "transport"), [(1, "gloo"), (2, "shm"), (2, "gloo")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_packed_layers_train_as_in_plain_pytorch(stage: int, ranks: int, transport: str, precision: str) -> None:
    recipe = Recipe(ranks, accumulation=2, steps=3, precision=precision)
    input_gradients.clear()
    expected = oracle.train(ADAPTED, recipe)
    by_place = torch.stack(input_gradients).view(recipe.steps, recipe.accumulation, ranks, ROWS, WIDTH)
    start_bytes = packed_bytes(oracle.build(ADAPTED).state_dict())
    assert len(start_bytes) == 2 + 1 + 4 + 3
    actual = run_ranks(train_rank, ranks, recipe, Setting(stage, transport=transport), transport=transport)
    kept = packed_bytes(actual[0][0].model)
    assert kept.keys() == start_bytes.keys() and all(torch.equal(kept[name], start_bytes[name]) for name in kept)
    for values in (expected.model, actual[0][0].model):  # packed bytes are compared above
        for name in start_bytes:
            del values[name]
    assert not (text := complaints([trace for trace, _ in actual], expected, recipe)), "\n".join(text)
    for rank, (_, gradients) in enumerate(actual):
        error, _ = relative_error({"x": torch.stack(gradients)}, {"x": by_place[:, :, rank].reshape(-1, ROWS, WIDTH)})
        assert error <= (FP32_BOUND if precision == "fp32" else BF16_GRAD_BOUND), (rank, error)


class RecomputedModel(AdaptedModel):
    """The same model with recomputed blocks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return mse(self.head(x), y)


def losses_of(kind: type[AdaptedModel], born_sharded: bool, setting: Setting, recipe: Recipe) -> list[float]:
    torch.manual_seed(0)
    config = ds_config(recipe, setting)
    with windlass.zero.Init(config_dict_or_path=config) if born_sharded else nullcontext():
        model = kind()
    engine = windlass.initialize(model=model, config=config)[0]
    losses = train_steps(engine, recipe.precision, 0, 4)
    engine.destroy()
    return losses


WAYS: dict[str, tuple[type[AdaptedModel], bool, tuple[tuple[str, Any], ...]]] = {
    "parameters on the host": (AdaptedModel, False, (("offload_param", {"device": "cpu"}),)),
    "recomputed blocks": (RecomputedModel, False, ()),
    "sharded init": (AdaptedModel, True, ()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_other_options_at_stage_3_train_alike(way: str, transport: str) -> None:
    kind, born_sharded, zero = WAYS[way]
    recipe = Recipe(precision="bf16", steps=4)
    plain = run_ranks(losses_of, 1, AdaptedModel, False, Setting(0), recipe)[0]
    for result in run_ranks(losses_of, 2, kind, born_sharded, Setting(3, zero=zero), recipe, transport=transport):
        assert result == pytest.approx(plain, rel=BF16_GRAD_BOUND)


# ------------------------------------------------------------------------------------------------------ memory at rest


def bytes_at_rest(precision: str) -> tuple[int, int]:
    """Return the bytes of packed layers on this rank between steps at stage 3, and the padding of their units."""
    engine = start(ADAPTED, ds_config(Recipe(precision=precision), Setting(stage=3)))
    batch = cast(micro_batch(Place(0, 0, dist.get_rank())), Recipe(precision=precision).dtype)
    ADAPTED.train(engine, batch, engine.backward)
    engine.step()
    units = [unit for unit in engine._sharded.units if unit.dtype == torch.uint8]
    assert all(unit.reshards == (dist.get_world_size() > 1) and not unit.trainable for unit in units)
    held = sum(unit.shard_slot.numel if unit.shard_slot is not None else unit.local_shard.numel() for unit in units)
    padding = sum(unit.layout.padded - unit.layout.numel for unit in units)
    for unit in units:  # between uses, only the shard of a unit is in memory
        assert not unit.frees_memory or unit.full.untyped_storage().nbytes() == 0
    engine.destroy()
    return held, padding


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "transport"), [(1, "gloo"), (2, "shm"), (2, "gloo"), (4, "gloo")])
def test_packed_bytes_are_sharded_over_the_ranks(ranks: int, transport: str, precision: str) -> None:
    full = sum(value.numel() for value in packed_bytes(oracle.build(ADAPTED).state_dict()).values())
    shapes = {
        "int8": (HIDDEN, WIDTH),
        "bf16": (WIDTH, HIDDEN),
        "int4_g32_zp": (HIDDEN, WIDTH),
        "int3_g32": (WIDTH, HIDDEN),
    }
    forms = [get_weight_format(name).file_form(*shape) for name, shape in shapes.items()]
    assert full == sum(form.nbytes for parts in forms for form in parts.values())
    for held, padding in run_ranks(bytes_at_rest, ranks, precision, transport=transport):
        assert held * ranks == full + padding
        assert padding < 2 * 16 * (10 + ranks), "two blocks of ten packed tensors, each aligned to 16 bytes"


# --------------------------------------------------------------------------------------------------------- checkpoints


def engine_of(stage: int, precision: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return windlass.initialize(
        model=AdaptedModel(), config=ds_config(Recipe(precision=precision, accumulation=1), Setting(stage=stage))
    )[0]


def train_steps(engine: Any, precision: str, first: int, last: int) -> list[float]:
    """Return the losses of steps. All ranks train equal micro-batches, so any number of ranks has the same losses."""
    losses = []
    for step in range(first, last):
        batch = cast(micro_batch(Place(step, 0, 0)), Recipe(precision=precision).dtype)
        losses.append(float(ADAPTED.train(engine, batch, engine.backward)))
        engine.step()
    return losses


def save_and_go_on(folder: str, stage: int, precision: str, everything: bool) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(stage, precision)
    train_steps(engine, precision, 0, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=not everything)
    engine.save_16bit_model(folder, "whole.safetensors")
    losses = train_steps(engine, precision, 2, 4)
    state = engine.full_state_dict()
    engine.destroy()
    return losses, packed_bytes(state) if state is not None else {}


def resume(folder: str, stage: int, precision: str, seed: int) -> tuple[list[float], dict[str, Tensor]]:
    """Load into a model with other packed weights (of another seed), and continue."""
    engine = engine_of(stage, precision, seed)
    engine.load_checkpoint(folder)
    losses = train_steps(engine, precision, 2, 4)
    state = engine.full_state_dict()
    engine.destroy()
    return losses, packed_bytes(state) if dist.get_rank() == 0 else {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "stages"), [((2, 1), (3, 3)), ((1, 2), (3, 3)), ((2, 2), (1, 3)), ((4, 2), (3, 0))])
def test_checkpoints_preserve_the_packed_bytes(
    ranks: tuple[int, int], stages: tuple[int, int], precision: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    torch.manual_seed(0)
    wanted_bytes = packed_bytes(AdaptedModel().state_dict())
    expected, went_on = run_ranks(save_and_go_on, ranks[0], str(folder), stages[0], precision, True)[0]
    actual, loaded = run_ranks(resume, ranks[1], str(folder), stages[1], precision, 7)[0]
    assert actual == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 1e-2)
    export_safetensors(folder, tmp_path / "exported", dtype=torch.float16)
    read = [windlass.read_checkpoint(folder).model_state_dict(), load_file(folder / "whole.safetensors")]
    read += [load_file(tmp_path / "exported" / "model.safetensors")]
    for values in (went_on, loaded, *map(packed_bytes, read)):
        assert values.keys() == wanted_bytes.keys()
        assert all(torch.equal(values[name], wanted_bytes[name]) for name in values)
    model = AdaptedModel()
    model.load_state_dict(read[2])
    layer = model.blocks[0].rise.base
    assert torch.equal(layer.unpack(), layer.format.unpack(layer.packed()))


def adapters_alone(folder: str) -> list[str]:
    """Return the errors of loading a checkpoint of adapters only, over their own base weights and over others."""
    text = []
    save_and_go_on(folder, 3, "bf16", False)
    for seed in (0, 7):
        try:
            resume(folder, 3, "bf16", seed)
            text.append("")
        except windlass.WindlassError as error:
            text.append(str(error))
    return text


def test_adapters_resume_over_their_packed_base(tmp_path: Path) -> None:
    for same, other in run_ranks(adapters_alone, 2, str(tmp_path)):
        assert same == ""
        assert "was saved with another base model" in other and "blocks.0.rise.base.int8_weight" in other


def into_other_formats(folder: str) -> str:
    """Return the error of a load into a model whose first layer is packed in another format."""
    save_and_go_on(folder, 3, "bf16", True)
    torch.manual_seed(0)
    model = AdaptedModel()
    model.blocks[0].rise.base = PackedLinear.from_linear(model.blocks[0].rise.base.to_linear(), "fp32")
    engine = windlass.initialize(model=model, config=ds_config(Recipe(precision="bf16"), Setting(stage=3)))[0]
    text = ""
    try:
        engine.load_checkpoint(folder)
    except windlass.WindlassError as error:
        text = str(error)
    engine.destroy()
    return text


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(into_other_formats, 2, str(tmp_path)):
        assert "blocks.0.rise.base.fp32_weight" in text and "blocks.0.rise.base.int8_weight" in text


def used_where_it_is_sharded() -> list[str]:
    """Return the error of reading a sharded packed weight, and whether the gathered weight is finite."""
    engine, text = engine_of(3, "bf16"), []
    layer = engine.module.blocks[0].rise.base
    with torch._C.DisableTorchFunctionSubclass():
        assert bool((raw_data(layer.int8_weight_scale) == 255).all()), "float32 of these bytes is NaN"
    try:
        layer.unpack()
    except windlass.WindlassError as error:
        text.append(str(error))
    with windlass.zero.GatheredParameters(list(layer.parameters())):
        text.append(str(bool(torch.isfinite(layer.unpack()).all())))
    engine.destroy()
    return text


def test_a_sharded_packed_weight_is_never_read_as_numbers() -> None:
    for refused, gathered in run_ranks(used_where_it_is_sharded, 2):
        assert "blocks.0.rise.base.int8_weight" in refused and "GatheredParameters" in refused
        assert gathered == "True"
