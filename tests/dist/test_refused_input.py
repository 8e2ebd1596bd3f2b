"""Tests that unsupported input raises on every rank, with an error that names the cause, the place and the fix."""

from __future__ import annotations

import logging
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.dist.test_offload import offload_to
from tests.models import Place
from tests.oracle import Recipe
from windlass.base.errors import ModelError
from windlass.storage.striped_files import filesystem_of


def refusal(what: str) -> str:
    import windlass

    model = oracle.build(specimen("mlp"))
    config: dict[str, Any] = ds_config(Recipe(), Setting(stage=2))
    if what == "frozen":
        model.requires_grad_(False)
    elif what == "device":
        model.blocks[1].up.weight = torch.nn.Parameter(torch.empty(32, 16, device="meta"))
    elif what == "triangle":
        config["train_batch_size"] = 7
    elif what == "world":
        del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        config["train_batch_size"] = 7
    elif what == "axes":
        config["parallel"] = {"pp": 3, "sp": 2}
    elif what == "ratio":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 1.5}
    elif what == "offload_param":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    elif what == "no_path":
        config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    elif what == "key":
        config["zero_optimization"]["stagee"] = 1
    elif what == "optimizer":
        config["optimizer"]["type"] = "AdamV"
    elif what == "sparse":
        config["optimizer"] = {"type": "SparseAdam", "params": {"lr": 1e-3}}
    elif what == "warm-up":
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}
    else:
        assert what == "config"
        config = {}
    try:
        windlass.initialize(model=model, config=config or None).__getitem__(0).destroy()
    except windlass.WindlassError as error:
        if what == "warm-up":  # raised after all other checks; the model still accepts an engine
            del config["scheduler"]
            windlass.initialize(model=model, config=config)[0].destroy()
        return f"{type(error).__name__}: {error}"
    return ""


WORDS = {
    "frozen": ("ModelError", "requires_grad"),
    "device": ("ModelError", "blocks.1.up.weight", "meta"),
    "triangle": ("ConfigError", "train_batch_size", "7", "2"),
    "world": ("ConfigError", "train_batch_size", "7", "2"),
    "axes": ("ConfigError", "pp 3 x dp_replicate 1 x ep 1 x sp 2 x tp 1 = 6 ranks", "world size 2", "pp 1 with"),
    "ratio": ("ConfigError", "zero_optimization.offload_optimizer.ratio", "1.5", "less than or equal to 1"),
    "offload_param": ("ConfigError", "zero_optimization.offload_param", "stage 3", "2"),
    "no_path": ("ConfigError", "zero_optimization.offload_optimizer.nvme_path", "folder"),
    "key": ("ConfigError", "stagee", "nearest is zero_optimization.stage"),
    "optimizer": ("ConfigError", "AdamV", "nearest is Adam"),
    "sparse": ("ConfigError", "SparseAdam"),
    "config": ("ConfigError", "config"),
    "warm-up": ("ConfigError", "warmup_num_steps", "-1"),
}


@pytest.mark.parametrize("what", WORDS)
def test_invalid_input_is_refused_by_name_on_every_rank(what: str) -> None:
    for text in run_ranks(refusal, 2, what):
        for word in WORDS[what]:
            assert word in text


def apart() -> list[str]:
    """Return the errors of `initialize` if rank 1 freezes a parameter, has another layer, dtype or optimizer group."""
    import windlass

    text = []
    for what in ("frozen", "other", "narrow", "group"):
        model, rank = oracle.build(specimen("mlp")), torch.distributed.get_rank()
        config = ds_config(Recipe(), Setting(stage=2))
        del config["optimizer"]
        trained = list(model.parameters())
        if rank == 1 and what == "frozen":
            model.blocks[1].up.weight.requires_grad_(False)
        elif rank == 1 and what == "other":
            model.blocks[1] = torch.nn.Linear(16, 16)
        elif rank == 1 and what == "narrow":
            model.bfloat16()
        elif rank == 1:
            trained.pop()
        try:
            windlass.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.1), config=config)
            text.append("")
        except windlass.WindlassError as error:
            text.append(f"{type(error).__name__}: {error}")
    return text


def test_ranks_with_different_models_raise_with_the_parameter() -> None:
    for frozen, other, narrow, group in run_ranks(apart, 2):
        for text in (frozen, other, narrow, group):
            assert text.startswith("ModelError: the model is not the same on all ranks"), text
        assert (
            "'blocks.1.up.weight' is [32, 16] in torch.float32, trained, in group 0 of the optimizer on rank" in frozen
        )
        assert "[32, 16] in torch.float32, frozen" in frozen and "freeze" in frozen
        assert "missing on rank 1" in other and "'blocks.1." in other
        assert "in torch.bfloat16" in narrow and "in no group of an optimizer on rank 1" in group


