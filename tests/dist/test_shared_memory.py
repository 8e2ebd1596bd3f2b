"""Tests of ranks that cannot share memory: in different process-id namespaces, or one without free file descriptors."""

from __future__ import annotations

import contextlib
import errno
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


def _without_descriptors() -> list[str | None]:
    group = world_group()
    failing = mock.patch("os.memfd_create", side_effect=OSError(errno.EMFILE, "Too many open files"))
    with failing if group.index == 1 else contextlib.nullcontext():
        found = [shared_memory_problem(group)]
    return [*found, shared_memory_problem(group)]


def test_a_rank_that_cannot_allocate_memory_is_named_on_all_ranks() -> None:
    for without, after in run_ranks(_without_descriptors, 2, timeout=60.0):
        assert without is not None and "rank 1 cannot allocate" in without and "Too many open files" in without
        assert after is None


def test_ranks_of_different_pid_namespaces_do_not_share_memory() -> None:
    for before, inside in run_ranks(_problems, 2):
        assert before is None
        assert inside is not None and "cannot map" in inside
