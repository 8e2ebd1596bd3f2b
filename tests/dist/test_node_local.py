"""Tests of checkpoints on node-local disks, with a complete copy on every node. A directory simulates a node's disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import windlass
from tests.dist.equivalence_runs import whole_params
from tests.dist.harness import run_ranks
from tests.models import Place, mlp, rows
from windlass.base.collective_activity import activity
from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, SavedState, node_disks
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_save import CheckpointSave

Files = dict[str, str]


def config(stage: int, local: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"use_node_local_storage": local, **more},
    }


def contents(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def saved(disks: list[str], stage: int, blocking: bool, more: dict[str, Any]) -> tuple[Files, dict[str, Any], bool]:
    """Save on this rank's disk, continue, and load. Return files, saved weights, and whether they were restored."""
    before = Path.cwd()
    os.chdir(disks[dist.get_rank()])
    os.environ["GROUP_RANK"] = disks[dist.get_rank()]
    try:
        engine = windlass.initialize(model=mlp(), config=config(stage, **more))[0]
        for step in range(3):
            engine.backward(engine(**rows(Place(step, 0, dist.get_rank()))))
            engine.step()
            if step == 1:
                engine.save_checkpoint("kept", tag="two", blocking=blocking)
                weights = whole_params(engine.module)
        engine.finish_checkpoint()
        result = contents(Path("kept"))
        engine.load_checkpoint("kept")
        back = whole_params(engine.module)
        engine.destroy()
        return result, weights, all(torch.equal(back[name], value) for name, value in weights.items())
    finally:
        os.chdir(before)


def loaded(folder: str) -> dict[str, Any]:
    engine = windlass.initialize(model=mlp(), config=config(0, local=False))[0]
    engine.load_checkpoint(folder)
    result = whole_params(engine.module)
    engine.destroy()
    return result


def disks(tmp_path: Path, ranks: int, each: int) -> list[str]:
    results = [tmp_path / f"node{rank // each}" for rank in range(ranks)]
    for path in results:
        path.mkdir(exist_ok=True)
    return [str(path) for path in results]


@pytest.mark.parametrize(
    ("ranks", "each", "stage", "blocking", "more"),
    [(2, 1, 3, True, {}), (4, 2, 1, False, {}), (2, 1, 1, True, {"format": "deepspeed"}), (2, 2, 2, True, {})],
    ids=["two nodes", "two nodes of two, behind", "files of deepspeed", "one disk"],
)
def test_every_node_has_the_full_checkpoint(
    ranks: int, each: int, stage: int, blocking: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    places = disks(tmp_path, ranks, each)
    answers = run_ranks(saved, ranks, places, stage, blocking, more, transport="gloo")
    for files, _, back in answers:
        assert back and files == answers[0][0] and "latest" in files and "two/checkpoint.json" in files
    for place in dict.fromkeys(places):
        assert [path.name for path in Path(place, "kept").iterdir() if path.name.endswith(".writing")] == []
        result = run_ranks(loaded, 1, f"{place}/kept")[0]
        assert all(torch.equal(result[name], value) for name, value in answers[0][1].items())


def fails(disks: list[str]) -> str:
    before = Path.cwd()
    os.chdir(disks[dist.get_rank()])
    try:
        engine = windlass.initialize(model=mlp(), config=config(1))[0]
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint("kept", tag="two")
        engine.destroy()
        return str(caught.value)
    finally:
        os.chdir(before)


def test_a_node_that_cannot_write_stops_all(tmp_path: Path) -> None:
    places = disks(tmp_path, 2, 1)
    Path(places[1], "kept").write_text("a file in the way")
    for text in run_ranks(fails, 2, places, transport="gloo"):
        assert "rank 1" in text and "kept" in text
    assert list(Path(places[0], "kept").iterdir()) == []


def progress_while_copying(disks: list[str]) -> tuple[int, set[str]]:
    """Return the number of different progress counts in this rank's waits for copies, and the names of the waits."""
    os.chdir(disks[dist.get_rank()])
    os.environ["GROUP_RANK"] = disks[dist.get_rank()]
    node_disks._CHUNK, node_disks._NOTE_INTERVAL_S = 1000, 0.0
    counts, waits = [], set[str]()
    receive = node_disks._Channel.receive

    def observed(channel: node_disks._Channel, source: int) -> Any:
        assert activity.current_wait is not None
        waits.add(activity.current_wait.operation)
        value = receive(channel, source)
        counts.append(activity.progress_count)
        return value

    node_disks._Channel.receive = observed
    shard = FlatShard("x", (4000,), 1000 * dist.get_rank(), torch.ones(1000))
    ranks = CheckpointRanks.of_group(None)
    CheckpointSave("kept", "t", SavedState([shard]), ranks, True, use_node_local_storage=True).finish(ranks)
    return len(set(counts)), waits


def test_ranks_that_wait_for_a_long_copy_show_its_progress_to_the_watchdog(tmp_path: Path) -> None:
    for seen, waits in run_ranks(progress_while_copying, 4, disks(tmp_path, 4, 2), transport="gloo"):
        assert seen > 8 and waits == {"copying to the disks of other nodes"}  # two files, each of more than four chunks
