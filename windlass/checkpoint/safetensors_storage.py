"""Storage for `torch.distributed.checkpoint`: safetensors files and a JSON index, without pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from windlass.base.atomic_file import open_new
from windlass.checkpoint.checkpoint_directory import INDEX_FILE, disk_errors
from windlass.checkpoint.checkpoint_index import (
    FORMAT,
    FORMAT_VERSION,
    CheckpointIndex,
    ChunkRecord,
    TensorRecord,
    encode_index,
    entry_name,
    read_index,
)
from windlass.checkpoint.checkpoint_state import HeldTensor
from windlass.checkpoint.chunk_reader import ChunkReader
from windlass.checkpoint.fragment_boxes import flat_ranges_of_box
from windlass.checkpoint.open_file_cache import OpenFileCache
from windlass.checkpoint.rank_file import RankFile, RankFileItem
from windlass.checkpoint.safetensors_file import TensorEntry, dtype_from_code
from windlass.checkpoint.shard_load_planner import Wanted
from windlass.checkpoint.write_assignment import HeldTensorInfo, HeldTensorInfos, boxes_to_write

T = TypeVar("T")


@dataclass(frozen=True)
class WrittenFile:
    """Size of a rank's file, and the crc32 of each of its boxes as `boxes_to_write` orders them; sent to rank 0."""

    nbytes: int
    checksums: list[int]


class SafetensorsWriter:
    """Writer of one data file per rank into the existing directory `path`, and of `checkpoint.json` on rank 0.

    Args:
        rank: this rank; its file is `rank_<rank>.safetensors`.
        held: the tensors that this rank holds.
        ranks: for each rank, the boxes (rectangular parts of tensors) that it holds, and a flag for each box that is 1
            if the rank writes the box (`write_assignment.assign_writers`). Rank 0 needs the items of all ranks, another
            rank only its own.
        plain: plain data shared by all ranks, as `windlass.checkpoint.plain_data` encodes it.
        rank_plain: plain data of each rank.

    Attributes:
        file: the data file of this rank.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        held: Mapping[str, HeldTensor],
        ranks: Mapping[int, tuple[HeldTensorInfos, bytes]],
        plain: Any,
        rank_plain: Iterable[Any],
    ) -> None:
        self.path, self._ranks = path, ranks
        self._plain = {} if plain is None else plain
        self._rank_plain = tuple(rank_plain)
        self._boxes = boxes_to_write(*ranks[rank])
        pieces = {(name, piece.offsets): piece for name, holding in held.items() for piece in holding.boxes}
        items = []
        for name, of, box in self._boxes:
            piece = pieces[name, box[0]]
            entry = TensorEntry(held[name].dtype, box[1])
            items.append(RankFileItem(entry_name(name, of.shape, box), entry, piece.get, piece.storage))
        self._observer: Callable[[str, tuple[int, ...], int, torch.Tensor], object] | None = None
        self._places = {entry_name(name, of.shape, box): (name, of.shape, box[0]) for name, of, box in self._boxes}
        self.file = RankFile(path / _file_name(rank), items, self._on_tensor_written)

    def observe(self, callback: Callable[[str, tuple[int, ...], int, torch.Tensor], object]) -> None:
        """Call `callback` for each box (rectangular part of a tensor) as it is written.

        The arguments are the tensor's name and shape, the flat position of the box's first element in the tensor, and
        the box's elements `[n]`. A box that is not a flat range is passed as several ranges.
        """
        self._observer = callback

    def _on_tensor_written(self, name: str, tensor: torch.Tensor) -> None:
        if self._observer is None:
            return
        of, shape, offsets = self._places[name]
        if not tensor.numel():
            self._observer(of, shape, 0, tensor.reshape(-1))
        for start, flat in flat_ranges_of_box(shape, offsets, tensor):
            self._observer(of, shape, start, flat)

    def add_plain(self, key: str, value: Any) -> None:
        """Add a JSON value to the plain data of the index, for values known only after the files are written."""
        self._plain[key] = value

    def write(self) -> WrittenFile:
        """Write this rank's file. May be called in any thread; not collective."""
        sums = self.file.write()
        size = self.file.path.stat().st_size if self._boxes else 0
        return WrittenFile(size, [sums[entry_name(name, of.shape, box)] for name, of, box in self._boxes])

    def write_index(self, files: Sequence[WrittenFile]) -> None:
        """Write the index durably, which completes the checkpoint in the directory. Called on the first rank only.

        Args:
            files: results of `write` on each rank.
        """
        found: dict[str, tuple[HeldTensorInfo, list[ChunkRecord]]] = {}
        for described, _ in self._ranks.values():
            for name, held in described.items():
                found.setdefault(name, (held, []))
        for rank, one in enumerate(files):
            for (name, held, box), crc in zip(boxes_to_write(*self._ranks[rank]), one.checksums, strict=True):
                chunk = ChunkRecord(
                    offsets=box[0],
                    sizes=box[1],
                    file=_file_name(rank),
                    entry=entry_name(name, held.shape, box),
                    crc32=crc,
                )
                found[name][1].append(chunk)
        index = CheckpointIndex(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            world_size=len(self._rank_plain),
            files={_file_name(rank): one.nbytes for rank, one in enumerate(files) if one.checksums},
            tensors={
                name: TensorRecord(shape=held.shape, dtype=held.dtype_code, chunks=tuple(chunks))
                for name, (held, chunks) in found.items()
            },
            plain=self._plain,
            ranks=self._rank_plain,
        )
        path, text = self.path / INDEX_FILE, encode_index(index)
        with disk_errors(path, len(text)), open_new(path, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


class SafetensorsReader(StorageReader):
    """Reader of the checkpoint directory `path`. It reads only requested chunks, each once, and checks their crc32."""

    def __init__(self, path: str | os.PathLike[str], index: CheckpointIndex | None = None):
        self.path = Path(path)
        self._index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path, self._index = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _tensor_metadata(record) for name, record in self._load_index().tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        known = {
            (name, chunk.offsets): (chunk, dtype_from_code(record.dtype))
            for name, record in self._load_index().tensors.items()
            for chunk in record.chunks
        }
        with ChunkReader(OpenFileCache(self.path)) as sources:
            sources.fill([_wanted(item, planner, *known[_stored_box(item)]) for item in plan.items])
        return _completed_future(None)

    def _load_index(self) -> CheckpointIndex:
        if self._index is None:
            self._index = read_index(self.path)
        return self._index

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / INDEX_FILE).is_file()


def _completed_future(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _stored_box(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    """Return the tensor name and the offsets in the tensor of the stored chunk that an item reads."""
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _wanted(item: ReadItem, planner: LoadPlanner, chunk: ChunkRecord, dtype: torch.dtype) -> Wanted:
    """Convert a read item of torch's planner to a `Wanted` range of a stored chunk."""
    into, done = partial(planner.resolve_tensor, item), partial(planner.commit_tensor, item)
    return Wanted(chunk, dtype, tuple(item.storage_offsets), tuple(item.lengths), into, None, done)


def _tensor_metadata(record: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_from_code(record.dtype)),
        torch.Size(record.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in record.chunks],
    )
