"""Tests of checkpoint formats of other libraries: a toy format is listed and loaded like windlass's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from windlass.base.errors import CheckpointError, ConfigError
from windlass.checkpoint import FlatShard, SavedState, foreign_formats, load, read_full, read_plain, save
from windlass.checkpoint.checkpoint_index import FORMAT, FORMAT_VERSION, CheckpointIndex, ChunkRecord, TensorRecord
from windlass.checkpoint.checkpoint_listing import list_checkpoints
from windlass.checkpoint.foreign_formats import ExportSource, ParameterOrder, register_foreign_format
from windlass.checkpoint.safetensors_file import TensorEntry, TensorFile, TensorFileWriter
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint

WEIGHT = torch.arange(12.0).view(3, 4)


class ToyFormat:
    """Format of one safetensors file that has no checksums, named `toy.weights`."""

    name = "toy"

    def recognizes(self, path: Path) -> bool:
        return (path / "toy.weights").is_file()

    def read_index(self, path: Path, parameter_order: ParameterOrder | None) -> CheckpointIndex:
        with TensorFile(path / "toy.weights") as file:
            file.check_entry("weight", torch.float32, (3, 4))
        return CheckpointIndex.model_construct(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            world_size=1,
            files={"toy.weights": (path / "toy.weights").stat().st_size},
            tensors={"param/weight": TensorRecord((3, 4), "F32", (_chunk(0, 1), _chunk(1, 2)))},
            plain={},
            ranks=(None,),
        )

    def open_file(self, path: Path) -> TensorFile:
        return _RowsFile(path)

    def find_damage(self, path: Path, indexed_files: Collection[str]) -> str:
        return f"{path} is marked" if (path / "marked").exists() else ""

    def plan_export(self, source: ExportSource) -> Callable[[Path, int], None]:
        raise NotImplementedError

    def write_tools(self, directory: Path) -> None:
        (directory / "toy.txt").write_text("")


class _RowsFile(TensorFile):
    """Reader of entries `first-count` of rows of the file's only tensor."""

    def byte_range(self, entry: str) -> tuple[int, int]:
        first, count = map(int, entry.split("-"))
        begin, _ = super().byte_range("weight")
        return begin + first * 16, begin + (first + count) * 16

    def check_entry(self, entry: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.check_size(entry, torch.Size(shape).numel() * dtype.itemsize)

    def verify_checksum(self, entry: str, crc32: int | None) -> None:
        assert crc32 is None


def _chunk(first: int, count: int) -> ChunkRecord:
    return ChunkRecord((first, 0), (count, 4), "toy.weights", f"{first}-{count}", None)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Directory with a toy checkpoint under the tag `t`."""
    monkeypatch.setattr(foreign_formats, "_formats", dict(foreign_formats._formats))
    register_foreign_format(ToyFormat())
    (tmp_path / "t").mkdir()
    with TensorFileWriter(tmp_path / "t" / "toy.weights", {"weight": TensorEntry(torch.float32, (3, 4))}) as file:
        file.write("weight", WEIGHT)
    assert torch.equal(load_file(tmp_path / "t" / "toy.weights")["weight"], WEIGHT)
    yield tmp_path


def test_registered_format_is_read_in_any_layout(toy: Path) -> None:
    assert torch.equal(dict(read_full(toy, "t"))["param/weight"], WEIGHT)
    assert read_plain(toy, "t") == {}
    middle = torch.zeros(5)
    load(toy, "t", SavedState([FlatShard("param/weight", (3, 4), 3, middle)]))
    assert torch.equal(middle, WEIGHT.view(-1)[3:8])


def test_registered_format_is_listed_with_its_damage(toy: Path) -> None:
    listed = list_checkpoints(toy, verify=True).checkpoints
    assert [(item.tag, item.problem, item.verified) for item in listed] == [("t", "", True)]
    (toy / "t" / "marked").touch()
    assert "is marked" in list_checkpoints(toy, verify=True).checkpoints[0].problem


def test_damage_beside_an_own_checkpoint_is_found(toy: Path) -> None:
    save(toy, "own", SavedState([FlatShard("param/weight", (3, 4), 0, WEIGHT.view(-1))]))
    assert list_checkpoints(toy, verify=True).checkpoints[-1].problem == ""
    (toy / "own" / "marked").touch()
    assert "is marked" in list_checkpoints(toy, verify=True).checkpoints[-1].problem


def test_unknown_directory_names_the_formats(toy: Path) -> None:
    (toy / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither checkpoint\.json nor .* \(deepspeed, toy\)"):
        StoredCheckpoint.from_path(toy / "empty")


def test_name_is_registered_once(toy: Path) -> None:
    with pytest.raises(ConfigError, match="'toy' is registered already"):
        register_foreign_format(ToyFormat())
    assert [item.name for item in foreign_formats.foreign_formats()] == ["deepspeed", "toy"]
