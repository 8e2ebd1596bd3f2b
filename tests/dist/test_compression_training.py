"""Tests that compression during training gives the same model at every ZeRO stage, under tp, pp and offload, as in one
process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import windlass
from tests.dist.averaged_losses import part_of_rank, step_and_average, train_and_end
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import build
from windlass.base.errors import ConfigError, PeerError
from windlass.compress.compression_training import compression_clock, end_compression_step, init_compression
from windlass.compress.quantize_training import bit_planner, prepare_quantize_training
from windlass.compress.redundancy_clean import redundancy_clean
from windlass.config.compression_section import Eigenvalue
from windlass.config.quantize_training_section import QuantizeTraining
from windlass.parallel.experts import MixtureOfExperts
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential

STEPS, ROWS = 5, 4


def technique(shared: dict[str, Any], params: dict[str, Any], modules: str) -> dict[str, Any]:
    groups = {"group": {"params": params, "modules": [modules]}}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}


CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.0}},
    "gradient_clipping": 0.0,
    "train_batch_size": ROWS,
    "compression_training": {
        "weight_quantization": technique(
            {"schedule_offset": 1, "quantize_groups": 4, "rounding": "stochastic"},
            {"start_bits": 5, "target_bits": 3, "quantization_period": 1},
            "first",
        ),
        "activation_quantization": technique({"schedule_offset": 2}, {"bits": 6}, "second"),
        "sparse_pruning": technique({"schedule_offset": 0, "method": "topk"}, {"dense_ratio": 0.5}, "second"),
        "row_pruning": technique({"schedule_offset": 3, "method": "l1"}, {"dense_ratio": 0.5}, "first"),
    },
}


class Model(nn.Module):
    """Two blocks of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"first": nn.Linear(12, 20), "second": nn.Linear(20, 12)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["second"](torch.tanh(block["first"](x)))
        return (x - 1).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(step))


def prepared() -> nn.Module:
    torch.manual_seed(0)
    return init_compression(Model(), CONFIG)


def train_plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Callable[[int], Tensor] = batch,
    after_step: Callable[[int], object] = lambda step: None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a prepared model in this process; return the losses and the final values."""
    losses = []
    compression_clock(model).step = 0
    for step in range(STEPS):
        loss = model(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_compression_step(model)
        after_step(step)
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain() -> tuple[list[float], dict[str, Tensor]]:
    model = prepared()
    return train_plainly(model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0))


def step_of(engine: Any, number: int) -> float:
    """Train a step on this rank's rows, and return the mean loss of all ranks."""
    share = ROWS // dist.get_world_size()
    loss = engine(batch(number)[dist.get_rank() * share :][:share])
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(stage: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train, resuming from a checkpoint after two steps with a new engine."""
    losses: list[float] = []
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    for first, last in ((0, 2), (2, STEPS)):
        engine = windlass.initialize(model=prepared(), config=config)[0]
        if first:
            engine.load_checkpoint(folder)
        for step in range(first, last):
            losses.append(step_of(engine, step))
        if not first:
            engine.save_checkpoint(folder)
        state = engine.full_state_dict()
        engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("stage", "ranks", "transport"), [(0, 2, "gloo"), (1, 2, "gloo"), (2, 2, "shm"), (3, 2, "shm")]
)
def test_every_stage_trains_the_same_compressed_model(stage: int, ranks: int, transport: str, tmp_path: Path) -> None:
    losses, state = plain()
    found, sharded = run_ranks(train, ranks, stage, str(tmp_path), transport=transport)[0]
    assert found == pytest.approx(losses, rel=2e-5)
    assert sharded.keys() == state.keys() and any("scores" in name for name in state)
    for name, value in state.items():
        torch.testing.assert_close(sharded[name].to(value.dtype), value, rtol=1e-4, atol=1e-5)


def clean_engines() -> dict[str, tuple[float, float, list[str]]]:
    """Return losses of engines before and after `redundancy_clean`, and names and shapes of the models' states."""
    related = {
        **CONFIG["compression_training"]["row_pruning"]["different_groups"]["group"],
        "related_modules": [["second"]],
    }
    pruned = {"row_pruning": {**CONFIG["compression_training"]["row_pruning"], "different_groups": {"group": related}}}
    bits = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_schedule": {"schedule_offset": 1}}
    everywhere = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1}
    found = {}
    for name, part, zero in (
        ("pruned", {"compression_training": pruned}, {"stage": 2}),
        ("rounded", {"quantize_training": {"enabled": True, **bits}}, {"stage": 1}),
        ("sharded", {"compression_training": pruned}, {"stage": 3, **everywhere}),
    ):
        plain = {name: value for name, value in CONFIG.items() if name != "compression_training"}
        config = {**plain, **part, "zero_optimization": zero}
        torch.manual_seed(0)
        model = init_compression(Model(), config) if "compression_training" in part else Model()
        engine = windlass.initialize(model=model, config=config)[0]
        for step in range(4):
            step_of(engine, step)
        engine.eval()
        before = float(engine(batch(9)).detach())
        if name == "sharded":
            with pytest.raises(ConfigError, match=r"are sharded over ranks; call engine.destroy\(\) before"):
                redundancy_clean(engine, config)
            engine.destroy()
            after = float(redundancy_clean(engine, config).module(batch(9)).detach())
        else:
            assert redundancy_clean(engine, config) is engine
            after = float(engine(batch(9)).detach())
        found[name] = before, after, [f"{key} {tuple(value.shape)}" for key, value in model.state_dict().items()]
        engine.destroy()
    return found