def bad_disk(what: str, folder: str) -> list[Any]:
    """Make one rank's disk unusable.

    Return the error of `initialize`, whether the model is unchanged, and the files left. Then train on a usable disk.
    """
    import windlass

    rank = torch.distributed.get_rank()
    path = Path(folder, f"rank{rank}")
    path.mkdir()
    bad = {"file": path / "taken", "below a file": path / "taken" / "below", "denied": Path("/proc/self/below")}
    (path / "taken").write_text("somebody's")
    where = bad.get(what, path) if rank == 1 else path
    model = oracle.build(specimen("mlp"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    setting = Setting(stage=3, zero=offload_to("nvme", "nvme", where))
    text = ""
    with pytest.MonkeyPatch.context() as patch:
        if what == "full" and rank == 1:
            patch.setattr(os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=3, f_frsize=4096))
        try:
            windlass.initialize(model=model, config=ds_config(Recipe(), setting))
        except windlass.WindlassError as error:
            text = f"{type(error).__name__}: {error}"
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    left = [entry.name for entry in path.iterdir() if entry.name != "taken"]
    config = ds_config(Recipe(), Setting(stage=3, zero=offload_to("nvme", "nvme", path)))
    engine = windlass.initialize(model=model, config=config)[0]
    batch = specimen("mlp").batch(Place(0, 0, rank))
    specimen("mlp").train(engine, batch, engine.backward)
    engine.step()
    engine.destroy()
    return [text, same, left]


BAD_DISKS = {
    "file": ("rank1/taken", "a file is where a directory should be"),
    "below a file": ("rank1/taken/below", "a file is where a directory should be"),
    "denied": ("/proc/self/below", "nvme_path"),
    "full": ("no space for all offloaded tensors", "more needed on", "12288 bytes free", "free space there"),
}


@pytest.mark.parametrize("what", BAD_DISKS)
def test_unusable_disk_of_one_rank_raises_on_all_and_changes_nothing(what: str, tmp_path: Path) -> None:
    for text, same, left in run_ranks(bad_disk, 2, what, str(tmp_path)):
        assert text.startswith("StorageError: ") and "rank 1: " in text and "rank 0" not in text.replace("rank0", "")
        for word in BAD_DISKS[what]:
            assert word in text
        assert same and left == []


def space_taken(folder: str, optimizer: str) -> list[int]:
    """Return the size of the tier's file after `initialize` and after a step."""
    recipe = Recipe(optimizer=optimizer, optimizer_params=(("lr", 1e-3),))
    subject = specimen("four_blocks")
    zero = (*offload_to("nvme", "nvme", folder, gradient_device="nvme"), ("sub_group_size", 5000))
    engine = start(subject, ds_config(recipe, Setting(stage=3, zero=zero)))
    file = engine._sharded.tiers.disk._stripes.descriptors[0]
    sizes = [os.fstat(file).st_size]
    subject.train(engine, subject.batch(Place(0, 0, torch.distributed.get_rank())), engine.backward)
    engine.step()
    sizes.append(os.fstat(file).st_size)
    engine.destroy()
    return sizes


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "SGD"])
def test_all_space_is_reserved_before_any_transfer(optimizer: str, tmp_path: Path) -> None:
    for before, after in run_ranks(space_taken, 2, str(tmp_path), optimizer):
        assert before == after > 0


def files_of(folder: str) -> dict[str, Any]:
    """Start and end an engine with a disk tier beside files of a dead and of a live process.

    Return the modes of the engine's files, which of the other files remain, and warnings about /dev/shm.
    """
    received: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: received.append(record.getMessage())  # type: ignore[method-assign]
    user, host = os.getuid(), "".join(c if c.isalnum() or c == "." else "_" for c in platform.node())
    dead, live = (
        Path(folder, f"windlass-{user}-{host}-{n}-{t}-windlass-x") for n, t in ((999999999, 1), (1, _began(1)))
    )
    for path in (dead, live):
        path.mkdir(exist_ok=True)
        Path(path, "stripe").write_text("of a process")
    logging.getLogger("windlass").addHandler(handler)
    try:
        engine = start(specimen("mlp"), ds_config(Recipe(), Setting(stage=2, zero=offload_to("nvme", "none", folder))))
        disk = engine._sharded.tiers.disk
        state = os.fstat(disk._stripes.descriptors[0])
        results = {
            "directory": [stat.S_IMODE(path.stat().st_mode) for path in disk.directories()],
            "file": (stat.S_IMODE(state.st_mode), state.st_nlink),
            "dead": dead.exists(),
            "live": Path(live, "stripe").read_text(),
        }
        engine.destroy()
        results["left"] = sorted(path.name for path in Path(folder).iterdir()) == [live.name]
        shared = start(
            specimen("mlp"), ds_config(Recipe(), Setting(stage=2, zero=offload_to("nvme", "none", "/dev/shm")))
        )
        shared.destroy()
        results["warned"] = [line for line in received if "this is memory" in line and "/dev/shm" in line]
    finally:
        logging.getLogger("windlass").removeHandler(handler)
    return results


