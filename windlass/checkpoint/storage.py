"""Storage under `torch.distributed.checkpoint`: safetensors files and a JSON index; no pickle is written or read."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from windlass.base.errors import CheckpointError
from windlass.checkpoint.directory import METADATA, disk_errors, require_space
from windlass.checkpoint.fragment import runs
from windlass.checkpoint.index import FORMAT, FORMAT_VERSION, Chunk, Index, TensorRecord, read_index, to_text
from windlass.checkpoint.rank_file import Item, RankFile
from windlass.checkpoint.shards import ShardLoadPlanner, ShardSavePlanner, Where, data_of, nbytes_of
from windlass.checkpoint.sources import Source, Sources
from windlass.checkpoint.state import Drawer
from windlass.checkpoint.tensor_file import Entry, code_of, dtype_of

T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """Where one box went: what a rank tells the coordinator."""

    file: str
    file_bytes: int
    entry: str
    crc32: int


class SafetensorsWriter(StorageWriter):
    """Writes one data file a rank into the existing directory `path`, and from rank 0 `checkpoint.json`.

    Args:
        rank: this rank; its file is `rank_<rank>.safetensors`.
        plain: what all ranks share, as `windlass.checkpoint.plain` encodes it.
        ranks: one such value a rank.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0, plain: Any = None, ranks: Iterable[Any] = ({},)):
        self.path = Path(path)
        self._rank = rank
        self._plain = {} if plain is None else plain
        self._ranks = tuple(ranks)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the directory is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(
                    f"{item.index.fqn!r} is no tensor: this storage writes tensors and JSON, never a pickle; give it "
                    "as plain data"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Checks, before a byte is written, that the bytes of all ranks fit on the disk of rank 0."""
        require_space(self.path, nbytes_of(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = self.file_of(plan, planner)
        return _done(self.results(plan, file, file.write()))

    def file_of(self, plan: SavePlan, planner: SavePlanner) -> RankFile:
        """What this rank writes of the plan that was agreed on."""
        items = [
            Item(_entry_name(item), _entry(item), partial(_resolved, planner, item), _drawer_of(planner, item))
            for item in plan.items
        ]
        return RankFile(self.path / f"rank_{self._rank:05d}.safetensors", items)

    def results(self, plan: SavePlan, file: RankFile, sums: dict[str, int]) -> list[WriteResult]:
        """What the coordinator has to know of a file that is written.

        Args:
            sums: crc32 of each entry.
        """
        size = file.path.stat().st_size if plan.items else 0
        found = []
        for item in plan.items:
            name = _entry_name(item)
            where = Written(file.path.name, size, name, sums[name])
            found.append(WriteResult(item.index, file.entries[name].nbytes, where))
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, durably: from here on the directory holds a whole checkpoint."""
        written: dict[Where, Written] = {
            (result.index.fqn, tuple(result.index.offset or ())): result.storage_data
            for of_rank in results
            for result in of_rank
        }
        index = Index(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            world_size=len(self._ranks),
            files={one.file: one.file_bytes for one in written.values()},
            tensors={name: _record(name, found, written) for name, found in metadata.state_dict_metadata.items()},
            plain=self._plain,
            ranks=self._ranks,
        )
        path, text = self.path / METADATA, to_text(index)
        with disk_errors(path, len(text)), open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)


