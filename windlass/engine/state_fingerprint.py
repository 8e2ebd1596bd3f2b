"""The fingerprint of an engine: a short hash of its parameters and optimizer states, equal wherever they rest.

What is hashed is what a checkpoint holds ([Note: fingerprint]): parameters by name, their masters where they are
trained, and every optimizer state by parameter and key; of a state in 8 bits the values that its codes mean. Buffers
are left out, since ranks may differ in them. Of replicas each holder hashes a share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, LazyFlatTensor, LazyStorage
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.fragment_boxes import flat_ranges_of_box, place_range
from windlass.checkpoint.tensor_hash import TensorHash, fingerprint_digest
from windlass.engine.optimizer_state_saving import decode_codes, flat_state, is_coded, state_kind
from windlass.engine.parameter_fragments import ChunkSaveStorage, parameter_fragments
from windlass.engine.rank_state_checkpoint import rank_state_shards
from windlass.parallel.placement import Placement
from windlass.zero.core.unit import Unit
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk
from windlass.zero.update.update_protocol import Update

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel

StorageOf = Callable[[UpdateChunk], LazyStorage]


@dataclass(frozen=True)
class Fingerprint:
    """16 hexadecimal digits each of the parameters and of the optimizer states."""

    parameters: str
    states: str

    def __str__(self) -> str:
        return f"{self.parameters}-{self.states}"


def compute_fingerprint(
    model: ShardedModel,
    units: Iterable[Unit] | None = None,
    error_prefix: str = "there is no fingerprint",
    excluded: Collection[str] = (),
) -> Fingerprint:
    """Take the fingerprint of `model`, or of some of its units and all its optimizer states. Collective.

    Memory: what rests on disk comes one chunk at a time; 512 KiB besides.

    Args:
        failed: begins the error where something can't be read.
        without: names of parameters of trained units that do not count.

    Raises:
        CheckpointError: something has no hash, on some rank; on all ranks.
        StorageError: something can't be read, on some rank; on all ranks.
        UpdateError: the update under way failed on some rank.
    """
    model.finish_update()
    model.recapture_parameters()
    drawers: dict[int, LazyStorage] = {}

    def drawer_of(chunk: UpdateChunk) -> LazyStorage:
        return drawers.setdefault(id(chunk), ChunkSaveStorage(model.masters, chunk))

    def work() -> tuple[int, int]:
        found = _HashPair(TensorHash(), TensorHash())
        of = model.units if units is None else units
        for drawer, together in _group_by_storage(_hashed_shards(model, of, drawer_of, found, excluded)):
            with drawer.open() if drawer is not None else nullcontext():
                for part in together:
                    part.add_to_hash()
        return found.parameters.value(), found.states.value()

    try:
        sums = CheckpointRanks.of_group(model.mesh.world.process_group).run_on_all("taking the fingerprint", work)
    except CheckpointError:  # on all ranks
        model.disk_health.check(f"{error_prefix}, masters and optimizer states could not be read")
        raise
    return Fingerprint(fingerprint_digest(one for one, _ in sums), fingerprint_digest(other for _, other in sums))


class StreamedFingerprint:
    """The fingerprint of a save that does not block, taken by its thread of what it writes: `Later` of a save. To take
    it before would be to read everything, which is what such a save puts off.

    Of states in 8 bits it has none: codes mean nothing without their scales, which lie elsewhere.
    """

    key = "fingerprint"

    def __init__(self, model: ShardedModel, units: Iterable[Unit], excluded: Collection[str]) -> None:
        self._hashes = _HashPair(TensorHash(), TensorHash())
        of = _hashed_shards(model, units, lambda chunk: ChunkSaveStorage(model.masters, chunk), self._hashes, excluded)
        self._hash_of = {part.shard.name: part.target_hash for part in of}  # what is plain is hashed on the way
        formats = model.update.formats().values() if model.update is not None else ()
        self._has_coded_states = any(kept.is_quantized for one in formats for kept in one.values())

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> None:
        """Elements of a tensor that this rank writes, and no other."""
        into = self._hash_of.get(name)
        if into is not None and not (self._has_coded_states and into is self._hashes.states):
            into.add(name, shape, start, flat)

    def local_part(self) -> tuple[int, int]:
        """Of parameters and of states."""
        return self._hashes.parameters.value(), self._hashes.states.value()

    def combine(self, sums: list[tuple[int, int]]) -> dict[str, str | None]:
        """As an index has it."""
        states = None if self._has_coded_states else fingerprint_digest(other for _, other in sums)
        return {"parameters": fingerprint_digest(one for one, _ in sums), "states": states}


@dataclass(frozen=True)
class _HashPair:
    parameters: TensorHash
    states: TensorHash


@dataclass(frozen=True)
class _HashedShard:
    """A shard, the hash that it goes into, and which of how many equal shares of it this rank hashes."""

    shard: FlatShard
    target_hash: TensorHash
    replica: int
    replica_count: int

    def add_to_hash(self) -> None:
        shard = self.shard
        first, values = 0, shard.values()
        if self.replica_count > 1:
            first, last = (shard.numel * (self.replica + more) // self.replica_count for more in (0, 1))
            values = values[first:last]
        hash_range(self.target_hash, shard.name, shard.placement, shard.start + first, values)


def _hashed_shards(
    model: ShardedModel, units: Iterable[Unit], storage_of: StorageOf, hashes: _HashPair, excluded: Collection[str]
) -> Iterator[_HashedShard]:
    for unit in units:
        if not unit.is_primary_replica:
            continue
        everywhere, replicas = unit.dp_group.mesh.data, unit.dp_group.mesh.replicate
        cut = model.policy.state if model.masters.chunks_of(unit) else unit.reshards
        holders = replicas if cut else everywhere
        for shard in parameter_fragments(model, [unit], storage_of, write_back=False, excluded=excluded):
            yield _HashedShard(shard, hashes.parameters, holders.index, holders.size)
        if everywhere.index == 0:  # a tensor without elements counts too
            for name, placement in zip(unit.names, unit.placements, strict=True):
                if name not in excluded and placement.is_first_shard:
                    hashes.parameters.add_plain(f"param/{name}", list(placement.global_shape))
    if model.update is not None:
        yield from _hashed_states(model.update, storage_of, hashes.states, is_sharded=model.policy.state)
        for shard in rank_state_shards(model):  # every rank has a row of its own
            yield _HashedShard(shard, hashes.states, 0, 1)


def _hashed_states(
    update: Update, storage_of: StorageOf, target_hash: TensorHash, *, is_sharded: bool
) -> Iterator[_HashedShard]:
    formats = update.formats()
    for tenancy in update.state_entries():
        unit, placement = tenancy.chunk.unit, tenancy.chunk.unit.placements[tenancy.index]
        if not unit.is_primary_replica:
            continue
        holders = unit.dp_group.mesh.replicate if is_sharded else unit.dp_group.mesh.data
        drawer = storage_of(tenancy.chunk)
        state = update.state_offload.describe_state(tenancy.chunk, tenancy.state_key)
        kept = formats.get(id(tenancy.parameter), {})
        codes = {key: one.is_signed for key, one in kept.items() if is_coded(state, key, one)}
        once = (
            tenancy.start == 0 and holders.index == 0 and placement.is_first_shard
        )  # of the pieces of a parameter, the first tells its counts
        scales = {f"{name}_scale" for name in codes}
        for key, value in state.items():
            if key in scales:
                continue
            where = f"state/{tenancy.name}/{key}"
            kind = "pieces float32" if key in codes else state_kind(update, tenancy, key, value)
            if kind == "value" or value.dim() == 0:
                if once:
                    target_hash.add_plain(where, _plain_value(value))
                continue
            get = partial(flat_state, update.state_offload, tenancy, key)
            resting = LazyFlatTensor(value.numel(), value.dtype, drawer, get)
            if key in codes:
                get = partial(_decode_state, update, tenancy, key, codes[key])
                resting = LazyFlatTensor(value.numel(), torch.float32, drawer, get)
            whole = kind.startswith("whole")
            if whole and not placement.is_first_shard:  # the ranks of other parts have the same
                continue
            shape = tuple(value.shape if whole else unit.shapes[tenancy.index])
            shard = FlatShard(where, shape, 0 if whole else tenancy.start, resting, None if whole else placement)
            yield _HashedShard(shard, target_hash, holders.index, holders.size)


def hash_range(target_hash: TensorHash, name: str, placement: Placement, start: int, flat: torch.Tensor) -> None:
    """Add elements `[start, start + n)` of the part of a tensor that lies here, `flat` `[n]`."""
    if placement.is_full:
        target_hash.add(name, placement.global_shape, start, flat)
        return
    for part in place_range(placement, start, start + flat.numel()):
        for first, values in flat_ranges_of_box(placement.global_shape, part.offsets, part.view_of(flat)):
            target_hash.add(name, placement.global_shape, first, values)


def _plain_value(value: Any) -> Any:
    """A count as what it counts: rules keep it as a tensor or as a number, of this dtype or that."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else [list(value.shape), str(value.dtype)]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)


def _decode_state(update: Update, entry: StateEntry, key: str, signed: bool) -> torch.Tensor:
    codes, scales = (flat_state(update.state_offload, entry, name) for name in (key, f"{key}_scale"))
    return decode_codes(codes, scales, signed)


def _group_by_storage(shards: Iterable[_HashedShard]) -> Iterator[tuple[LazyStorage | None, list[_HashedShard]]]:
    """Parts by what must be open for them."""
    found: dict[int, tuple[LazyStorage | None, list[_HashedShard]]] = {}
    for part in shards:
        found.setdefault(id(part.shard.storage), (part.shard.storage, []))[1].append(part)
    return iter(found.values())
