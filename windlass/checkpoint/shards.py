"""Planners under `torch.distributed.checkpoint`: how this rank's boxes are saved, and filled from any other cut."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from windlass.base.errors import CheckpointError
from windlass.checkpoint.fragment import flat_start, is_contiguous
from windlass.checkpoint.state import Drawer, Holding, Piece

# [Note: shards through torch's planners]
# torch has a private protocol by which an object shows itself as boxes to its default planners. Planners of our own
# need no private name: `SavePlanner`, `LoadPlanner` and the resharding arithmetic (`create_read_items_for_chunk_list`)
# are public. What is written is described by torch's own metadata, so that plain `torch.distributed.checkpoint.load`
# with our storage reader fills ordinary tensors and DTensors too.

Where = tuple[str, tuple[int, ...]]


class ShardSavePlanner(SavePlanner):
    """Plans the saving of a `dict[str, Holding]`: replicas are written once, by the rank with the least to write."""

    def set_up_planner(
        self, state_dict: dict[str, Holding], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._held = state_dict
        self._pieces = {(name, piece.offsets): piece for name, held in state_dict.items() for piece in held.pieces}

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, held, piece) for name, held in self._held.items() for piece in held.pieces]
        # A name of which this rank holds nothing makes no item, so it is told apart: some rank must hold it.
        return SavePlan(items, planner_data=[name for name, held in self._held.items() if not held.pieces])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Gives each box one writer, and describes all of them.

        Raises:
            CheckpointError: ranks disagree on a tensor's shape or dtype, or their boxes leave gaps or overlap.
        """
        described = _describe(all_plans)
        for name in (name for plan in all_plans for name in plan.planner_data if name not in described):
            raise CheckpointError(f"every rank's range of {name!r} is empty; over all ranks the ranges must cover it")
        writers = _writers(all_plans)
        plans = []
        for rank, plan in enumerate(all_plans):
            items = []
            for item in plan.items:
                if writers[_where(item)] != rank:
                    continue
                chunks = described[item.index.fqn].chunks
                items.append(replace(item, index=replace(item.index, index=len(chunks))))
                chunks.append(data_of(item).chunk)
            plans.append(replace(plan, items=items))
        for name, record in described.items():
            _check_cover(name, record)
        return plans, Metadata(dict(described))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._pieces[_where(write_item)].get()

    def drawer_of(self, write_item: WriteItem) -> Drawer | None:
        """What must be open for `resolve_data`."""
        return self._pieces[_where(write_item)].drawer


