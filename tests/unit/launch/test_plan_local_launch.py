"""Tests of sharing threads between ranks, and of plans refused before any rank starts."""

from __future__ import annotations

import os
import threading

import pytest

from windlass.launch.start_ranks import LaunchError, launch, start_ranks, threads_per_rank


@pytest.mark.parametrize(("nproc", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (9, 1), (100, 1)])
def test_cores_are_divided_between_ranks(nproc: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert threads_per_rank(nproc) == threads


@pytest.mark.parametrize(
    ("entrypoint", "nproc", "message"),
    [
        ([], 1, "nothing to run"),
        (["no/such/script.py"], 1, "no such script: no/such/script.py"),
        ([__file__], 0, "--nproc is 0"),
        ([__file__], -2, "--nproc is -2"),
    ],
)
def test_invalid_launch_is_refused(entrypoint: list[str], nproc: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(entrypoint, nproc)


def test_only_the_main_thread_can_start_ranks() -> None:
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            launch([__file__], 1)
        except LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_invalid_port_is_refused(port: int) -> None:
    with pytest.raises(LaunchError, match=f"--master-port {port} is not a port"):
        start_ranks([__file__], 1, master_port=port)
