"""What a checkpoint of trained parameters alone says of the others: a hash of each, by which a changed base is known.

[Note: adapters] Where few parameters are trained, what is trained is the run's, and the rest came from somewhere and
can be had again. So by default a checkpoint leaves frozen parameters out if those that are trained are at most a tenth
of all; it holds their hashes, and a model whose frozen parameters have others refuses to load it. Above a tenth they
are saved: there leaving them out would save little, and may lose what exists nowhere else (layers that were frozen in
the middle of a run, or that were never trained at all).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

from windlass.base.errors import CheckpointError
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.fingerprint import Hash, digest
from windlass.engine.pieces import UnitCut
from windlass.zero.sharded import ShardedModel
from windlass.zero.unit import Unit

_FEW = 0.1  # of all elements


def trains_adapters(model: ShardedModel) -> bool:
    """Whether so few parameters are trained that checkpoints leave out the others by default."""
    trained = sum(sum(unit.layout.numels) for unit in model.units if unit.trainable)
    return 0 < trained <= _FEW * sum(sum(unit.layout.numels) for unit in model.units)


def base_hashes(model: ShardedModel) -> dict[str, str]:
    """A hash of each frozen parameter, by name: 16 hexadecimal digits, the same at any stage, on any number of ranks.
    Collective. Memory: what this rank keeps of one unit, where that rests on disk.

    Raises:
        CheckpointError: a parameter could not be read; on all ranks.
    """
    frozen = [unit for unit in model.units if not unit.trainable]
    ranks = Ranks.of(model.mesh.data.process_group)
    parts = ranks.each("taking the hash of what is frozen", lambda: _sums(model, frozen))
    model.health.check("frozen parameters could not be read")
    return {name: digest(part[name] for part in parts) for unit in frozen for name in unit.names}


def check_base(model: ShardedModel, saved: dict[str, str], path: str) -> None:
    """See that what is frozen here is what was frozen when a checkpoint of the others was saved. Collective.

    Raises:
        CheckpointError: it is not; names what differs.
    """
    here = base_hashes(model)
    changed = [name for name, taken in here.items() if name in saved and saved[name] != taken]
    if changed:
        shown = ", ".join(changed[:8]) + (", ..." if len(changed) > 8 else "")
        raise CheckpointError(
            f"{path} was saved over another base: {len(changed)} of {len(here)} frozen parameters are not what they "
            f"were: {shown}. Load the base that was trained over (in the same dtype), or pass load_module_strict=False "
            "to load over this one"
        )


def _sums(model: ShardedModel, units: Iterable[Unit]) -> dict[str, int]:
    """This rank's part of each hash. What several ranks hold alike, the first of them adds."""
    found: dict[str, int] = {}
    for unit in units:
        mine = model.mesh.replicate.index == 0 if unit.released else model.mesh.data.index == 0
        hashes = {index: Hash() for index in range(len(unit.names))}
        cut = UnitCut(model, unit, keep=False)
        with cut.open() if mine else nullcontext():
            for piece in cut.pieces() if mine else ():
                where = "param", tuple(unit.shapes[piece.index]), piece.start
                hashes[piece.index].add(*where, cut.get(piece))
        if model.mesh.data.index == 0:  # a parameter without elements has a shape and a dtype too
            for index, one in hashes.items():
                one.add_plain("param", [list(unit.shapes[index]), str(unit.dtype)])
        found.update({unit.names[index]: one.value() for index, one in hashes.items()})
    return found