class ShardLoadPlanner(LoadPlanner):
    """Plans the filling of a `dict[str, Holding]`, every name of which the checkpoint must hold, in its shape."""

    def set_up_planner(
        self, state_dict: dict[str, Holding], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._held = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, held in self._held.items() for item in self._read_items(name, held)])

    def _read_items(self, name: str, held: Holding) -> list[ReadItem]:
        record = self._metadata.state_dict_metadata[name]
        assert isinstance(record, TensorStorageMetadata)
        items = create_read_items_for_chunk_list(name, record, [_chunk(piece) for piece in held.pieces])
        # torch finds them along one dimension; drawers shall be opened in the order of the pieces
        return sorted(items, key=lambda item: item.dest_index.index or 0)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is not stored as a tensor; give a tensor only for tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of this rank's memory that the item fills: a view."""
        view = self._piece(read_item).get()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def drawer_of(self, read_item: ReadItem) -> Drawer | None:
        """What must be open for `resolve_tensor`."""
        return self._piece(read_item).drawer

    def _piece(self, read_item: ReadItem) -> Piece:
        index = read_item.dest_index
        assert index.index is not None, f"torch has not said for which piece of {index.fqn!r} an item is"
        return self._held[index.fqn].pieces[index.index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: `resolve_tensor` gave the memory itself."""


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))


def _write_item(name: str, held: Holding, piece: Piece) -> WriteItem:
    chunk = _chunk(piece)
    data = TensorWriteData(chunk, TensorProperties(dtype=held.dtype), torch.Size(held.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def data_of(item: WriteItem) -> TensorWriteData:
    """The description of the tensor that `item` writes."""
    assert item.tensor_data is not None
    return item.tensor_data


def _where(item: WriteItem) -> Where:
    return item.index.fqn, tuple(data_of(item).chunk.offsets)


def _describe(plans: list[SavePlan]) -> dict[str, TensorStorageMetadata]:
    """Each tensor's shape and dtype, without chunks yet; all ranks must agree on them."""
    described: dict[str, TensorStorageMetadata] = {}
    first: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, data_of(item)
            known = described.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
            here, there = (tuple(data.size), data.properties.dtype), (tuple(known.size), known.properties.dtype)
            if here != there:
                raise CheckpointError(
                    f"ranks disagree on {name!r}: rank {first[name]} has shape {there[0]}, {there[1]}, rank {rank} has "
                    f"shape {here[0]}, {here[1]}; one name must mean one tensor on all ranks"
                )
            first.setdefault(name, rank)
    return described


def _writers(plans: list[SavePlan]) -> dict[Where, int]:
    """Which rank writes each box: of those that hold it, the one with the fewest bytes so far."""
    holders: dict[Where, list[int]] = defaultdict(list)
    sizes: dict[Where, torch.Size] = {}
    nbytes: dict[Where, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            where, data = _where(item), data_of(item)
            if sizes.setdefault(where, data.chunk.sizes) != data.chunk.sizes:
                raise CheckpointError(
                    f"ranks {holders[where][0]} and {rank} hold ranges of {where[0]!r} that overlap but differ; "
                    "replicas must be cut alike"
                )
            holders[where].append(rank)
            nbytes[where] = data.chunk.sizes.numel() * data.properties.dtype.itemsize
    load = [0] * len(plans)
    writers: dict[Where, int] = {}
    for where, ranks in holders.items():
        writers[where] = min(ranks, key=load.__getitem__)
        load[writers[where]] += nbytes[where]
    return writers


def _check_cover(name: str, record: TensorStorageMetadata) -> None:
    """The boxes must cover the tensor, each element once."""
    shape = tuple(record.size)
    if not all(is_contiguous(shape, tuple(chunk.sizes)) for chunk in record.chunks):
        _check_tiles(name, record)
        return
    spans = sorted((flat_start(shape, tuple(chunk.offsets)), chunk.sizes.numel()) for chunk in record.chunks)
    position = 0
    for start, count in spans:
        if start < position:
            raise CheckpointError(f"element {start} of {name!r} lies in two different cuts; replicas must be cut alike")
        if start > position:
            break
        position = start + count
    if position != record.size.numel():
        raise CheckpointError(
            f"no rank holds element {position} of {name!r} (shape {shape}); over all ranks the ranges must cover it"
        )


def _check_tiles(name: str, record: TensorStorageMetadata) -> None:
    """As `_check_cover`, of boxes that are no flat ranges: no two overlap, and together they have all elements."""
    shape = tuple(record.size)
    open_: list[ChunkStorageMetadata] = []  # those that reach the rows where the next one begins
    for chunk in sorted(record.chunks, key=lambda one: tuple(one.offsets)):
        open_ = [other for other in open_ if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        for other in open_:
            if all(
                max(a, b) < min(a + n, b + m)
                for a, n, b, m in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            ):
                raise CheckpointError(
                    f"boxes of {name!r} (shape {shape}) at {tuple(other.offsets)} and {tuple(chunk.offsets)} overlap; "
                    "replicas must be cut alike"
                )
        open_.append(chunk)
    held = sum(chunk.sizes.numel() for chunk in record.chunks)
    if held != record.size.numel():
        raise CheckpointError(
            f"ranks hold {held} of the {record.size.numel()} elements of {name!r} (shape {shape}); over all ranks the "
            "boxes must cover it"
        )


def nbytes_of(plans: list[SavePlan]) -> int:
    """The bytes of tensor data that all `plans` together write."""
    items = [data_of(item) for plan in plans for item in plan.items]
    return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in items)
