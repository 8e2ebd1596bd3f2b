"""Tests of checkpoints of several ranks: saved on 2, loaded on 3 and 1, and one rank's error raised on all ranks."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from tests.unit.checkpoint import sample_states
from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, SavedState, list_tags, load, read_full, read_plain, save
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.comm.rank_group import RankGroup

WORLD = 3
Run = tuple[Path, list[dict[str, Any]]]


def failure(call: Callable[[], object]) -> str:
    """Return the text of the CheckpointError that `call` raises."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def full_disk(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def resharded(rank: int, root: Path) -> dict[str, Any]:
    """Save on ranks 0 and 1 and load on all three. Save on all three, for a load in the pytest process."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        save(root, "two", sample_states.state(rank, 2), process_group=pair)
    else:
        assert "not in the process group" in failure(lambda: CheckpointRanks.of_group(pair))
    dist.barrier()
    into = sample_states.empty(rank, WORLD)
    loaded = load(root, None, into)
    sample_states.assert_loaded(into)
    assert loaded.plain == sample_states.state(0, 2).plain
    save(root, "three", sample_states.state(rank, WORLD, offset=1))
    everywhere = {name: sample_states.whole(name) for name in sample_states.SHAPES}
    save(root, "replicas", SavedState(tensors=everywhere), save_latest=False)
    return {
        "saved_world_size": loaded.saved_world_size,
        "rank_plain": None if loaded.rank_plain is None else loaded.rank_plain["rank"],
    }


def failures(rank: int, root: Path) -> dict[str, str]:
    """Cause an error on one rank at a time. The pytest process checks that all ranks raise the same error."""
    state = sample_states.state(rank, WORLD)
    results: dict[str, str] = {}
    odd = SavedState(shards=state.shards, rank_plain={"odd": object()} if rank == 1 else {})
    results["plain"] = failure(lambda: save(root, "bad", odd))
    results["tags"] = failure(lambda: save(root, f"bad{rank}", state))
    overlap = [FlatShard("x", (9,), 3 * rank - (rank == 1), torch.zeros(3 + (rank == 1)))]
    results["overlap"] = failure(lambda: save(root, "bad", SavedState(shards=overlap)))
    recut = [FlatShard("x", (9,), 0, torch.zeros(9 - (rank == 2)))]
    results["recut"] = failure(lambda: save(root, "bad", SavedState(shards=recut)))
    shapes = [FlatShard("x", (9 + rank // 2,), 3 * rank, torch.zeros(3))]
    results["shapes"] = failure(lambda: save(root, "bad", SavedState(shards=shapes)))
    with mock.patch.object(os, "fsync", full_disk if rank == 2 else os.fsync):
        results["disk"] = failure(lambda: save(root, "three", state))
    with mock.patch.object(os, "rename", side_effect=PermissionError(errno.EACCES, "Permission denied")):
        results["rename"] = failure(lambda: save(root, "bad", state))
    misfit = sample_states.empty(rank, WORLD)
    if rank == 1:
        misfit.tensors = {"buffer/count": torch.zeros(2), "buffer/running_mean": torch.zeros(4)}
    results["misfit"] = failure(lambda: load(root, "three", misfit))
    lonely = SavedState(tensors={"buffer/lonely": torch.zeros(1)} if rank == 1 else {})
    results["missing"] = failure(lambda: load(root, "three", lonely))
    results["absent"] = failure(lambda: load(root, "nowhere", sample_states.empty(rank, WORLD)))
    save(root, "damaged", state, save_latest=False)
    if rank == 0:
        path = root / "damaged" / "rank_00002.safetensors"
        path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")
    dist.barrier()
    results["damage"] = failure(lambda: load(root, "damaged", sample_states.empty(rank, WORLD)))
    return results


def saved_and_loaded(root: Path) -> dict[str, Any]:
    """Save and load on one rank. Return its results."""
    rank = dist.get_rank()
    result = {"resharded": resharded(rank, root), "failures": failures(rank, root)}
    into = sample_states.empty(rank, WORLD)
    load(root, None, into)
    sample_states.assert_loaded(into, offset=1)
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Directory that three ranks saved into, and the result of each."""
    root = tmp_path_factory.mktemp("ranks") / "run"
    return root, run_ranks(saved_and_loaded, WORLD, root)


def test_two_ranks_save_and_three_load(run: Run) -> None:
    _, results = run
    assert [result["resharded"]["saved_world_size"] for result in results] == [2, 2, 2]
    assert [result["resharded"]["rank_plain"] for result in results] == [0, 1, None]


@pytest.mark.parametrize(("tag", "offset", "world"), [("two", 0, 2), ("three", 1, 3)])
def test_one_process_loads_a_checkpoint_of_several_ranks(run: Run, tag: str, offset: int, world: int) -> None:
    root, _ = run
    into = sample_states.empty()
    loaded = load(root, tag, into)
    sample_states.assert_loaded(into, offset=offset)
    assert loaded.saved_world_size == world
    assert dict(read_full(root, tag))["param/conv"].equal(sample_states.whole("param/conv", offset))


def test_replicas_are_written_once_with_writes_spread_over_ranks(run: Run) -> None:
    root, _ = run
    files = json.loads((root / "replicas" / "checkpoint.json").read_text())["tensors"]
    writers = [chunk["file"] for record in files.values() for chunk in record["chunks"]]
    assert len(writers) == len(sample_states.SHAPES)
    assert set(writers) == {f"rank_{rank:05d}.safetensors" for rank in range(WORLD)}


def test_failure_on_one_rank_raises_the_same_error_on_all(run: Run) -> None:
    root, results = run
    received = results[0]["failures"]
    assert [result["failures"] for result in results] == [received] * WORLD
    expected = {
        "plain": "preparing to save failed on rank 1: odd is a builtins.object",
        "tags": "ranks save to different paths (rank 0: ",
        "overlap": "rank 0: element 2 of 'x' lies in two different boxes",
        "recut": "ranks 0 and 2 hold ranges of 'x' that overlap but differ",
        "shapes": "ranks disagree on 'x': rank 0 has shape (9,), torch.float32, rank 2 has shape (10,)",
        "disk": "saving failed on rank 2: disk full while writing",
        "rename": "finishing the save failed on rank 0:",
        "misfit": "preparing to load failed on rank 1: ",
        "missing": "1 missing (buffer/lonely)",
        "absent": "looking for the checkpoint failed on rank 0: there is no checkpoint 'nowhere'",
        "damage": "rank_00002.safetensors is damaged: entry",
    }
    assert received.keys() == expected.keys()
    for fault, text in expected.items():
        assert text in received[fault], fault
    assert list_tags(root) == ["two", "three", "replicas", "damaged"]
    assert {path.name for path in root.iterdir()} == {*list_tags(root), "latest"}


def largest_gathered_object(root: Path) -> int:
    """Return the bytes of the largest object that this rank receives from all ranks in a save."""
    sizes = [0]
    gather = RankGroup.all_gather_object

    def measured(group: RankGroup, value: Any) -> list[Any]:
        values = gather(group, value)
        sizes.append(max(len(pickle.dumps(one)) for one in values))
        return values

    with mock.patch.object(RankGroup, "all_gather_object", measured):
        save(root, "t", SavedState(tensors={"x": torch.ones(2)}, plain={"client": "a" * 1_000_000}))
    return max(sizes)


def test_client_state_is_not_sent_to_every_rank(tmp_path: Path) -> None:
    assert max(run_ranks(largest_gathered_object, 2, tmp_path)) < 100_000
    assert len(read_plain(tmp_path, "t")["client"]) == 1_000_000
