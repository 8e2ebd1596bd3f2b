"""Tests of the tools around training: logging, timers, leaf modules, groups, norms, nested tensors, paths."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.log import logger as own_logger
from windlass.compat import (
    attribute_paths,
    balanced_partition,
    norm_functions,
    numa_cores,
    nvtx_ranges,
    parallel_groups,
    rank_logging,
    runtime_functions,
    wall_clock_timers,
    z3_leaf_modules,
)
from windlass.compat.on_device import OnDevice
from windlass.compat.repeating_loader import RepeatingLoader


@contextlib.contextmanager
def one_rank(tmp_path: Any) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    before = rank_logging.logger.level, own_logger.level
    yield
    logging.Logger.setLevel(rank_logging.logger, before[0])
    own_logger.setLevel(before[1])


def test_logger_level_is_shared_with_windlass() -> None:
    rank_logging.logger.setLevel(logging.ERROR)
    assert own_logger.level == logging.ERROR
    rank_logging.set_log_level_from_string("Debug")
    assert rank_logging.get_current_level() == logging.DEBUG and rank_logging.should_log_le("info")
    with pytest.raises(ValueError, match="'loud' is not a log level; use one of debug"):
        rank_logging.set_log_level_from_string("loud")


def test_only_chosen_ranks_print(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rank_logging.print_dist("alone")
    assert rank_logging.get_dist_msg("alone", [3]) == "[Rank -1] alone"
    with one_rank(tmp_path):
        assert rank_logging.get_dist_msg("x", [0]) == rank_logging.get_dist_msg("x", [-1]) == "[Rank 0] x"
        assert rank_logging.get_dist_msg("x", [1]) is None and rank_logging.get_dist_msg("x") is None
        rank_logging.print_json_dist({"loss": 1}, [0], tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == '{"loss": 1, "rank": 0}'
    assert capsys.readouterr().out == "[Rank -1] alone\n"


def test_log_once_logs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(rank_logging.logger, "warning", lambda text, *_: reported.append(text))
    for _ in range(2):
        rank_logging.warning_once("only this time")
        rank_logging.logger.warning_once("only this time")
    assert reported == ["only this time"]


def test_torch_versions() -> None:
    assert rank_logging.required_torch_version(min_version=2.6) and rank_logging.required_torch_version("2.10")
    assert not rank_logging.required_torch_version(max_version="2.9") and not rank_logging.required_torch_version(99)


def test_z3_leaf_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    assert z3_leaf_modules.set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[1][0]]
    assert z3_leaf_modules.z3_leaf_module(model[0]) and not z3_leaf_modules.z3_leaf_module(model)
    assert z3_leaf_modules.get_z3_leaf_modules(model) == [model[0], model[1][0]]
    assert z3_leaf_modules.unset_z3_leaf_modules(model, ["Linear"]) == [model[0], model[1][0]]
    assert z3_leaf_modules.get_z3_leaf_modules(model) == []
    assert z3_leaf_modules.set_z3_leaf_modules(model, ["torch.nn.modules.activation.ReLU"]) == [model[1][1]]
    assert z3_leaf_modules.set_z3_leaf_modules_by_name(model, ["0", "9"], raise_if_not_found=False) == (
        [model[0]],
        ["9"],
    )
    assert z3_leaf_modules.set_z3_leaf_modules_by_suffix(model, [".0"])[0] == [model[1][0]]
    with pytest.raises(ValueError, match="no module of .*Conv2d"):
        z3_leaf_modules.set_z3_leaf_modules(model, [nn.Conv2d])
    assert z3_leaf_modules.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="no module named '9'"):
        z3_leaf_modules.set_z3_leaf_modules_by_name(model, ["9"])


def test_data_parallel_groups(tmp_path: Any) -> None:
    with pytest.raises(AssertionError, match="init_distributed"):
        parallel_groups._get_data_parallel_group()
    with one_rank(tmp_path):
        assert parallel_groups._get_data_parallel_group() is dist.group.WORLD
        assert parallel_groups._get_data_parallel_group_ranks() == [0]
        assert (parallel_groups._get_data_parallel_world_size(), parallel_groups._get_data_parallel_rank()) == (1, 0)
        assert (parallel_groups._get_sequence_parallel_world_size(), parallel_groups._get_sequence_parallel_rank()) == (
            1,
            0,
        )
        assert parallel_groups._get_sequence_data_parallel_group() is dist.group.WORLD
        assert (parallel_groups.get_model_parallel_world_size(), parallel_groups.get_tensor_model_parallel_rank()) == (
            1,
            0,
        )
        with pytest.raises(KeyError, match="sequence-parallel"):
            parallel_groups._get_sequence_parallel_group()
        with pytest.raises(AssertionError, match="model-parallel"):
            parallel_groups.get_model_parallel_group()
    with pytest.raises(parallel_groups.DeprecatedException, match="MoE"):
        parallel_groups.initialize()


def test_mpu_of_the_script_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = SimpleNamespace(
        get_data_parallel_world_size=lambda: 4,
        get_data_parallel_rank=lambda: 2,
        get_sequence_parallel_group=lambda: "sp",
        get_model_parallel_world_size=lambda: 2,
        get_model_parallel_rank=lambda: 1,
    )
    monkeypatch.setattr(parallel_groups, "mpu", unit)
    with one_rank(tmp_path):
        assert (parallel_groups._get_data_parallel_world_size(), parallel_groups._get_data_parallel_rank()) == (4, 2)
    assert parallel_groups._get_sequence_parallel_group() == "sp"
    assert parallel_groups.get_tensor_model_parallel_world_size() == 2
    assert (
        parallel_groups.bwc_tensor_model_parallel_rank(unit) == 1
        and parallel_groups.bwc_tensor_model_parallel_rank() == 0
    )
    assert parallel_groups.bwc_pipeline_parallel_world_size(unit) == 1


def test_timers() -> None:
    clock = wall_clock_timers.SynchronizedWallClockTimer()
    timer = clock("forward")
    assert clock("forward") is timer
    with pytest.raises(AssertionError, match="'forward' is stopped"):
        timer.stop()
    for _ in range(2):
        timer.start()
        time.sleep(0.01)
        timer.stop()
    assert 10 <= timer.mean() < timer.elapsed(reset=False) and timer.elapsed() >= 20
    assert timer.elapsed() == 0
    timer.start()
    with pytest.raises(AssertionError, match="started twice"):
        timer.start()
    assert timer.elapsed() > 0 and timer.started_, "it goes on"
    timer.stop()
    mean = clock.get_mean(["forward", "absent"])
    assert mean.keys() == {"forward"} and clock.get_mean(["forward"]) == mean
    assert "GB" in clock.memory_usage()
    assert (
        wall_clock_timers.trim_mean([100.0, *[1.0] * 8, -100.0], 0.1) == 1.0
        and wall_clock_timers.trim_mean([], 0.1) == 0
    )


def test_a_log_of_timers_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    clock = wall_clock_timers.SynchronizedWallClockTimer()
    clock("a").start()
    clock("a").stop()
    clock.log(["a", "b"])
    assert capsys.readouterr().out.startswith("[Rank -1] time (ms) | a: 0.")


def test_throughput_excludes_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [0.0]
    monkeypatch.setattr(wall_clock_timers, "_synchronized_time", lambda: moment[0])
    text: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    timer = wall_clock_timers.ThroughputTimer(config, 8, start_step=1, steps_per_output=3, logging_fn=text.append)
    assert timer.avg_samples_per_sec() == -math.inf
    for step in range(3):
        timer.start()
        moment[0] += 0.05 if step == 0 else 0.01
        timer.stop(global_step=True)
    assert timer.avg_samples_per_sec() == pytest.approx(8 / 0.01)
    assert len(text) == 1 and "global_step=3" in text[0]
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def test_throughput_with_host_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 6 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(wall_clock_timers, "_MEMINFO", tmp_path / "meminfo")
    text: list[str] = []
    timer = wall_clock_timers.ThroughputTimer(
        SimpleNamespace(enabled=True, synchronized=False), 8, 0, 1, monitor_memory=True, logging_fn=text.append
    )
    timer.start()
    timer.stop(global_step=True)
    assert text[1:] == ["epoch=0/micro_step=1/global_step=1, vm %: 25.0, swap %: 0.0"]


def test_nvtx_decorator_keeps_the_function() -> None:
    @nvtx_ranges.instrument_w_nvtx
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert double(3) == 6 and double.__name__ == "double" and double.__doc__ == "Twice."


def test_on_device_constructs_on_the_device() -> None:
    with OnDevice(torch.float16, "meta"):
        layer = nn.Linear(4, 2)
        index = torch.arange(3)
        requested = torch.zeros(2, dtype=torch.float32)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16
    assert index.is_meta and index.dtype == torch.int64
    assert requested.dtype == torch.float16
    with OnDevice(torch.bfloat16, "cpu"):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    with OnDevice(torch.float16, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    assert nn.Linear(2, 2).weight.dtype == torch.float32


def test_repeating_loader_restarts() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


def test_nested_tensors_are_moved() -> None:
    inner = torch.ones(2)
    nested = {"a": [inner, (torch.zeros(1), "text", 3)]}
    moved = runtime_functions.move_to_device(nested, "meta")
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1:] == ("text", 3)
    assert runtime_functions.copy_to_device(nested, "meta", lambda one: one is inner)["a"][0].is_meta
    kept = runtime_functions.move_to_device([inner], torch.device("cpu"), torch.is_tensor)
    assert kept[0] is inner
    assert runtime_functions.get_tensor_bytes(nested) == 12
    assert runtime_functions.compare_tensors_in_structures(nested, {"a": [torch.ones(2), (torch.zeros(1), "text", 3)]})
    assert not runtime_functions.compare_tensors_in_structures(
        nested, {"a": [torch.ones(2), (torch.ones(1), "text", 3)]}
    )


def test_seeds_are_set() -> None:
    drawn = []
    for _ in range(2):
        runtime_functions.set_random_seed(2**40 + 1)
        drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_memory_is_shown_only_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    text: list[str] = []
    monkeypatch.setattr(own_logger, "info", text.append)
    runtime_functions.see_memory_usage("here")
    assert text == []
    runtime_functions.see_memory_usage("here", force=True)
    assert text[0].startswith("here: host resident")


def test_norms_equal_torch() -> None:
    torch.manual_seed(0)
    layer, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    for module in (layer, twin):
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    for kind in (2, 1, math.inf):
        expected = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None], kind)
        assert norm_functions.get_grad_norm(layer.parameters(), kind) == pytest.approx(expected.item(), rel=1e-6)
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    torch.testing.assert_close(norm_functions.clip_grad_norm_(layer.parameters(), 0.5), expected)
    for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    for broken in (math.inf, math.nan):  # no finite gradient is left to be applied alone
        for module in (layer, twin):
            module.weight.grad, module.bias.grad = torch.full((3, 5), broken), torch.ones(3)
            module.weight.grad[0] = 1.0
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        torch.testing.assert_close(
            norm_functions.clip_grad_norm_(layer.parameters(), 0.5), expected, equal_nan=True, rtol=0, atol=0
        )
        for parameter, other in zip(layer.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, equal_nan=True, rtol=0, atol=0)
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.bias.grad = torch.ones(3)
    assert norm_functions.get_grad_zeros(layer.parameters()) == 15
    assert norm_functions.get_weight_norm(layer.weight) == pytest.approx(layer.weight.norm().item())


def test_invalid_norms_are_detected() -> None:
    assert norm_functions.get_global_norm([3.0, 4.0]) == 5.0
    assert norm_functions.get_global_norm([3.0, -1.0]) == norm_functions.get_global_norm([3.0, math.nan]) == math.inf
    assert norm_functions.is_invalid_grad_norm(torch.tensor(-1.0)) and not norm_functions.is_invalid_grad_norm(0.0)
    assert norm_functions.get_global_norm_of_tensors([torch.tensor([math.inf])]).item() == -1
    assert norm_functions.combine_grad_norm_groups([3.0, torch.tensor(4.0)]).item() == 5.0
    assert norm_functions.has_inf_or_nan(torch.tensor([1.0, math.nan])) and not norm_functions.has_inf_or_nan(
        torch.zeros(0)
    )
    values = torch.tensor([1.0, math.inf, math.nan])
    norm_functions.mask_nan_or_inf_with_val_inplace(values)
    assert values.tolist() == [1.0, -1.0, -1.0]
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert norm_functions.clip_tensors_by_global_norm(tensors, 1.0) == pytest.approx(5.0)
    assert tensors[1].item() == pytest.approx(0.8)
    # arguments of DeepSpeed 0.19.8, by position and by name
    assert norm_functions.get_global_norm_of_tensors(tensors, 2, None, False).item() == pytest.approx(1.0)
    assert norm_functions.clip_tensors_by_global_norm(tensors, use_graph=True) == pytest.approx(1.0)
    layer = nn.Linear(1, 1)
    layer.weight.grad = torch.tensor([[math.inf]])
    assert (
        norm_functions.CheckOverflow([[layer.weight]]).check()
        and not norm_functions.CheckOverflow([[layer.bias]]).check()
    )


def test_balanced_partitions() -> None:
    # values of DeepSpeed 0.19.8
    assert balanced_partition.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert balanced_partition.partition_uniform(3, 5) == [0, 1, 2, 3, 3, 3]
    assert balanced_partition.partition_balanced([1, 2, 3, 4, 5, 6, 7, 8, 9, 100], 4) == [0, 5, 7, 9, 10]
    assert balanced_partition.partition_balanced([1] * 5, 2) == [0, 3, 5]
    assert balanced_partition.partition_balanced([5, 1, 1, 1, 1, 1], 3) == [0, 1, 4, 6]
    assert balanced_partition.partition_balanced([1] * 7, 3) == [0, 3, 5, 7]
    assert balanced_partition.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]


def test_module_paths() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleDict({"a": nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)])}))
    assert attribute_paths.recursive_getattr(model, "1.a.1") is model[1]["a"][1]
    new = nn.Tanh()
    attribute_paths.recursive_setattr(model, "1.a.0", new)
    attribute_paths.recursive_setattr(model, "0", new)
    assert model[1]["a"][0] is new and model[0] is new


def test_transposed_layers_become_linear() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.bias

    model, data = nn.Sequential(Transposed(), nn.ReLU()), torch.randn(4, 3)
    expected = model(data)
    assert attribute_paths.convert_conv1d_to_linear(model, Transposed) is model
    assert isinstance(model[0], nn.Linear)
    torch.testing.assert_close(model(data), expected)
    shared = Transposed()
    twice = attribute_paths.convert_conv1d_to_linear(nn.ModuleDict({"a": shared, "b": shared}), Transposed)
    assert isinstance(twice["a"], nn.Linear) and twice["b"] is twice["a"]
    with pytest.raises(ModelError, match="the model itself is a Transposed.*pass the module that contains it"):
        attribute_paths.convert_conv1d_to_linear(shared, Transposed)


def test_scalars_are_reduced_on_a_device_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no CPU tensors, and ranks without gradients, or counts, have no other."""

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        raise ConnectionError(tensor.device.type)

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "meta:nccl")
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    mpu = SimpleNamespace(get_model_parallel_group=object)
    for function in (norm_functions.get_grad_norm, norm_functions.get_grad_zeros, norm_functions.get_weight_norm):
        with pytest.raises(ConnectionError, match="meta"):
            function([], mpu=mpu)


