"""Several gloo ranks: saved on 2 and loaded on 3 and 1, and one rank's fault told alike by all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint import states
from tests.unit.checkpoint.rank_worker import WORLD
from windlass.checkpoint import load, read_full, tags

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The directory that three ranks saved into, and what each of them found."""
    root = tmp_path_factory.mktemp("ranks") / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.checkpoint.rank_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(root)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * WORLD, "\n".join(outputs)
    return root, [json.loads(Path(f"{root}.{rank}.json").read_text()) for rank in range(WORLD)]


def test_two_ranks_save_and_three_load(run: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = run
    assert [result["resharded"]["saved_world_size"] for result in results] == [2, 2, 2]
    assert [result["resharded"]["rank_plain"] for result in results] == [0, 1, None]


@pytest.mark.parametrize(("tag", "offset", "world"), [("two", 0, 2), ("three", 1, 3)])
def test_one_process_loads_what_several_saved(
    run: tuple[Path, list[dict[str, Any]]], tag: str, offset: int, world: int
) -> None:
    root, _ = run
    into = states.empty()
    loaded = load(root, tag, into)
    states.assert_loaded(into, offset=offset)
    assert loaded.saved_world_size == world
    assert dict(read_full(root, tag))["param/conv"].equal(states.whole("param/conv", offset))


def test_replicas_are_written_once_and_by_all(run: tuple[Path, list[dict[str, Any]]]) -> None:
    root, _ = run
    files = json.loads((root / "replicas" / "checkpoint.json").read_text())["tensors"]
    writers = [chunk["file"] for record in files.values() for chunk in record["chunks"]]
    assert len(writers) == len(states.SHAPES)
    assert set(writers) == {f"rank_{rank:05d}.safetensors" for rank in range(WORLD)}


def test_a_fault_on_one_rank_is_told_alike_on_all(run: tuple[Path, list[dict[str, Any]]]) -> None:
    root, results = run
    told = results[0]["failures"]
    assert [result["failures"] for result in results] == [told] * WORLD
    expected = {
        "plain": "preparing to save failed on rank 1: odd is a builtins.object",
        "tags": "ranks save to different places (rank 0: ",
        "overlap": "rank 0: element 2 of 'x' lies in two different cuts",
        "recut": "ranks 0 and 2 hold ranges of 'x' that overlap but differ",
        "shapes": "ranks disagree on 'x': rank 0 has shape (9,), torch.float32, rank 2 has shape (10,)",
        "disk": "saving failed on rank 2: disk full while writing",
        "rename": "finishing the save failed on rank 0:",
        "misfit": "preparing to load failed on rank 1: ",
        "missing": "1 missing (buffer/lonely)",
        "absent": "looking for the checkpoint failed on rank 0: there is no checkpoint 'nowhere'",
        "damage": "rank_00002.safetensors is damaged: entry",
    }
    assert told.keys() == expected.keys()
    for fault, text in expected.items():
        assert text in told[fault], fault
    assert tags(root) == ["two", "three", "replicas", "damaged"]
    assert {path.name for path in root.iterdir()} == {*tags(root), "latest"}
