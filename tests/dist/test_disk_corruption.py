"""Tests of bytes that change on one rank's disk: no step uses them, no save contains them, and a load repairs them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.equivalence_runs import specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_disk_failure import BAD_RANK, attempt, begin, forget, step
from tests.dist.test_offload import LATE
from tests.dist.test_one_bit_adam import FREEZE, Case, train
from tests.models import Place
from tests.unit.storage.test_page_checksums import rewrite

# the damaged kind of data, and the kind of damage
CASES = [
    ("parameters", "flip"),
    ("master", "flip"),
    ("exp_avg", "flip"),
    ("gradient", "flip"),
    ("master", "old"),
    ("exp_avg", "zero"),
    ("master", "swap"),
    ("parameters", "cut"),
]
FIRST = {"parameters": "this forward could not read parameters"}
HOLDERS = {"parameters": "parameters of ", "gradient": "gradient of "}


class Spoiler:
    """Tool that changes the files of one rank, bypassing the disk tier.

    Attributes:
        names: names of all parameters of the model.
    """

    def __init__(self, engine: Any, kind: str, how: str) -> None:
        self.model, self.kind, self.how = engine._sharded, kind, how
        self.disk = self.model.tiers.disk
        self.names = {name for unit in self.model.units for name in unit.names}
        self._old: dict[tuple[Any, int], bytes] = {}

    def spans(self) -> list[tuple[Any, int, int]]:
        """Return `(extent, offset, bytes)` for all data of this kind."""
        self.model.tiers.staging.wait_all()
        if self.kind in ("master", "exp_avg"):
            records = self.model.masters.state_offload._records.values()
            key = "" if self.kind == "master" else "exp_avg"
            return [(r.extent, e.offset, e.nbytes) for r in records for e in r.entries if e.key == key]
        if self.kind == "worker_error":
            slots = list(self.model.update._phase._memory._slots.values())
        elif self.kind == "loco_error":
            slots = list(self.model.quantization_errors._memory._slots.values())
        elif self.kind == "parameters":
            slots = [u.shard_slot for u in self.model.units]
        else:
            slots = [s.storage for s in self.model.slots]
        return [(slot.extent, 0, slot.nbytes) for slot in slots if slot is not None and slot.extent is not None]

    def content(self, extent: Any, at: int, nbytes: int) -> bytes:
        into = torch.empty(nbytes, dtype=torch.uint8)
        self.disk.read_unguarded(extent, at, into)
        return bytes(into.numpy())

    def remember(self) -> None:
        self._old = {(extent, at): self.content(extent, at, nbytes) for extent, at, nbytes in self.spans()}

    def spoil(self) -> None:
        result = self.spans()
        theirs: list[Any] = [None] * dist.get_world_size()
        if self.how == "swap":
            dist.all_gather_object(theirs, [self.content(extent, at, nbytes) for extent, at, nbytes in result])
        if dist.get_rank() != BAD_RANK:
            return
        assert result
        if self.how == "cut":
            os.ftruncate(self.disk._stripes.descriptors[0], 0)
            return
        before = [self.content(extent, at, nbytes) for extent, at, nbytes in result]
        for number, ((extent, at, nbytes), data) in enumerate(zip(result, before, strict=True)):
            if self.how == "flip":  # the lowest bits of 200 mantissas
                changed = bytearray(data)
                for place in range(0, nbytes, max(4, nbytes // 200 // 4 * 4)):
                    changed[place] ^= 1
            elif self.how == "old":
                changed = bytearray(self._old[extent, at])
            elif self.how == "zero":
                changed = bytearray(nbytes)
            else:
                changed = bytearray(theirs[1][number][:nbytes])
            assert bytes(changed) != data
            rewrite(self.disk, extent, at, bytes(changed))


def damaged(subject: Any, engine: Any, saved: str, kind: str, how: str) -> dict[str, Any]:
    """Return the errors of each call when data is damaged before a step, and the state after a following load."""
    import windlass

    spoiler = Spoiler(engine, kind, how)
    spoiler.remember()
    step(subject, engine, 5)
    batch = subject.batch(Place(6, 0, dist.get_rank()))

    def one() -> None:
        forget(engine)
        if kind != "gradient":
            spoiler.spoil()
        subject.train(engine, batch, engine.backward)
        if kind == "gradient":
            spoiler.spoil()
        engine.step()

    parameter = next(engine.module.parameters())
    text: dict[str, Any] = {"step": attempt(one)}
    text["forward"] = attempt(lambda: subject.train(engine, batch, engine.backward))
    text["again"] = attempt(engine.step)
    text["read"] = attempt(lambda: windlass.zero.full_param(parameter))
    text["part"] = attempt(lambda: engine.load_checkpoint(saved, load_optimizer_states=False))
    text["save"] = attempt(lambda: engine.save_checkpoint(saved))
    text["behind"] = attempt(lambda: engine.save_checkpoint(saved, blocking=False))
    text["latest"] = Path(saved, "latest").read_text().strip()
    text["load"] = attempt(lambda: engine.load_checkpoint(saved))
    text["names"] = spoiler.names
    return text


def all_damaged(folder: str, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Damage one engine in each way, and continue from a checkpoint as if nothing had happened."""
    subject, engine = begin(f"{folder}/disk", "nvme")
    step(subject, engine, 0)
    saved = f"{folder}/saved"
    engine.save_checkpoint(saved)
    step(subject, engine, 1)
    expected = whole_params(engine.module)
    results = []
    for kind, how in cases:
        text = damaged(subject, engine, saved, kind, how)
        results.append(text)
        if text["load"]:
            break
        text["save again"] = attempt(lambda: engine.save_checkpoint(f"{folder}/other"))
        step(subject, engine, 1)
        text["same"] = all(torch.equal(value, expected[name]) for name, value in whole_params(engine.module).items())
    engine.destroy()
    return results


