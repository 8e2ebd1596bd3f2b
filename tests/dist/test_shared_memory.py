"""Test that ranks in different process-id namespaces do not share memory."""

from __future__ import annotations

import os
from unittest import mock

import torch.distributed as dist

from tests.dist.harness import run_ranks
from windlass.comm.rank_group import world_group
from windlass.comm.shared_memory import shared_memory_problem


def _problems() -> list[str | None]:
    group = world_group()
    pids: list[int] = [0] * group.size
    dist.all_gather_object(pids, os.getpid())
    found = [shared_memory_problem(group)]
    # As in two containers: both ranks report the same process id, that of rank 0.
    with mock.patch("os.getpid", lambda: pids[0]):
        found.append(shared_memory_problem(group))
    return found


def test_ranks_of_different_pid_namespaces_do_not_share_memory() -> None:
    for before, inside in run_ranks(_problems, 2):
        assert before is None
        assert inside is not None and "cannot map" in inside
