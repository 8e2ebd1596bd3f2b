"""Tests that distillation trains the same model at every stage of ZeRO as in one process, with a sharded teacher."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import windlass
from tests.causal_models import model_of
from tests.dist.harness import run_ranks
from windlass.compress.compression_training import init_compression
from windlass.compress.distillation import Distillation
from windlass.compress.teacher_cache import TeacherCache

STEPS, ROWS, LENGTH, CLASSES = 3, 4, 6, 13
TERMS = {"task": 0.5, "hidden": 0.7, "attention": 0.9, "temperature": 2.0}
RATE = 0.02


class Attention(nn.Module):
    """Attention with one head. It returns the attention weights too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (one(x) for one in self.inputs)
        weights = (query @ key.transpose(1, 2)).softmax(-1)
        return weights @ value, weights[:, None]


class Block(nn.Module):
    """Attention and a matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.fall = Attention(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)[0]
        return x + torch.tanh(self.fall(x))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, layers: int, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(hidden_size=width, vocab_size=CLASSES)
        self.table = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(step: int) -> Tensor:
    return torch.randint(CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def models() -> tuple[Model, Model]:
    return Model(2, 8, seed=0), Model(4, 12, seed=1)


def kl(first: Tensor, second: Tensor) -> Tensor:
    return F.kl_div(second, first, reduction="none", log_target=True).sum(-1).mean()


def expected_loss(student: Model, teacher: Model, projection: nn.Linear, ids: Tensor) -> Tensor:
    """Return the loss by its formula, with the blocks called one by one."""
    hidden: list[list[Tensor]] = [[], []]
    maps: list[list[Tensor]] = [[], []]
    logits = []
    for place, model in enumerate((student, teacher)):
        with torch.set_grad_enabled(model is student):
            x = model.table(ids)
            for block in model.blocks:
                maps[place].append(block.attention(x)[1])
                x = block(x)
                hidden[place].append(x)
            logits.append(model.head(x))
    loss = TERMS["task"] * F.cross_entropy(logits[0].flatten(0, 1), ids.flatten())
    loss = loss + 4 * kl((logits[1] / 2).log_softmax(-1), (logits[0] / 2).log_softmax(-1))
    for mine, its in ((0, 1), (1, 3)):
        loss = loss + TERMS["hidden"] / 2 * F.mse_loss(projection(hidden[0][mine]), hidden[1][its])
        loss = loss + TERMS["attention"] / 2 * kl(maps[1][its].log(), maps[0][mine].log())
    return loss


def plain() -> tuple[list[float], dict[str, Tensor]]:
    student, teacher = models()
    torch.manual_seed(5)
    projection = nn.Linear(8, 12, bias=False)
    trained = [*student.parameters(), *projection.parameters()]
    optimizer, losses = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0), []
    for step in range(STEPS):
        loss = expected_loss(student, teacher, projection, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    state = student.state_dict() | {"distillation_projection.weight": projection.weight}
    return losses, {name: value.detach().clone() for name, value in state.items()}


def config(stage: int, device: str = "none") -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if device != "none":
        zero["offload_param"] = {"device": device}
    return {"train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(), "zero_optimization": zero}


def train(stage: int, teacher_stage: int, device: str) -> dict[str, Any]:
    """Train with every term and a teacher that an engine without optimizer holds."""
    student, teacher = models()
    teaching = windlass.initialize(model=teacher, config=config(teacher_stage, device))[0]
    torch.manual_seed(5)
    Distillation(teaching, **TERMS).attach(student)
    more = {
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "distillation": {"temperature": 2.0},
    }
    engine = windlass.initialize(model=student, config={**config(stage), **more})[0]
    share, losses = ROWS // dist.get_world_size(), []
    for step in range(STEPS):
        ids = batch(step)[dist.get_rank() * share :][:share]
        loss = engine(input_ids=ids, labels=ids)["loss"]
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    held = sum(
        unit.shard_slot.numel if unit.shard_slot is not None else unit.local_shard.numel()
        for unit in teaching._sharded.units
    )
    state = engine.full_state_dict()
    result = {
        "losses": losses,
        "state": state if dist.get_rank() == 0 else {},
        "held": held,
        "whole": sum(p.numel() for p in models()[1].parameters()),
        "states": teaching.optimizer is not None or teaching._sharded.update is not None,
    }
    engine.destroy()
    teaching.destroy()
    return result


@pytest.mark.parametrize(
    ("stage", "ranks", "transport", "teacher", "device"),
    [
        (0, 1, "gloo", 0, "none"),
        (1, 2, "gloo", 3, "none"),
        (2, 2, "shm", 3, "cpu"),
        (3, 2, "shm", 3, "none"),
        (3, 2, "gloo", 3, "cpu"),
    ],
)
def test_every_stage_distils_the_same_model(stage: int, ranks: int, transport: str, teacher: int, device: str) -> None:
    losses, state = plain()
    results = run_ranks(train, ranks, stage, teacher, device, transport=transport)
    assert results[0]["losses"] == pytest.approx(losses, rel=2e-5)
    assert results[0]["state"].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(results[0]["state"][name], value, rtol=1e-4, atol=1e-5)
    for result in results:
        assert not result["states"], "a teacher has no optimizer"
        assert result["held"] <= result["whole"] / (ranks if teacher == 3 else 1) + 64 * ranks


def train_in_stages(
    teacher_kind: str, stage: int, parallel: dict[str, int], pipeline: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Train over a pipeline with every term; the teacher is a module, or an engine of a stage of ZeRO."""
    student, teacher = models()
    teaching: Any = teacher
    if teacher_kind != "module":
        teaching = windlass.initialize(model=teacher, config=config(int(teacher_kind)))[0]
    torch.manual_seed(5)
    Distillation(teaching, **TERMS).attach(student)
    replicas = dist.get_world_size() // parallel["pp"]
    sizes = {"train_batch_size": ROWS, "gradient_accumulation_steps": 2}
    optimizer = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}}
    more = {"optimizer": optimizer, "gradient_clipping": 0.0, "parallel": parallel, "pipeline": pipeline, **sizes}
    engine = windlass.initialize(
        model=student, config={"zero_optimization": config(stage)["zero_optimization"], **more}
    )[0]
    losses = []
    for step in range(STEPS):
        micro_batches = [rows.chunk(replicas)[engine.mesh.dense.data.index] for rows in batch(step).chunk(2)]
        losses.append(float(engine.train_batch(iter([{"input_ids": ids, "labels": ids} for ids in micro_batches]))))
    state = engine.full_state_dict()
    engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("teacher", "stage", "ranks", "pipeline", "transport"),
    [
        ("module", 1, 2, {}, "gloo"),
        ("3", 0, 2, {"schedule": "zero-bubble"}, "shm"),
        pytest.param("0", 1, 2, {"schedule": "gpipe"}, "gloo", marks=pytest.mark.slow),
        pytest.param("3", 3, 4, {}, "shm", marks=pytest.mark.slow),
        pytest.param("module", 2, 4, {}, "gloo", marks=pytest.mark.slow),
    ],
)
def test_stages_of_a_pipeline_distil_the_same_model(
    teacher: str, stage: int, ranks: int, pipeline: dict[str, Any], transport: str
) -> None:
    losses, state = plain()
    results = run_ranks(train_in_stages, ranks, teacher, stage, {"pp": 2}, pipeline, transport=transport)
    for found, _ in results:
        assert found == pytest.approx(losses, rel=2e-5)
    assert results[0][1].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-4, atol=1e-5)


