"""Tests of starting a process group: it needs a complete environment, and errors and warnings name the cause."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from windlass.base.errors import CommunicationError
from windlass.comm import bootstrap, group_creation
from windlass.comm.bootstrap import DEFAULT_TIMEOUT, default_timeout, discover, init_distributed
from windlass.comm.group_creation import init_default_group

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OTHERS = ("LOCAL_WORLD_SIZE", "DEEPSPEED_TIMEOUT", "SLURM_NTASKS", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("another test left its process group")
    before = dict(os.environ)
    for name in (*NAMES, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.clear()  # `init_distributed` leaves its variables in the environment
    os.environ.update(before)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Return the warnings of the package's logger."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("windlass").addHandler(handler)
    yield lines
    logging.getLogger("windlass").removeHandler(handler)


def test_incomplete_environment_is_refused_with_the_missing_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CommunicationError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing"):
        init_distributed()


def test_failed_rendezvous_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in zip(NAMES, ("1", "2", "1", "127.0.0.1", port), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match=f"rank 1 of 2 could not connect to the others at 127.0.0.1:{port}"):
        init_distributed(timeout=timedelta(milliseconds=100))


def test_a_port_of_another_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for name, value in zip(NAMES, ("0", "2", "0", "127.0.0.1", port), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(CommunicationError, match=f"127.0.0.1:{port}: .*give each job a MASTER_PORT of its own"):
            init_distributed(timeout=timedelta(milliseconds=100))


def test_failed_default_group_leaves_nothing_to_a_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    one_rank = {"rank": 0, "world_size": 1}

    def left(group: object) -> None:
        raise CommunicationError("a rank left")

    with pytest.raises(RuntimeError, match="timed out"):
        init_default_group("gloo", init_method=url, rank=1, world_size=2, timeout=timedelta(milliseconds=100))
    with monkeypatch.context() as patch, pytest.raises(CommunicationError, match="a rank left"):
        patch.setattr(group_creation, "_wait_for_all_checks", left)
        init_default_group("gloo", store=HashStore(), **one_rank)
    assert not dist.is_initialized(), "a second init_distributed would return with a broken group"
    with pytest.raises(RuntimeError, match="timed out"):
        init_default_group("gloo", init_method=url, rank=1, world_size=2, timeout=timedelta(milliseconds=100))
    init_default_group("gloo", store=HashStore(), **one_rank)
    try:  # ranks find each other by the group's name, and other ranks, without a failed attempt, use "0"
        assert dist.group.WORLD is not None and dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()


def test_group_that_is_created_again_finds_no_old_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher keeps its store. Ranks use the same part of it, whether they have failed before or not."""
    kept, where, long = HashStore(), ("127.0.0.1", 1), timedelta(seconds=60)
    monkeypatch.setattr(bootstrap, "rendezvous", lambda url, timeout: iter([(kept, 0, 2)]))
    ranks: list[dict[tuple[str, int], str]] = [{}, {}, {}]

    def join(rank: int) -> Any:
        monkeypatch.setattr(bootstrap, "_last_numbers", ranks[rank])
        return bootstrap._launcher_store(where, long)

    join(0).set("rank 0", "an address")
    assert join(1).get("rank 0") == b"an address"
    again = join(1)  # e.g. rank 1 has failed
    assert not again.check(["rank 0"])
    again.set("rank 1", "an address")
    assert join(2).get("rank 1") == join(0).get("rank 1") == b"an address"
    assert not join(0).check(["rank 1"])


def test_unknown_local_rank_is_left_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    discover()
    assert "LOCAL_RANK" not in os.environ, "all ranks of a host would use GPU 0"


@pytest.mark.parametrize(("count", "lines"), [("4", 1), ("1", 0)])
def test_process_not_started_by_srun_is_warned_that_it_trains_alone(
    count: str, lines: int, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", count)
    init_distributed()
    dist.destroy_process_group()
    assert len(warned) == lines and all("SLURM_NTASKS is 4" in line for line in warned)


def test_ranks_on_several_hosts_need_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    several_hosts(monkeypatch)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommunicationError, match="Open MPI started 2 ranks on several hosts .* set MASTER_ADDR"):
        init_distributed()


def test_master_address_is_read_from_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    several_hosts(monkeypatch)
    world = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2, bcast=lambda value, root: "127.0.0.1")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world)))
    with pytest.raises(CommunicationError, match="rank 1 of 2 could not connect to the others at 127.0.0.1:1:"):
        init_distributed(timeout=timedelta(milliseconds=100), port=1)
    world.Get_size = lambda: 1
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE"):  # set by `init_distributed`; monkeypatch would restore them
        del os.environ[name]
    with pytest.raises(CommunicationError, match="mpi4py reports 1 of 1: mpi4py was built for another MPI"):
        init_distributed(timeout=timedelta(milliseconds=100))


def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)


@pytest.mark.parametrize(("text", "wanted"), [("", DEFAULT_TIMEOUT), ("2", timedelta(minutes=2))])
def test_timeout_is_read_from_the_environment(text: str, wanted: timedelta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", text)
    assert default_timeout() == wanted


@pytest.mark.parametrize("text", ["soon", "0", "-1"])
def test_timeout_must_be_positive(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", text)
    with pytest.raises(CommunicationError, match="DEEPSPEED_TIMEOUT = "):
        default_timeout()