@pytest.mark.parametrize(("ranks", "transport"), [(1, "gloo"), (2, "gloo"), (2, "shm")])
def test_damage_aborts_the_step_and_a_load_repairs_it(ranks: int, transport: str, tmp_path: Path) -> None:
    cases = [case for case in CASES if case[1] != "swap" or ranks > 1][: None if transport == "gloo" else 3]
    for result in run_ranks(all_damaged, ranks, str(tmp_path), cases, env=LATE, transport=transport, timeout=180):
        for (kind, how), reported in zip(cases, result, strict=True):
            where = kind, how, {call: str(words)[:400] for call, words in reported.items()}
            assert reported["step"].startswith(f"StorageError: {FIRST.get(kind, 'this step was applied in part')}"), (
                where
            )
            what = "short read" if how == "cut" else "damaged: the checksum differs from that of the written bytes"
            words = ["rank 0: reading ", what, HOLDERS.get(kind, "master weights and optimizer states of "), "bytes ",
                     f"of the file on {tmp_path}/disk (", " of it, of ", "load the last checkpoint"]  # fmt: skip
            if how != "cut":
                words.append({"master": "the master weight of '", "exp_avg": "exp_avg of '"}.get(kind, "of '"))
            for word in words:
                assert word in reported["step"], (word, where)
            assert any(f"'{name}'" in reported["step"] for name in reported["names"]), where
            for call in ("forward", "again", "read", "part"):
                assert reported[call].startswith("StorageError: ") and what in reported[call], (call, where)
            for call in ("save", "behind"):
                assert reported[call].startswith("CheckpointError: nothing is saved") and what in reported[call], (
                    call,
                    where,
                )
            assert not any("states are unchanged" in str(text) for text in reported.values()), where
            assert reported["latest"] == "global_step1" and reported["load"] == reported["save again"] == "", where
            assert reported["same"], where


