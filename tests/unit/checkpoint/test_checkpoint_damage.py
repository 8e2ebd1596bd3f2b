"""Tests of damaged and malicious checkpoints and full disks.

Each case is reported, no content is executed, and no incomplete checkpoint is accepted as complete.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint import sample_states
from windlass.base.errors import CheckpointError
from windlass.checkpoint import SavedState, list_tags, load, read_full, read_latest, safetensors_file, save
from windlass.checkpoint.staging_checkpoint import StagingCheckpoint

DATA = "t/rank_00000.safetensors"
INDEX = "t/checkpoint.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    save(root, "t", sample_states.state(0, 1))
    return root


def change_index(root: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Edit the index as an attacker who knows the format would: with a correct checksum."""
    path = root / INDEX
    fields = json.loads(path.read_text())
    del fields["crc32"]
    change(fields)
    body = json.dumps(fields)[:-1]
    path.write_text(f'{body},\n"crc32": "{zlib.crc32(body.encode()):08x}"}}\n')


def load_all(root: Path, tag: str | None = None) -> None:
    load(root, tag, sample_states.empty())


class Planted:
    """Object whose pickle creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_flipped_bytes_of_the_data_are_detected(saved: Path) -> None:
    path = saved / DATA
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for at in range(header, len(good), 37):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is damaged: entry '.*' has crc32"):
            load_all(saved)
        with pytest.raises(CheckpointError, match="rank_00000.safetensors is damaged"):
            list(read_full(saved, None, _all_names(saved)))


def _all_names(root: Path) -> list[str]:
    return list(json.loads((root / INDEX).read_text())["tensors"])


def test_flipped_bytes_of_the_index_are_detected(saved: Path) -> None:
    path = saved / INDEX
    good = path.read_bytes()
    for at in range(0, len(good) - 1, 13):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match=r"checkpoint.json"):
            load_all(saved)


def test_forged_header_cannot_address_bytes_before_the_data(saved: Path) -> None:
    path, name = saved / DATA, _all_names(saved)[0]
    good = path.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    header = json.loads(good[8:length])
    size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    header[name]["data_offsets"] = [-(1 << 20), size - (1 << 20)]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + good[length:])
    change_index(saved, lambda fields: fields.update(files={path.name: path.stat().st_size}))
    with pytest.raises(CheckpointError, match="entry for tensor .* is"):
        dict(read_full(saved, None, [name]))


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_truncated_files_are_detected(saved: Path, length: int) -> None:
    for name in (DATA, INDEX):
        path = saved / name
        good = path.read_bytes()
        path.write_bytes(good[: length if length >= 0 else len(good) - 3])
        with pytest.raises(CheckpointError, match=path.name):
            load_all(saved)
        path.write_bytes(good)
    load_all(saved)


def test_missing_files_are_reported_by_name(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint 'u' in .*Checkpoints there: t"):
        load_all(saved, "u")
    with pytest.raises(CheckpointError, match=r"directory .*absent does not exist"):
        load_all(tmp_path / "absent")
    os.remove(saved / DATA)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is missing"):
        load_all(saved)
    os.remove(saved / INDEX)
    with pytest.raises(CheckpointError, match=r"not a windlass checkpoint: it has no checkpoint.json"):
        load_all(saved)
    os.remove(saved / "latest")
    assert read_latest(saved) is None
    with pytest.raises(CheckpointError, match=r"has no 'latest' file; pass a tag"):
        load_all(saved)


def test_planted_pickle_is_never_opened(saved: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    payload = pickle.dumps(Planted(trap))
    assert pickle.loads(payload) is None and trap.exists()  # the payload runs when it is unpickled
    trap.unlink()
    for name in (".metadata", "__0_0.distcp", "mp_rank_00_model_states.pt", "rank_00001.safetensors"):
        (saved / "t" / name).write_bytes(payload)
    load_all(saved)
    (saved / DATA).write_bytes(payload)
    change_index(saved, lambda fields: fields.update(files={"rank_00000.safetensors": len(payload)}))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_all(saved)
    (saved / INDEX).write_bytes(payload)
    with pytest.raises(CheckpointError, match="checkpoint.json"):
        load_all(saved)
    assert not trap.exists()


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "weights.pt", "a/b.safetensors", ".safetensors"]
)
def test_an_index_cannot_name_other_files(saved: Path, name: str) -> None:
    change_index(saved, lambda fields: fields.update(files={name: 3}))
    with pytest.raises(CheckpointError, match="not a valid index"):
        load_all(saved)


@pytest.mark.parametrize("tag", ["../outside", "/etc", "..", ".hidden", "", "a\nb", "a/b", "latest", "x" * 201])
def test_tag_outside_the_directory_is_refused(saved: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        save(saved, tag, sample_states.state(0, 1))
    with pytest.raises(CheckpointError, match="tag"):
        load_all(saved, tag)
    (saved / "latest").write_text(tag)
    if tag.strip() != "t":
        with pytest.raises(CheckpointError, match="latest is refused"):
            load_all(saved)


def test_link_outside_the_directory_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved / "t", tmp_path / "elsewhere")
    (saved / "t").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads outside"):
        load_all(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version 2, this windlass reads 1"),
        ({"format": "other"}, "not a windlass checkpoint"),
        ({"world_size": 2}, "'ranks' has 1 items"),
        ({"tensors": {"x": {"shape": [2], "dtype": "F32", "chunks": []}}}, "hold 0 elements"),
        ({"tensors": {"x": {"shape": [-2], "dtype": "F32", "chunks": []}}}, "not a valid index"),
        ({"files": {}}, "its file is not listed"),
        (
            {
                "files": {"a.safetensors": 0},
                "tensors": {
                    "x": {
                        "shape": [4],
                        "dtype": "F32",
                        "chunks": [
                            {"offsets": [at], "sizes": [2], "file": "a.safetensors", "entry": "x", "crc32": 0}
                            for at in (0, 1)
                        ],
                    }
                },
            },
            "overlap, or elements are missing, from element 2 on",
        ),
    ],
)
def test_inconsistent_index_is_refused(saved: Path, change: dict[str, object], message: str) -> None:
    change_index(saved, lambda fields: fields.update(change))
    with pytest.raises(CheckpointError, match=message):
        load_all(saved)


def assert_former_is_good(root: Path) -> None:
    into = sample_states.empty()
    assert load(root, None, into).tag == "t"
    sample_states.assert_loaded(into)
    assert {path.name for path in root.iterdir()} == {"t", "latest"}


def test_lack_of_space_is_reported_before_writing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(saved)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    opened: list[Path] = []
    monkeypatch.setattr(safetensors_file, "disk_errors", lambda path, needed: opened.append(path))
    for tag in ("t", "u"):
        with pytest.raises(CheckpointError, match=r"needs \d+ bytes, 100 are free"):
            save(saved, tag, sample_states.state(0, 1, offset=5))
    assert opened == []
    monkeypatch.undo()
    assert_former_is_good(saved)


# The fsyncs of a save: data, index, their directory, the parent, `latest`, the parent.
@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("tag", ["t", "u"])
def test_fsync_failure_leaves_a_complete_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch, call: int, tag: str
) -> None:
    real, calls = os.fsync, iter(range(100))

    def fsync(handle: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"disk full while writing /.*: it needs \d+ bytes, \d+ are free"):
        save(saved, tag, sample_states.state(0, 1, offset=5))
    monkeypatch.undo()
    into = sample_states.empty()
    loaded = load(saved, None, into)
    sample_states.assert_loaded(into, offset=0 if loaded.plain["step"] == 12 else 5)
    save(saved, tag, sample_states.state(0, 1, offset=5))
    assert sorted({path.name for path in saved.iterdir()}) == sorted({"t", tag, "latest"})


class Killed(BaseException):
    """Stand-in for kill -9, which handlers of `Exception` do not catch."""


# Calls that are patched below: 15 if a save replaces the tag, 11 if the tag is new. The last step kills nothing.
KILLS = {"t": 15, "u": 11}


@pytest.mark.parametrize(("tag", "step"), [(tag, step) for tag, kills in KILLS.items() for step in range(kills + 1)])
def test_killed_writer_leaves_a_complete_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch, step: int, tag: str
) -> None:
    steps = iter(range(1000))

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if next(steps) == step:
                raise Killed
            return real(*args, **kwargs)

        return call

    for name in ("rename", "replace", "fsync", "mkdir", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))
    monkeypatch.setattr(StagingCheckpoint, "discard", lambda draft: None)
    with pytest.raises(Killed) if step < KILLS[tag] else nullcontext():
        save(saved, tag, sample_states.state(0, 1, offset=5))
    monkeypatch.undo()
    into = sample_states.empty()
    loaded = load(saved, None, into)
    sample_states.assert_loaded(into, offset=0 if loaded.plain["step"] == 12 else 5)
    save(saved, tag, sample_states.state(0, 1, offset=6))
    into = sample_states.empty()
    assert load(saved, None, into).tag == tag
    sample_states.assert_loaded(into, offset=6)
    assert sorted({path.name for path in saved.iterdir()}) == sorted({"t", tag, "latest"})


def test_writer_killed_twice_leaves_the_former_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename(saved / "t", saved / ".t.replaced")  # killed between the two renames of a replacement
    (saved / ".t.writing").mkdir()

    def fsync(handle: int) -> None:
        raise Killed

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(StagingCheckpoint, "discard", lambda draft: None)
    with pytest.raises(Killed):
        save(saved, "t", sample_states.state(0, 1, offset=5))
    monkeypatch.undo()
    into = sample_states.empty()
    load(saved, None, into)
    sample_states.assert_loaded(into)


def test_save_does_not_replace_a_foreign_directory(saved: Path) -> None:
    (saved / "notes").mkdir()
    save(saved, "notes", SavedState(tensors={"x": torch.zeros(1)}))  # an empty folder is accepted
    (saved / "mine").mkdir()
    (saved / "mine" / "file.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="mine exists and is not a windlass checkpoint"):
        save(saved, "mine", SavedState(tensors={"x": torch.zeros(1)}))
    assert (saved / "mine" / "file.txt").read_text() == "keep"
    assert list_tags(saved) == ["t", "notes"]


def test_an_unreadable_folder_hides_no_other_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "private":
            raise PermissionError(path)
        return stat(path, **options)

    (saved / "private").mkdir()
    monkeypatch.setattr(Path, "stat", refuse)
    assert list_tags(saved) == ["t"]


@pytest.mark.parametrize("tag", ["latest_universal", "broken\udc80"])
def test_reserved_and_unprintable_tags_are_refused(saved: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint tag .* cannot be used.*latest_universal"):
        save(saved, tag, SavedState(tensors={"x": torch.zeros(1)}))


def test_unwritable_path_is_reported_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/\.t\.writing cannot be written"):
        save(tmp_path / "file", "t", sample_states.state(0, 1))
