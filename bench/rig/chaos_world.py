"""Ranks that train and save until they are killed, and their logs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import windlass
import windlass.checkpoint.collective_transfer
import windlass.initialize  # imported before the fork, so that forked ranks need not import it

RANKS = 2
_PR_SET_PDEATHSIG = 1
# File-system calls of a save that are counted; a rank is killed just before one of them.
CALLS = ("fsync", "rename", "replace", "unlink", "posix_fallocate", "mkdir")


@dataclass(frozen=True)
class Fate:
    """Planned end of a world: `rank` kills itself, or (`everybody`) all ranks, after `calls` file-system calls."""

    rank: int
    calls: int
    everybody: bool


class Marks:
    """Log of a rank. Each line is written by one system call, so that lines survive the rank's death."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"marks{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, *words: object) -> None:
        line = " ".join(map(str, words))
        os.write(self._file, f"{time.monotonic():.4f} {line}\n".encode())


def read_marks(folder: Path, rank: int) -> list[list[str]]:
    """Return the words of each line, its time first."""
    path = folder / f"marks{rank}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def train(folder: Path, last: int, *, saves: bool = True) -> None:
    """Resume from the newest checkpoint and train up to step `last`; save after every other step, alternately blocking
    and async."""
    rank = int(os.environ["RANK"])
    mark = Marks(folder, rank)
    mark("pid", os.getpid())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers += [torch.nn.Linear(192, 192), torch.nn.Tanh()]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = windlass.initialize(model=torch.nn.Sequential(*layers), config=config)
    saved = folder / "saved"
    if (saved / "latest").exists():
        engine.load_checkpoint(str(saved))
    mark("up", engine.global_steps)
    waiting = None
    for step in range(engine.global_steps, last):
        torch.manual_seed(RANKS * step + rank)
        rows = torch.randn(2, 192)
        loss = (engine(rows) - rows).square().mean()
        engine.backward(loss)
        engine.step()
        mark("step", step, float(loss).hex())
        if saves and step % 2:
            blocking = step % 4 == 1
            mark("save", step + 1, "blocking" if blocking else "behind")
            engine.save_checkpoint(str(saved), tag=f"place{step // 2 % 3}", blocking=blocking)
            if waiting is not None:
                mark("done", waiting)
            waiting = None if blocking else step + 1
            mark(*(("done", step + 1) if blocking else ("goes on", step + 1)))
    engine.destroy()
    if waiting is not None:
        mark("done", waiting)


def obey(fate: Fate) -> None:
    """Install the kill that `fate` plans on its rank. Collective."""
    pids: list[Any] = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() != fate.rank:
        return
    left = iter(range(fate.calls))

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                others = [pid for pid in pids if pid != os.getpid()] if fate.everybody else []
                for pid in [*others, os.getpid()]:
                    os.kill(pid, signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


class World:
    """Ranks forked from this process, which has imported torch and must not have started a thread.

    Args:
        fate: planned end; None: the run is not killed.
    """

    def __init__(self, folder: Path, last: int, *, fate: Fate | None = None, saves: bool = True) -> None:
        self.folder = folder
        store = folder / f"store{time.monotonic_ns()}"
        self.pids = [self._start(rank, store, last, fate, saves) for rank in range(RANKS)]
        self._left = set(self.pids)

    def running(self) -> set[int]:
        """Return the processes that have not ended."""
        for pid in list(self._left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._left.discard(pid)
        return self._left

    def wait(self, seconds: float) -> set[int]:
        """Wait at most `seconds` for all ranks to end. Return the running ones."""
        until = time.monotonic() + seconds
        while self.running() and time.monotonic() < until:
            time.sleep(0.01)
        return self.running()

    def kill(self, pids: set[int]) -> None:
        """Send SIGKILL to the processes of `pids` that still run."""
        for pid in pids & self.running():
            os.kill(pid, signal.SIGKILL)

    def _start(self, rank: int, store: Path, last: int, fate: Fate | None, saves: bool) -> int:
        parent = os.getpid()
        if pid := os.fork():
            return pid
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(code)
            output = os.open(self.folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            os.environ.update({name: str(value) for name, value in names.items()})
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
            if fate is not None:
                obey(fate)
            train(self.folder, last, saves=saves)
            code = 0
        except BaseException as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)


if __name__ == "__main__":  # a rank of `windlass run`
    train(Path(sys.argv[1]), int(sys.argv[2]))
