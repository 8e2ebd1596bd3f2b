"""Tests of the listing of `windlass checkpoints`, and of the checkpoints that `keep_last` removes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.unit.checkpoint import sample_states
from windlass.checkpoint import SavedState, checkpoint_listing, list_tags, read_latest, save
from windlass.checkpoint.checkpoint_directory import write_latest
from windlass.checkpoint.checkpoint_listing import list_checkpoints
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_save import CheckpointSave
from windlass.checkpoint.retention import remove_old_checkpoints
from windlass.cli.main import main

DATA = "rank_00000.safetensors"


def state(step: int) -> SavedState:
    result = sample_states.state(0, 1)
    result.plain = {"engine": {"global_steps": step}, "layout": {"stage": 3, "ranks": 1}, "trainable_only": False}
    return result


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Directory with two checkpoints of a run and one folder that is not a checkpoint."""
    result = tmp_path / "run"
    for number, tag in enumerate(("global_step1", "best")):
        save(result, tag, state(number + 1))
        os.utime(result / tag / "checkpoint.json", (1000 + number, 1000 + number))
    (result / "notes").mkdir()
    return result


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", *arguments])
    return int(ended.value.code or 0)


def test_listing_of_a_directory(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(root)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == ["tag", "global_step1", "best (latest)"]
    assert "stage 3, 1 rank" in lines[1] and "file sizes match" in lines[1]
    assert run(str(root), "--verify", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [(item["tag"], item["step"], item["latest"], item["verified"]) for item in result["checkpoints"]] == [
        ("global_step1", 1, False, True),
        ("best", 2, True, True),
    ]
    sizes = [sum(file.stat().st_size for file in (root / tag).iterdir()) for tag in ("global_step1", "best")]
    assert [item["nbytes"] for item in result["checkpoints"]] == sizes
    assert [item["written"] for item in result["checkpoints"]] == [1000, 1001]
    assert (result["latest"], result["damaged"], result["leftovers"]) == ("best", False, [])


def test_verify_finds_a_flipped_byte_and_listing_a_missing_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "best" / DATA
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert run(str(root)) == 0
    assert run(str(root), "--verify") == 1
    text = capsys.readouterr().out
    assert f"damaged: the checkpoint file {path} is damaged: entry" in text and text.count("DAMAGED") == 1
    path.write_bytes(good[:-1])
    assert run(str(root)) == 1
    path.unlink()
    assert run(str(root)) == 1
    assert "is missing" in capsys.readouterr().out
    (root / "global_step1" / "checkpoint.json").write_text("{")
    assert [bool(item.problem) for item in list_checkpoints(root).checkpoints] == [True, True]


@pytest.mark.parametrize(("content", "said"), [("gone", "names 'gone', and there is no such"), ("../out", "refused")])
def test_dangling_latest_is_a_problem(root: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "latest").write_text(content)
    assert run(str(root)) == 1
    assert said in capsys.readouterr().out


def test_remains_of_interrupted_saves_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".next.writing").mkdir()
    (root / ".next.writing" / DATA).write_bytes(b"1234")
    shutil.move(root / "best", root / ".best.replaced")
    assert run(str(root)) == 0, "the former one loads"
    text = capsys.readouterr().out
    assert "unfinished: .next.writing (4 B): a save of 'next' that is running, or was killed" in text
    assert "unfinished: .best.replaced" in text and "which loads as that tag" in text


def test_missing_directory_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "nowhere")) == 1
    assert "nowhere cannot be read" in capsys.readouterr().err
    save(tmp_path / "run", "t", SavedState())
    assert run(str(tmp_path / "run" / "t")) == 1
    assert "run/t is a checkpoint itself" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(str(tmp_path / "empty")) == 0


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Directory with several checkpoints saved in this order; `latest` names the last one."""
    result = tmp_path / "run"
    for number, tag in enumerate(("best", "global_step9", "mine", "global_step10", "global_step11", "global_stepx")):
        save(result, tag, SavedState())
        os.utime(result / tag / "checkpoint.json", (1000 + number, 1000 + number))
    (result / "global_step1").mkdir()
    (result / "global_step1" / "mp_rank_00_model_states.pt").write_bytes(b"")
    return result


def test_rotation_removes_the_oldest_of_this_run(many: Path) -> None:
    write_latest(many, "global_step11")
    assert remove_old_checkpoints(many, 2, "global_step11", {"mine"}) == ["global_step9", "mine"]
    assert list_tags(many) == ["best", "global_step10", "global_step11", "global_stepx"]
    assert (many / "global_step1" / "mp_rank_00_model_states.pt").exists(), "what is not a checkpoint of ours stays"
    assert not list(many.glob(".*")), "nothing is left of what was removed"
    assert remove_old_checkpoints(many, 2, "global_step11", {"mine"}) == []


@pytest.mark.parametrize("keep", [1, 2])
def test_rotation_keeps_the_saved_checkpoint_and_latest(many: Path, keep: int) -> None:
    write_latest(many, "global_step9")
    assert remove_old_checkpoints(many, keep, "mine", {"mine"}) == ["global_step10", "global_step11"]
    assert "global_step9" in list_tags(many) and "mine" in list_tags(many)


def test_rotation_warns_of_a_checkpoint_it_cannot_remove(
    many: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*paths: object) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "rename", refused)
    with caplog.at_level("WARNING", logger="windlass"):
        remove_old_checkpoints(many, 1, "global_step11", set())
    assert "global_step9 could not be removed" in caplog.text
    assert "global_step9" in list_tags(many)
    (many / "latest").write_text("../outside")
    assert remove_old_checkpoints(many, 1, "global_step11", set()) == []


def test_killed_rotation_leaves_no_partial_checkpoint(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_old_checkpoints(many, 1, "global_step11", set())
    monkeypatch.undo()
    assert "global_step9" not in list_tags(many)
    assert [left.name for left in list_checkpoints(many).leftovers] == [".global_step9.removing"]
    remove_old_checkpoints(many, 1, "global_step11", set())
    assert not list_checkpoints(many).leftovers


def test_listing_skips_a_checkpoint_removed_meanwhile(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint_listing.read_any_index

    def removed(path: Path) -> object:
        result = read(path)
        if path.name == "global_step9":
            shutil.rmtree(path)
        return result

    monkeypatch.setattr(checkpoint_listing, "read_any_index", removed)
    assert "global_step9" not in [item.tag for item in list_checkpoints(many).checkpoints]


def test_save_succeeds_if_the_rotation_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> None:
        raise PermissionError(13, "not yours")

    with caplog.at_level("WARNING", logger="windlass"):
        ranks = CheckpointRanks.of_group(None)
        CheckpointSave(tmp_path, "t", SavedState(), ranks, True, failing).finish(ranks)
    assert "the clean-up after it failed: [Errno 13] not yours" in caplog.text
    assert read_latest(tmp_path) == "t" and list_tags(tmp_path) == ["t"]
