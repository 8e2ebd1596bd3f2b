"""Tests that an asynchronous save equals a blocking one although training continues during the save."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_offload import EMULATED, LATE, offload_to
from tests.models import Place, cast
from tests.oracle import Recipe
from windlass.compat.checkpoint.recovery_scripts import SCRIPTS

SMALL = (("sub_group_size", 100),)
ADAM = Recipe(optimizer="AdamW", optimizer_params=ADAMW)
NARROW = Recipe(precision="bf16", optimizer="AdamW", optimizer_params=ADAMW)
EIGHT = Recipe(precision="bf16", optimizer="AdamW", optimizer_params=(*ADAMW, ("state_dtype", "8bit")))
Case = tuple[str, Recipe, int, str, str, tuple[tuple[str, Any], ...], dict[str, Any]]
# model, recipe, stage, tier of states, tier of parameters, other keys of zero_optimization and of offload_optimizer
CASES: list[Case] = [
    ("tied", ADAM, 0, "none", "none", (), {}),
    ("batch_norm", ADAM, 1, "none", "none", (), {}),
    ("lora", NARROW, 2, "cpu", "none", (), {}),
    ("tied", ADAM, 2, "cpu", "none", SMALL, {"delayed_update": True}),
    ("odd_shapes", ADAM, 3, "none", "none", (), {}),
    ("tied", ADAM, 2, "nvme", "none", SMALL, {}),
    ("lora", NARROW, 3, "nvme", "nvme", SMALL, {}),
    ("odd_shapes", NARROW, 3, "nvme", "cpu", SMALL, {"ratio": 0.5}),
    ("tied", EIGHT, 2, "cpu", "none", (), {}),
]


def engine_for(case: Case, folder: str, seed: int, **more: Any) -> Any:
    import windlass

    name, recipe, stage, state, param, zero, optimizer = case
    setting = Setting(stage=stage, zero=(*offload_to(state, param, f"{folder}/disk", **optimizer), *zero))
    config = {**ds_config(recipe, setting), **more}
    own: dict[str, Any] = {}
    if recipe == EIGHT:
        del config["optimizer"]
        own["optimizer"] = lambda parameters: windlass.optim.CPUAdam(parameters, lr=1e-3, state_dtype="8bit")
    return windlass.initialize(model=oracle.build(specimen(name), seed + dist.get_rank()), config=config, **own)[0]


def train(engine: Any, case: Case, first: int, last: int) -> list[float]:
    subject, recipe = specimen(case[0]), case[1]
    losses = []
    for step in range(first, last):
        batch = cast(subject.batch(Place(step, 0, dist.get_rank())), recipe.dtype)
        losses.append(float(subject.train(engine, batch, engine.backward)))
        engine.step()
    return losses


class Gate:
    """Lock that delays the writing thread until it is opened, or until a step waits for the thread."""

    def __init__(self) -> None:
        self.open, self.waited_for = threading.Event(), False

    @contextmanager
    def closed(self) -> Iterator[None]:
        from windlass.checkpoint.checkpoint_state import OffloadedStorage
        from windlass.checkpoint.rank_file import RankFile

        write = RankFile.write

        def late(file: Any) -> Any:
            away = [item.storage for item in file._items.values() if isinstance(item.storage, OffloadedStorage)]
            while not self.open.is_set() and not self.waited_for:
                self.waited_for = any(drawer.has_waiter for drawer in away)
                time.sleep(0.002)
            return write(file)

        with mock.patch.object(RankFile, "write", late):
            try:
                yield
            finally:
                self.open.set()


def content(folder: Path) -> dict[str, Any]:
    """Return the content of each file. An asynchronous save has no fingerprint of 8-bit states."""
    results: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    index = results["checkpoint.json"] = json.loads(results["checkpoint.json"])
    del index["crc32"]
    if "signed uint8" in json.dumps(index["plain"]["states"]):
        assert (index["plain"]["fingerprint"].pop("states") is None) == (folder.parent.name == "behind")
    return results


def compared(case: Case, folder: str) -> dict[str, Any]:
    """Save twice at one step, blocking and asynchronously, with two more steps during the second save."""
    engine = engine_for(case, folder, 0)
    train(engine, case, 0, 2)
    client = {"words": ["a", "b"]}
    engine.save_checkpoint(f"{folder}/at_once", client_state=client)
    gate = Gate()
    with gate.closed():
        engine.save_checkpoint(f"{folder}/behind", client_state=client, blocking=False)
        client["words"].append("later")
        early = Path(folder, "behind", "latest").exists()
        expected = train(engine, case, 2, 4)
    engine.finish_checkpoint()
    dist.barrier()
    both = [content(Path(folder, which, "global_step2")) for which in ("at_once", "behind")]
    different = sorted(name for name in both[0].keys() | both[1].keys() if both[0].get(name) != both[1].get(name))
    left = sorted(os.listdir(f"{folder}/behind"))
    engine.destroy()
    other = engine_for(case, folder, 50)
    other.load_checkpoint(f"{folder}/behind")
    actual = train(other, case, 2, 4)
    other.destroy()
    return {
        "early": early,
        "different": different,
        "left": left,
        "found": actual == expected,
        "files": len(both[0]),
        "waited": gate.waited_for,
    }


def all_compared(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    results = []
    for number, case in enumerate(cases):
        try:
            results.append(compared(case, f"{folder}/{number}"))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return results


@in_shares
@pytest.mark.parametrize(("ranks", "transport", "env"), [(2, "gloo", LATE), (2, "shm", EMULATED), (1, "gloo", LATE)])
def test_async_save_equals_a_blocking_save(
    ranks: int, transport: str, env: dict[str, str], every: bool, tmp_path: Path
) -> None:
    cases = [CASES[0], CASES[4], CASES[6]] if ranks == 1 else share(CASES, transport == "shm", 2, every)
    results = run_ranks(all_compared, ranks, cases, str(tmp_path), env=env, transport=transport, timeout=120)
    for case, item in ((case, entry) for result in results for case, entry in zip(cases, result, strict=True)):
        assert not item["early"], f"{case}: it blocked"
        assert item["different"] == [] and item["left"] == ["global_step2", "latest", *sorted(SCRIPTS)], case
        assert item["files"] == ranks + 1 and item["found"], case
    for case, *of_ranks in zip(cases, *results, strict=True):
        if case[3] == "nvme":
            assert any(entry["waited"] for entry in of_ranks), f"{case}: no step came to what was still to be read"


BAD_RANK = 1


class FullEngine:
    """I/O engine whose disk is full."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, write: bool, spans: Any) -> Any:
        return Full()