def _began(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_files_are_private_and_only_those_of_dead_processes_are_removed(tmp_path: Path) -> None:
    (result,) = run_ranks(files_of, 1, str(tmp_path))
    assert result["directory"] == [0o700] and result["file"] == (0o600, 0)
    assert not result["dead"] and result["live"] == "of a process" and result["left"]
    if filesystem_of(Path("/dev/shm")) == "tmpfs":
        assert len(result["warned"]) == 1


ENDS = """
import os, signal, sys, torch, windlass
import torch._dynamo  # as every optimizer does: here, once for all that are forked
windlass.initialize  # imported at its first use
folder = sys.argv[1]
def train():
    away = {"device": "nvme", "nvme_path": folder}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "zero_optimization": {"stage": 3, "offload_optimizer": away, "offload_param": away}}
    engine, *_ = windlass.initialize(model=torch.nn.Linear(4, 4), config=config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    return engine
for end in ("exit", "raise", "kill"):
    pid = os.fork()
    if pid == 0:
        engine = train()
        if end == "raise":
            raise RuntimeError("odd")
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit()
    os.waitpid(pid, 0)
    print(end, len(os.listdir(folder)), flush=True)
train().destroy()
print("next", len(os.listdir(folder)), flush=True)
"""


@pytest.mark.slow  # `tests/process/test_disk_tier_processes.py` tests each end with one tier.
def test_no_file_remains_after_any_exit(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[:4] == ["exit 0", "raise 0", "kill 1", "next 0"], done.stderr[-2000:]


def nan_loss(setting: Setting) -> list[str]:
    """Train a step with NaN in the input of rank 1. Return the error, and "True" if all weights are finite."""
    subject = specimen("mlp")
    engine = start(subject, ds_config(Recipe(), setting))
    rank = torch.distributed.get_rank()
    batch = subject.batch(Place(0, 0, rank))
    if rank == 1:
        batch["x"][0, 0] = float("nan")
    text = ""
    try:
        subject.train(engine, batch, engine.backward)
        engine.step()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    import windlass

    finite = all(bool(windlass.zero.full_param(p).isfinite().all()) for p in engine.module.parameters())
    engine.destroy()
    return [text, str(finite)]


def test_nan_loss_raises_and_leaves_the_weights_finite(stage: int) -> None:
    for text, finite in run_ranks(nan_loss, 2, Setting(stage=stage)):
        assert text.startswith("LossError") and "nan" in text.lower()
        assert finite == "True"


def set_by_hand(stages: list[int]) -> None:
    import windlass
    from windlass.compat.deepspeed_initialize import initialize

    for stage in stages:
        torch.manual_seed(0)
        model, config = torch.nn.Linear(3, 1), ds_config(Recipe(), Setting(stage=stage))
        config.update(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
        engine = windlass.initialize(model=model, config=config)[0]
        before = engine.full_state_dict()
        engine.backward(engine(torch.ones(1, 3)).sum())
        with pytest.raises(
            ModelError, match=r"'bias'.grad was assigned by the script \(1 such parameters\).*torch.autograd.backward"
        ):
            model.bias.grad = torch.ones(1)
        assert all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())
        engine.zero_grad()
        # the call that the message recommends
        torch.autograd.backward([model.bias], [torch.full((1,), 1.0 + engine.global_rank)])
        assert windlass.zero.full_grad(model.bias).item() == (1 + engine.world_size) / 2
        engine.step()
        after = engine.full_state_dict()
        if engine.global_rank == 0:  # only rank 0 gets the state
            assert after["bias"] < before["bias"] and torch.equal(after["weight"], before["weight"])
        engine = initialize(model=model, config=config)[0]
        model.bias.grad = torch.ones(1)
        engine.step()  # a DeepSpeed engine does not raise
        assert model.bias.grad is None
        engine.destroy()


def test_manually_set_gradient_is_not_ignored() -> None:
    run_ranks(set_by_hand, 2, [0, 3])
