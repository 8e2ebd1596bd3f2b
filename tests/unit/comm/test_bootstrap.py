"""A process group is started from whole environments only, and every way to fail is told in our words."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.comm.bootstrap import init_distributed

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.is_initialized():
        pytest.skip("another test left its process group")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What the package's logger warned of."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("windlass").addHandler(handler)
    yield lines
    logging.getLogger("windlass").removeHandler(handler)


def test_half_an_environment_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CommunicationError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing"):
        init_distributed()


def test_ranks_that_cannot_meet_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in zip(NAMES, ("1", "2", "1", "127.0.0.1", port), strict=False):
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match=f"rank 1 of 2 could not meet the others at 127.0.0.1:{port}"):
        init_distributed(timeout=timedelta(seconds=1))


@pytest.mark.parametrize(("count", "lines"), [("4", 1), ("1", 0)])
def test_a_process_of_another_launcher_is_told_that_it_is_alone(
    count: str, lines: int, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", count)
    init_distributed()
    dist.destroy_process_group()
    assert len(warned) == lines and all("OMPI_COMM_WORLD_SIZE is 4" in line for line in warned)