def test_an_engine_evaluates_its_cleaned_model() -> None:
    found = run_ranks(clean_engines, 2)[0]
    whole = [f"{key} {tuple(value.shape)}" for key, value in Model().state_dict().items()]
    smaller = [one.replace("20", "10") for one in whole]
    for name, (before, after, states) in found.items():
        assert after == pytest.approx(before, rel=1e-6)
        assert states == (whole if name == "rounded" else smaller)


# ----------------------------------------------------------------------------- matrices and layers sharded over ranks


def language_techniques(names: dict[str, str]) -> dict[str, Any]:
    """Return five techniques on layers that are sharded along their outputs or along their inputs."""
    masked = {"schedule_offset": 1, "method": "topk"}
    return {
        "weight_quantization": {
            "shared_parameters": {
                "enabled": True,
                "schedule_offset": 1,
                "quantize_groups": 2,
                "rounding": "stochastic",
            },
            "different_groups": {
                "bits": {"params": {"start_bits": 5, "target_bits": 3}, "modules": [names["column"], names["row"]]},
                "format": {"params": {"weight_format": "int2_g32"}, "modules": [names["table"], names["attention"]]},
            },
        },
        "activation_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 1},
            "different_groups": {"inputs": {"params": {"bits": 6}, "modules": [names["row"], names["column"]]}},
        },
        "sparse_pruning": technique(masked, {"dense_ratio": 0.5}, names["row"]),
        "row_pruning": technique(masked, {"dense_ratio": 0.5}, names["column"]),
        "head_pruning": technique({**masked, "num_heads": 4}, {"dense_ratio": 0.5}, names["output"]),
    }


LLAMA = {"column": "up_proj", "row": "down_proj", "table": "embed_tokens", "attention": "k_proj", "output": "o_proj"}
LANGUAGE: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.0}},
    "gradient_clipping": 0.0,
    "compression_training": language_techniques(LLAMA),
}