def language_models() -> tuple[nn.Module, nn.Module]:
    """Return two Llamas with eager attention: four layers of width 32, and six layers of width 48."""
    found = []
    for layers, width, seed in ((4, 32, 0), (6, 48, 1)):
        torch.manual_seed(seed)
        sizes = {"hidden_size": width, "intermediate_size": 40, "num_hidden_layers": layers, "vocab_size": 31}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        model = model_of("LlamaForCausalLM", tie_word_embeddings=layers == 4, **sizes, **heads)
        model.set_attn_implementation("eager")
        found.append(model)
    return found[0], found[1]


def language_batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(step))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[::2, :2], labels[::2, :5] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def micro_batches_of(step: int) -> list[dict[str, Tensor]]:
    whole = language_batch(step)
    return [{name: value[place::2] for name, value in whole.items()} for place in range(2)]


def distil_language_plainly(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    student, teacher = language_models()
    torch.manual_seed(5)
    Distillation(teacher, **options).attach(student).train()
    optimizer, losses = torch.optim.SGD(student.parameters(), lr=0.1), []
    for step in range(STEPS):
        mean = 0.0
        for part in micro_batches_of(step):
            loss = student(**part).loss / 2
            loss.backward()
            mean += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return losses, {name: value.detach() for name, value in student.named_parameters()}


def distil_language_in_stages(
    options: dict[str, Any],
    parallel: dict[str, int],
    pipeline: dict[str, Any],
    folder: Path | None,
    has_teacher: bool = True,
) -> tuple[list[float], dict[str, Tensor]]:
    student, teacher = language_models()
    torch.manual_seed(5)
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    cache = None
    if folder is not None:
        cache = TeacherCache(folder, top_k=31, temperature=options["temperature"], rank=rank)
    Distillation(teacher if has_teacher else None, cache=cache, **options).attach(student)
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "parallel": parallel,
        "pipeline": pipeline,
    }
    engine = windlass.initialize(model=student, config=config)[0]
    losses = [float(engine.train_batch(iter(micro_batches_of(step)))) for step in range(STEPS)]
    state = engine.full_state_dict()
    engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}


INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
LABELLED = {"hidden": 0.7, "attention": 0.9, "task": 0.3, "temperature": 2.0, "tokens": "labelled"}
NAMED = {
    "hidden": 0.5,
    "temperature": 1.5,
    "layers": {"model.layers.3": "model.layers.1", "0": "2", "model.norm": "-1"},
}
LOGITS_ALONE = {"temperature": 1.0, "divergence": "reverse"}


@pytest.mark.parametrize(
    ("options", "ranks", "parallel", "pipeline", "cached"),
    [
        (LABELLED, 2, {"pp": 2}, INTERLEAVED, False),
        pytest.param(LABELLED, 3, {"pp": 3}, {}, False, marks=pytest.mark.slow),
        pytest.param(NAMED, 2, {"pp": 2}, {}, False, marks=pytest.mark.slow),
        pytest.param(NAMED, 4, {"pp": 2, "tp": 2}, {}, False, marks=pytest.mark.slow),
        pytest.param(LOGITS_ALONE, 4, {"pp": 2, "tp": 2}, {}, False, marks=pytest.mark.slow),
        pytest.param(LOGITS_ALONE, 2, {"pp": 2}, INTERLEAVED, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_distil_a_language_model_as_one_process_does(
    options: dict[str, Any],
    ranks: int,
    parallel: dict[str, int],
    pipeline: dict[str, Any],
    cached: bool,
    tmp_path: Path,
) -> None:
    losses, parameters = distil_language_plainly(options)
    folder = tmp_path / "cache" if cached else None
    for has_teacher in (True, False) if cached else (True,):  # first the teacher fills the cache
        results = run_ranks(distil_language_in_stages, ranks, options, parallel, pipeline, folder, has_teacher)
        for found, _ in results:
            assert found == pytest.approx(losses, rel=3e-3 if cached else 2e-5)  # a cache stores 16 bits
        for name, value in parameters.items():
            torch.testing.assert_close(
                results[0][1][name], value, rtol=1e-4, atol=1e-3 if cached else 1e-5, msg=f"{name} differs"
            )


XTC = {
    "compression_training": {
        "layer_reduction": {
            "enabled": True,
            "module_name_prefix": "blocks",
            "teacher_layer": [1, 3],
            "other_module_name": ["table", "head"],
        },
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 0},
            "different_groups": {
                "one": {"params": {"weight_format": "binary"}, "modules": ["fall", "table"]},
                "two": {"params": {"target_bits": 2}, "modules": ["attention"]},
            },
        },
    }
}


def one_stage(stage: int | None) -> list[float]:
    """Train a student of fewer layers in 1 and 2 bits from a full teacher, at a ZeRO stage or (None) in plain torch."""
    teacher = Model(4, 8, seed=1)
    student = init_compression(Model(2, 8, seed=0), XTC, teacher_model=teacher)
    assert torch.equal(student.blocks[1].fall.weight, teacher.blocks[3].fall.weight)
    losses, terms, share = [], {"hidden": 0.5, "layers": {0: 1, 1: 3}}, ROWS
    if stage is None:
        Distillation(teacher, **terms).attach(student)
        optimizer: Any = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=0.0)
    else:
        share //= dist.get_world_size()
        teaching = windlass.initialize(model=teacher, config=config(3))[0]
        Distillation(teaching, **terms).attach(student)
        more = {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}}, "gradient_clipping": 0.0}
        engine = windlass.initialize(model=student, config={**config(stage), **XTC, **more})[0]
    for step in range(STEPS):
        if stage is None:
            loss = student(batch(step))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            continue
        loss = engine(batch(step)[dist.get_rank() * share :][:share])["loss"]
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def test_few_bits_and_fewer_layers_are_trained_in_one_stage() -> None:
    expected = one_stage(None)
    assert expected[-1] < expected[0]
    assert run_ranks(one_stage, 2, 3, transport="gloo")[0] == pytest.approx(expected, rel=2e-5)


