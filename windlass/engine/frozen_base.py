"""What a checkpoint of trained parameters alone says of the others: a hash of each, by which a changed base is known.

[Note: adapters] Where few parameters are trained, what is trained is the run's, and the rest came from somewhere and
can be had again. So by default a checkpoint leaves frozen parameters out if those that are trained are at most a tenth
of all; it holds their hashes, and a model whose frozen parameters have others refuses to load it. Above a tenth they
are saved: there leaving them out would save little, and may lose what exists nowhere else (layers that were frozen in
the middle of a run, or that were never trained at all).

To take the hashes is to read all of the base, so a unit is read again only where it may have changed: the cut of a
released one was given new values, or a parameter that stays was changed in place or given other memory.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from weakref import WeakKeyDictionary

from windlass.base.errors import CheckpointError
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.fingerprint import Hash, digest
from windlass.engine.fingerprint import add_range
from windlass.engine.pieces import UnitCut
from windlass.zero.sharded import ShardedModel
from windlass.zero.unit import Unit

_FEW = 0.1  # of all elements
_taken: WeakKeyDictionary[Unit, tuple[Hashable, dict[str, int]]] = WeakKeyDictionary()  # this rank's part, and of what


def trains_adapters(model: ShardedModel) -> bool:
    """Whether so few parameters are trained that checkpoints leave out the others by default."""
    base, total, trained = base_of(model), 0, 0
    for unit in model.units:
        total += sum(unit.layout.numels)
        named = zip(unit.names, unit.layout.numels, strict=True)
        trained += sum(numel for name, numel in named if unit.trainable and name not in base)
    everywhere: list[tuple[int, int]] = model.mesh.world_of((trained, total))
    return 0 < sum(one for one, _ in everywhere) <= _FEW * sum(all_ for _, all_ in everywhere)


def base_of(model: ShardedModel) -> frozenset[str]:
    """Parameters that were never trained here, by name; some may share a unit with what was unfrozen."""
    return frozenset(name for name, _ in model.unwatched())


def base_hashes(model: ShardedModel) -> dict[str, str]:
    """A hash of each frozen parameter, by name: 16 hexadecimal digits, the same at any stage, on any number of ranks.
    Collective. Memory: what this rank keeps of one unit, where that rests on disk.

    Raises:
        CheckpointError: a parameter could not be read; on all ranks.
    """
    base = base_of(model)
    frozen = [unit for unit in model.units if not base.isdisjoint(unit.names)]
    model.take_back()
    ranks = Ranks.of(model.mesh.world.process_group)
    parts = ranks.each("taking the hash of what is frozen", lambda: _sums(model, frozen, base))
    model.health.check("frozen parameters could not be read")
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: digest(part[name] for part in parts if name in part) for name in names}


def check_base(model: ShardedModel, saved: dict[str, str], held: Container[str], path: str) -> None:
    """See that what is frozen here is what was frozen when a checkpoint of the others was saved. Collective.

    Args:
        saved: the hashes; none where the checkpoint does not say.
        held: names of the tensors in the checkpoint.

    Raises:
        CheckpointError: it is not; names what differs.
    """
    if not saved:
        return
    here = base_hashes(model)
    known = {name for names in model.mesh.world_of([n for u in model.units for n in u.names]) for name in names}
    differs = {
        "are not what they were": [name for name, taken in here.items() if name in saved and saved[name] != taken],
        "were not there": [name for name in here if name not in saved and f"param/{name}" not in held],
        "are not there any more": [name for name in saved if name not in known],
    }
    told = [
        f"{len(names)} of {len(here)} frozen parameters {what}: {', '.join(names[:8])}" + ", ..." * (len(names) > 8)
        for what, names in differs.items()
        if names
    ]
    if told:
        raise CheckpointError(
            f"{path} was saved over another base: {'; '.join(told)}. Load the base that was trained over (in the same "
            "dtype), or pass load_module_strict=False to load over this one"
        )


def _sums(model: ShardedModel, units: Iterable[Unit], names: Container[str]) -> dict[str, int]:
    """This rank's part of each hash, of the parameters in `names`."""
    found: dict[str, int] = {}
    for unit in units:
        now = _state_of(unit)
        before = _taken.get(unit)
        if before is None or before[0] != now:
            before = _taken[unit] = now, _sums_of(model, unit)
        found.update({name: value for name, value in before[1].items() if name in names})
    return found


def _state_of(unit: Unit) -> Hashable:
    """Another one after every change of a unit's values that can be known."""
    return unit.renewed if unit.released else tuple((p._version, p.data_ptr()) for p in unit.parameters)


def _sums_of(model: ShardedModel, unit: Unit) -> dict[str, int]:
    """Of what several ranks hold alike, each adds a share."""
    if not unit.speaks:
        return {}
    data = unit.family.mesh.data
    holders = unit.family.mesh.replicate if unit.released else data
    hashes = {index: Hash() for index in range(len(unit.names))}
    cut = UnitCut(model, unit, keep=False)
    with cut.open():
        for piece in cut.pieces():
            first, last = (piece.numel * (holders.index + more) // holders.size for more in (0, 1))
            placement, start = unit.placements[piece.index], piece.start + first
            add_range(hashes[piece.index], "param", placement, start, cut.get(piece)[first:last])
    if data.index == 0:  # a parameter without elements has a shape and a dtype too
        for index, one in hashes.items():
            if unit.placements[index].begins:
                one.add_plain("param", [list(unit.placements[index].shape), str(unit.dtype)])
    return {unit.names[index]: one.value() for index, one in hashes.items()}