def test_numa_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa_cores.parse_range_list("0-3,8") == [0, 1, 2, 3, 8] and numa_cores.parse_range_list("") == []
    for wrong in ("3-1", "a", "1,1", "0-"):
        with pytest.raises(ValueError):
            numa_cores.parse_range_list(wrong)
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa_cores, "cores_of_nodes", lambda: {0: [0, 1, 2, 3], 1: [], 2: [4, 5, 6, 7]})
    assert numa_cores.get_numactl_cmd("0-7", 2, 1) == (4, ["numactl", "-m", "2", "-C", "4-7"])
    assert numa_cores.get_numactl_cmd("0,2,4,6", 1, 0) == (4, ["numactl", "-C", "0,2,4,6"])
    with pytest.raises(ValueError, match="3 ranks share 2 cores"):
        numa_cores.get_numactl_cmd("0-1", 3, 0)


def test_memory_is_bound_to_the_number_of_a_numa_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """POWER hosts number their nodes with gaps."""
    for number, cores in ((0, "0-3"), (8, "4-7"), (252, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa_cores, "_NODES", tmp_path)
    assert numa_cores.get_numa_cores() == [[0, 1, 2, 3], [4, 5, 6, 7], []]
    assert numa_cores.get_numactl_cmd("0-7", 2, 1) == (4, ["numactl", "-m", "8", "-C", "4-7"])


def test_ranks_are_bound_to_one_thread_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets have 28 cores each; CPUs 0 to 55 are the first threads of the cores, 56 to 111 the second ones."""
    nodes = [[*range(28), *range(56, 84)], [*range(28, 56), *range(84, 112)]]
    read_text = Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        if path.name != "thread_siblings_list":
            return read_text(path, *args, **options)
        core = int(path.parts[-3].removeprefix("cpu")) % 56
        return f"{core},{core + 56}\n"

    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa_cores, "cores_of_nodes", lambda: dict(enumerate(nodes)))
    monkeypatch.setattr(Path, "read_text", read)
    assert numa_cores.get_numactl_cmd(None, 2, 0) == (28, ["numactl", "-m", "0", "-C", "0-27"])
    assert numa_cores.get_numactl_cmd(None, 2, 1) == (28, ["numactl", "-m", "1", "-C", "28-55"])


def test_file_name_helpers_match_the_written_files() -> None:
    from windlass.compat import checkpoint_constants as names
    from windlass.compat.checkpoint import deepspeed_export

    assert names.get_model_ckpt_name_for_rank("a", "00") == f"a/{deepspeed_export.MODEL_FILE}"
    assert names.get_zero_ckpt_name_for_rank("a", 3, 0) == "a/zero_pp_rank_3_mp_rank_00_optim_states.pt"


def test_monitors_have_the_attributes_of_their_sections(tmp_path: Path) -> None:
    from windlass.compat.monitor_writers import WandbMonitor, csvMonitor, get_monitor_config

    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = get_monitor_config({"train_batch_size": 1, "csv_monitor": files, "wandb": {"group": "g"}})
    csv, wandb = csvMonitor(csv_config=config.csv_monitor), WandbMonitor(wandb_config=config.wandb)
    wandb.log({"loss": 1.0})  # no effect: the wandb section is disabled
    assert (csv.enabled, csv.output_path, csv.job_name) == (True, str(tmp_path), "run")
    assert (wandb.enabled, wandb.group, wandb.team, wandb.project) == (False, "g", None, "deepspeed")


def test_monitors_expose_their_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.compat.monitor_writers import CometMonitor, TensorBoardMonitor, WandbMonitor, get_monitor_config

    said: list[Any] = []
    run = SimpleNamespace(log=lambda data, **more: said.append((data, more)))
    experiment = object()
    for name, start, made in (("wandb", "init", run), ("comet_ml", "start", experiment)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{start: lambda made=made, **_: made}))
    on, path = {"enabled": True}, {"output_path": str(tmp_path), "job_name": "run"}
    config = get_monitor_config({"train_batch_size": 1, "tensorboard": {**on, **path}, "wandb": on, "comet": on})
    WandbMonitor(wandb_config=config.wandb).log({"a": 1}, step=2, commit=False)
    assert said == [({"a": 1}, {"step": 2, "commit": False})]
    assert CometMonitor(comet_config=config.comet).experiment is experiment
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoardMonitor(tensorboard_config=config.tensorboard)
    board.write_events([("loss", 2.5, 10)], flush=False)
    board.get_summary_writer(base="logs").add_scalar("own", 1.0, 1)
    board.flush()
    events = reading.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert events.Scalars("loss")[0].value == 2.5 and events.Scalars("own")[0].value == 1.0
    board = TensorBoardMonitor(get_monitor_config({"train_batch_size": 1}).tensorboard)
    board.flush()
    assert board.get_summary_writer() is None and board.summary_writer is None


def test_adamw_has_no_adam_w_mode(caplog: pytest.LogCaptureFixture) -> None:
    """AdamW accepts `adam_w_mode` false and ignores it, with a warning, because DeepSpeed's AdamW ignores it too."""
    from windlass.compat.tolerated_keys import resolve_tolerated_keys

    given = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "adam_w_mode": False}}}
    with caplog.at_level("WARNING", logger="windlass"):
        assert resolve_tolerated_keys(given)["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.0}
    assert "AdamW always decouples its decay" in caplog.text and given["optimizer"]["params"]["adam_w_mode"] is False
    assert resolve_tolerated_keys({"optimizer": {**given["optimizer"], "type": "Adam"}})["optimizer"]["type"] == "Adam"


def test_pinned_memory_is_summed_and_logged_at_each_doubling(caplog: pytest.LogCaptureFixture) -> None:
    from windlass.compat import pinned_memory

    tracker = pinned_memory.PinnedMemoryTracker()
    rank_logging.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="DeepSpeed"):
            for gigabytes in (30, 3, 5, 100):
                tracker.track(gigabytes * 2**30)
    finally:
        rank_logging.logger.removeHandler(caplog.handler)
    reports = dict.fromkeys(record.getMessage() for record in caplog.records)  # pytest may capture each record twice
    assert [text.split(":")[0] for text in reports] == [
        f"pinned memory, checkpoint {size}.000 GB" for size in (32, 64, 128)
    ]
    assert tracker.summary() == "138.000 GB pinned in 4 allocations"
    assert [pinned_memory.format_bytes(size) for size in (512, 2048, 2**20)] == ["512 B", "2.0 KB", "1.00 MB"]


def test_deprecated_keys_are_logged_by_the_logger_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.compat.config_sections import DeepSpeedZeroConfig

    text: list[str] = []
    monkeypatch.setattr(rank_logging.logger, "warning", lambda message, *args: text.append(message))
    DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True)
    assert len(text) == 1 and "elastic checkpointing is deprecated" in text[0]


def test_parameters_used_in_a_backward_are_counted() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(2), requires_grad=number < 2) for number in range(3))
    seen: list[int] = []
    used.register_hook(
        lambda gradient: seen.append(norm_functions.count_used_parameters_in_backward([used, unused, frozen]))
    )
    (used * 2).sum().backward()
    assert seen == [1]
    with pytest.raises(RuntimeError, match="during a backward"):
        norm_functions.count_used_parameters_in_backward([used])