SNIP = {"method": "snip_momentum", "schedule_offset": 0, "schedule_offset_end": 2, "block_pattern": "2x1"}
FOLLOWED: dict[str, Any] = {
    **LANGUAGE,
    "compression_training": {"sparse_pruning": technique(SNIP, {"dense_ratio": 0.5}, "up_proj|down_proj")},
    "quantize_training": {
        "quantize_bits": {"start_bits": 6, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    },
}


def language_model(config: dict[str, Any]) -> nn.Module:
    return init_compression(build("llama", tied=False), {**config, "train_batch_size": ROWS})


def ids(step: int) -> Tensor:
    return torch.randint(30, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def plain_language(config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = language_model(config), []
    prepare_quantize_training(
        model, QuantizeTraining.model_validate(config.get("quantize_training", {"enabled": False})), Eigenvalue()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
    for step in range(3):
        compression_clock(model).step = step
        loss = model(input_ids=ids(step), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_compression_step(model)
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_in_parts(axis: str, zero: dict[str, Any], followed: bool) -> tuple[list[float], dict[str, Tensor]]:
    chosen = FOLLOWED if followed else LANGUAGE
    batch_sizes = {"train_micro_batch_size_per_gpu": ROWS // (2 if axis == "pp" else 1)}
    batch_sizes |= {"gradient_accumulation_steps": 2} if axis == "pp" else {}
    if axis == "dp":
        batch_sizes["train_micro_batch_size_per_gpu"] = ROWS // dist.get_world_size()
    config = {**chosen, **batch_sizes, "zero_optimization": zero}
    if axis != "dp":
        config["parallel"] = {axis: 2}
    engine = windlass.initialize(model=language_model(chosen), config=config)[0]
    losses = []
    for step in range(3):
        rows = ids(step)
        if axis == "pp":
            loss = engine.train_batch(iter([{"input_ids": part, "labels": part} for part in rows.chunk(2)]))
            losses.append(float(loss))
            continue
        if axis == "dp":
            rows = part_of_rank(rows)
        losses.append(step_and_average(engine, engine(input_ids=rows, labels=rows).loss))
    state = engine.full_state_dict()
    engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}


OFFLOADS = ("offload_param", "offload_optimizer")
OFFLOADED_STATES = {"offload_optimizer": {"device": "cpu"}}
OFFLOADED = {"stage": 3, **{part: {"device": "cpu"} for part in OFFLOADS}}
DISK = {"stage": 3, **{part: {"device": "nvme"} for part in OFFLOADS}}  # the test adds a folder


# If `followed`, masks by gradients (snip_momentum) and bits by steps (MoQ) replace the other techniques.
@pytest.mark.parametrize(
    ("axis", "zero", "transport", "followed"),
    [
        ("tp", {"stage": 0}, "shm", False),
        ("tp", {"stage": 2}, "gloo", False),
        ("pp", {"stage": 1}, "gloo", False),
        ("dp", OFFLOADED, "shm", False),
        ("tp", {"stage": 1}, "gloo", True),
        ("dp", DISK, "gloo", True),
        pytest.param("dp", DISK, "shm", False, marks=pytest.mark.slow),
        pytest.param("tp", {"stage": 3}, "shm", False, marks=pytest.mark.slow),
        pytest.param("tp", {"stage": 3}, "gloo", True, marks=pytest.mark.slow),
        pytest.param("pp", {"stage": 0}, "shm", True, marks=pytest.mark.slow),
        pytest.param("dp", OFFLOADED, "gloo", True, marks=pytest.mark.slow),
    ],
)
def test_layers_and_matrices_in_parts_are_compressed_as_wholes(
    axis: str, zero: dict[str, Any], transport: str, followed: bool, tmp_path: Path
) -> None:
    if zero is DISK:
        zero = {**DISK, **{part: {"device": "nvme", "nvme_path": str(tmp_path)} for part in OFFLOADS}}
    losses, state = plain_language(FOLLOWED if followed else LANGUAGE)
    found, parts = run_ranks(train_in_parts, 2, axis, zero, followed, transport=transport)[0]
    assert found == pytest.approx(losses, rel=1e-4)
    assert parts.keys() == state.keys()
    if followed:
        masks = [value for name, value in state.items() if name.endswith("sparse_pruning_mask")]
        assert len(masks) == 8 and all(0.45 < float(mask.float().mean()) < 0.55 for mask in masks)
    else:
        assert sum("scores" in name for name in state) == 12
    for name, value in state.items():
        torch.testing.assert_close(parts[name].to(value.dtype), value, rtol=1e-3, atol=1e-4)


CLASSIFIER: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "train_batch_size": ROWS,
    "compression_training": {
        "sparse_pruning": technique({"method": "topk", "schedule_offset": 0}, {"dense_ratio": 0.5}, "score"),
        "row_pruning": technique({"method": "topk", "schedule_offset": 0}, {"dense_ratio": 0.5}, "mlp"),
    },
}


def classifier() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, mlp_bias=True, pad_token_id=0)
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return init_compression(model, CLASSIFIER)


def step_classifier(parallel: dict[str, int]) -> dict[str, Tensor]:
    """Return the weights after one SGD step, which changes them in proportion to the gradient."""
    engine = windlass.initialize(model=classifier(), config={**CLASSIFIER, "parallel": parallel})[0]
    rows = ids(0).clamp(min=1)
    engine.backward(engine(input_ids=rows, labels=torch.arange(ROWS) % 2).loss)
    engine.step()
    state = engine.full_state_dict()
    engine.destroy()
    return state if dist.get_rank() == 0 else {}


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "tp_sequence_norms": True}], ids=str)
def test_scores_of_whole_layers_and_biases_have_the_gradient_of_one_rank(parallel: dict[str, Any]) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids(0).clamp(min=1), labels=torch.arange(ROWS) % 2).loss.backward()
    optimizer.step()
    state = run_ranks(step_classifier, 2, parallel)[0]
    assert sum("scores" in name for name in state) == 4
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name].to(value.dtype), value, rtol=1e-4, atol=1e-6, msg=name)


