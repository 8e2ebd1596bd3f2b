"""Tests that the programs of the parallelism guide train as one process over the axes of its configurations."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.harness import RankError, run_ranks
from tests.dist.parallel_runs import VOCABULARY, build
from tests.dist.test_guides import GUIDES, ROOT, programs

SAMPLES, LENGTH, CLIP = 16, 13, 1.0
GRID = ("pp", "dp_replicate", "ep", "sp", "tp")
TEXT = (GUIDES / "parallel.md").read_text()


def configs() -> dict[str, dict[str, Any]]:
    """Return the configurations of the guide, by the comment before them."""
    result = re.findall(r"<!-- config: (\w+) -->\n```json\n(.*?)```", TEXT, re.DOTALL)
    return {name: json.loads(text) for name, text in result}


def program(name: str) -> str:
    return programs("parallel.md")[name]


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, with some tokens excluded from the loss."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": labels_of(ids)}


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    return ids.masked_fill(ids < 5, -100)


class Watched:
    """Recorder of a model's input batches, before they are sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:  # not in calls that inspect the forward
            self.seen.append(kwargs["input_ids"].clone())


def trained(tag: str, kind: str, code: str) -> dict[str, Any]:
    """Run a program on a rank with a transformers model, under a configuration of the guide."""
    model = build(kind, tied=False)
    watched = Watched(model)
    names: dict[str, Any] = {"model": model, "config": configs()[tag], "dataset": Texts(), "losses": []}
    exec(program(code), names)
    engine = names["engine"]
    found = {"losses": names["losses"], "seen": watched.seen, "readers": engine.data_loading_ranks}
    found["axes"] = {axis: engine.mesh.grid.size(axis) for axis in GRID}
    engine.destroy()
    return found


