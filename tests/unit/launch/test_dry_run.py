"""Tests of a dry run: rank placements and traffic of the axes as a diagram, a golden diagram, and invalid plans."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from windlass.base.errors import ConfigError
from windlass.comm.mesh_shape import MeshShape
from windlass.compat.deepspeed_command import build_deepspeed_parser
from windlass.launch import dry_run, launch_command, plan_from_flags
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_flags import AXIS_FLAGS, build_run_parser, parse_flags
from windlass.launch.rank_map import HostRankMap, format_rank_list
from windlass.launch.rank_placement import Host
from windlass.parallel.comm_volumes import StepWorkload, compute_step_volumes, sum_bytes_by_axis
from windlass.parallel.model_shape import PRESETS

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "dry_run_pp4_tp4_dp2.txt"


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plan_from_flags, "count_devices", lambda: 0)


def flags(*words: str) -> argparse.Namespace:
    return parse_flags(build_run_parser(), ["--dry-run", *words])


def drawn(*words: str) -> str:
    text = io.StringIO()
    assert dry_run.show_rank_map(flags(*words), Console(file=text, width=120, soft_wrap=True)) == 0
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def test_32_devices_on_4_nodes() -> None:
    """pp 4 x tp 4 x dp 2: a node has one pipeline stage, on two tp groups that are data-parallel."""
    text = drawn("--nnodes", "4", "--nproc", "8", "--pp", "4", "--tp", "4")
    assert text == GOLDEN.read_text("utf-8"), text


def test_configuration_sets_the_axes_and_the_step(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "gradient_accumulation_steps": 3,
                "tensor_parallel": {"autotp_size": 2},
                "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
                "fp16": {"enabled": True},
            }
        )
    )
    text = drawn("--nproc", "8", "--config", str(path), "--shape", "70b", "--tokens", "100")
    work = StepWorkload(100, 3, 3, backward_gather_ranks=2)
    expected = sum_bytes_by_axis(compute_step_volumes(PRESETS["70b"], MeshShape(dp_shard=4, tp=2), work))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert f"{expected['data'] / 1e9:,.1f} GB" in lines["data"]
    assert f"{expected['tp'] / 1e9:,.1f} GB" in lines["tp"] or f"{expected['tp'] / 1e6:,.1f} MB" in lines["tp"]
    assert "3 micro-batches of 100 tokens" in text and "stage 3" in text and "70.6e9 parameters" in text
    assert "pp" not in lines and "warning" not in text


def test_memory_is_the_maximum_over_stages() -> None:
    sketch = HostRankMap(MeshShape(pp=4), (Host("here", (0, 1, 2, 3)),), PRESETS["7b"], StepWorkload(64, 2))
    (talk,) = sketch.axis_traffic()
    assert talk.nbytes == 2 * 2 * 64 * 4096 * 2  # inner stage: 2 directions x 2 micro-batches x 64 x 4096 bf16 values
    assert (talk.num_ranks, talk.num_nodes, talk.example_ranks) == (4, 1, (0, 1, 2, 3))


def test_tensor_parallel_group_across_nodes_is_warned_about(tmp_path: Path) -> None:
    text = drawn("--nnodes", "2", "--nproc", "8", "--tp", "16")
    assert "warning: tp 16 crosses nodes, of which the smallest has 8 ranks" in text and "write tp 8" in text
    assert "across 2 nodes" in text
    hostfile = tmp_path / "hosts"
    hostfile.write_text("big slots=6\nsmall slots=2\n")
    text = drawn("--hostfile", str(hostfile), "--tp", "4")
    assert "tp 4 crosses nodes, of which the smallest has 2 ranks" in text and "write tp 2" in text
    assert "big" in text and "small" in text
    assert "warning" not in drawn("--hostfile", str(hostfile), "--tp", "2")


def test_brackets_in_the_names_of_hosts_and_models_are_drawn(tmp_path: Path) -> None:
    hostfile, model = tmp_path / "hosts", tmp_path / "[big]"
    hostfile.write_text("[fe80::1] slots=1\n[fe80::2] slots=1\n")
    model.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (model / "config.json").write_text(json.dumps(sizes))
    text = drawn("--hostfile", str(hostfile), "--shape", str(model))
    assert "[fe80::1]" in text and "[fe80::2]" in text and f"--shape {model}" in text


def test_empty_stages_and_experts_are_warned_about() -> None:
    assert "pp 33 is more than the 32 layers" in drawn("--nproc", "33", "--pp", "33")
    assert "ep 16 is more than the 8 experts" in drawn("--nproc", "16", "--ep", "16", "--shape", "8x7b")


def test_large_world_is_drawn_partially() -> None:
    text = drawn("--nnodes", "128", "--nproc", "8", "--pp", "8", "--tp", "8", "--ep", "4", "--shape", "8x7b")
    assert "and 112 more nodes, up to rank 1023" in text
    assert len(text.splitlines()) < 120


def test_sizes_that_do_not_fit_are_one_message() -> None:
    with pytest.raises(
        ConfigError, match=r"pp 3 .* tp 2 = 6 ranks do not divide the world size 8 \(the slots of these hosts"
    ):
        drawn("--nproc", "8", "--pp", "3", "--tp", "2")
    with pytest.raises(ConfigError, match=r"parallel.tp"):
        drawn("--nproc", "8", "--tp", "0")
    for words, text in (
        (("--config", "x.json", "--dp-replicate", "2"), "--config and --dp-replicate together"),
        (("--tokens", "0"), "--tokens 0; at least one"),
    ):
        with pytest.raises(LaunchError, match=text):
            drawn("--nproc", "8", *words)


def test_nothing_is_started_and_no_script_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_command, "_choose_launch", lambda *args: pytest.fail("a run"))
    assert launch_command.launch_from_args(flags("--nproc", "4", "--sp", "2", "no_such_script.py")) == 0
    assert "4 ranks on 1 node: pp 1 x dp_replicate 1 x dp_shard 2 x ep 1 x sp 2 x tp 1" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--config", "--shape", "--tokens", *(f"--{axis}" for axis in AXIS_FLAGS)])
def test_flags_of_a_dry_run_are_refused_without_it(flag: str) -> None:
    with pytest.raises(LaunchError, match=f"{flag} is for --dry-run"):
        launch_command.launch_from_args(parse_flags(build_run_parser(), [flag, "2", "script.py"]))


def test_deepspeed_command_has_no_dry_run_flags() -> None:
    args = parse_flags(build_deepspeed_parser(), ["script.py"])
    assert args.dry_run is False
    dry_run.reject_dry_run_flags(args)


def test_rank_ranges_are_abbreviated() -> None:
    assert format_rank_list((0, 1, 2, 3)) == "0-3"
    assert format_rank_list((0, 1)) == "0 1"
    assert format_rank_list((0, 8, 16, 24)) == "0 8 16 24"
    assert format_rank_list(tuple(range(0, 80, 8))) == "0 8 ... 72"
    assert format_rank_list((5,)) == "5"