# ------------------------------------------------------------------------------------ gradients and curvature

FOLLOWING: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "train_batch_size": ROWS,
    "compression_training": {
        "sparse_pruning": technique(
            {"method": "snip_momentum", "schedule_offset": 1, "schedule_offset_end": 4, "block_pattern": "2x1"},
            {"dense_ratio": 0.4},
            "second",
        )
    },
    "quantize_training": {
        "quantize_bits": {"start_bits": 8, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
        "eigenvalue": {"enabled": True, "layer_name": "blocks", "tol": 1e-3, "max_iter": 20},
    },
}


def following_model() -> nn.Module:
    torch.manual_seed(0)
    return init_compression(Model(), FOLLOWING)


def plain_following() -> tuple[list[float], dict[str, Tensor]]:
    model = following_model()
    section = QuantizeTraining.model_validate(FOLLOWING["quantize_training"])
    prepare_quantize_training(model, section, Eigenvalue())
    optimizer, planner = torch.optim.SGD(model.parameters(), lr=0.1), bit_planner(model)
    return train_plainly(model, optimizer, after_step=lambda step: planner.end_step(model, step + 1))


def train_following(stage: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    losses: list[float] = []
    engine = windlass.initialize(model=following_model(), config={**FOLLOWING, "zero_optimization": {"stage": stage}})[
        0
    ]
    for step in range(STEPS):
        losses.append(step_of(engine, step))
    state = engine.full_state_dict()
    buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
    engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}, buffers


@pytest.mark.parametrize(("stage", "ranks", "transport"), [(0, 2, "gloo"), (3, 2, "shm")])
def test_masks_and_bits_follow_the_whole_batch(stage: int, ranks: int, transport: str) -> None:
    losses, state = plain_following()
    schedule = state["quantize_training_schedule"]
    assert int(schedule[:, 0].min()) < 8 and float(state["blocks.0.second.sparse_pruning_mask"].float().mean()) < 0.5
    results = run_ranks(train_following, ranks, stage, transport=transport)
    assert results[0][0] == pytest.approx(losses, rel=2e-5)
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name].to(value.dtype), value, rtol=1e-3, atol=1e-5)
    for name, value in results[1][2].items():
        assert torch.equal(value, results[0][2][name]), "the same on all ranks"


CURVED: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "train_batch_size": ROWS,
    "quantize_training": {
        "quantize_bits": {"start_bits": 8, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "eigenvalue": {"enabled": True, "layer_name": "model.layers", "tol": 0, "max_iter": 3},
    },
}


def recorded_eigenvalues(model: nn.Module) -> list[list[float]]:
    """Return a list to which the planner of a model adds the eigenvalues that it computes."""
    found: list[list[float]] = []
    planner = bit_planner(model)
    assert planner is not None
    measure = planner.eigenvalues

    def record(*args: Any) -> list[float]:
        found.append(measure(*args))
        return found[-1]

    planner.eigenvalues = record  # type: ignore[method-assign]
    return found


def train_curved(parallel: dict[str, Any], zero: dict[str, Any]) -> tuple[list[float], list[list[float]], Tensor]:
    config = {**CURVED, "parallel": parallel, "zero_optimization": zero}
    engine = windlass.initialize(model=build("uneven", tied=False), config=config)[0]
    found = recorded_eigenvalues(engine.module)
    losses = [step_and_average(engine, engine(input_ids=ids(step), labels=ids(step)).loss) for step in range(2)]
    schedule = engine.module.get_buffer("quantize_training_schedule").clone()
    engine.destroy()
    return losses, found, schedule