def cached(folder: str) -> list[list[float]]:
    """Train with a cache that a sharded teacher fills, then with the cache alone. Rank 1 repeats its batch."""
    losses = []
    for alone in (False, True):
        student, teacher = models()
        teaching = None if alone else windlass.initialize(model=teacher, config=config(3))[0]
        cache = TeacherCache(folder, top_k=CLASSES, rank=dist.get_rank())
        Distillation(teaching, cache=cache).attach(student)
        more = {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
        engine = windlass.initialize(model=student, config={**config(2), **more})[0]
        losses.append([])
        for step in range(STEPS):
            ids = batch(0 if dist.get_rank() else step)[:2]  # rank 1 trains one batch again and again
            loss = engine(input_ids=ids)["loss"]
            engine.backward(loss)
            engine.step()
            losses[-1].append(float(loss.detach()))
        engine.destroy()
    return losses


def test_ranks_share_a_cache_and_then_train_without_the_teacher(tmp_path: Path) -> None:
    for first, second in run_ranks(cached, 2, str(tmp_path), transport="gloo"):
        assert first == second
    stored = sum(path.stat().st_size for path in tmp_path.glob("rank*.bin"))
    assert stored == 2 * STEPS * (20 + batch(0).shape[1] * CLASSES * 4), "both ranks have the first batch"


def refused() -> list[str]:
    text = []
    for section, attach in (({"distillation": {"hidden": 1.0}}, False), ({}, True)):
        student, teacher = models()
        if attach:
            trained = windlass.initialize(
                model=teacher, config={**config(0), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            )[0]
        try:
            if attach:
                Distillation(trained)
            windlass.initialize(model=student, config={**config(0), **section})
        except windlass.WindlassError as error:
            text.append(str(error))
    return text


def test_a_missing_or_trained_teacher_is_refused() -> None:
    missing, trained = run_ranks(refused, 1, transport="gloo")[0]
    assert "the model has no teacher; call Distillation(teacher, ...)" in missing
    assert "has an optimizer; build it without one" in trained
