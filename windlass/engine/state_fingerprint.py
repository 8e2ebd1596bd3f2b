"""Fingerprint of an engine: a short hash of its parameters and optimizer states, independent of tiers and sharding.

The hashed values are those in a checkpoint ([Note: fingerprint]): parameters by name, from master weights where they
are trained, and every optimizer state by parameter and key. States in 8 bits are dequantized first. Buffers are left
out, since ranks may differ in them. If several ranks hold a replica, each hashes an equal share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, LazyFlatTensor, LazyStorage, plain_data
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
    """Hashes of the parameters and of the optimizer states, 16 hexadecimal digits each."""

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
    """Compute the fingerprint of `model`, or of some of its units and all its optimizer states. Collective.

    Memory: one chunk of the offloaded states at a time, and 512 KiB.

    Args:
        error_prefix: start of the error message if a value cannot be read.
        excluded: names of parameters of trained units that are left out.

    Raises:
        CheckpointError: a value on some rank cannot be hashed. Raised on all ranks.
        StorageError: a value on some rank cannot be read. Raised on all ranks.
        UpdateError: the delayed update in flight failed on some rank.
    """
    model.finish_update()
    model.recapture_parameters()
    handles: dict[int, LazyStorage] = {}

    def handle_of(chunk: UpdateChunk) -> LazyStorage:
        return handles.setdefault(id(chunk), ChunkSaveStorage(model.masters, chunk))

    def work() -> tuple[int, int]:
        hashes = _HashPair(TensorHash(), TensorHash())
        of = model.units if units is None else units
        shards = _hashed_shards(model, of, handle_of, hashes, excluded)
        for handle, together in _group_by_storage(part for part in shards if part.is_counted):
            with handle.open() if handle is not None else nullcontext():
                for part in together:
                    part.add_to_hash()
        return hashes.parameters.value(), hashes.states.value()

    try:
        sums = CheckpointRanks.of_group(model.mesh.world.process_group).run_on_all("taking the fingerprint", work)
    except CheckpointError:  # raised on all ranks, so all reach the collective check
        model.disk_health.check(f"{error_prefix}, master weights and optimizer states could not be read")
        raise
    return Fingerprint(fingerprint_digest(one for one, _ in sums), fingerprint_digest(other for _, other in sums))


def has_coded_states(model: ShardedModel) -> bool:
    """Return True if some optimizer states are codes of 8 bits."""
    formats = model.update.formats().values() if model.update is not None else ()
    return any(kept.is_quantized for one in formats for kept in one.values())


class StreamedFingerprint:
    """Fingerprint of a save, computed from the bytes that it writes (a `DerivedMetadata`).

    Computing it before the save would read all values once more, and offloaded ones from their tier. States in 8 bits
    get no fingerprint: they must be dequantized for it, and their scales are stored elsewhere.
    """

    key = "fingerprint"

    def __init__(self, model: ShardedModel, units: Iterable[Unit], excluded: Collection[str]) -> None:
        self._hashes = _HashPair(TensorHash(), TensorHash())
        of = _hashed_shards(model, units, lambda chunk: ChunkSaveStorage(model.masters, chunk), self._hashes, excluded)
        # Iterating over `_hashed_shards` also adds plain values to the hashes. Tensors are added in `add`, on the rank
        # that writes them. So `is_counted` is ignored: that rank may hold a replica that is not counted.
        self._hash_of = {part.shard.name: part.target_hash for part in of}
        self._has_coded_states = has_coded_states(model)

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> None:
        """Hash elements of a tensor that only this rank writes."""
        into = self._hash_of.get(name)
        if into is not None and not (self._has_coded_states and into is self._hashes.states):
            into.add(name, shape, start, flat)

    def local_part(self) -> tuple[int, int]:
        """Return this rank's hashes of parameters and of states."""
        return self._hashes.parameters.value(), self._hashes.states.value()

    def combine(self, sums: list[tuple[int, int]]) -> dict[str, str | None]:
        """Combine the hashes of all ranks into an entry of the checkpoint's index: digests of parameters and of states.

        The digest of states is None if some states have 8 bits.
        """
        states = None if self._has_coded_states else fingerprint_digest(other for _, other in sums)
        return {"parameters": fingerprint_digest(one for one, _ in sums), "states": states}


@dataclass(frozen=True)
class _HashPair:
    parameters: TensorHash
    states: TensorHash


