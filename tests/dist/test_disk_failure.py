"""Tests of a disk that fails on one rank: every rank raises, none hangs, and none continues from half a step."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_offload import LATE, offload_to
from tests.models import Place
from tests.oracle import Recipe

BAD_RANK = 0


class Failed:
    """Request that fails with an error."""

    def __init__(self, failure: tuple[int, int, int, int]) -> None:
        self._failure = failure

    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True

    def failure(self) -> tuple[int, int, int, int]:
        return self._failure


class FailedLate(Failed):
    """Request whose failure is known only after a wait."""

    def __init__(self, failure: tuple[int, int, int, int]) -> None:
        super().__init__(failure)
        self._over = False

    def done(self) -> bool:
        return self._over

    def wait(self, seconds: float) -> bool:
        self._over = True
        return True


class GoneDevice:
    """I/O engine whose reads, writes, or both fail with EIO."""

    def __init__(self, engine: Any, writes: Sequence[bool], kind: type[Failed] = Failed) -> None:
        self._engine, self._writes, self._kind = engine, writes, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, write: bool, spans: Sequence[tuple[int, ...]]) -> Any:
        if write in self._writes and spans:
            return self._kind((errno.EIO, spans[0][0], spans[0][1], 0))
        return self._engine.submit(write, spans)


class Breaker:
    """Tool that breaks the disk of one rank and repairs it."""

    def __init__(self, engine: Any) -> None:
        self.disk = engine._sharded.tiers.disk
        self._whole = self.disk._transfers._engine

    def smash(self, how: str) -> None:
        if dist.get_rank() != BAD_RANK:
            return
        if how == "cut":
            os.ftruncate(self.disk._stripes.descriptors[0], 0)
        else:
            self.disk._transfers._engine = GoneDevice(
                self._whole, {"read": [False], "write": [True], "gone": [False, True]}[how]
            )

    def mend(self) -> None:
        self.disk._transfers._engine = self._whole


def begin(
    folder: str,
    gradients: str = "cpu",
    param: str = "nvme",
    optimizer: str = "AdamW",
    among: int = -1,
    accumulation: int = 1,
) -> tuple[Any, Any]:
    subject = specimen("four_blocks")
    cut = (("stage3_max_reuse_distance", 0), ("mics_shard_size", among))
    zero = (*offload_to("nvme", param, folder, gradient_device=gradients), *cut)
    recipe = Recipe(
        accumulation=accumulation,
        optimizer=optimizer,
        optimizer_params=ADAMW if optimizer == "AdamW" else (("lr", 1e-3),),
    )
    return subject, start(subject, ds_config(recipe, Setting(stage=3 if param == "nvme" else 2, zero=zero)))


def forget(engine: Any) -> None:
    """Drop the parameters that the last step left in memory, so that they are read from disk again."""
    for unit in engine._sharded.units:
        if unit.shard_slot is not None:
            unit.shard_slot.drop_staged()


def attempt(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step(subject: Any, engine: Any, number: int, breaker: Breaker | None = None, when: str = "", how: str = "") -> None:
    """Run one step. `when` names the call before which the disk breaks."""
    batch = subject.batch(Place(number, 0, dist.get_rank()))

    def backward(loss: torch.Tensor) -> None:
        if when == "backward" and breaker:
            breaker.smash(how)
        engine.backward(loss)

    if when == "forward" and breaker:
        forget(engine)
        breaker.smash(how)
    subject.train(engine, batch, backward)
    if when == "step" and breaker:
        breaker.smash(how)
    engine.step()


def repeated(folder: str, when: str, how: str, gradients: str, among: int = -1) -> list[Any]:
    """Return the error of the disk failure, and whether the step, repeated on a working disk, has the right result."""
    results = []
    text = ""
    for breaks in (False, True):
        subject, engine = begin(folder, gradients, among=among)
        for number in range(3):
            if breaks and number == 1:
                breaker = Breaker(engine)
                text = attempt(lambda: step(subject, engine, 1, breaker, when, how))  # noqa: B023
                breaker.mend()
            step(subject, engine, number)
        results.append(whole_params(engine.module))
        engine.destroy()
    return [text, all(torch.equal(results[0][name], results[1][name]) for name in results[0])]


@pytest.mark.parametrize(
    ("transport", "when", "how", "gradients", "words"),
    [
        ("gloo", "forward", "read", "cpu", ("this forward could not read parameters", "reading", "parameters of")),
        pytest.param(
            *("shm", "forward", "read", "cpu", ("this forward could not read parameters", "reading", "parameters of")),
            marks=pytest.mark.slow,
        ),
        ("gloo", "backward", "read", "cpu", ("this step was skipped", "reading", "parameters of")),
        ("shm", "backward", "write", "nvme", ("this step was skipped", "writing", "gradient of")),
    ],
)
def test_failure_before_the_update_changes_nothing(
    transport: str, when: str, how: str, gradients: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    for text, equal in run_ranks(repeated, 2, str(tmp_path), when, how, gradients, env=LATE, transport=transport):
        assert text.startswith("StorageError: ") and "parameters and optimizer states are unchanged" in text
        for word in (*words, "rank 0: ", "EIO", str(tmp_path)):
            assert word in text
        assert equal
    assert list(tmp_path.iterdir()) == []


def test_failed_read_in_one_group_is_raised_by_the_step(tmp_path: Path) -> None:
    """A read failure in one of several groups is raised by the step on all ranks.

    The forward of the group can't inform the other groups, which may have no failure.
    """
    for text, equal in run_ranks(repeated, 2, str(tmp_path), "forward", "read", "cpu", 1, env=LATE):
        assert text.startswith("StorageError: this step was skipped") and "rank 0: reading" in text and "EIO" in text
        assert equal


def half_a_step(folder: str, how: str, param: str, optimizer: str) -> dict[str, str]:
    """Return the errors of each call after an update in which the disk failed."""
    subject, engine = begin(folder, param=param, optimizer=optimizer)
    step(subject, engine, 0)
    engine.save_checkpoint(f"{folder}/saved")
    breaker = Breaker(engine)
    batch = subject.batch(Place(1, 0, dist.get_rank()))
    name, parameter = next(iter(engine.module.named_parameters()))
    import windlass

    text = {"step": attempt(lambda: step(subject, engine, 1, breaker, "step", how))}
    breaker.mend()
    text["forward"] = attempt(lambda: subject.train(engine, batch, engine.backward))
    text["again"] = attempt(engine.step)
    text["save"] = attempt(lambda: engine.save_checkpoint(f"{folder}/saved"))
    text["read"] = attempt(lambda: windlass.zero.full_param(parameter))
    if how != "cut":
        breaker.smash(how)
        text["broken"] = attempt(lambda: engine.load_checkpoint(f"{folder}/saved"))
        breaker.mend()
    text["load"] = attempt(lambda: engine.load_checkpoint(f"{folder}/saved"))
    step(subject, engine, 1)
    result = whole_params(engine.module)
    text["destroy"] = attempt(engine.destroy)
    dist.barrier()
    text["left"] = " ".join(sorted(os.listdir(folder)))
    text["latest"] = Path(folder, "saved", "latest").read_text()
    shapes = {key: tuple(value.shape) for key, value in engine.module.named_parameters()}
    text["shapes"] = "" if shapes == {k: tuple(v.shape) for k, v in subject.build().named_parameters()} else str(shapes)
    _, again = begin(f"{folder}/other", param=param, optimizer=optimizer)
    again.load_checkpoint(f"{folder}/saved")
    text["steps"] = str(again.global_steps)
    step(subject, again, 1)
    text["same"] = str(all(torch.equal(value, result[name]) for name, value in whole_params(again.module).items()))
    again.destroy()
    return text


@pytest.mark.parametrize(
    ("ranks", "transport", "how", "param", "optimizer"),
    [
        (2, "gloo", "read", "nvme", "AdamW"),
        (2, "shm", "write", "none", "AdamW"),
        (2, "gloo", "gone", "none", "Lamb"),
        (1, "gloo", "cut", "none", "AdamW"),
    ],
)
def test_training_cannot_continue_after_a_partial_step(
    ranks: int, transport: str, how: str, param: str, optimizer: str, tmp_path: Path
) -> None:
    reason = "short read" if how == "cut" else "EIO"
    for text in run_ranks(half_a_step, ranks, str(tmp_path), how, param, optimizer, env=LATE, transport=transport):
        assert text["step"].startswith("StorageError: this step was applied in part: rank 0: ")
        for word in (reason, "master weights and optimizer states of", str(tmp_path), "load the last checkpoint"):
            assert word in text["step"]
        for call, kind in (("forward", "Storage"), ("again", "Storage"), ("read", "Storage"),
                           ("save", "Checkpoint")):  # fmt: skip
            assert text[call].startswith(f"{kind}Error: ") and "applied in part" in text[call] and reason in text[call]
        assert how == "cut" or text["broken"].startswith("StorageError: ")
        assert text["load"] == "" and text["same"] == "True", text
        assert text["destroy"] == "" and text["shapes"] == ""
        assert text["left"] == "saved" and text["latest"].strip() == "global_step1" and text["steps"] == "1"


def over_stages(folder: str, stage: int, delays: bool, how: str) -> dict[str, Any]:
    """Break the disk of rank 0 under a pipeline, continue from a checkpoint, and compare with an undisturbed run."""
    from tests.dist import pipeline_engine_runs as runs

    both = {"device": "nvme", "nvme_path": folder}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 2000}
    zero |= {"offload_optimizer": {**both, "delayed_update": delays}, **({"offload_param": both} if stage == 3 else {})}
    case = runs.Case(stage=stage, config=(("zero_optimization", zero),))

    def train(engine: Any) -> None:
        for number in range(1, 3):
            runs.one_step(engine, case, number)

    results, text = [], {}
    for breaks in (False, True):
        engine = runs.start(case)
        runs.one_step(engine, case, 0)
        engine.save_checkpoint(f"{folder}/saved", tag=str(breaks))
        if breaks:
            forget(engine)
            breaker = Breaker(engine)
            breaker.smash(how)
            text["step"] = attempt(lambda: train(engine))  # noqa: B023 with a delay the second step receives the error
            breaker.mend()
            text["again"] = attempt(lambda: train(engine))  # noqa: B023
            text["save"] = attempt(lambda: engine.save_checkpoint(f"{folder}/saved", tag="mixed"))  # noqa: B023
            engine.load_checkpoint(f"{folder}/saved", tag=str(breaks))
        train(engine)
        results.append({name: value.clone() for name, value in engine.full_state_dict().items()})
        engine.destroy()
    text["same"] = all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    text["left"] = sorted(os.listdir(f"{folder}/saved"))
    return text


@pytest.mark.parametrize(
    ("transport", "stage", "delays", "how"),
    [
        ("gloo", 1, True, "write"),
        pytest.param("shm", 1, False, "read", marks=pytest.mark.slow),
        pytest.param("gloo", 3, False, "write", marks=pytest.mark.slow),
        ("shm", 3, False, "read"),
    ],
)
def test_disk_failure_under_one_stage_of_a_pipeline(
    transport: str, stage: int, delays: bool, how: str, tmp_path: Path
) -> None:
    for text in run_ranks(over_stages, 2, str(tmp_path), stage, delays, how, env=LATE, transport=transport):
        assert "rank 0: " in text["step"] and "EIO" in text["step"] and text["same"], text
        if stage == 3 and how == "read":  # a read of parameters fails before anything has changed
            assert "parameters and optimizer states are unchanged" in text["step"], text
            assert text["again"] == text["save"] == "", text
            continue
        assert text["step"].startswith("StorageError: ") and "load the last checkpoint" in text["step"], text
        assert text["again"].startswith("StorageError: ") and text["save"].startswith("CheckpointError: nothing is"), (
            text
        )
        assert "mixed" not in text["left"], text


def late(folder: str) -> list[str]:
    """Return the errors of a step whose last writes fail after its return, of the next step, and of a save."""
    subject, engine = begin(folder, param="none")
    step(subject, engine, 0)
    breaker = Breaker(engine)
    if dist.get_rank() == BAD_RANK:
        breaker.disk._transfers._engine = GoneDevice(breaker._whole, [True], FailedLate)
    text = [attempt(lambda: step(subject, engine, 1))]
    breaker.mend()
    text.append(attempt(lambda: step(subject, engine, 2)))
    text.append(attempt(lambda: engine.save_checkpoint(f"{folder}/saved")))
    engine.destroy()
    return text


def test_late_write_failure_is_raised_by_the_next_step(tmp_path: Path) -> None:
    for first, second, save in run_ranks(late, 2, str(tmp_path)):
        assert first == ""
        assert second.startswith("StorageError: ") and "rank 0: writing" in second and "EIO" in second
        assert "load the last checkpoint" in second and "states are unchanged" not in second
        assert save.startswith("CheckpointError: nothing is saved") and "EIO" in save
    assert list(tmp_path.iterdir()) == []


def failing_save(folder: str) -> list[str]:
    subject, engine = begin(folder)
    step(subject, engine, 0)
    breaker = Breaker(engine)
    breaker.smash("read")
    text = attempt(lambda: engine.save_checkpoint(f"{folder}/saved"))
    breaker.mend()
    there = str(any(Path(folder, "saved").iterdir()))
    breaker.smash("write")  # a save writes nothing to the tier, and so loses nothing there
    again = attempt(lambda: engine.save_checkpoint(f"{folder}/saved"))
    breaker.mend()
    step(subject, engine, 1)
    engine.destroy()
    return [text, there, again]


def test_save_with_a_failed_read_raises_on_all_ranks(tmp_path: Path) -> None:
    for text, there, again in run_ranks(failing_save, 2, str(tmp_path)):
        assert text.startswith("StorageError: nothing is saved")
        assert "rank 0: reading" in text and "states are unchanged" in text
        assert there == "False" and again == ""


def destroyed_blind(folder: str) -> list[Any]:
    """Call `destroy` while the parameters can't be read."""
    import logging

    subject, engine = begin(folder)
    step(subject, engine, 0)
    forget(engine)
    Breaker(engine).smash("gone")
    received: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: received.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("windlass").addHandler(handler)
    try:
        text = attempt(engine.destroy)
    finally:
        logging.getLogger("windlass").removeHandler(handler)
    full = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    return [text, full, [line for line in received if "destroy() returns is incomplete" in line]]


def test_destroyed_model_with_lost_parameters_logs_an_error(tmp_path: Path) -> None:
    for text, full, received in run_ranks(destroyed_blind, 2, str(tmp_path)):
        assert text == "" and not full
        assert len(received) == 1 and "rank 0: reading" in received[0] and "NaN" in received[0]
    assert list(tmp_path.iterdir()) == []
