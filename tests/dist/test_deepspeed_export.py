"""Tests of saving in DeepSpeed's format: the files hold the training state, and windlass can load them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from tests.dist.test_deepspeed_resume import CLIENT, Net, config_of, engine_for, steps
from windlass.checkpoint.checkpoint_listing import list_checkpoints
from windlass.compat.checkpoint import consolidated
from windlass.compat.checkpoint.to_windlass import main as to_windlass


def files_of(stage: int, ranks: int, bf16: bool) -> set[str]:
    """Return the names of the files that DeepSpeed would write."""
    prefix = "bf16_" if bf16 else ""
    optim = {f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)} if stage else set()
    if stage == 3:
        return optim | {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)}
    return optim | {"mp_rank_00_model_states.pt"}


def own_files_taken_away(folder: Path, target: Path) -> None:
    """Copy a checkpoint without windlass's own files, so that only DeepSpeed's remain."""
    shutil.copytree(folder, target)
    for path in (target / "global_step3").iterdir():
        if path.suffix != ".pt":
            path.unlink()


def formatted(folder: str, precision: str, stages: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """Save at each stage, and continue from DeepSpeed's files alone."""
    import windlass

    results = {}
    for stage in stages:
        root = Path(folder) / str(stage)
        sub_group = {"sub_group_size": 60} if stage == 3 else {}
        engine = engine_for(stage, precision, 0, checkpoint="deepspeed", **sub_group)
        steps(engine, 0, 3)
        blocking = stage != 2  # at stage 2 a thread writes the files during training
        assert engine.save_checkpoint(str(root), client_state=CLIENT, blocking=blocking) is True
        engine.finish_checkpoint()
        named = dict(engine.module.named_parameters())
        masters = {name: windlass.zero.full_param(p).detach().clone() for name, p in named.items()}
        fingerprint, expected = engine.fingerprint(), steps(engine, 3, 5)
        engine.destroy()
        if dist.get_rank() == 0:
            own_files_taken_away(root, Path(f"{root}-pt"))
        dist.barrier()
        other = engine_for(3 - stage, precision, 50)
        _, client = other.load_checkpoint(f"{root}-pt")
        same = other.fingerprint() == fingerprint
        losses = steps(other, 3, 5)
        other.destroy()
        results[stage] = {"masters": masters, "same": same, "losses": (expected, losses), "client": client}
    return results


