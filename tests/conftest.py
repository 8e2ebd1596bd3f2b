"""Settings of all tests: no network, one thread, quiet libraries, bytecode, no variables for debugging."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process with the threads of tokenizers cannot fork ranks safely
for _name in ("WINDLASS_DEBUG", "WINDLASS_TRANSPORT", "WINDLASS_LOG_LEVEL", "LOGLEVEL"):
    os.environ.pop(_name, None)

# Container images often disable bytecode. Each of the many processes of a run would then compile all modules that it
# imports: importing torch takes three times as long.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts background jobs with SIGINT ignored, and nohup with SIGHUP ignored. Children inherit this, and tests
# send both signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Ranks share few cores here. By the default policy the receiver of a message preempts its sender, which often holds a
# lock of gloo's connection at that moment; gloo's event loop then spins until the sender runs again, for a third of all
# processor time. Under SCHED_BATCH a thread that wakes up waits for its turn. Threads and processes inherit the policy.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Machines that run tests are often busy: a slow example is not a failure. On CI the examples are the same every time.
settings.register_profile("windlass", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("windlass")


# Imports create millions of objects that live until the end. Each full collection would walk through all of them, which
# takes up to a second, and many tests collect garbage.
gc.disable()
_modules_at_freeze = 0


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude the imported modules and the collected tests from garbage collection, and turn it on."""
    _freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_new_modules() -> None:
    """Exclude modules that earlier test files imported from garbage collection."""
    if len(sys.modules) > _modules_at_freeze + 50:
        _freeze()


def _freeze() -> None:
    global _modules_at_freeze
    _modules_at_freeze = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: the tests compute little, and several threads would compete with those of parallel tests."""
    import torch  # not at the top: the controller of pytest-xdist does not need torch

    torch.set_num_threads(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here ({mounted.stderr.decode().strip()})")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