class LaterWriter(SafetensorsWriter):
    """As SafetensorsWriter, but only what is to be written is agreed on; `write` and `finish_with` are for later.

    Attributes:
        file: of this rank.
    """

    file: RankFile

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._plan, self.file = plan, self.file_of(plan, planner)
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._metadata = metadata

    def look(self, seen: Callable[[str, tuple[int, ...], int, torch.Tensor], object]) -> None:
        """Have `seen` called with each box as it is written: the tensor's name and shape, at which of its elements the
        box begins, and its elements `[n]`; a box that is no flat range comes as several."""
        places = {
            _entry_name(item): (item.index.fqn, tuple(data.size), tuple(data.chunk.offsets))
            for item in self._plan.items
            for data in (data_of(item),)
        }

        def see(name: str, tensor: torch.Tensor) -> None:
            of, shape, offsets = places[name]
            if not tensor.numel():
                seen(of, shape, 0, tensor.reshape(-1))
            for start, flat in runs(shape, offsets, tensor):
                seen(of, shape, start, flat)

        self.file.seen = see

    def add_plain(self, key: str, value: Any) -> None:
        """Say something in the plain data of the index that is known only now; JSON as it is."""
        self._plain[key] = value

    def write(self) -> list[WriteResult]:
        """Writes this rank's file; from any thread, and without other ranks."""
        return self.results(self._plan, self.file, self.file.write())

    def finish_with(self, results: list[list[WriteResult]]) -> None:
        """As `finish`, with what `write` returned on all ranks. On the first rank only."""
        super().finish(self._metadata, results)


class SafetensorsReader(StorageReader):
    """Reads the checkpoint directory `path`: only the chunks that are asked for, each once and checked by its crc32."""

    def __init__(self, path: str | os.PathLike[str], index: Index | None = None):
        self.path = Path(path)
        self._index = index
        self._chunks: dict[Where, Source] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path, self._index = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = read_index(self.path)
        self._chunks = {
            (name, chunk.offsets): Source(chunk, dtype_of(record.dtype))
            for name, record in self._index.tensors.items()
            for chunk in record.chunks
        }
        return Metadata({name: _described(record) for name, record in self._index.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with Sources(self.path, planner) as sources:
            for item in plan.items:
                sources.expect(self._source(item))
            for drawer, items in _by_drawer(plan.items, lambda item: _drawer_of(planner, item)):
                by_chunk: dict[Source, list[ReadItem]] = defaultdict(list)
                for item in items:
                    by_chunk[self._source(item)].append(item)
                with drawer.open() if drawer is not None else nullcontext():
                    for source in sorted(by_chunk, key=sources.position):
                        sources.read(source, by_chunk[source])
        return _done(None)

    def _source(self, item: ReadItem) -> Source:
        return self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / METADATA).is_file()


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _entry_name(item: WriteItem) -> str:
    """A whole tensor is stored under its own name, a box of it with its offsets behind an @."""
    data = data_of(item)
    if data.chunk.sizes == data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _entry(item: WriteItem) -> Entry:
    data = data_of(item)
    return Entry(data.properties.dtype, tuple(data.chunk.sizes))


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _drawer_of(planner: SavePlanner | LoadPlanner, item: Any) -> Drawer | None:
    """What must be open for an item; torch's own planners know of no drawers."""
    return planner.drawer_of(item) if isinstance(planner, (ShardSavePlanner, ShardLoadPlanner)) else None


def _by_drawer(items: Iterable[T], drawer_of: Callable[[T], Drawer | None]) -> list[tuple[Drawer | None, list[T]]]:
    """Items by the drawer that must be open for them: first those that need none, then as drawers first appear."""
    found: dict[int, tuple[Drawer | None, list[T]]] = {id(None): (None, [])}
    for item in items:
        drawer = drawer_of(item)
        found.setdefault(id(drawer), (drawer, []))[1].append(item)
    return list(found.values())


def _record(name: str, found: object, written: dict[Where, Written]) -> TensorRecord:
    assert isinstance(found, TensorStorageMetadata)
    chunks = []
    for chunk in found.chunks:
        where = written[name, tuple(chunk.offsets)]
        chunks.append(
            Chunk(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=where.file,
                entry=where.entry,
                crc32=where.crc32,
            )
        )
    return TensorRecord(shape=tuple(found.size), dtype=code_of(found.properties.dtype), chunks=tuple(chunks))


def _described(record: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_of(record.dtype)),
        torch.Size(record.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in record.chunks],
    )
