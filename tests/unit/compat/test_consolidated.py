"""Tests of `zero_to_fp32` and similar commands on windlass and DeepSpeed checkpoints: output and errors."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.deepspeed_checkpoint_writer import write
from tests.unit.compat.test_deepspeed_index import MODEL, OPTIM, changed, trained
from windlass.base.errors import CheckpointError
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.compat.checkpoint import consolidated, to_windlass
from windlass.compat.checkpoint.recovery_scripts import SCRIPTS, write_recovery_scripts
from windlass.compat.checkpoint.to_windlass import convert_to_windlass
from windlass.compat.checkpoint.to_windlass import main as ds_to_universal
from windlass.compat.clone_tensors import clone_tensors_for_torch_save


def made(path: Path, stage: int = 2, own: bool = False) -> dict[str, torch.Tensor]:
    """Write a directory with one checkpoint of DeepSpeed, or of windlass if `own`. Return its weights."""
    state = trained()
    tag = write(path, "global_step4", state, stage=stage, ranks=2)
    if own:
        convert_to_windlass(tag, path / "other")
        shutil.rmtree(tag)
        (path / "latest").write_text("other")
    weights = {**state.module, **state.masters}
    return {**weights, "head.weight": weights["up.weight"]}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_exported_weights_equal_master_weights(stage: int, own: bool, lazy: bool, tmp_path: Path) -> None:
    weights = made(tmp_path, stage, own)
    result = consolidated.get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=lazy)
    assert result.keys() == weights.keys() and result["head.weight"] is result["up.weight"]
    for name, value in weights.items():
        item = result[name].contiguous()
        assert torch.equal(item, value) and item.dtype == value.dtype == result[name].dtype, name
        assert tuple(result[name].shape) == tuple(value.shape) and result[name].numel() == value.numel()
    without = consolidated.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert set(weights) - set(without) == {"base"}


@pytest.mark.parametrize("own", [False, True])
def test_files_have_the_requested_dtype_and_size(own: bool, tmp_path: Path) -> None:
    weights = made(tmp_path / "run", own=own)
    out = tmp_path / "out"
    assert consolidated.zero_to_fp32([str(tmp_path / "run"), str(out)]) == 0
    written = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert written.keys() == weights.keys()
    assert written["head.weight"].data_ptr() == written["up.weight"].data_ptr()
    for name, value in weights.items():
        assert torch.equal(written[name], value.float() if value.is_floating_point() else value), name
    arguments = [str(tmp_path / "run"), str(tmp_path / "st"), "--dtype", "bf16", "--safe_serialization"]
    assert consolidated.zero_to_torch([*arguments, "--max_shard_size", "40B"]) == 0
    index = json.loads((tmp_path / "st" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["weight_map"].keys() == weights.keys()
    parts: dict[str, torch.Tensor] = {}
    for file in files:
        parts |= load_file(tmp_path / "st" / file)
    assert index["metadata"]["total_size"] == sum(part.nbytes for part in parts.values())
    assert parts.keys() == weights.keys() - {"head.weight"}
    for name, value in parts.items():
        expected = weights[name].bfloat16() if weights[name].is_floating_point() else weights[name]
        assert torch.equal(value, expected) and value.dtype == expected.dtype, name
    assert sorted(path.name for path in out.iterdir()) == ["pytorch_model.bin"], "nothing else is left"


def test_plain_model_loads_the_files(tmp_path: Path) -> None:
    weights = made(tmp_path)
    model = torch.nn.Module()
    model.up = torch.nn.Linear(3, 5)
    assert consolidated.load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    assert torch.equal(model.up.weight, weights["up.weight"]) and torch.equal(model.up.bias, weights["up.bias"])


def _stage(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["optimizer_state_dict"].update(zero_stage=value)


def test_errors_have_the_types_that_callers_expect(tmp_path: Path) -> None:
    made(tmp_path)
    get = consolidated.get_fp32_state_dict_from_zero_checkpoint
    tag = tmp_path / "global_step4"
    with pytest.raises(FileNotFoundError, match="global_step9' does not exist"):
        get(tmp_path, "global_step9")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"can't find \*_model_states.pt"):
        get(tmp_path, "empty")
    first = tag / OPTIM.replace("rank_1", "rank_0")
    good = first.read_bytes()
    changed(first, _stage(7))
    with pytest.raises(ValueError, match="unknown zero stage 7"):
        get(tmp_path)
    first.write_bytes(good)
    changed(first, lambda value: value.update(optimizer_state_dict={"state": {}}))
    with pytest.raises(ValueError, match="is not a zero checkpoint"):
        get(tmp_path)
    first.write_bytes(good)
    second = (tag / OPTIM).read_bytes()
    (tag / OPTIM).unlink()
    with pytest.raises(ValueError, match="2 .* are expected"):
        get(tmp_path)
    (tag / OPTIM).write_bytes(second)
    changed(tag / MODEL, lambda value: value.pop("buffer_names"))
    with pytest.raises(ValueError, match="is not a model state checkpoint"):
        get(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(ValueError, match="unable to find the file 'latest'"):
        get(tmp_path)
    with pytest.raises(ValueError, match=f"give its parent, and the tag {tag.name!r}"):
        get(tag)
    with pytest.raises(ValueError, match="nowhere' does not exist"):
        get(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="unknown zero stage 5"):
        consolidated.get_model_state_file(tag, 5)
    with pytest.raises(FileNotFoundError, match="zero_pp_rank_0"):
        consolidated.get_model_state_file(tag, 3)
    assert consolidated.get_model_state_file(tag, 2) == str(tag / MODEL)
    assert [Path(path).name for path in consolidated.get_optim_files(tag)] == [first.name, OPTIM]
    for dtype in ("int8", torch.int64):
        with pytest.raises(ValueError, match="Unsupported output dtype"):
            consolidated.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "o", dtype=dtype)
    with pytest.raises(ValueError, match="max_shard_size 'big' is not a size"):
        consolidated.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "o", max_shard_size="big")


def test_script_is_written_on_a_file_system_without_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    write_recovery_scripts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(SCRIPTS)


def test_ds_to_universal_writes_a_windlass_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = trained(epoch=3)
    source = write(tmp_path, "global_step4", state, stage=3, ranks=2)
    target = tmp_path / "uni"
    options = ["--num_extract_workers", "2", "--num_merge_workers", "1", "--keep_temp_folder", "--no_strict"]
    where = ["--input_folder", str(source), "--output_folder", str(target)]
    assert ds_to_universal([*where, *options, "--inject_missing_state"]) == 0
    assert "in any layout" in capsys.readouterr().out
    assert (tmp_path / "latest_universal").read_text() == "uni"
    shutil.rmtree(target)
    # A script passes the options as an object.
    assert ds_to_universal(argparse.Namespace(input_folder=str(source), output_folder=str(target), strict=True)) == 0
    with pytest.raises(CheckpointError, match="is not the directory of a checkpoint"):
        ds_to_universal(argparse.Namespace(input_folder=str(tmp_path), output_folder=str(tmp_path / "other")))
    with StoredCheckpoint(tmp_path, "uni") as stored:
        assert stored.plain["client"] == {"epoch": 3} and stored.plain["engine"]["global_steps"] == 4
        for name, master in state.masters.items():
            assert torch.equal(stored.read_full(f"param/{name}"), master)
            assert torch.equal(stored.read_full(f"state/{name}/exp_avg"), state.moments[name]["exp_avg"])
    assert ds_to_universal(["--input_folder", str(target), "--output_folder", str(tmp_path / "again")]) == 0
    assert StoredCheckpoint(tmp_path, "again").index.tensors == StoredCheckpoint(tmp_path, "uni").index.tensors
    assert ds_to_universal(["--input_folder", str(tmp_path), "--output_folder", str(tmp_path / "x")]) == 1
    assert "is not the directory of a checkpoint" in capsys.readouterr().err
    (source / "zero").mkdir()
    for path in source.glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="universal checkpoint of DeepSpeed"):
        StoredCheckpoint(tmp_path, "global_step4")


def test_clones_have_their_own_storage() -> None:
    flat = torch.arange(8.0)
    given = {"a": [flat[2:4], (flat[:1], "x")], "n": 3}
    result = clone_tensors_for_torch_save(given)
    assert result["a"][0].untyped_storage().nbytes() == 8 and torch.equal(result["a"][0], flat[2:4])
    assert result["a"][1][1] == "x" and isinstance(result["a"][1], tuple) and result["n"] == 3
    result["a"][0].zero_()
    assert flat[2] == 2


def test_a_failed_write_frees_the_tensor_that_was_read() -> None:
    stored = SimpleNamespace(read_full=lambda name: torch.ones(2))
    storage = to_windlass._StoredTensorStorage(stored, "up.weight")  # type: ignore[arg-type]
    with pytest.raises(OSError), storage.open():
        raise OSError(28, "No space left on device")
    assert storage._values is None


def test_numbered_states_are_not_dropped_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path, "global_step4", trained(), stage=0, ranks=1)
    with caplog.at_level("WARNING", logger="windlass"):
        convert_to_windlass(source, tmp_path / "uni")
    assert "stores optimizer states by number: they are not in" in caplog.text