def alone(kind: str, readers: list[list[torch.Tensor]], micros: int = 1) -> list[list[float]]:
    """Return the losses of each data-loading rank in plain PyTorch in one process."""
    model = build(kind, tied=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results: list[list[float]] = [[] for _ in readers]
    for step in range(0, len(readers[0]), micros):
        for own, batches in zip(results, readers, strict=True):
            losses = torch.stack([model(input_ids=x, labels=labels_of(x)).loss for x in batches[step : step + micros]])
            own.append(losses.mean().item())
            (losses.mean() / len(readers)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return results


def by_reader(found: list[dict[str, Any]], what: str) -> list[Any]:
    """Return one value per data-loading rank, from the first of the ranks that read its data."""
    count = found[0]["readers"][0]
    own = [[item[what] for item in found if item["readers"][1] == number] for number in range(count)]
    return [ranks[0] for ranks in own]


AXES = {"tensor": "llama", "ulysses": "llama", "ring": "llama", "experts": "mixtral", "together": "llama"}
AXES |= {"copies": "llama", "long": "llama"}


@pytest.mark.parametrize("tag", AXES)
def test_guide_configuration_trains_as_one_process(tag: str) -> None:
    text = {axis: size for axis, size in configs()[tag]["parallel"].items() if axis in GRID}
    world = 4 if tag == "copies" else math.prod(text.values())
    actual = run_ranks(trained, world, tag, AXES[tag], "train", timeout=120)
    assert all({axis: entry["axes"][axis] for axis in text} == text for entry in actual)
    expected = alone(AXES[tag], by_reader(actual, "seen"))
    for item in actual:
        assert len(item["losses"]) == SAMPLES // 2 // item["readers"][0]
        assert item["losses"] == pytest.approx(expected[item["readers"][1]], rel=1e-5)


def test_every_configuration_is_run() -> None:
    assert {*AXES, "table", "pipeline"} == set(configs())


def test_a_pipeline_trains_as_one_process() -> None:
    actual = run_ranks(trained, 2, "pipeline", "llama", "a model over stages", timeout=120)
    assert [entry["axes"]["pp"] for entry in actual] == [2, 2]
    (expected,) = alone("llama", by_reader(actual, "seen"), micros=4)
    for item in actual:
        assert len(expected) == 2 and item["losses"] == pytest.approx(expected, rel=1e-5)


class Pairs(torch.utils.data.Dataset[Any]):
    """Sequences that are their own labels. Records the indices that were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return ids, ids


def row_of_layers() -> tuple[list[float], list[int], dict[str, torch.Tensor]]:
    dataset = Pairs()
    names: dict[str, Any] = {"config": configs()["pipeline"], "dataset": dataset, "losses": []}
    exec(program("a row of layers"), names)
    exec(program("a model over stages"), names)
    weights = names["engine"].full_state_dict()
    names["engine"].destroy()
    return names["losses"], dataset.read, weights


def test_layer_list_trains_as_one_process() -> None:
    found = run_ranks(row_of_layers, 2, timeout=120)
    names: dict[str, Any] = {}
    exec(program("a row of layers"), names)
    model, dataset = names["model"], Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for losses, read, _ in found:
        assert read == found[0][1] and len(read) == SAMPLES and losses == found[0][0]
    ids = [torch.stack([dataset[index][0] for index in read[at : at + 2]]) for at in range(0, SAMPLES, 2)]
    wanted = []
    for step in (0, 4):
        loss = torch.stack([model.loss_fn(model(x), x) for x in ids[step : step + 4]]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert found[0][0] == pytest.approx(wanted, rel=1e-5)
    assert set(found[0][2]) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(found[0][2][name], value, rtol=1e-5, atol=1e-6), name


# tests of user-defined plan tables, layers and experts


class Gated(nn.Module):
    """Gate and value from one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(16, 96), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return x + self.out(F.silu(gate) * value)


class Stranger(nn.Module):
    """Model that the tracer can't shard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x), y))


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random features and classes."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=draw), "y": torch.randint(0, 5, (), generator=draw)}


def with_table() -> tuple[str, list[float]]:
    import windlass

    config = configs()["table"]
    without = {**config, "parallel": {"tp": 2}}
    with pytest.raises(windlass.WindlassError) as error:
        windlass.initialize(model=Stranger(), config=without)
    names: dict[str, Any] = {"model": Stranger(), "config": config, "dataset": Points(), "losses": []}
    exec(program("train"), names)
    losses = [*names["losses"], *_plainly(Stranger(), list(names["loader"]))]
    return str(error.value), losses


def _plainly(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = model(**batch)
        loss = getattr(loss, "loss", loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_message_matches_the_guide_and_its_table_works() -> None:
    (printed,) = re.findall(r"```text\n(tensor parallelism can't shard.*?)\n```", TEXT, re.DOTALL)
    for message, losses in run_ranks(with_table, 2):
        assert message == printed.replace("\n", " ")
        assert len(losses) == 2 * SAMPLES // 4


def _features(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=draw), torch.randint(0, 5, (4,), generator=draw)


def own_layers() -> tuple[tuple[int, int], list[float]]:
    names: dict[str, Any] = {"config": {**configs()["tensor"], "zero_optimization": {"stage": 3}}}
    exec(program("layers of your own"), names)
    engine = names["engine"]
    count, number = engine.data_loading_ranks
    losses = []
    for step in range(3):
        x, y = _features(step * count + number)
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return (count, number), losses


@pytest.mark.parametrize("world", [2, 4])
def test_user_defined_layers_train_as_one_process(world: int) -> None:
    from windlass.comm.mesh_axis import single_rank_axis as lonely

    names: dict[str, Any] = {}
    exec(program("layers of your own").split("\nwindlass.init_distributed")[0], names)
    torch.manual_seed(0)
    up_and_down = names["MLP"]
    layers = [nn.Linear(6, 16), *(up_and_down(16, 24, lonely("tp")) for _ in range(2)), nn.Linear(16, 5)]
    wanted = _alone(nn.Sequential(*layers), lambda model, x, y: F.cross_entropy(model(x), y), world // 2)
    for (_, number), losses in run_ranks(own_layers, world):
        assert losses == pytest.approx(wanted[number], rel=1e-5)


def _alone(model: nn.Module, loss_of: Any, readers: int) -> list[list[float]]:
    """Train three steps in one process on the features of all data-loading ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results: list[list[float]] = [[] for _ in range(readers)]
    for step in range(3):
        losses = [loss_of(model, *_features(step * readers + number)) for number in range(readers)]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        for own, loss in zip(results, losses, strict=True):
            own.append(loss.item())
    return results


def own_experts(name: str) -> tuple[str, int, list[float], int]:
    import windlass
    from windlass.parallel.experts import expert_modules

    registered = "register_experts(" in program(name)
    before, refused = dict(expert_modules._registry), ""
    names: dict[str, Any] = {}
    exec(program(name).split("\nregister_experts(")[0], names)
    if registered:
        with pytest.raises(windlass.WindlassError) as error:
            windlass.initialize(model=names["Model"](), config=configs()["experts"])
        refused = str(error.value)
        exec(program(name), names)
    torch.manual_seed(5)
    try:
        engine, *_ = windlass.initialize(model=names["Model"](), config=configs()["experts"])
    finally:
        expert_modules._registry.clear()
        expert_modules._registry.update(before)
    count, number = engine.data_loading_ranks
    here = sum(p.numel() for n, p in engine.module.named_parameters() if "experts" in n)
    losses = []
    for step in range(3):
        loss = engine(*_features(step * count + number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return refused, number, losses, here


@pytest.mark.parametrize("name", ["experts of your own model", "experts of an unknown class"])
def test_user_defined_experts_train_as_one_process(name: str) -> None:
    names: dict[str, Any] = {}
    exec(program(name).split("\nregister_experts(")[0], names)
    torch.manual_seed(5)
    model = names["Model"]()
    whole = sum(p.numel() for n, p in model.named_parameters() if "experts" in n)
    wanted = _alone(model, lambda model, x, y: model(x, y), 2)
    found = run_ranks(own_experts, 2, name)
    for refused, number, losses, here in found:
        assert losses == pytest.approx(wanted[number], rel=1e-5)
        assert 2 * here == whole
        assert ("cannot distribute experts (Bank)" in refused) == (name == "experts of an unknown class")


# tests of data loaders


def own_loader(tag: str, kind: str, change: tuple[str, str]) -> tuple[tuple[int, int], list[list[int]]]:
    import windlass

    engine, *_ = windlass.initialize(model=build(kind, tied=False), config=configs()[tag])
    scope: dict[str, Any] = {"dataset": Texts(), "engine": engine}
    exec(program("a loader of your own").replace(*change), scope)
    seen = []
    for batch in scope["loader"]:
        engine.backward(engine(**batch).loss)
        engine.step()
        seen += batch["input_ids"].tolist()
    return engine.data_loading_ranks, seen


@pytest.mark.parametrize(("tag", "kind", "readers"), [("tensor", "llama", 1), ("experts", "mixtral", 2)])
def test_loader_over_data_loading_ranks_has_each_sample_once(tag: str, kind: str, readers: int) -> None:
    result = run_ranks(own_loader, 2, tag, kind, ("", ""))
    by_number = {number: seen for (_, number), seen in result}
    assert len(by_number) == readers
    assert all(seen == by_number[number] for (_, number), seen in result)
    everything = [tuple(ids) for seen in by_number.values() for ids in seen]
    assert len(everything) == len(set(everything)) == SAMPLES


def test_loader_over_all_ranks_is_refused() -> None:
    change = ("num_replicas=readers, rank=reader", "num_replicas=2, rank=engine.global_rank")
    with pytest.raises(RankError, match="are neighbours along tp and got different inputs"):
        run_ranks(own_loader, 2, "tensor", "llama", change)


# tests of checkpoints and commands


def moved(folder: str) -> tuple[str, str, list[torch.Tensor], list[float]]:
    """Train five steps over tp at stage 1, and the other three over sp at stage 3."""
    import windlass

    model = build("llama", tied=False)
    watched = Watched(model)
    engine, _, loader, _ = windlass.initialize(model=model, config=configs()["tensor"], training_data=Texts())
    names: dict[str, Any] = {"engine": engine, "folder": folder, "windlass": windlass, "dataset": Texts()}
    names["losses"] = []
    loop = "for " + program("train").split("for ", 1)[1]
    exec(loop, names | {"loader": itertools.islice(loader, 5)})
    before = str(engine.fingerprint())
    exec(program("leave one layout"), names)
    torch.manual_seed(99)
    other = build("llama", tied=False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()  # so that later values can only come from the checkpoint
    watched_too = Watched(other)
    names |= {"model": other, "config": configs()["ulysses"]}
    exec(program("go on in another"), names)
    after = str(names["engine"].fingerprint())
    exec(loop, names)
    names["engine"].destroy()
    return before, after, watched.seen + watched_too.seen, names["losses"]


def test_checkpoint_of_one_layout_resumes_in_another(tmp_path: Path) -> None:
    actual = run_ranks(moved, 2, str(tmp_path), timeout=120)
    (expected,) = alone("llama", [actual[0][2]])
    for before, after, seen, losses in actual:
        assert before == after
        assert len(seen) == 8 and losses == pytest.approx(expected, rel=1e-5)


def test_formulas_match_the_source() -> None:
    from windlass.parallel.comm_volumes import (
        StepWorkload,
        compute_data_parallel_volumes,
        compute_expert_parallel_volumes,
        compute_pipeline_volumes,
        compute_tensor_parallel_volumes,
    )

    said: dict[str, Any] = {}
    exec(program("bytes that a rank receives in a step"), said)

    def total(found: Any) -> int:
        return sum(volume.nbytes for volume in found)

    size, tokens, hidden, layers = 7 * 2**20, 2**12, 2**9, 6
    for stage in range(4):
        work = StepWorkload(tokens, micro_batches=3, zero_stage=stage)
        assert total(compute_data_parallel_volumes("data", size, 8, 1, work)) == said["zero"](size, 8, 3, stage)
    part = [
        v
        for v in compute_data_parallel_volumes("data", size, 32, 4, StepWorkload(tokens, zero_stage=3))
        if v.operation == "replicate"
    ]
    assert total(part) == said["copies"](size, 8, 4)
    work, shared = StepWorkload(tokens, micro_batches=3), tokens * hidden * 2
    assert total(compute_tensor_parallel_volumes(layers, shared, tokens, 4, work)) == said["tensor"](
        layers, tokens, hidden, 4, 3
    )
    assert total(compute_pipeline_volumes(shared, 4, work, False, False)) == said["pipeline"](tokens, hidden, 3)
    rows = tokens * 2
    assert total(compute_expert_parallel_volumes(layers, rows, hidden, 4, work)) == said["experts"](
        layers, tokens, 2, hidden, 4, 3
    )


@pytest.mark.parametrize("keys", [16, 4, 1])
def test_attention_formulas_match_the_source(keys: int) -> None:
    from windlass.parallel.comm_volumes import StepWorkload, compute_sequence_parallel_volumes
    from windlass.parallel.model_shape import ModelShape

    said: dict[str, Any] = {}
    exec(program("bytes that a rank receives in a step"), said)
    shape = ModelShape(hidden=512, layers=6, heads=16, kv_heads=keys, vocabulary=64)
    for ranks in (2, 8):
        for ways, wanted in (
            (0, said["ulysses"](6, 2**12, 16, keys, 32, ranks, 3)),
            (1, said["ring"](6, 2**12, keys, 32, ranks, 3)),
        ):
            found = compute_sequence_parallel_volumes(
                shape, 6, ranks, 1, StepWorkload(2**12, micro_batches=3, ulysses_degree=ways)
            )
            assert sum(volume.nbytes for volume in found) == wanted


@pytest.mark.slow
def test_commands_of_the_guide_run(tmp_path: Path) -> None:
    source = Path(json.__file__).parents[1]
    names = ("argparse.py", "typing.py", "inspect.py", "subprocess.py", "pathlib.py")
    (tmp_path / "notes.txt").write_text("".join((source / name).read_text() for name in names))
    commands = [line for line in re.findall(r"^\$ windlass (.*)$", TEXT, re.MULTILINE) if "--dry-run" not in line]
    assert [command.split()[0] for command in commands] == ["train", "train", "train", "export"]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "windlass", *command.split()],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    exported, trained_to = tmp_path / "exported", tmp_path / "runs" / "stages" / "hf"
    from safetensors.torch import load_file

    item, other = (load_file(folder / "model.safetensors") for folder in (exported, trained_to))
    assert set(item) == set(other) and all(torch.equal(item[name], other[name]) for name in item)
