"""Tests in one process: saved tensors load in any sharding, and every mismatch is reported by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tests.unit.checkpoint import sample_states
from windlass.base.errors import CheckpointError
from windlass.checkpoint import (
    FlatShard,
    SavedState,
    chunk_reader,
    list_tags,
    load,
    read_full,
    read_latest,
    read_plain,
    save,
)
from windlass.checkpoint.checkpoint_listing import list_checkpoints
from windlass.checkpoint.checkpoint_state import hold_tensors
from windlass.checkpoint.safetensors_export import export_safetensors
from windlass.checkpoint.safetensors_file import TensorFile
from windlass.checkpoint.safetensors_storage import SafetensorsReader


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path, "global_step12", sample_states.state(0, 1))
    return tmp_path


def test_state_round_trips(saved: Path) -> None:
    into = sample_states.empty()
    loaded = load(saved, None, into)
    sample_states.assert_loaded(into)
    assert loaded.plain == sample_states.state(0, 1).plain
    assert loaded.rank_plain is not None and torch.equal(loaded.rank_plain["rng"], torch.zeros(3, dtype=torch.uint8))
    assert (loaded.tag, loaded.path, loaded.saved_world_size) == ("global_step12", saved / "global_step12", 1)
    assert (loaded.matched, loaded.missing, loaded.unexpected) == (len(sample_states.SHAPES) + 2, (), ())
    assert read_latest(saved) == "global_step12"
    assert {path.name for path in loaded.path.iterdir()} == {"checkpoint.json", "rank_00000.safetensors"}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.integers(1, 5), max_size=4), cuts=st.lists(st.integers(0, 625), max_size=4), data=st.data())
def test_any_sharding_loads_into_any_other(
    tmp_path: Path, shape: list[int], cuts: list[int], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    values = torch.arange(numel, dtype=torch.int32)

    def ranges(points: list[int]) -> list[tuple[int, int]]:
        ends = sorted({0, numel, *(point % (numel + 1) for point in points)})
        return list(zip(ends, ends[1:], strict=False))

    given_shards = [FlatShard("x", tuple(shape), start, values[start:stop]) for start, stop in ranges(cuts)]
    save(tmp_path, "t", SavedState(shards=given_shards))
    other = data.draw(st.lists(st.integers(0, 625), max_size=4))
    into = [FlatShard("x", tuple(shape), a, torch.full((b - a,), -1, dtype=torch.int32)) for a, b in ranges(other)]
    load(tmp_path, "t", SavedState(shards=into))
    assert torch.equal(torch.cat([shard.tensor for shard in into]), values)
    assert torch.equal(dict(read_full(tmp_path, "t"))["x"], values.view(shape))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2]
    + [torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex64, torch.int64, torch.bool],
)
def test_every_dtype_round_trips_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (64 * dtype.itemsize,), dtype=torch.uint8)
    value = (bits if dtype == torch.bool else bits * 173).view(dtype)
    save(tmp_path, "t", SavedState(tensors={"x": value}))
    into = torch.empty_like(value)
    load(tmp_path, "t", SavedState(tensors={"x": into}))
    assert torch.equal(into.view(torch.uint8), value.view(torch.uint8))


def test_non_contiguous_memory_is_saved_and_loaded(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4).t()
    save(tmp_path, "t", SavedState(tensors={"x": value}))
    into = torch.zeros(3, 4).t()
    load(tmp_path, "t", SavedState(tensors={"x": into}))
    assert torch.equal(into, value)


def test_autograd_notices_that_a_saved_tensor_was_loaded_over(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    save(tmp_path, "t", SavedState(tensors={"x": weight}))
    loss = (weight * weight).sum()
    load(tmp_path, "t", SavedState(tensors={"x": weight}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_equal_shard_is_read_directly_into_its_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    real = TensorFile.read_into

    def spy(self: TensorFile, entry: str, tensor: torch.Tensor, crc32: int) -> None:
        filled.append(tensor.data_ptr())
        real(self, entry, tensor, crc32)

    monkeypatch.setattr(TensorFile, "read_into", spy)
    monkeypatch.setattr(chunk_reader, "_SMALL", 0)
    into = sample_states.empty()
    load(saved, None, into)
    assert {shard.tensor.data_ptr() for shard in into.shards if shard.tensor.numel()} <= set(filled)


def test_small_adjacent_tensors_are_read_together_and_checked_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = TensorFile._read

    def counted(self: TensorFile, at: int, raw: Any, entry: str) -> None:
        reads.append(at)
        real(self, at, raw, entry)

    values = {f"t{number}": torch.full((number % 7, 3), float(number)) for number in range(300)}
    path = save(tmp_path, "t", SavedState(tensors=values))
    monkeypatch.setattr(TensorFile, "_read", counted)
    into = {name: torch.zeros_like(value) for name, value in values.items()}
    wider = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in values.items()}
    for result in (into, wider):
        reads.clear()
        load(tmp_path, "t", SavedState(tensors=result), cast=True)
        assert all(torch.equal(result[name], value.to(result[name].dtype)) for name, value in values.items())
        assert len(reads) == 1
    file = path / "rank_00000.safetensors"
    with TensorFile(file) as opened:
        at = opened.byte_range("t200")[1] - 1
    damaged = bytearray(file.read_bytes())
    damaged[at] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="'t200' has crc32"):
        load(tmp_path, "t", SavedState(tensors=into))


def test_missing_and_unexpected_names_are_errors_unless_allowed(saved: Path) -> None:
    into = sample_states.empty()
    into.tensors = {"buffer/running_mean": torch.zeros(4), "buffer/new": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"1 missing \(buffer/new\); 1 unexpected \(buffer/count\)"):
        load(saved, None, into)
    loaded = load(saved, None, into, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("buffer/new",), ("buffer/count",))
    assert loaded.matched == len(sample_states.SHAPES) + 1
    assert torch.equal(into.tensors["buffer/running_mean"], torch.arange(4.0))


def test_names_can_be_left_out_by_prefix(saved: Path) -> None:
    into = SavedState(
        shards=[shard for shard in sample_states.shards(0, 1, fill=False) if shard.name.startswith("param/")]
    )
    with pytest.raises(CheckpointError, match="4 unexpected"):
        load(saved, None, into)
    assert load(saved, None, into, ignore=("state/", "master/", "buffer/")).unexpected == ()


def test_mismatched_shapes_and_dtypes_are_all_named(saved: Path) -> None:
    into = SavedState(
        shards=[FlatShard("param/bias", (12,), 0, torch.zeros(12, dtype=torch.bfloat16))],
        tensors={"buffer/running_mean": torch.zeros(4, dtype=torch.float64)},
    )
    with pytest.raises(
        CheckpointError, match=r"'param/bias' has shape \(11,\).*'buffer/running_mean' is torch.float32"
    ):
        load(saved, None, into, strict=False)
    into = SavedState(tensors={"buffer/running_mean": torch.zeros(4, dtype=torch.float64)})
    load(saved, None, into, strict=False, cast=True)
    assert torch.equal(into.tensors["buffer/running_mean"], torch.arange(4.0, dtype=torch.float64))


def test_full_tensors_are_read_without_a_process_group(saved: Path) -> None:
    names = [*sample_states.SHAPES, "buffer/running_mean", "buffer/count"]
    results = dict(read_full(saved))
    assert list(results) == names
    assert all(torch.equal(results[name], sample_states.whole(name)) for name in sample_states.SHAPES)
    assert [name for name, _ in read_full(saved, "global_step12", ["param/bias"])] == ["param/bias"]
    assert read_plain(saved)["step"] == 12
    with pytest.raises(CheckpointError, match="no tensor named 'param/absent'"):
        read_full(saved, None, ["param/absent"])


def test_data_files_are_valid_safetensors(saved: Path) -> None:
    with safe_open(saved / "global_step12" / "rank_00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("param/embed.weight"), sample_states.whole("param/embed.weight"))
        assert torch.equal(file.get_tensor("param/scale"), sample_states.whole("param/scale"))
        assert file.get_tensor("param/empty").shape == (0, 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_dcp_planners_use_the_storage(saved: Path) -> None:
    name = "param/embed.weight"
    target = {name: torch.zeros(7, 5, dtype=torch.bfloat16)}
    reader = SafetensorsReader(saved / "global_step12")
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    state_dict_loader.load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert torch.equal(target[name], sample_states.whole(name))


def test_a_tag_is_replaced_and_tags_are_listed_oldest_first(saved: Path) -> None:
    save(saved, "b", sample_states.state(0, 1, offset=1))
    save(saved, "a", sample_states.state(0, 1, offset=2), save_latest=False)
    assert read_latest(saved) == "b"
    save(saved, "global_step12", sample_states.state(0, 1, offset=3))
    assert list_tags(saved) == ["b", "a", "global_step12"]
    into = sample_states.empty()
    load(saved, "global_step12", into)
    sample_states.assert_loaded(into, offset=3)
    assert {path.name for path in saved.iterdir()} == {"a", "b", "global_step12", "latest"}


@pytest.mark.parametrize("tag", ["a ", " b", "c"])
def test_blanks_of_a_tag_are_kept(tmp_path: Path, tag: str) -> None:
    save(tmp_path, tag, SavedState(tensors={"x": torch.ones(2)}))
    assert load(tmp_path, None, SavedState(tensors={"x": torch.zeros(2)})).tag == tag
    (tmp_path / "latest").write_text(f"{tag}\n")
    assert read_latest(tmp_path) == tag
    if tag == "c":  # written by hand
        (tmp_path / "latest").write_text(" c \n")
        assert read_latest(tmp_path) == "c"


def test_lazy_conjugates_are_saved_and_loaded(tmp_path: Path) -> None:
    phases = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tensors = {"buffer/phases": phases, "buffer/imaginary": phases.imag}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    assert phases.is_conj() and phases.imag.is_neg()
    save(tmp_path, "t", SavedState(tensors=tensors))
    for tensor in tensors.values():
        tensor.zero_()
    load(tmp_path, "t", SavedState(tensors=tensors))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_a_tensor_without_memory_is_named(tmp_path: Path) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match=r"'buffer/gone': .* can't be saved"):
        save(tmp_path, "t", SavedState(tensors={"buffer/gone": freed}))


def test_ranges_must_cover_each_tensor_once(tmp_path: Path) -> None:
    part = FlatShard("x", (4, 2), 0, torch.zeros(3))
    with pytest.raises(CheckpointError, match="no rank holds element 3 of 'x'"):
        save(tmp_path, "t", SavedState(shards=[part]))
    with pytest.raises(CheckpointError, match="gives element 2 of 'x' twice"):
        save(tmp_path, "t", SavedState(shards=[part, FlatShard("x", (4, 2), 2, torch.zeros(6))]))
    with pytest.raises(CheckpointError, match="every rank's range of 'x' is empty"):
        save(tmp_path, "t", SavedState(shards=[FlatShard("x", (4, 2), 8, torch.zeros(0))]))
    assert list(tmp_path.iterdir()) == []


def test_bad_shards_and_names_are_refused() -> None:
    with pytest.raises(CheckpointError, match="contiguous 1-D"):
        FlatShard("x", (4,), 0, torch.zeros(8)[::2])
    with pytest.raises(CheckpointError, match=r"elements \[2, 5\), but shape \(2, 2\) has 4"):
        FlatShard("x", (2, 2), 2, torch.zeros(3))
    for name in ("", "plain/x", "rank/0/x"):
        with pytest.raises(CheckpointError, match="cannot name a tensor"):
            hold_tensors([], {name: torch.zeros(1)})
    with pytest.raises(CheckpointError, match="different shapes or dtypes"):
        hold_tensors([FlatShard("x", (4,), 0, torch.zeros(1)), FlatShard("x", (5,), 1, torch.zeros(1))], {})
    with pytest.raises(CheckpointError, match="give it once"):
        hold_tensors([FlatShard("x", (1,), 0, torch.zeros(1))], {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="cannot hold tensors of dtype torch.complex128"):
        save("/nowhere", "t", SavedState(tensors={"x": torch.zeros(1, dtype=torch.complex128)}))


def test_unsupported_dtype_is_refused_with_the_tensor_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'buffer/phases': a checkpoint cannot hold .* torch.complex128"):
        save(tmp_path, "t", SavedState(tensors={"buffer/phases": torch.zeros(2, dtype=torch.complex128)}))


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Set another default device and dtype, as a script may do."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_default_device_of_the_script_is_ignored(saved: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    into = sample_states.empty()
    request.getfixturevalue("elsewhere")
    load(saved, None, into)
    full = dict(read_full(saved))
    assert list_checkpoints(saved, verify=True).checkpoints[0].verified
    export_safetensors(saved, tmp_path / "out")
    torch.set_default_device(None)
    sample_states.assert_loaded(into)
    assert torch.equal(full["param/embed.weight"], sample_states.whole("param/embed.weight"))


def test_shards_are_views_not_copies() -> None:
    flat = torch.zeros(10)
    held = hold_tensors([FlatShard("x", (5, 3), 2, flat)], {})
    for piece in held["x"].boxes:
        piece.get().fill_(1)
    assert flat.eq(1).all()
