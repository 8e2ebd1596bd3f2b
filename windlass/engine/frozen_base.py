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
    return 0 < trained <= _FEW * total


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
    ranks = Ranks.of(model.mesh.data.process_group)
    parts = ranks.each("taking the hash of what is frozen", lambda: _sums(model, frozen))
    model.health.check("frozen parameters could not be read")
    return {n: digest(part[n] for part in parts) for unit in frozen for n in unit.names if n in base}


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
    known = {name for unit in model.units for name in unit.names}
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


def _sums(model: ShardedModel, units: Iterable[Unit]) -> dict[str, int]:
    """This rank's part of each hash."""
    found: dict[str, int] = {}
    for unit in units:
        now = _state_of(unit)
        before = _taken.get(unit)
        if before is None or before[0] != now:
            before = _taken[unit] = now, _sums_of(model, unit)
        found.update(before[1])
    return found


def _state_of(unit: Unit) -> Hashable:
    """Another one after every change of a unit's values that can be known."""
    return unit.renewed if unit.released else tuple((p._version, p.data_ptr()) for p in unit.parameters)


def _sums_of(model: ShardedModel, unit: Unit) -> dict[str, int]:
    """Of what several ranks hold alike, each adds a share."""
    holders = model.mesh.replicate if unit.released else model.mesh.data
    hashes = {index: Hash() for index in range(len(unit.names))}
    cut = UnitCut(model, unit, keep=False)
    with cut.open():
        for piece in cut.pieces():
            first, last = (piece.numel * (holders.index + more) // holders.size for more in (0, 1))
            where = "param", tuple(unit.shapes[piece.index]), piece.start + first
            hashes[piece.index].add(*where, cut.get(piece)[first:last])
    if model.mesh.data.index == 0:  # a parameter without elements has a shape and a dtype too
        for index, one in hashes.items():
            one.add_plain("param", [list(unit.shapes[index]), str(unit.dtype)])
    return {unit.names[index]: one.value() for index, one in hashes.items()}
