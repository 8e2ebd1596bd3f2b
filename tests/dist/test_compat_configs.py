"""Tests that public configurations train under `deepspeed.initialize`, or raise an error that names the missing key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.dist.harness import run_ranks
from windlass.base.errors import ConfigError
from windlass.config.config_source import read_source

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "compat" / "configs"
NO_BATCH = "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
NOBODY = "no program filled it in"
AS_THEY_ARE = {
    "fp16_all_knobs": "trains",
    "full_zero3_offload": NO_BATCH,
    "llama_practice": "trains",
    "onebit_adam": NO_BATCH,
    "trainer_auto": NOBODY,
    "zero2_knobs": NO_BATCH,
    "zero3_nvme_buffers": NO_BATCH,
    "zero3_nvme_missing_comma": NO_BATCH,
    "zero3_trailing_comma": NO_BATCH,
}
WITH_A_BATCH = {name: "trains" if why == NO_BATCH else why for name, why in AS_THEY_ARE.items()}


def attempt(config: Any) -> str:
    """Train a small model for one step. Return "trains" or the error."""
    torch.manual_seed(0)
    return attempt_on(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), config)


def attempt_on(model: nn.Module, config: Any) -> str:
    """Train the given model for one step. Return "trains" or the error."""
    from windlass.compat.deepspeed_initialize import initialize

    data = config if isinstance(config, dict) else read_source(config).data
    optimizer = None if "optimizer" in data else torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        engine = initialize(model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config)[0]
    except ConfigError as error:
        return str(error)
    assert engine.config == data
    x = torch.ones(2, 4, dtype=engine.get_data_types()[0])
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 1 and loss.isfinite()
    engine.destroy()
    return "trains"


def attempts(folder: str) -> dict[str, tuple[str, str]]:
    """Try each configuration file as it is, and with a small batch size."""
    results = {}
    for name in AS_THEY_ARE:
        data = dict(read_source(str(CONFIGS / f"{name}.json")).data)
        for key in ("train_batch_size", "gradient_accumulation_steps"):
            data.pop(key, None)
        zero = data.get("zero_optimization", {})
        for section in ("offload_optimizer", "offload_param"):
            if "nvme_path" in zero.get(section, {}):
                zero[section]["nvme_path"] = folder
        batched = {**data, "train_micro_batch_size_per_gpu": 2}
        results[name] = (attempt(str(CONFIGS / f"{name}.json")), attempt(batched))
    return results


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the collection of configurations is not beside the checkout")
def test_common_configurations_train(tmp_path: Path) -> None:
    (result,) = run_ranks(attempts, 1, str(tmp_path))
    for name, (as_is, batched) in result.items():
        assert AS_THEY_ARE[name] in as_is, f"{name}: {as_is}"
        assert WITH_A_BATCH[name] in batched, f"{name} with a batch size: {batched}"


SETTLED: dict[str, dict[str, Any]] = {
    "parameters that stage 2 keeps": {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
    "states that stage 0 keeps": {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
    "sizes of nothing": {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 0, "allgather_bucket_size": 0, "sub_group_size": 0}
    },
    "two ways to divide": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "two rates": {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 2}},
    },
    "a warm-up that never ends": {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9, "total_num_steps": 4}},
    },
    "other axes": {
        "pipeline": {"stages": 1, "seed_layers": True},
        "sequence_parallel_size": 1,
        "use_data_before_expert_parallelism": True,
    },
    "leaves": {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Block"], "name_suffixes": ["mlp"]}}},
}


def settle() -> dict[str, str]:
    return {name: attempt({"train_micro_batch_size_per_gpu": 2, **config}) for name, config in SETTLED.items()}


def train_under_init() -> str:
    """Train a model constructed under `zero.Init` with the configuration "two rates" and an unknown key."""
    from windlass.compat.partition_parameters import Init

    with Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 2, **SETTLED["two rates"], "no.such": 1}):
        model = nn.Linear(4, 4)
    return attempt_on(model, {"train_micro_batch_size_per_gpu": 2, **SETTLED["two rates"]})


def test_zero_init_accepts_the_configurations_of_initialize() -> None:
    assert run_ranks(train_under_init, 2) == ["trains", "trains"]


def test_contradictions_that_deepspeed_resolves_train() -> None:
    """Contradictions in which one key wins, and keys of unused axes, are accepted as in DeepSpeed."""
    assert set(run_ranks(settle, 1)[0].values()) == {"trains"}


def rates() -> list[float]:
    """Return the learning rate of each update, where the configuration gives optimizer and schedule different rates."""
    from windlass.compat.deepspeed_initialize import initialize

    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 2, **SETTLED["two rates"]}
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    results = []
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        results += engine.get_lr()
        engine.step()
    engine.destroy()
    return results


def test_learning_rate_of_the_schedule_has_precedence() -> None:
    assert run_ranks(rates, 1)[0] == pytest.approx([0, 0, 3e-3, 3e-3])


def half_made(stage: int) -> tuple[str, bool]:
    """Return the error of `initialize` for an invalid schedule, and whether the model's output is unchanged."""
    from windlass.compat.deepspeed_initialize import initialize

    model, before = nn.Linear(4, 4), torch.ones(2, 4)
    expected = model(before)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    }
    try:
        initialize(model=model, model_parameters=model.parameters(), config=config)
    except ConfigError as error:
        return str(error), torch.equal(model(before), expected)
    return "", False


@pytest.mark.parametrize("stage", [0, 3])
def test_late_errors_of_initialize_are_reported(stage: int) -> None:
    for text, plain in run_ranks(half_made, 2, stage):
        assert "warmup_num_steps: 0 does not fit" in text and plain


