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
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.tensor_hash import TensorHash, fingerprint_digest
from windlass.engine.parameter_fragments import UnitShardStorage
from windlass.engine.state_fingerprint import hash_range
from windlass.zero.core.unit import Unit
from windlass.zero.sharded_model import ShardedModel

_ADAPTER_FRACTION = 0.1  # of all elements
_hash_cache: WeakKeyDictionary[Unit, tuple[Hashable, dict[str, int]]] = (
    WeakKeyDictionary()
)  # this rank's part, and of what


def trains_adapters(model: ShardedModel) -> bool:
    """Whether so few parameters are trained that checkpoints leave out the others by default."""
    base, total, trained = frozen_parameter_names(model), 0, 0
    for unit in model.units:
        total += sum(unit.layout.numels)
        named = zip(unit.names, unit.layout.numels, strict=True)
        trained += sum(numel for name, numel in named if unit.trainable and name not in base)
    everywhere: list[tuple[int, int]] = model.mesh.gather_from_world((trained, total))
    return 0 < sum(one for one, _ in everywhere) <= _ADAPTER_FRACTION * sum(all_ for _, all_ in everywhere)


def frozen_parameter_names(model: ShardedModel) -> frozenset[str]:
    """Parameters that were never trained here, by name; some may share a unit with what was unfrozen."""
    return frozenset(name for name, _ in model.unhooked_parameters())


def frozen_parameter_hashes(model: ShardedModel) -> dict[str, str]:
    """A hash of each frozen parameter, by name: 16 hexadecimal digits, the same at any stage, on any number of ranks.
    Collective. Memory: what this rank keeps of one unit, where that rests on disk.

    Raises:
        CheckpointError: a parameter could not be read; on all ranks.
    """
    base = frozen_parameter_names(model)
    frozen = [unit for unit in model.units if not base.isdisjoint(unit.names)]
    model.recapture_parameters()
    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    parts = ranks.run_on_all("taking the hash of what is frozen", lambda: _local_hashes(model, frozen, base))
    model.disk_health.check("frozen parameters could not be read")
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: fingerprint_digest(part[name] for part in parts if name in part) for name in names}


def check_frozen_parameters(
    model: ShardedModel, saved_hashes: dict[str, str], saved_names: Container[str], path: str
) -> None:
    """See that what is frozen here is what was frozen when a checkpoint of the others was saved. Collective.

    Args:
        saved: the hashes; none where the checkpoint does not say.
        held: names of the tensors in the checkpoint.

    Raises:
        CheckpointError: it is not; names what differs.
    """
    if not saved_hashes:
        return
    here = frozen_parameter_hashes(model)
    known = {
        name for names in model.mesh.gather_from_world([n for u in model.units for n in u.names]) for name in names
    }
    differs = {
        "are not what they were": [
            name for name, taken in here.items() if name in saved_hashes and saved_hashes[name] != taken
        ],
        "were not there": [name for name in here if name not in saved_hashes and f"param/{name}" not in saved_names],
        "are not there any more": [name for name in saved_hashes if name not in known],
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


def _local_hashes(model: ShardedModel, units: Iterable[Unit], names: Container[str]) -> dict[str, int]:
    """This rank's part of each hash, of the parameters in `names`."""
    found: dict[str, int] = {}
    for unit in units:
        now = _unit_version(unit)
        before = _hash_cache.get(unit)
        if before is None or before[0] != now:
            before = _hash_cache[unit] = now, _hash_unit(model, unit)
        found.update({name: value for name, value in before[1].items() if name in names})
    return found


def _unit_version(unit: Unit) -> Hashable:
    """Another one after every change of a unit's values that can be known."""
    return unit.update_count if unit.reshards else tuple((p._version, p.data_ptr()) for p in unit.parameters)


def _hash_unit(model: ShardedModel, unit: Unit) -> dict[str, int]:
    """Of what several ranks hold alike, each adds a share."""
    if not unit.is_primary_replica:
        return {}
    data = unit.dp_group.mesh.data
    holders = unit.dp_group.mesh.replicate if unit.reshards else data
    hashes = {index: TensorHash() for index in range(len(unit.names))}
    cut = UnitShardStorage(model, unit, write_back=False)
    with cut.open():
        for piece in cut.fragments():
            first, last = (piece.numel * (holders.index + more) // holders.size for more in (0, 1))
            placement, start = unit.placements[piece.index], piece.start + first
            hash_range(hashes[piece.index], "param", placement, start, cut.get(piece)[first:last])
    if data.index == 0:  # a parameter without elements has a shape and a dtype too
        for index, one in hashes.items():
            if unit.placements[index].is_first_shard:
                one.add_plain("param", [list(unit.placements[index].global_shape), str(unit.dtype)])
    return {unit.names[index]: one.value() for index, one in hashes.items()}
