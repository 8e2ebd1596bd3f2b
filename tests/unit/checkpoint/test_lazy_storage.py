"""Tests of lazy storage handles: each is opened once, one at a time, and every stored byte is read once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, LazyFlatTensor, SavedState, load, save
from windlass.checkpoint.checkpoint_state import OffloadedStorage
from windlass.checkpoint.rank_file import RankFile, RankFileItem
from windlass.checkpoint.safetensors_file import TensorEntry, TensorFile, TensorFileWriter

_open: list[Any] = []


@dataclass
class Shelf:
    """Lazy storage handle of tensors by name. They are in memory only while the handle is open."""

    away: dict[str, torch.Tensor]
    here: dict[str, torch.Tensor] = field(default_factory=dict)
    times: int = 0
    is_resident: bool = False

    @contextmanager
    def open(self) -> Iterator[None]:
        assert not _open, "two drawers at once"
        _open.append(self)
        self.times += 1
        self.here = {name: tensor.clone() for name, tensor in self.away.items()}
        yield
        self.away, self.here = self.here, {}
        _open.remove(self)


def resting(shelf: Shelf, name: str, shape: tuple[int, ...], start: int) -> FlatShard:
    tensor = shelf.away[name]
    get = partial(lambda shelf, name: shelf.here[name], shelf, name)
    return FlatShard(name, shape, start, LazyFlatTensor(tensor.numel(), tensor.dtype, shelf, get))


def ranges(numel: int, points: list[int]) -> list[tuple[int, int]]:
    ends = sorted({0, numel, *(point % (numel + 1) for point in points)})
    return list(zip(ends, ends[1:], strict=False))


NAMES = {"param/x": torch.int32, "state/x/mean": torch.int32, "state/x/code": torch.uint8}


def shelves(shape: tuple[int, ...], points: list[int], *, fill: bool) -> tuple[list[Shelf], list[FlatShard]]:
    """Return one handle for each range of a parameter and its states, and the shards that refer to it."""
    numel, drawers, shards = math.prod(shape), [], []
    for start, stop in ranges(numel, points):
        values = torch.arange(start, stop)
        shelf = Shelf(
            {name: (values + n if fill else values * 0).to(kind) for n, (name, kind) in enumerate(NAMES.items())}
        )
        drawers.append(shelf)
        shards += [resting(shelf, name, shape, start) for name in NAMES]
    return drawers, shards


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 999), max_size=5),
    others=st.lists(st.integers(0, 999), max_size=5),
)
def test_lazy_handles_are_opened_once_and_one_at_a_time(
    tmp_path: Path, shape: list[int], cuts: list[int], others: list[int]
) -> None:
    before, shards = shelves(tuple(shape), cuts, fill=True)
    save(tmp_path, "t", SavedState(shards=shards, tensors={"count": torch.tensor(7)}))
    after, into = shelves(tuple(shape), others, fill=False)
    count = torch.tensor(0)
    read: list[int] = []
    real = TensorFile._read

    def spy(self: TensorFile, at: int, raw: Any, entry: str) -> None:
        read.append(len(raw))
        real(self, at, raw, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFile, "_read", spy)
        load(tmp_path, "t", SavedState(shards=into, tensors={"count": count}))
    numel = math.prod(shape)
    assert [shelf.times for shelf in (*before, *after)] == [1] * len(before + after)
    assert sum(read) == numel * (4 + 4 + 1) + 8
    assert count.item() == 7
    for number, (name, kind) in enumerate(NAMES.items()):
        result = torch.cat([shelf.away[name] for shelf in after])
        assert torch.equal(result, (torch.arange(numel) + number).to(kind)), name


def test_offloaded_tensors_are_cast_on_load(tmp_path: Path) -> None:
    save(tmp_path, "t", SavedState(shards=[FlatShard("x", (10,), 0, torch.arange(10.0))]))
    drawers = [Shelf({"x": torch.zeros(5, dtype=torch.bfloat16)}) for _ in range(2)]
    shards = [resting(shelf, "x", (10,), 5 * number) for number, shelf in enumerate(drawers)]
    load(tmp_path, "t", SavedState(shards=shards), cast=True)
    assert torch.equal(torch.cat([shelf.away["x"] for shelf in drawers]), torch.arange(10.0).bfloat16())


@pytest.mark.parametrize("wanted", [[(0, 4), (4, 9), (9, 12)], [(3, 5)], [(0, 1)], [(11, 12)]])
def test_box_read_in_parts_is_checked_completely(tmp_path: Path, wanted: list[tuple[int, int]]) -> None:
    save(tmp_path, "t", SavedState(shards=[FlatShard("x", (12,), 0, torch.arange(12.0))]))
    path = tmp_path / "t" / "rank_00000.safetensors"
    good = path.read_bytes()
    for at in range(len(good) - 48, len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        shards = [resting(Shelf({"x": torch.zeros(stop - start)}), "x", (12,), start) for start, stop in wanted]
        with pytest.raises(CheckpointError, match="entry 'x' has crc32"):
            load(tmp_path, "t", SavedState(shards=shards))
        _open.clear()  # the error left its handle registered as open


def test_handle_that_differs_from_its_declaration_is_refused(tmp_path: Path) -> None:
    shelf = Shelf({"x": torch.zeros(4)})
    shard = resting(shelf, "x", (4,), 0)
    shelf.away["x"] = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(
        CheckpointError, match=r"'x' was declared with 4 elements of torch.float32, and has 4 of torch.f"
    ):
        save(tmp_path, "t", SavedState(shards=[shard]))
    _open.clear()


def test_loading_many_ranks_opens_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.checkpoint import open_file_cache

    monkeypatch.setattr(open_file_cache, "_OPEN", 2)
    save(tmp_path, "t", SavedState(shards=[FlatShard("x", (6,), 0, torch.arange(6.0))]))
    path, index = tmp_path / "t", (tmp_path / "t" / "checkpoint.json")
    from windlass.checkpoint.checkpoint_index import ChunkRecord, TensorRecord, encode_index, parse_index
    from windlass.checkpoint.safetensors_file import TensorEntry, TensorFileWriter

    chunks, files = [], {}
    for number in range(6):
        name = f"rank_{number:05d}.safetensors"
        with TensorFileWriter(path / name, {f"x@{number}": TensorEntry(torch.float32, (1,))}) as file:
            crc32 = file.write(f"x@{number}", torch.tensor([float(number)]))
        files[name] = (path / name).stat().st_size
        chunks.append(ChunkRecord(offsets=(number,), sizes=(1,), file=name, entry=f"x@{number}", crc32=crc32))
    old = parse_index(index.read_text(), index)
    record = TensorRecord(shape=(6,), dtype="F32", chunks=tuple(chunks))
    index.write_text(encode_index(old.model_copy(update={"files": files, "tensors": {"x": record}})))
    opened: list[TensorFile] = []
    real = TensorFile.__init__

    def remember(self: TensorFile, path: Path) -> None:
        opened.append(self)
        real(self, path)

    most = 0

    class Watching(Shelf):
        @contextmanager
        def open(self) -> Iterator[None]:
            nonlocal most
            with super().open():
                yield
                most = max(most, sum(file._file is not None for file in opened))

    drawers = [Watching({"x": torch.zeros(2)}) for _ in range(3)]
    monkeypatch.setattr(TensorFile, "__init__", remember)
    load(tmp_path, "t", SavedState(shards=[resting(shelf, "x", (6,), 2 * n) for n, shelf in enumerate(drawers)]))
    assert torch.equal(torch.cat([shelf.away["x"] for shelf in drawers]), torch.arange(6.0))
    assert most == 2 and all(file._file is None for file in opened)


def test_overlapping_ranges_are_all_filled(tmp_path: Path) -> None:
    save(tmp_path, "t", SavedState(shards=[FlatShard("x", (3, 4), 0, torch.arange(12.0))]))
    spans = [(0, 7), (0, 2), (3, 9), (6, 12)]
    drawers = [Shelf({"x": torch.zeros(stop - start)}) for start, stop in spans]
    shards = [resting(shelf, "x", (3, 4), start) for shelf, (start, _) in zip(drawers, spans, strict=True)]
    load(tmp_path, "t", SavedState(shards=shards))
    for shelf, (start, stop) in zip(drawers, spans, strict=True):
        assert torch.equal(shelf.away["x"], torch.arange(float(start), stop))


@pytest.mark.parametrize("stays", [False, True])
def test_writer_waits_only_for_tensors_that_are_freed(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer waits only for tensors that are freed before the next handle opens.

    Tensors that stay in memory are written later, without a wait. Memory that is reused must be written first.
    """
    memory, awaited = torch.empty(3 << 18), 0
    real = TensorFileWriter.wait

    class Lent(Shelf):
        @contextmanager
        def open(self) -> Iterator[None]:
            if stays:
                self.here = self.away
                yield
            else:
                self.here = {"x": memory.copy_(self.away["x"])}
                yield
                memory.fill_(torch.nan)

    def settle(self: TensorFileWriter) -> None:
        nonlocal awaited
        awaited += 1
        real(self)

    monkeypatch.setattr(TensorFileWriter, "wait", settle)
    drawers = [Lent({"x": torch.full_like(memory, n)}, is_resident=stays) for n in range(4)]
    full = (4 * memory.numel(),)
    shards = [resting(shelf, "x", full, n * memory.numel()) for n, shelf in enumerate(drawers)]
    save(tmp_path, "t", SavedState(shards=shards))
    assert awaited == (0 if stays else len(drawers))
    result = torch.empty(full)
    load(tmp_path, "t", SavedState(shards=[FlatShard("x", full, 0, result)]))
    assert torch.equal(result, torch.arange(4.0).repeat_interleave(memory.numel()))