def decays() -> list[float]:
    """Return the default weight decay by optimizer type and `torch_adam`."""
    from windlass.compat.deepspeed_initialize import initialize

    results = []
    for kind in ("Adam", "AdamW"):
        for of_torch in (False, True):
            model, params = nn.Linear(4, 4), {"lr": 1e-3, "torch_adam": of_torch}
            config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": kind, "params": params}}
            engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
            results.append(engine.optimizer.param_groups[0]["weight_decay"])
            engine.destroy()
    return results


def test_default_weight_decay_is_deepspeeds() -> None:
    """The default decay is DeepSpeed's: 0 in its own Adam, under both names; 0.01 in torch's AdamW (`torch_adam`)."""
    assert run_ranks(decays, 1)[0] == [0.0, 0.01, 0.0, 0.01]


class Numbers(Dataset[torch.Tensor]):
    """The numbers 0 to 10."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index)]) for index in range(3))


def order(folder: str) -> list[list[list[float]]]:
    """Return batches of the loader: twice, in the next epoch, after a load; and those of an evaluation loader."""
    from windlass.compat.deepspeed_initialize import initialize

    model = nn.Linear(1, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    engine, _, loader, _ = initialize(
        model=model, model_parameters=model.parameters(), training_data=Numbers(), config=config
    )

    def once() -> list[list[float]]:
        return [batch.flatten().tolist() for batch in loader]

    results = [once(), once()]
    loader.data_sampler.set_epoch(1)
    results.append(once())
    for number, batch in enumerate(loader):
        engine.backward(engine(batch).square().mean())
        engine.step()
        if number == 1:
            engine.save_checkpoint(folder)
    assert len(loader) == len(results[0]) and engine.tput_timer.avg_samples_per_sec() > 0
    engine.load_checkpoint(folder)
    results.append(once())
    evaluated = engine.deepspeed_io(Numbers(), route="eval")
    results.append([batch.flatten().tolist() for batch in evaluated])
    for route in ("eval", "predict"):
        assert [batch.flatten().tolist() for batch in engine.deepspeed_io(Stream(), route=route)] == [[0.0, 1.0], [2.0]]
    engine.destroy()
    return results


def test_loader_starts_at_the_first_batch(tmp_path: Path) -> None:
    """The loader follows torch's DistributedSampler: the order is the same until `set_epoch`, also after a load."""
    by_rank = run_ranks(order, 2, str(tmp_path))
    for rank, (first, second, third, resumed, evaluated) in enumerate(by_rank):
        for epoch, result in enumerate((first, third)):
            sampler = torch.utils.data.DistributedSampler(Numbers(), 2, rank)
            sampler.set_epoch(epoch)
            assert [value for batch in result for value in batch] == [float(index) for index in sampler]
        assert second == first and resumed == third != first
        assert evaluated[0] == [float(rank), float(rank + 2)]


def autocasts() -> dict[tuple[bool, bool], bool]:
    """Return whether autocast is active in the model, by (the script's own autocast, the section's setting)."""
    from windlass.compat.deepspeed_initialize import initialize

    class Told(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    seen: list[bool] = []
    results = {}
    for around, section in ((False, False), (False, True), (True, False), (True, True)):
        model = Told(4, 4)
        config = {"train_micro_batch_size_per_gpu": 2, "torch_autocast": {"enabled": section, "dtype": "bfloat16"}}
        engine = initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))[0]
        for device in ("cpu", "cuda"):  # the autocast of a GPU script; DeepSpeed checks no other device
            torch.set_autocast_enabled(device, around)
        engine(torch.ones(2, 4))
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, False)
        engine.destroy()
        results[around, section] = seen.pop()
    return results


def test_autocast_follows_the_configuration() -> None:
    result = run_ranks(autocasts, 1)[0]
    assert result == {(around, section): section for around in (False, True) for section in (False, True)}


def monitored(folder: str) -> list[str]:
    """Write a script's own events and the engine's."""
    from windlass.compat.deepspeed_config import DeepSpeedConfig
    from windlass.compat.deepspeed_initialize import initialize
    from windlass.compat.monitor_writers import MonitorMaster

    section = {"enabled": True, "output_path": folder, "job_name": "run"}
    config = {"train_micro_batch_size_per_gpu": 2, "csv_monitor": section}
    monitor = MonitorMaster(DeepSpeedConfig(config).monitor_config)
    assert monitor.enabled
    for step in range(3):
        monitor.write_events([("Mine/loss", torch.tensor(step / 2), step), ("Mine/best so far", 1, step)])
    model = nn.Linear(4, 4)
    engine = initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))[0]
    engine.monitor.write_events([("Own", 0.5, 7)])
    engine.destroy()
    plain = initialize(model=nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 2})[0]
    assert not plain.monitor.enabled  # neither an optimizer nor a csv_monitor section
    plain.destroy()
    evaluation = initialize(model=nn.Linear(4, 4), config=config)[0]
    evaluation.monitor.write_events([("Accuracy", 0.75, 7)])
    evaluation.destroy()
    return (Path(folder) / "run" / "Mine_loss.csv").read_text().split()


def test_monitor_writes_metrics_of_the_script(tmp_path: Path) -> None:
    result = run_ranks(monitored, 2, str(tmp_path))[0]
    assert result == ["step,loss", "0,0.0", "1,0.5", "2,1.0"], "once, by rank 0"
    assert (tmp_path / "run" / "Own.csv").read_text().split() == ["step,Own", "7,0.5"]
    assert (tmp_path / "run" / "Accuracy.csv").read_text().split() == ["step,Accuracy", "7,0.75"]
    assert (tmp_path / "run" / "Mine_best_so_far.csv").exists()