@pytest.mark.parametrize(
    ("precision", "ranks", "stages"),
    [
        ("bf16", 2, (2, 3)),
        pytest.param("bf16", 2, (0, 1, 3), marks=pytest.mark.slow),
        pytest.param("fp32", 1, (0, 1, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_files_contain_the_training_state(precision: str, ranks: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    everywhere = run_ranks(formatted, ranks, str(tmp_path), precision, stages)
    for stage in stages:
        root = tmp_path / str(stage)
        tag = root / "global_step3"
        assert (root / "latest").read_text() == "global_step3"
        assert {path.name for path in tag.glob("*.pt")} == files_of(stage, ranks, precision == "bf16")
        assert list_checkpoints(root, verify=True).checkpoints[0].problem == ""
        for result in (item[stage] for item in everywhere):
            assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-6), stage
            assert stage == 0 or result["same"], stage
            assert result["client"].keys() == CLIENT.keys() and result["client"]["epoch"] == 7
        damaged = max(tag.glob("*.pt"), key=lambda path: path.stat().st_size)
        good = damaged.read_bytes()
        damaged.write_bytes(good[:512] + bytes([good[512] ^ 1]) + good[513:])
        assert str(damaged) in list_checkpoints(root, verify=True).checkpoints[0].problem
        damaged.write_bytes(good)
        masters = everywhere[0][stage]["masters"]
        for folder in (root, Path(f"{root}-pt"))[: 2 if stage else 1]:
            weights = consolidated.get_fp32_state_dict_from_zero_checkpoint(folder)
            assert set(weights) == {*masters, "count", "head.weight"}
            assert weights["head.weight"] is weights["embed.weight"]
            for name, value in masters.items():
                assert torch.equal(weights[name], value), (stage, folder, name)
            trained = consolidated.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
            assert set(weights) - set(trained) == {"frozen.weight", "frozen.bias"}, (stage, folder)
        # the file contains no class that torch would refuse
        states = torch.load(next(tag.glob("*model_states.pt")), weights_only=True)
        assert states["dp_world_size"] == ranks and torch.equal(states["t"], CLIENT["t"])
    source = tmp_path / "3-pt" / "global_step3"
    assert to_windlass(["--input_folder", str(source), "--output_folder", str(tmp_path / "uni" / "t")]) == 0
    assert run_ranks(universal, ranks, str(tmp_path / "uni"), precision)[0] == pytest.approx(
        everywhere[0][3]["losses"][0], rel=1e-6
    )


def universal(folder: str, precision: str) -> list[float]:
    """Continue from the output of `ds_to_universal`."""
    engine = engine_for(1, precision, 9, load_universal=True)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    losses = steps(engine, 3, 5)
    engine.destroy()
    return losses


def scaled(folder: str) -> list[dict[str, Any]]:
    """Save under fp16, and read the loss scale from DeepSpeed's files alone."""
    results = []
    for stage in (0, 1, 3):
        root = Path(folder) / str(stage)
        engine = engine_for(stage, "fp16", 0, checkpoint="deepspeed")
        steps(engine, 0, 3)
        engine.save_checkpoint(str(root))
        saved = engine._scaler.state_dict()
        masters = engine.fingerprint()
        engine.destroy()
        own_files_taken_away(root, Path(f"{root}-pt"))
        other = engine_for(stage, "fp16", 50)
        other.load_checkpoint(f"{root}-pt")
        results.append(
            {"stage": stage, "scale": (saved, other._scaler.state_dict()), "same": other.fingerprint() == masters}
        )
        other.destroy()
    return results


def test_files_contain_the_loss_scale(tmp_path: Path) -> None:
    for result in run_ranks(scaled, 1, str(tmp_path))[0]:
        before, after = result["scale"]
        if result["stage"] == 0:  # DeepSpeed's files do not store the remaining hysteresis
            before = {**before, "hysteresis_left": after["hysteresis_left"]}
        assert before == after
        assert before["scale"] > 1 and (result["same"] or result["stage"] == 0)


def whole(folder: str) -> dict[str, Any]:
    """Call the functions of DeepSpeed's engine that return, save or load full weights."""
    from windlass.compat.deepspeed_initialize import initialize

    engine = engine_for(3, "bf16", 0, initialize=initialize)
    steps(engine, 0, 1)
    first = engine._zero3_consolidated_16bit_state_dict()
    trained = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert engine.save_16bit_model(folder) and engine.save_fp16_model(folder, "old.bin")
    assert engine.load_universal_checkpoint() is False
    engine.save_checkpoint(folder)
    expected = steps(engine, 1, 3)
    engine.destroy()
    other = engine_for(2, "bf16", 7, initialize=initialize)
    seen: list[set[str]] = []

    def by(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        seen.append(set(src))
        dst.load_state_dict(src)

    path, _ = other.load_checkpoint(folder, custom_load_fn=by)
    state = other.module_state_dict(exclude_frozen_parameters=True)
    losses = steps(other, 1, 3)
    text = ""
    try:
        other._zero3_consolidated_16bit_state_dict()
    except ValueError as error:
        text = str(error)
    lost = other.load_checkpoint(f"{folder}/nowhere")
    try:
        other.save_checkpoint("")
    except ValueError as error:
        text += str(error)
    other.destroy()
    return {
        "first": first,
        "trained": None if trained is None else set(trained),
        "names": set(state),
        "seen": seen,
        "losses": (expected, losses),
        "said": text,
        "path": path,
        "lost": lost,
    }


def test_full_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    ours, theirs = run_ranks(whole, 2, str(tmp_path))
    assert theirs["first"] is None and theirs["trained"] is None
    frozen = {"frozen.weight", "frozen.bias"}
    assert ours["trained"] == set(ours["first"]) - frozen == ours["names"]
    assert ours["seen"] == theirs["seen"] == [set(ours["first"])]
    assert ours["losses"][1] == pytest.approx(ours["losses"][0], rel=2e-2)
    assert "requires ZeRO-3 mode" in ours["said"] and "save_dir is empty" in ours["said"]
    assert ours["lost"] == (None, None)
    for name in ("pytorch_model.bin", "old.bin"):
        written = torch.load(tmp_path / name, weights_only=True)
        assert written.keys() == ours["first"].keys()
        assert all(torch.equal(written[key], value) for key, value in ours["first"].items())
        assert written["head.weight"].data_ptr() == written["embed.weight"].data_ptr()


def tagged(folder: str) -> dict[str, Any]:
    """Save with a different tag on each rank, e.g. one that contains the loss."""
    import windlass

    results: dict[str, Any] = {}
    for mode in ("WARN", "IGNORE", "FAIL"):
        config = config_of(2, "fp32") | {"checkpoint": {"tag_validation": mode}}
        engine = windlass.initialize(model=Net(), config=config)[0]
        root = Path(folder) / mode
        try:
            engine.save_checkpoint(str(root), tag=f"loss-{dist.get_rank()}")
            results[mode] = engine.load_checkpoint(str(root))[0]
        except AssertionError as error:
            results[mode] = str(error)
        engine.destroy()
    return results


def test_tag_is_that_of_rank_0(tmp_path: Path) -> None:
    results = run_ranks(tagged, 2, str(tmp_path))
    assert results[0] == results[1]
    for mode in ("WARN", "IGNORE"):
        assert results[0][mode] == str(tmp_path / mode / "loss-0")
        assert (tmp_path / mode / "latest").read_text() == "loss-0"
        assert not (tmp_path / mode / "loss-1").exists()
    assert "rank 1: 'loss-1'" in results[0]["FAIL"] and not (tmp_path / "FAIL").exists()