@pytest.mark.parametrize(
    ("parallel", "zero", "transport"),
    [
        ({"tp": 2, "tp_sequence_norms": True}, {"stage": 1}, "gloo"),
        pytest.param({"tp": 2}, {"stage": 3}, "shm", marks=pytest.mark.slow),
        pytest.param({"sp": 2}, {"stage": 0}, "gloo", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_curvature_of_matrices_in_parts_is_that_of_the_whole(
    parallel: dict[str, Any], zero: dict[str, Any], transport: str
) -> None:
    model, losses = build("uneven", tied=False), []
    section = QuantizeTraining.model_validate(CURVED["quantize_training"])
    prepare_quantize_training(model, section, Eigenvalue())
    values, planner = recorded_eigenvalues(model), bit_planner(model)
    assert planner is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression_clock(model).step = 0
    for step in range(2):
        loss = model(input_ids=ids(step), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_compression_step(model)
        planner.end_step(model, step + 1)
        losses.append(float(loss.detach()))
    assert len(values) == 1 and len(set(values[0])) == 3
    ranks = run_ranks(train_curved, 2, parallel, zero, transport=transport)
    for found, measured, schedule in ranks:
        assert measured == ranks[0][1], "bit for bit the same on all ranks"
        assert measured[0] == pytest.approx(values[0], rel=1e-3)
        assert torch.equal(schedule, model.get_buffer("quantize_training_schedule"))
        assert found == pytest.approx(losses, rel=1e-4)


CURVED_STEPS = 6
CURVED_IN_TWO = {**CURVED, "gradient_accumulation_steps": 2}


class Stack(nn.Module):
    """The layers of `stacked_layers` as a plain module."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(stacked_layers()):
            self.add_module(str(number), layer)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x: Any = input_ids
        for layer in self.children():
            x = layer(x)
        return language_loss(x, labels)


class Residual(nn.Module):
    """Block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def stacked_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(30, 12), *(Residual() for _ in range(3)), nn.LayerNorm(12), nn.Linear(12, 30)]


def language_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def curved_model(kind: str) -> nn.Module:
    if kind == "stack":
        return PipelineSequential(stacked_layers(), loss_fn=language_loss)
    if kind == "specs":  # each rank keeps only the layers of its stage
        return PipelineSequential(stacked_layers(), num_stages=2, loss_fn=language_loss)
    return build(kind, tied=False)


def curved_config(kind: str) -> dict[str, Any]:
    section = CURVED["quantize_training"]
    if kind not in ("stack", "specs"):
        return CURVED_IN_TWO
    eigenvalue = {**section["eigenvalue"], "layer_name": ""}
    return {**CURVED_IN_TWO, "quantize_training": {**section, "eigenvalue": eigenvalue}}


def train_curved_stages(
    kind: str, parallel: dict[str, int], zero: dict[str, Any], pipeline: dict[str, Any], folder: Path | None
) -> tuple[list[float], list[list[float]], dict[str, Tensor]]:
    """Train over a pipeline. With a folder, another engine loads a checkpoint and trains the second half."""
    dp = dist.get_world_size() // math.prod(parallel.values())
    config = {**curved_config(kind), "parallel": parallel, "zero_optimization": zero, "pipeline": pipeline}
    losses, found = [], []
    engine = windlass.initialize(model=curved_model(kind), config=config)[0]
    measured = recorded_eigenvalues(engine.module)
    for step in range(CURVED_STEPS):
        if folder is not None and step == CURVED_STEPS // 2:
            engine.save_checkpoint(str(folder))
            engine.destroy()
            engine = windlass.initialize(model=curved_model(kind), config=config)[0]
            engine.load_checkpoint(str(folder))
            found, measured = measured, recorded_eigenvalues(engine.module)
        parts = [rows.chunk(dp)[engine.mesh.dense.data.index] for rows in ids(step).chunk(2)]
        is_pair = kind in ("stack", "specs")
        batches = [(part, part) if is_pair else {"input_ids": part, "labels": part} for part in parts]
        losses.append(float(engine.train_batch(iter(batches))))
    state = engine.full_state_dict()
    state["schedule"] = engine.module.get_buffer("quantize_training_schedule").clone()
    engine.destroy()
    return losses, found + measured, state


@pytest.mark.parametrize(
    ("kind", "ranks", "parallel", "zero", "pipeline", "transport", "resumes"),
    [
        ("uneven", 2, {"pp": 2}, {"stage": 1}, {}, "gloo", True),
        ("specs", 2, {"pp": 2}, {"stage": 0}, {"schedule": "zero-bubble"}, "shm", False),
        pytest.param("stack", 1, {"pp": 1}, {"stage": 0}, {}, "gloo", False, marks=pytest.mark.slow),
        pytest.param("stack", 3, {"pp": 3}, {"stage": 1}, {}, "gloo", True, marks=pytest.mark.slow),
        pytest.param(
            "uneven", 2, {"pp": 2}, {"stage": 1, **OFFLOADED_STATES}, {}, "shm", False, marks=pytest.mark.slow
        ),
        pytest.param(
            "llama",
            2,
            {"pp": 2},
            {"stage": 0},
            {"schedule": "interleaved", "virtual_stages": 2},
            "gloo",
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param("uneven", 4, {"pp": 2}, {"stage": 3}, {}, "shm", True, marks=pytest.mark.slow),
        pytest.param("uneven", 4, {"pp": 2}, {"stage": 2}, {}, "gloo", False, marks=pytest.mark.slow),
        pytest.param("uneven", 4, {"pp": 2, "tp": 2}, {"stage": 1}, {}, "gloo", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_curvature_of_stages_is_that_of_the_whole_model(
    kind: str,
    ranks: int,
    parallel: dict[str, int],
    zero: dict[str, Any],
    pipeline: dict[str, Any],
    transport: str,
    resumes: bool,
    tmp_path: Path,
) -> None:
    model = Stack() if kind in ("stack", "specs") else build(kind, tied=False)
    section = QuantizeTraining.model_validate(curved_config(kind)["quantize_training"])
    prepare_quantize_training(model, section, Eigenvalue())
    values, planner, losses = recorded_eigenvalues(model), bit_planner(model), []
    assert planner is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(CURVED_STEPS):
        compression_clock(model).step = step
        mean = 0.0
        for part in ids(step).chunk(2):
            output = model(input_ids=part, labels=part)
            loss = (output if isinstance(output, Tensor) else output.loss) / 2
            loss.backward()
            mean += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        compression_clock(model).step = step + 1
        planner.end_step(model, step + 1)
        losses.append(mean)
    assert len(values) > 1 and len(set(values[0])) == len(values[0]) > 2
    folder = tmp_path if resumes else None
    results = run_ranks(train_curved_stages, ranks, kind, parallel, zero, pipeline, folder, transport=transport)
    schedule = model.get_buffer("quantize_training_schedule")
    for found, measured, state in results:
        assert measured == results[0][1], "bit for bit the same on all ranks"
        for one, other in zip(measured, values, strict=True):
            assert one == pytest.approx(other, rel=1e-3)
        assert torch.equal(state["schedule"], schedule)
        assert found == pytest.approx(losses, rel=1e-4)
    for name, value in model.named_parameters():
        torch.testing.assert_close(results[0][2][name], value.detach(), rtol=1e-3, atol=1e-5)


def start_with_a_block_on_two_ranks() -> str:
    model = build("uneven", tied=False)
    model.model.layers[2] = model.model.layers[0]
    try:
        windlass.initialize(model=model, config={**CURVED_IN_TWO, "parallel": {"pp": 2}})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_block_on_two_ranks_of_a_pipeline_is_refused_on_both() -> None:
    for message in run_ranks(start_with_a_block_on_two_ranks, 2):
        assert "block 0 of 'model.layers' shares a module" in message and "set parallel.pp to 1" in message


def fail_while_curvature_is_measured() -> tuple[str, list[float]]:
    """Return the error of a step whose curvature measurement fails on the last rank, and the other steps' losses."""
    engine = windlass.initialize(model=build("uneven", tied=False), config={**CURVED_IN_TWO, "parallel": {"pp": 2}})[0]
    layer, broken = engine.module.model.layers[2], engine.is_last_stage()

    def fail(*_: Any) -> None:
        if not layer.training:
            raise ValueError("a layer that fails in eval mode")

    handle = layer.register_forward_pre_hook(fail) if broken else None
    losses, message = [], ""
    for step in range(2):
        batches = iter([{"input_ids": part, "labels": part} for part in ids(step).chunk(2)])
        try:
            losses.append(float(engine.train_batch(batches)))
        except (ValueError, PeerError) as error:
            message = f"{type(error).__name__}: {error}"
            if handle is not None:
                handle.remove()
    engine.destroy()
    return message, losses


def test_an_error_while_curvature_is_measured_reaches_all_ranks() -> None:
    (peer, after), (own, others) = run_ranks(fail_while_curvature_is_measured, 2)
    assert (
        own == "ValueError: a layer that fails in eval mode" and peer.startswith("PeerError") and "ValueError" in peer
    )
    assert after == others and len(after) == 1, "training continues"


class Convolved(nn.Module):
    """Two convolutions. Pruning removes channels of the first one and blocks of weights of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 2, padding=1), nn.Conv2d(8, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x.view(-1, 3, 2, 2)))) - 1).square().mean()


CHANNELS: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "train_batch_size": ROWS,
    "compression_training": {
        "channel_pruning": technique({"method": "topk", "schedule_offset": 1}, {"dense_ratio": 0.5}, "first"),
        "sparse_pruning": technique(SNIP, {"dense_ratio": 0.5}, "second"),
    },
}


def convolved_model() -> nn.Module:
    torch.manual_seed(0)
    return init_compression(Convolved(), CHANNELS)


def train_channels(zero: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = windlass.initialize(model=convolved_model(), config={**CHANNELS, "zero_optimization": zero})[0]
    losses = [step_of(engine, step) for step in range(STEPS)]
    state = engine.full_state_dict()
    engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("zero", "transport"),
    [(OFFLOADED, "shm"), pytest.param({"stage": 1}, "gloo", marks=pytest.mark.slow)],
    ids=["offload", "stage1"],
)
def test_channels_are_pruned_as_in_one_process(zero: dict[str, Any], transport: str) -> None:
    model = convolved_model()
    losses, values = train_plainly(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found, state = run_ranks(train_channels, 2, zero, transport=transport)[0]
    assert found == pytest.approx(losses, rel=2e-5)
    assert float(state["second.sparse_pruning_mask"].float().mean()) == 0.5
    for name, value in values.items():
        torch.testing.assert_close(state[name].to(value.dtype), value, rtol=1e-4, atol=1e-5)


def momentum_after_a_bad_batch(section: dict[str, Any]) -> list[Tensor]:
    """Return the momentum of a mask before and after a batch of infinities, and after the next batch."""
    config = {name: value for name, value in FOLLOWING.items() if name != "quantize_training"} | section
    torch.manual_seed(0)
    engine = windlass.initialize(model=init_compression(Model(), config), config=config)[0]
    found = []
    for step, infinite in ((0, False), (1, False), (2, True), (3, False)):
        rows = batch(step).fill_(torch.inf) if infinite else batch(step)
        engine.backward(engine(rows.to(engine.module.blocks[0]["first"].bias.dtype)))
        try:
            engine.step()
        except windlass.WindlassError:
            assert infinite
        assert engine.was_step_applied() != infinite
        found.append(engine.module.get_buffer("blocks.0.second.sparse_pruning_momentum").clone())
    engine.destroy()
    return found[1:]


@pytest.mark.parametrize("section", [{}, {"fp16": {"enabled": True, "initial_scale_power": 4}}], ids=["fp32", "fp16"])
def test_a_step_that_is_not_applied_does_not_change_the_scores_of_masks(section: dict[str, Any]) -> None:
    before, bad, after = run_ranks(momentum_after_a_bad_batch, 1, section, transport="gloo")[0]
    assert float(before.abs().sum()) > 0 and torch.equal(bad, before)
    assert bool(after.isfinite().all()) and not torch.equal(after, before)


class Routed(nn.Module):
    """Mixture of three experts, which two ranks hold in unequal numbers."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 12))
        self.moe = MixtureOfExperts(12, expert, 3, drop_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x + self.moe(x)[0] - 1).square().mean()
        return loss


def routed_config() -> dict[str, Any]:
    snip = {"method": "snip_momentum", "schedule_offset": 0, "schedule_offset_end": 3, "block_pattern": "1x1"}
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "train_batch_size": ROWS,
        "parallel": {"ep": dist.get_world_size()},
        "compression_training": {
            "sparse_pruning": technique(snip, {"dense_ratio": 0.5}, r"experts.*\.0$"),
            "row_pruning": technique({"method": "l1"}, {"dense_ratio": 0.5}, r"experts.*\.2$"),
        },
    }


def masks_of_experts(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the masks of all experts before and after training. Assert that a load restores them."""
    torch.manual_seed(0)
    config = routed_config()
    model = init_compression(Routed(), config)
    for number, expert in enumerate(model.moe.deepspeed_moe["experts"].deepspeed_experts):
        expert[2].row_pruning_mask.fill_(number % 2 > 0)
    before = {name: value.clone() for name, value in model.named_buffers()}
    engine = windlass.initialize(model=model, config=config)[0]
    for step in range(3):
        step_of(engine, step)
    engine.save_checkpoint(folder)
    state = engine.full_state_dict()
    for buffer in engine.module.buffers():
        buffer.zero_()
    engine.load_checkpoint(folder)
    loaded = engine.full_state_dict()
    engine.destroy()
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    return before, {name: value for name, value in state.items() if name in before}


def test_experts_on_other_ranks_have_masks_of_their_own(tmp_path: Path) -> None:
    before, whole = run_ranks(masks_of_experts, 1, str(tmp_path / "one"), transport="gloo")[0]
    _, parts = run_ranks(masks_of_experts, 2, str(tmp_path / "two"), transport="gloo")[0]
    assert parts.keys() == before.keys()
    for name, value in whole.items():
        if "row" in name:
            assert torch.equal(value, before[name])
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-5)


def unprepared() -> str:
    with pytest.raises(windlass.WindlassError) as caught:
        windlass.initialize(model=Model(), config=CONFIG)
    return str(caught.value)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    assert "call init_compression(model, config)" in run_ranks(unprepared, 1, transport="gloo")[0]


# ------------------------------------------------------------------------ shared, repeated, frozen and recomputed parts


class Unusual(nn.Module):
    """Embedding tied to the head, a block that runs twice and is recomputed, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight
        self.block = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows)
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=False)
        logits = self.head(self.frozen(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def unusual_config(**more: Any) -> dict[str, Any]:
    snip = {"method": "snip_momentum", "schedule_offset": 1, "schedule_offset_end": 3, "block_pattern": "1x1"}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "train_batch_size": ROWS,
        "compression_training": {
            "weight_quantization": technique({"schedule_offset": 0}, {"target_bits": 4}, "table|head|frozen"),
            "activation_quantization": technique({"schedule_offset": 1}, {"bits": 6}, "block"),
            "sparse_pruning": technique(snip, {"dense_ratio": 0.5}, "block.0"),
        },
        **more,
    }


def unusual_rows(step: int) -> Tensor:
    return torch.randint(11, (ROWS, 6), generator=torch.Generator().manual_seed(step))


def train_unusual(stage: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(2)
    config = unusual_config(zero_optimization={"stage": stage})
    engine = windlass.initialize(model=init_compression(Unusual(), config), config=config)[0]
    return train_and_end(engine, lambda step: engine(part_of_rank(unusual_rows(step))), STEPS)


@pytest.mark.parametrize(("stage", "transport"), [(1, "gloo"), (3, "shm")])
def test_shared_repeated_frozen_and_recomputed_layers_train_as_in_plain_torch(stage: int, transport: str) -> None:
    torch.manual_seed(2)
    model = init_compression(Unusual(), unusual_config())
    assert model.head.weight is model.table.weight
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.0)
    losses, values = train_plainly(model, optimizer, unusual_rows)
    found, state = run_ranks(train_unusual, 2, stage, transport=transport)[0]
    assert found == pytest.approx(losses, rel=1e-4)
    for name, value in values.items():
        torch.testing.assert_close(state[name].to(value.dtype), value, rtol=1e-3, atol=1e-4)