class Full:
    def wait(self, seconds: float) -> bool:
        return True

    def failure(self) -> tuple[int, int, int, int]:
        return errno.ENOSPC, 0, 0, 0


@contextmanager
def full_disk(how: str) -> Iterator[None]:
    """Simulate a full disk on one rank, at the creation of a file or at the writes of its blocks."""
    from windlass.storage import direct_file_writer

    def taken(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    start = direct_file_writer.start_io_engine

    def started(*arguments: Any, **options: Any) -> Any:
        running = start(*arguments, **options)
        return running._replace(engine=FullEngine(running.engine))

    if dist.get_rank() != BAD_RANK:
        yield
    elif how == "space":
        with mock.patch.object(os, "posix_fallocate", taken):
            yield
    else:
        with mock.patch.object(direct_file_writer, "start_io_engine", started):
            yield


def attempt(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def full(folder: str) -> dict[str, Any]:
    """Return the errors of calls after an asynchronous save, and the files it left.

    The disk of one rank was full during the save.
    """
    case = CASES[4]
    engine = engine_for(case, folder, 0, checkpoint={"async_save": True})
    train(engine, case, 0, 1)
    engine.save_checkpoint(folder)
    engine.finish_checkpoint()
    text: dict[str, Any] = {}

    def failing(how: str) -> None:
        with full_disk(how):
            engine.save_checkpoint(folder, tag="bad")
            engine._async_save._thread.join()

    with full_disk("space"):
        text["blocking"] = attempt(lambda: engine.save_checkpoint(folder, tag="bad", blocking=True))
    failing("space")
    late = dist.get_rank() != BAD_RANK  # as if this rank's thread had not received the failure yet
    with (
        mock.patch.object(type(engine._async_save), "failure_flag", lambda saves: 0.0)
        if late
        else mock.patch("time.tzset")
    ):
        text["step"] = attempt(lambda: train(engine, case, 1, 2))
    text["steps"] = engine.global_steps
    text["then"] = attempt(lambda: train(engine, case, 2, 3))
    failing("blocks")
    text["save"] = attempt(lambda: engine.save_checkpoint(folder, tag="next"))
    failing("blocks")
    text["finish"] = attempt(engine.finish_checkpoint)
    dist.barrier()  # rank 0 removes the incomplete files
    text["left"] = sorted(os.listdir(folder))
    engine.save_checkpoint(folder, tag="good")
    engine.load_checkpoint(folder, tag="good")  # the load waits for the save
    failing("space")
    text["destroy"] = attempt(engine.destroy)
    text["again"] = attempt(engine.destroy)
    text["plain"] = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    other = engine_for(case, folder, 50)
    other.load_checkpoint(folder)
    text["loaded"] = other.global_steps
    other.destroy()
    return text


def test_full_disk_raises_on_all_ranks_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    results = run_ranks(full, 2, str(folder))
    assert results[0] == results[1]
    text = results[0]
    for call in ("blocking", "step", "save", "finish", "destroy"):
        assert text[call].startswith("CheckpointError: "), call
        for word in (f"rank {BAD_RANK}: disk full while writing", "earlier checkpoints are unchanged", ".safetensors"):
            assert word in text[call], text[call]
        assert ("the checkpoint" in text[call] and f"{folder}/bad was not written" in text[call]) != (
            call == "blocking"
        )
    assert (text["steps"], text["then"], text["again"], text["plain"], text["loaded"]) == (2, "", "", True, 3)
    assert text["left"] == ["global_step1", "latest", *sorted(SCRIPTS)]
    assert sorted(os.listdir(folder)) == ["global_step1", "good", "latest", *sorted(SCRIPTS)]


def cramped(folder: str) -> list[Any]:
    """Save asynchronously although one rank has no memory for the copy of its states."""
    import logging

    from windlass.checkpoint import async_save

    case = CASES[4]
    engine = engine_for(case, folder, 0)
    train(engine, case, 0, 1)
    engine.save_checkpoint(f"{folder}/at_once")
    received: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: received.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("windlass").addHandler(handler)
    try:
        with mock.patch.object(async_save, "free_memory", lambda: 10 if dist.get_rank() == BAD_RANK else None):
            engine.save_checkpoint(f"{folder}/behind", blocking=False)
    finally:
        logging.getLogger("windlass").removeHandler(handler)
    train(engine, case, 1, 2)
    engine.destroy()
    dist.barrier()
    both = [content(Path(folder, which, "global_step1")) for which in ("at_once", "behind")]
    return [both[0] == both[1], [line for line in received if "this save blocks" in line]]


def test_save_blocks_with_a_warning_without_memory_for_a_copy(tmp_path: Path) -> None:
    for rank, (equal, received) in enumerate(run_ranks(cramped, 2, str(tmp_path))):
        assert equal and len(received) == (rank == BAD_RANK)


def unreadable(folder: str) -> dict[str, Any]:
    """Save while one rank can't read its states from disk and the next step waits to overwrite them."""
    from windlass.base.errors import StorageError
    from windlass.zero.update.optimizer_state_offload import StateRecordOnDisk

    case = CASES[5]
    engine = engine_for(case, folder, 0)
    train(engine, case, 0, 1)
    engine.save_checkpoint(f"{folder}/saved")
    read, broken = StateRecordOnDisk.read, dist.get_rank() == BAD_RANK

    def failing(record: Any) -> Any:
        time.sleep(0.05)
        if broken:
            raise StorageError("EIO: the device went away")
        return read(record)

    text = {}
    with mock.patch.object(StateRecordOnDisk, "read", failing):
        engine.save_checkpoint(f"{folder}/saved", tag="bad", blocking=False)
        text["steps"] = attempt(lambda: [train(engine, case, step, step + 1) for step in (1, 2)])
        text["finish"] = attempt(engine.finish_checkpoint)
    text["then"] = attempt(lambda: train(engine, case, engine.global_steps, 4))
    text["save"] = attempt(lambda: engine.save_checkpoint(f"{folder}/saved"))
    engine.destroy()
    text["left"] = sorted(os.listdir(f"{folder}/saved"))
    return text


def test_unreadable_state_on_disk_blocks_no_step(tmp_path: Path) -> None:
    for text in run_ranks(unreadable, 2, str(tmp_path)):
        results = text["steps"] or text["finish"]
        assert results.startswith("CheckpointError: ") and f"rank {BAD_RANK}: StorageError: EIO" in results
        assert not (text["steps"] and text["finish"])
        assert (text["then"], text["save"]) == ("", "")
        assert text["left"] == ["global_step1", "global_step4", "latest", *sorted(SCRIPTS)]


def laid_out_again(folder: str) -> str:
    """Save states that are on disk while `refresh` allocates other disk space for them."""
    from windlass.zero.update.optimizer_state_offload import StateRecordOnDisk

    case, read = CASES[5], StateRecordOnDisk.read
    engine = engine_for(case, folder, 0)
    train(engine, case, 0, 1)
    saved = engine.fingerprint()

    def slowly(record: Any) -> Any:
        time.sleep(0.05)
        return read(record)

    with mock.patch.object(StateRecordOnDisk, "read", slowly):
        engine.save_checkpoint(f"{folder}/saved", blocking=False)
        engine.refresh()
    text = attempt(lambda: train(engine, case, 1, 2)) + attempt(engine.finish_checkpoint)
    assert engine.fingerprint() != saved
    engine.load_checkpoint(f"{folder}/saved")
    assert engine.fingerprint() == saved
    engine.destroy()
    return text


def test_refresh_waits_for_the_save(tmp_path: Path) -> None:
    assert run_ranks(laid_out_again, 1, str(tmp_path)) == [""]