@dataclass(frozen=True)
class _HashedShard:
    """Shard, and the hash that it is added to. This rank hashes one of `replica_count` equal parts of the shard.

    Attributes:
        is_counted: False for a shard that is hashed on other ranks, which hold a replica of it.
    """

    shard: FlatShard
    target_hash: TensorHash
    replica: int
    replica_count: int
    is_counted: bool = True

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
        data_group, replicas = unit.dp_group.mesh.data, unit.dp_group.mesh.replicate
        sharded = model.policy.state if model.masters.chunks_of(unit) else unit.reshards
        holders = replicas if sharded else data_group
        for shard in parameter_fragments(model, [unit], storage_of, write_back=False, excluded=excluded):
            yield _HashedShard(shard, hashes.parameters, holders.index, holders.size, unit.is_primary_replica)
        if data_group.index == 0 and unit.is_primary_replica:  # include tensors without elements
            for name, placement in zip(unit.names, unit.placements, strict=True):
                if name not in excluded and placement.is_first_shard:
                    hashes.parameters.add_plain(f"param/{name}", list(placement.global_shape))
    if model.update is not None:
        yield from _hashed_states(model.update, storage_of, hashes.states, is_sharded=model.policy.state)
        for shard in rank_state_shards(model):  # each rank hashes its own per-rank states; there are no replicas
            yield _HashedShard(shard, hashes.states, 0, 1)


def _hashed_states(
    update: Update, storage_of: StorageOf, target_hash: TensorHash, *, is_sharded: bool
) -> Iterator[_HashedShard]:
    formats = update.formats()
    for entry in update.state_entries():
        unit, placement = entry.chunk.unit, entry.chunk.unit.placements[entry.index]
        holders = unit.dp_group.mesh.replicate if is_sharded else unit.dp_group.mesh.data
        handle = storage_of(entry.chunk)
        state = update.state_offload.describe_state(entry.chunk, entry.state_key)
        kept = formats.get(id(entry.parameter), {})
        codes = {key: one.is_signed for key, one in kept.items() if is_coded(state, key, one)}
        once = (
            unit.is_primary_replica and entry.start == 0 and holders.index == 0 and placement.is_first_shard
        )  # one rank hashes the scalar states of a parameter: the holder of its first element
        scales = {f"{name}_scale" for name in codes}
        for key, value in state.items():
            if key in scales:
                continue
            where = f"state/{entry.name}/{key}"
            kind = "pieces float32" if key in codes else state_kind(update, entry, key, value)
            if kind == "value" or value.dim() == 0:
                if once:
                    target_hash.add_plain(where, _plain_value(value))
                continue
            get = partial(flat_state, update.state_offload, entry, key)
            resting = LazyFlatTensor(value.numel(), value.dtype, handle, get)
            if key in codes:
                get = partial(_decode_state, update, entry, key, codes[key])
                resting = LazyFlatTensor(value.numel(), torch.float32, handle, get)
            full = kind.startswith("whole")
            # the ranks with other shards of the parameter hold the same state
            is_counted = unit.is_primary_replica and (placement.is_first_shard or not full)
            shape = tuple(value.shape if full else unit.shapes[entry.index])
            shard = FlatShard(where, shape, 0 if full else entry.start, resting, None if full else placement)
            yield _HashedShard(shard, target_hash, holders.index, holders.size, is_counted)


def hash_range(target_hash: TensorHash, name: str, placement: Placement, start: int, flat: torch.Tensor) -> None:
    """Hash elements `[start, start + n)` of this rank's part of a tensor, given as `flat` of shape `[n]`."""
    if placement.is_full:
        target_hash.add(name, placement.global_shape, start, flat)
        return
    for part in place_range(placement, start, start + flat.numel()):
        for first, values in flat_ranges_of_box(placement.global_shape, part.offsets, part.view_of(flat)):
            target_hash.add(name, placement.global_shape, first, values)


def _plain_value(value: Any) -> Any:
    """Return a scalar state in a canonical form, since optimizers keep counts as tensors or numbers of any dtype.

    Other values are hashed as a load returns them: a checkpoint holds a `torch.Size` as a tuple, for example.
    """
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else [list(value.shape), str(value.dtype)]
    try:
        encoded, tensors = plain_data.encode(value, "")
    except CheckpointError:  # a save refuses this value, with the name of the state
        return repr(value)
    on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    loaded, again = plain_data.decode(encoded, on_host), plain_data.decode(encoded, on_host)
    if isinstance(loaded, int | float) and not isinstance(loaded, bool):
        return float(loaded)
    # the text of an object may contain its address
    return repr(loaded) if repr(loaded) == repr(again) else repr((encoded, on_host))


def _decode_state(update: Update, entry: StateEntry, key: str, signed: bool) -> torch.Tensor:
    codes, scales = (flat_state(update.state_offload, entry, name) for name in (key, f"{key}_scale"))
    return decode_codes(codes, scales, signed)


def _group_by_storage(shards: Iterable[_HashedShard]) -> Iterator[tuple[LazyStorage | None, list[_HashedShard]]]:
    """Group the shards by the lazy storage handle that must be open to read them."""
    by_storage: dict[int, tuple[LazyStorage | None, list[_HashedShard]]] = {}
    for part in shards:
        by_storage.setdefault(id(part.shard.storage), (part.shard.storage, []))[1].append(part)
    return iter(by_storage.values())
