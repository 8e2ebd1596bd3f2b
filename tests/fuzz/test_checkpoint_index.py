"""Fuzz tests of the index of windlass checkpoints, for every reader."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from tests.fuzz.checkpoints import index_text, one_of, readers, save_windlass, seeds_of
from tests.fuzz.mutations import BYTES, fuzz, other_values


def test_every_reader_of_an_index(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_windlass(directory)
    path = directory / "t" / "checkpoint.json"
    good = path.read_bytes()
    fields = json.loads(good)
    rest = sum(item.stat().st_size for item in directory.rglob("*") if item.is_file() and item != path)
    all_readers = readers(directory, tmp_path / "out")
    seeds = seeds_of(all_readers)

    def make(draw: random.Random) -> tuple[int, bytes]:
        forged = draw.randrange(4)
        case = index_text(other_values(draw, fields)) if forged else draw.choice(BYTES)(draw, good)
        path.write_bytes(case)
        return len(case) + rest, case

    fuzz(0.35, make, all_readers, one_of(seeds), tmp_path.parent / "index.case")
    shutil.rmtree(tmp_path)