def test_writers_of_offloaded_values_wait_for_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Away(OffloadedStorage):
        @contextmanager
        def open(self) -> Iterator[None]:
            log.append("open")
            yield

        def release_writers(self) -> None:
            if not self._released.is_set():
                log.append("release")
            super().release_writers()

    for name in ("wait", "submit_bytes"):
        real = getattr(TensorFileWriter, name)
        monkeypatch.setattr(TensorFileWriter, name, lambda *given, n=name, real=real: (log.append(n), real(*given)))
    values = torch.ones(5)
    entry = TensorEntry(values.dtype, tuple(values.shape))
    handles = [None, Away(), Away()]
    items = [RankFileItem(f"x{n}", entry, lambda: values, handle) for n, handle in enumerate(handles)]
    file = RankFile(tmp_path / "rank", items)
    file.copy_resident(torch.empty(file.copy_nbytes, dtype=torch.uint8))
    sums = file.write()
    one = ["open", "release", "submit_bytes", "wait"]
    assert log == [*one, *one, "submit_bytes"], "a handle is released once read, and the resident copy is written last"
    with TensorFile(tmp_path / "rank") as written:
        for n in range(3):
            written.read_into(f"x{n}", back := torch.zeros(5), sums[f"x{n}"])
            assert torch.equal(back, values)
