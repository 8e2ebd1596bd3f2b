"""Tests of the native kernels' threads when several Python threads use them at once, and after a fork."""

from __future__ import annotations

import subprocess
import sys

import pytest

from windlass.kernels.kernel_dispatch import list_kernel_paths

native = pytest.mark.skipif(len(list_kernel_paths()) == 1, reason="no native module was built")

_FORK = """
import os, signal, torch
from windlass.kernels.kernel_dispatch import apply_updates
from tests.unit.kernels.rule_cases import RULES, piece
rule = RULES["adamw"](1)
make = lambda: piece(rule, torch.ones(1 << 18), torch.ones(1 << 18))
mine, childs = make(), make()  # torch's own threads do not survive a fork
apply_updates(rule, [mine], threads=2)
child = os.fork()
if child == 0:
    signal.alarm(60)
    apply_updates(rule, [childs], threads=2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@native
def test_forked_child_updates_with_its_own_threads() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["7"]


_SIDE_BY_SIDE = """
import threading, torch
from windlass.kernels.kernel_dispatch import apply_updates
from tests.unit.kernels.rule_cases import RULES, piece
rule = RULES["adamw"](1)
pieces = [piece(rule, torch.full((1 << 17,), float(n)), torch.ones(1 << 17)) for n in range(4)]
alone = [piece(rule, torch.full((1 << 17,), float(n)), torch.ones(1 << 17)) for n in range(4)]
threads = [threading.Thread(target=apply_updates, args=(rule, [p]), kwargs={"threads": 3}) for p in pieces]
for t in threads: t.start()
for t in threads: t.join()
for p in alone: apply_updates(rule, [p], threads=1)
print(all(torch.equal(a.parameter, b.parameter) for a, b in zip(pieces, alone)))
"""


@native
def test_python_threads_may_update_concurrently() -> None:
    command = [sys.executable, "-c", _SIDE_BY_SIDE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["True"]
