"""What a save and a load do on all ranks between planning and files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.assignment import Described, assign, describe
from windlass.checkpoint.directory import require_space
from windlass.checkpoint.shards import wanted
from windlass.checkpoint.sources import Sources
from windlass.checkpoint.state import Holding
from windlass.checkpoint.storage import SafetensorsWriter
from windlass.checkpoint.stored import Stored


def plan(
    path: Path, held: dict[str, Holding], ranks: Ranks, plain: Any, rank_plain: Iterable[Any]
) -> SafetensorsWriter:
    """Agrees on which rank writes which boxes into the directory `path`; the writer of this rank's. Collective.

    Raises:
        CheckpointError: on all ranks alike, where any of them fails, or the disk has too little room.
    """
    mine: list[Described] = []

    def told() -> Described:
        mine.append(describe(held))
        return mine[0]

    everyone = ranks.to_first("saving", told)  # nothing on ranks that are not the first

    def decide() -> list[bytes]:
        chosen, nbytes = assign(everyone)
        require_space(path, nbytes)
        return chosen

    chosen = ranks.first("saving", decide)
    known = (
        dict(enumerate(zip(everyone, chosen, strict=True))) if everyone else {ranks.rank: (mine[0], chosen[ranks.rank])}
    )
    return SafetensorsWriter(path, ranks.rank, held, known, plain, rank_plain)


def read(
    stored: Stored, held: dict[str, Holding], ranks: Ranks, first: Collection[str], check: Callable[[], object]
) -> None:
    """Fills this rank's boxes from a checkpoint. Collective.

    Args:
        first: tensors that are filled before all others, on any rank; then `check` is called on all.

    Raises:
        CheckpointError: on all ranks alike, where any of them fails. What was filled till then stays filled.
    """

    def fill(some: dict[str, Holding]) -> None:
        with Sources(stored.files) as sources:
            sources.fill(list(wanted(some, stored.index)))

    def begin() -> None:
        fill({name: held[name] for name in first if name in held})
        check()

    ranks.each("loading", begin)
    ranks.each("loading", lambda: fill({name: one for name, one in held.items() if name not in first}))
