"""What a save and a load do on all ranks between planning and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.assignment import Described, assign, describe
from windlass.checkpoint.directory import require_space
from windlass.checkpoint.index import Index
from windlass.checkpoint.shards import ShardLoadPlanner
from windlass.checkpoint.state import Holding
from windlass.checkpoint.storage import SafetensorsReader, SafetensorsWriter


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


def read(path: Path, index: Index, held: dict[str, Holding], ranks: Ranks) -> None:
    """Fills this rank's boxes from the checkpoint directory `path`. Collective.

    Raises:
        CheckpointError: on all ranks alike, where any of them fails. What was filled till then stays filled.
    """

    def fill() -> None:
        planner = ShardLoadPlanner(held, index)
        SafetensorsReader(path, index).read_data(planner.create_local_plan(), planner)

    ranks.each("loading", fill)
