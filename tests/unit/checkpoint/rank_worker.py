"""One of three gloo ranks of the checkpoint tests: `python -m tests.unit.checkpoint.rank_worker RANK ROOT`."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.unit.checkpoint import states
from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, SavedState, load, save
from windlass.checkpoint.agree import Ranks

WORLD = 3


def failure(call: Callable[[], object]) -> str:
    """The text of the CheckpointError that `call` raises."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def full_disk(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def resharded(rank: int, root: Path) -> dict[str, Any]:
    """Saves on ranks 0 and 1, then loads on all three; saves on all three for the parent to load alone."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        save(root, "two", states.state(rank, 2), process_group=pair)
    else:
        assert "not in the process group" in failure(lambda: Ranks.of(pair))
    dist.barrier()
    into = states.empty(rank, WORLD)
    loaded = load(root, None, into)
    states.assert_loaded(into)
    assert loaded.plain == states.state(0, 2).plain
    save(root, "three", states.state(rank, WORLD, offset=1))
    everywhere = {name: states.whole(name) for name in states.SHAPES}
    save(root, "replicas", SavedState(tensors=everywhere), save_latest=False)
    return {
        "saved_world_size": loaded.saved_world_size,
        "rank_plain": None if loaded.rank_plain is None else loaded.rank_plain["rank"],
    }


def failures(rank: int, root: Path) -> dict[str, str]:
    """Faults on one rank each; the parent checks that all three ranks tell the same."""
    state = states.state(rank, WORLD)
    found: dict[str, str] = {}
    odd = SavedState(shards=state.shards, rank_plain={"odd": object()} if rank == 1 else {})
    found["plain"] = failure(lambda: save(root, "bad", odd))
    found["tags"] = failure(lambda: save(root, f"bad{rank}", state))
    overlap = [FlatShard("x", (9,), 3 * rank - (rank == 1), torch.zeros(3 + (rank == 1)))]
    found["overlap"] = failure(lambda: save(root, "bad", SavedState(shards=overlap)))
    recut = [FlatShard("x", (9,), 0, torch.zeros(9 - (rank == 2)))]
    found["recut"] = failure(lambda: save(root, "bad", SavedState(shards=recut)))
    shapes = [FlatShard("x", (9 + rank // 2,), 3 * rank, torch.zeros(3))]
    found["shapes"] = failure(lambda: save(root, "bad", SavedState(shards=shapes)))
    with mock.patch.object(os, "fsync", full_disk if rank == 2 else os.fsync):
        found["disk"] = failure(lambda: save(root, "three", state))
    with mock.patch.object(os, "rename", side_effect=PermissionError(errno.EACCES, "Permission denied")):
        found["rename"] = failure(lambda: save(root, "bad", state))
    misfit = states.empty(rank, WORLD)
    if rank == 1:
        misfit.tensors = {"buffer/count": torch.zeros(2), "buffer/running_mean": torch.zeros(4)}
    found["misfit"] = failure(lambda: load(root, "three", misfit))
    lonely = SavedState(tensors={"buffer/lonely": torch.zeros(1)} if rank == 1 else {})
    found["missing"] = failure(lambda: load(root, "three", lonely))
    found["absent"] = failure(lambda: load(root, "nowhere", states.empty(rank, WORLD)))
    save(root, "damaged", state, save_latest=False)
    if rank == 0:
        path = root / "damaged" / "rank_00002.safetensors"
        path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")
    dist.barrier()
    found["damage"] = failure(lambda: load(root, "damaged", states.empty(rank, WORLD)))
    return found


def main() -> None:
    rank, root = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}.store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    result = {"resharded": resharded(rank, root), "failures": failures(rank, root)}
    into = states.empty(rank, WORLD)
    load(root, None, into)
    states.assert_loaded(into, offset=1)
    Path(f"{root}.{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