def not_yet_stepped(folder: str) -> list[Any]:
    """Damage data that is read outside of an update: a gradient in accumulation, and the states that a save reads."""
    subject, engine = begin(f"{folder}/disk", "nvme", accumulation=2)
    plain, plain_engine = begin(f"{folder}/plain", "nvme", accumulation=2)

    def micro_batches(of: Any, to: Any, number: int, spoiler: Spoiler | None = None) -> None:
        for micro in range(2):
            of.train(to, of.batch(Place(number, micro, dist.get_rank())), to.backward)
            if spoiler is not None and micro == 0:
                to._sharded.reducer.finish()
                spoiler.spoil()
            to.step()

    micro_batches(subject, engine, 0)
    text = [attempt(lambda: micro_batches(subject, engine, 1, Spoiler(engine, "gradient", "flip")))]
    for number in (0, 1):
        micro_batches(plain, plain_engine, number)
    micro_batches(subject, engine, 1)
    same = whole_params(engine.module)
    text.append(all(torch.equal(value, same[name]) for name, value in whole_params(plain_engine.module).items()))
    plain_engine.destroy()
    for blocking in (True, False):
        engine.save_checkpoint(f"{folder}/saved", tag=f"good{blocking}")
        Spoiler(engine, "exp_avg", "flip").spoil()
        text.append(attempt(lambda: (engine.save_checkpoint(f"{folder}/saved", blocking=blocking),  # noqa: B023
                                     engine._async_save.finish())))  # fmt: skip
        text.append(sorted(os.listdir(f"{folder}/saved")))
        if not blocking:
            text.append(attempt(lambda: micro_batches(subject, engine, 2)))
        text.append(attempt(lambda: engine.load_checkpoint(f"{folder}/saved")))
    engine.destroy()
    return text


def test_damage_found_before_an_update(tmp_path: Path) -> None:
    for text in run_ranks(not_yet_stepped, 2, str(tmp_path), env=LATE, timeout=120):
        gradient, same, save, files, load, behind, still, step, again = text
        assert gradient.startswith("StorageError: this step was skipped") and "gradient of" in gradient
        assert "states are unchanged" in gradient and same, text
        assert (
            save.startswith("StorageError: nothing is saved")
            and "exp_avg of" in save
            and "states are unchanged" not in save
        )
        assert "Error: " in behind and "exp_avg of" in behind
        assert step.startswith("StorageError: this step was applied in part") and "exp_avg of" in step
        assert load == again == ""
        assert "goodTrue" in files and "latest" in files and not [n for n in files + still if n.startswith("global")]


def damaged_errors(folder: str) -> tuple[str, str, bool]:
    """Return the error of a step with damaged error feedback, that of a following load, and True if the run then
    continues as an undamaged one."""
    case = Case(2, nvme=True)
    engine = start(specimen(case.model), case.config(f"{folder}/disk"))
    train(engine, case, 0, FREEZE + 2)
    engine.save_checkpoint(f"{folder}/saved")
    train(engine, case, FREEZE + 2, FREEZE + 3)
    expected = whole_params(engine.module)
    Spoiler(engine, "worker_error", "flip").spoil()
    failed = attempt(lambda: train(engine, case, FREEZE + 3, FREEZE + 4))
    loaded = attempt(lambda: engine.load_checkpoint(f"{folder}/saved"))
    train(engine, case, FREEZE + 2, FREEZE + 3)
    same = all(torch.equal(value, expected[name]) for name, value in whole_params(engine.module).items())
    engine.destroy()
    return failed, loaded, same


def test_damaged_error_feedback_aborts_the_step_and_a_load_repairs_it(tmp_path: Path) -> None:
    for failed, loaded, same in run_ranks(damaged_errors, 2, str(tmp_path), timeout=120):
        assert failed.startswith("StorageError: this step was applied in part") and "worker_error of " in failed
        assert not loaded and same
