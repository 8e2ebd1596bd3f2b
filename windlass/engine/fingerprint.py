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
from windlass.checkpoint import Drawer, FlatShard, Resting
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.fingerprint import Hash, digest
from windlass.checkpoint.fragment import parts, runs
from windlass.engine.pieces import ChunkToRead, parameters
from windlass.engine.states import Update, decoded, is_coded, kind_of, of_tenant
from windlass.parallel.placement import Placement
from windlass.zero.chunk import Chunk, Tenancy
from windlass.zero.unit import Unit

if TYPE_CHECKING:
    from windlass.zero.sharded import ShardedModel

DrawerOf = Callable[[Chunk], Drawer]


@dataclass(frozen=True)
class Fingerprint:
    """16 hexadecimal digits each of the parameters and of the optimizer states."""

    parameters: str
    states: str

    def __str__(self) -> str:
        return f"{self.parameters}-{self.states}"


def fingerprint(
    model: ShardedModel,
    units: Iterable[Unit] | None = None,
    failed: str = "there is no fingerprint",
    without: Collection[str] = (),
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
    model.take_back()
    drawers: dict[int, Drawer] = {}

    def drawer_of(chunk: Chunk) -> Drawer:
        return drawers.setdefault(id(chunk), ChunkToRead(model.masters, chunk))

    def work() -> tuple[int, int]:
        found = _Hashes(Hash(), Hash())
        of = model.units if units is None else units
        for drawer, together in _by_drawer(_parts(model, of, drawer_of, found, without)):
            with drawer.open() if drawer is not None else nullcontext():
                for part in together:
                    part.add()
        return found.parameters.value(), found.states.value()

    try:
        sums = Ranks.of(model.mesh.world.process_group).each("taking the fingerprint", work)
    except CheckpointError:  # on all ranks
        model.health.check(f"{failed}, masters and optimizer states could not be read")
        raise
    return Fingerprint(digest(one for one, _ in sums), digest(other for _, other in sums))


class Written:
    """The fingerprint of a save that does not block, taken by its thread of what it writes: `Later` of a save. To take
    it before would be to read everything, which is what such a save puts off.

    Of states in 8 bits it has none: codes mean nothing without their scales, which lie elsewhere.
    """

    key = "fingerprint"

    def __init__(self, model: ShardedModel, units: Iterable[Unit], without: Collection[str]) -> None:
        self._found = _Hashes(Hash(), Hash())
        of = _parts(model, units, lambda chunk: ChunkToRead(model.masters, chunk), self._found, without)
        self._hashed = {part.shard.name: part.into for part in of}  # what is plain is hashed on the way
        formats = model.update.formats().values() if model.update is not None else ()
        self._coded = any(kept.coded for one in formats for kept in one.values())

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> None:
        """Elements of a tensor that this rank writes, and no other."""
        into = self._hashed.get(name)
        if into is not None and not (self._coded and into is self._found.states):
            into.add(name, shape, start, flat)

    def part(self) -> tuple[int, int]:
        """Of parameters and of states."""
        return self._found.parameters.value(), self._found.states.value()

    def whole(self, sums: list[tuple[int, int]]) -> dict[str, str | None]:
        """As an index has it."""
        states = None if self._coded else digest(other for _, other in sums)
        return {"parameters": digest(one for one, _ in sums), "states": states}


@dataclass(frozen=True)
class _Hashes:
    parameters: Hash
    states: Hash


@dataclass(frozen=True)
class _Part:
    """A shard, the hash that it goes into, and which of how many equal shares of it this rank hashes."""

    shard: FlatShard
    into: Hash
    index: int
    count: int

    def add(self) -> None:
        shard = self.shard
        first, values = 0, shard.values()
        if self.count > 1:
            first, last = (shard.numel * (self.index + more) // self.count for more in (0, 1))
            values = values[first:last]
        add_range(self.into, shard.name, shard.placement, shard.start + first, values)


def _parts(
    model: ShardedModel, units: Iterable[Unit], drawer_of: DrawerOf, found: _Hashes, without: Collection[str]
) -> Iterator[_Part]:
    for unit in units:
        if not unit.speaks:
            continue
        everywhere, replicas = unit.family.mesh.data, unit.family.mesh.replicate
        cut = model.policy.state if model.masters.of(unit) else unit.released
        holders = replicas if cut else everywhere
        for shard in parameters(model, [unit], drawer_of, keep=False, without=without):
            yield _Part(shard, found.parameters, holders.index, holders.size)
        if everywhere.index == 0:  # a tensor without elements counts too
            for name, placement in zip(unit.names, unit.placements, strict=True):
                if name not in without and placement.begins:
                    found.parameters.add_plain(f"param/{name}", list(placement.shape))
    if model.update is not None:
        yield from _states(model.update, drawer_of, found.states, cut=model.policy.state)


def _states(update: Update, drawer_of: DrawerOf, into: Hash, *, cut: bool) -> Iterator[_Part]:
    formats = update.formats()
    for tenancy in update.tenancies():
        unit, placement = tenancy.chunk.unit, tenancy.chunk.unit.placements[tenancy.index]
        if not unit.speaks:
            continue
        holders = unit.family.mesh.replicate if cut else unit.family.mesh.data
        drawer = drawer_of(tenancy.chunk)
        state = update.residence.described(tenancy.chunk, tenancy.tenant)
        kept = formats.get(id(tenancy.parameter), {})
        codes = {key: one.signed for key, one in kept.items() if is_coded(state, key, one)}
        once = (
            tenancy.start == 0 and holders.index == 0 and placement.begins
        )  # of the pieces of a parameter, the first tells its counts
        scales = {f"{name}_scale" for name in codes}
        for key, value in state.items():
            if key in scales:
                continue
            where = f"state/{tenancy.name}/{key}"
            kind = "pieces float32" if key in codes else kind_of(update, tenancy, key, value)
            if kind == "value" or value.dim() == 0:
                if once:
                    into.add_plain(where, _plain(value))
                continue
            get = partial(of_tenant, update.residence, tenancy, key)
            resting = Resting(value.numel(), value.dtype, drawer, get)
            if key in codes:
                get = partial(_decoded, update, tenancy, key, codes[key])
                resting = Resting(value.numel(), torch.float32, drawer, get)
            whole = kind.startswith("whole")
            if whole and not placement.begins:  # the ranks of other parts have the same
                continue
            shape = tuple(value.shape if whole else unit.shapes[tenancy.index])
            shard = FlatShard(where, shape, 0 if whole else tenancy.start, resting, None if whole else placement)
            yield _Part(shard, into, holders.index, holders.size)


def add_range(into: Hash, name: str, placement: Placement, start: int, flat: torch.Tensor) -> None:
    """Add elements `[start, start + n)` of the part of a tensor that lies here, `flat` `[n]`."""
    if placement.whole:
        into.add(name, placement.shape, start, flat)
        return
    for part in parts(placement, start, start + flat.numel()):
        for first, values in runs(placement.shape, part.offsets, part.of(flat)):
            into.add(name, placement.shape, first, values)


def _plain(value: Any) -> Any:
    """A count as what it counts: rules keep it as a tensor or as a number, of this dtype or that."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else [list(value.shape), str(value.dtype)]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)


def _decoded(update: Update, tenancy: Tenancy, key: str, signed: bool) -> torch.Tensor:
    codes, scales = (of_tenant(update.residence, tenancy, name) for name in (key, f"{key}_scale"))
    return decoded(codes, scales, signed)


def _by_drawer(parts: Iterable[_Part]) -> Iterator[tuple[Drawer | None, list[_Part]]]:
    """Parts by what must be open for them."""
    found: dict[int, tuple[Drawer | None, list[_Part]]] = {}
    for part in parts:
        found.setdefault(id(part.shard.drawer), (part.shard.drawer, []))[1].append(part)
    return iter(found.values())
