"""Hashes of frozen parameters, stored in a checkpoint that leaves these parameters out, to detect a changed base model.

[Note: adapters] If few parameters are trained, the frozen ones usually come from a pretrained model that can be loaded
again. So by default a checkpoint leaves frozen parameters out if the trained ones are at most a tenth of all elements.
Such a checkpoint holds hashes of the frozen parameters, and a load raises if the model's frozen parameters have other
hashes. Above a tenth, frozen parameters are saved: leaving them out would save little, and could lose values that exist
nowhere else (layers that were frozen in the middle of a run, or that were never trained at all).

Hashing reads all of the base model, so hashes are cached per unit. A unit is hashed again only if it may have changed:
the local shard of a resharding unit was written, or a persistent parameter was changed in place or has new storage.
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

_ADAPTER_FRACTION = 0.1  # trained fraction of all elements, up to which a checkpoint leaves out the frozen ones
_hash_cache: WeakKeyDictionary[Unit, tuple[Hashable, dict[str, int]]] = (
    WeakKeyDictionary()
)  # unit -> (version of its values, this rank's hash of each parameter)


def trains_adapters(model: ShardedModel) -> bool:
    """Return True if so few parameters are trained that checkpoints leave out the others by default. Collective."""
    base, total, trained = frozen_parameter_names(model), 0, 0
    for unit in model.units:
        total += sum(unit.layout.numels)
        named = zip(unit.names, unit.layout.numels, strict=True)
        trained += sum(numel for name, numel in named if unit.trainable and name not in base)
    counts: list[tuple[int, int]] = model.mesh.gather_from_world((trained, total))
    return 0 < sum(one for one, _ in counts) <= _ADAPTER_FRACTION * sum(all_ for _, all_ in counts)


def frozen_parameter_names(model: ShardedModel) -> frozenset[str]:
    """Return the names of the parameters that were never trained, also those in a unit that was unfrozen for
    another."""
    return frozenset(name for name, _ in model.unhooked_parameters())


def frozen_parameter_hashes(model: ShardedModel) -> dict[str, str]:
    """Return a hash of each frozen parameter by name: 16 hexadecimal digits, independent of stage and number of ranks.

    Collective. Memory: this rank's shard of one unit, if that is offloaded to NVMe.

    Raises:
        CheckpointError: a parameter could not be read. Raised on all ranks.
    """
    base = frozen_parameter_names(model)
    frozen = [unit for unit in model.units if not base.isdisjoint(unit.names)]
    model.recapture_parameters()
    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    parts = ranks.run_on_all("hashing the frozen parameters", lambda: _local_hashes(model, frozen, base))
    model.disk_health.check("frozen parameters could not be read")
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: fingerprint_digest(part[name] for part in parts if name in part) for name in names}


def check_frozen_parameters(
    model: ShardedModel, saved_hashes: dict[str, str], saved_names: Container[str], path: str
) -> None:
    """Check that the frozen parameters equal those at the save of a checkpoint that leaves them out. Collective.

    Args:
        saved_hashes: hashes of the checkpoint; nothing is checked if they are empty.
        saved_names: names of the tensors in the checkpoint.

    Raises:
        CheckpointError: a parameter differs; the message names the parameters.
    """
    if not saved_hashes:
        return
    here = frozen_parameter_hashes(model)
    known = {
        name for names in model.mesh.gather_from_world([n for u in model.units for n in u.names]) for name in names
    }
    differs = {
        "have other values": [
            name for name, taken in here.items() if name in saved_hashes and saved_hashes[name] != taken
        ],
        "are not in the checkpoint": [
            name for name in here if name not in saved_hashes and f"param/{name}" not in saved_names
        ],
        "are not in this model": [name for name in saved_hashes if name not in known],
    }
    differences = [
        f"{len(names)} frozen parameters (this model has {len(here)}) {what}: {', '.join(names[:8])}"
        + ", ..." * (len(names) > 8)
        for what, names in differs.items()
        if names
    ]
    if differences:
        raise CheckpointError(
            f"{path} was saved with another base model: {'; '.join(differences)}. Load the base model of the training "
            "(in the same dtype), or pass load_module_strict=False to load it with this one"
        )


def _local_hashes(model: ShardedModel, units: Iterable[Unit], names: Container[str]) -> dict[str, int]:
    """Return this rank's part of each hash of the parameters in `names`."""
    hashes: dict[str, int] = {}
    for unit in units:
        now = _unit_version(unit)
        before = _hash_cache.get(unit)
        if before is None or before[0] != now:
            before = _hash_cache[unit] = now, _hash_unit(model, unit)
        hashes.update({name: value for name, value in before[1].items() if name in names})
    return hashes


def _unit_version(unit: Unit) -> Hashable:
    """Return a value that differs after every detectable change of a unit's values."""
    return unit.update_count if unit.reshards else tuple((p._version, p.data_ptr()) for p in unit.parameters)


def _hash_unit(model: ShardedModel, unit: Unit) -> dict[str, int]:
    """Hash this rank's part of a unit. If several ranks hold the same values, each hashes an equal share."""
    if not unit.is_primary_replica:
        return {}
    data = unit.dp_group.mesh.data
    holders = unit.dp_group.mesh.replicate if unit.reshards else data
    hashes = {index: TensorHash() for index in range(len(unit.names))}
    storage = UnitShardStorage(model, unit, write_back=False)
    with storage.open():
        for piece in storage.fragments():
            first, last = (piece.numel * (holders.index + more) // holders.size for more in (0, 1))
            placement, start = unit.placements[piece.index], piece.start + first
            hash_range(hashes[piece.index], "param", placement, start, storage.get(piece)[first:last])
    if data.index == 0:  # the hash also covers shape and dtype, e.g. of a parameter without elements
        for index, one in hashes.items():
            if unit.placements[index].is_first_shard:
                one.add_plain("param", [list(unit.placements[index].global_shape), str(unit.dtype)])
    return {unit.names[index]: one.value() for index, one in hashes.items()}
