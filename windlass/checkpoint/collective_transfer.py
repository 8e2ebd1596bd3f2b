"""Collective parts of a save and a load, between planning and file access."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from windlass.checkpoint.checkpoint_directory import require_space
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_state import HeldTensor
from windlass.checkpoint.chunk_reader import ChunkReader
from windlass.checkpoint.safetensors_storage import SafetensorsWriter
from windlass.checkpoint.shard_load_planner import wanted
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.checkpoint.write_assignment import HeldTensorInfos, assign_writers, describe_held


def plan_save(
    path: Path, held: dict[str, HeldTensor], ranks: CheckpointRanks, plain: Any, rank_plain: Iterable[Any]
) -> SafetensorsWriter:
    """Agree on the rank that writes each box (rectangular part of a tensor) to the directory `path`. Collective.

    Return this rank's writer.

    Raises:
        CheckpointError: on all ranks, if any of them fails or the disk has too little space.
    """
    local: list[HeldTensorInfos] = []

    def describe() -> HeldTensorInfos:
        local.append(describe_held(held))
        return local[0]

    everyone = ranks.gather_to_first("saving", describe)  # empty on ranks other than the first

    def decide() -> list[bytes]:
        chosen, nbytes = assign_writers(everyone)
        require_space(path, nbytes)
        return chosen

    chosen = ranks.run_on_first("saving", decide)
    known = (
        dict(enumerate(zip(everyone, chosen, strict=True)))
        if everyone
        else {ranks.rank: (local[0], chosen[ranks.rank])}
    )
    return SafetensorsWriter(path, ranks.rank, held, known, plain, rank_plain)


def load_held_tensors(
    stored: StoredCheckpoint,
    held: dict[str, HeldTensor],
    ranks: CheckpointRanks,
    first: Collection[str],
    check: Callable[[], object],
    on_overwrite: Callable[[], object],
) -> None:
    """Fill this rank's parts of tensors from a checkpoint. Collective.

    Args:
        first: names of tensors that all ranks fill before any other tensor. Then `check` is called on all ranks.
        on_overwrite: called before the other tensors are filled, on all ranks or on none.

    Raises:
        CheckpointError: on all ranks, if any of them fails. Tensors filled before the failure keep the loaded values.
    """

    def fill(some: dict[str, HeldTensor]) -> None:
        with stored, ChunkReader(stored.files) as sources:
            sources.fill(list(wanted(some, stored.index)))

    def begin() -> None:
        fill({name: held[name] for name in first if name in held})
        check()

    ranks.run_on_all("loading", begin)
    on_overwrite()
    ranks.run_on_all("loading", lambda: fill({name: one for name, one in held.items() if name not in first}))
