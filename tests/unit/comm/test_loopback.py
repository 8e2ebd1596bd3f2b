"""Tests of detecting that all ranks are on one host, and of gloo's interface in that case."""

from __future__ import annotations

import socket

import pytest

from windlass.comm.addresses import GLOO_INTERFACE, gloo_at_loopback, is_loopback
from windlass.comm.rank_environment import rank_environment

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("10.0.0.1", False), ("localhost.example.org", False), ("", False), (None, False)],
)  # fmt: skip
def test_loopback_addresses(address: str | None, expected: bool) -> None:
    assert is_loopback(address) == expected


def test_interface_set_by_the_user_is_kept() -> None:
    interfaces = {name for _, name in socket.if_nameindex()}
    assert gloo_at_loopback({GLOO_INTERFACE: "eth7"}) == {}
    assert gloo_at_loopback({})[GLOO_INTERFACE] in interfaces & {"lo", "lo0"}


TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**TWO, "MASTER_ADDR": HOST, "LOCAL_WORLD_SIZE": "2"}, True),  # torchrun
        ({**TWO, "MASTER_ADDR": HOST, "LOCAL_WORLD_SIZE": "1"}, False),
        ({**TWO, "MASTER_ADDR": HOST}, False),  # started by hand: other ranks may be on other hosts
        ({**TWO, "MASTER_ADDR": "127.0.0.1"}, True),  # a rank that reaches a loopback address is on this host
        ({**TWO, "MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "1"}, True),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, False),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, True),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}, False),
    ],
)
def test_ranks_of_one_host_are_detected(environ: dict[str, str], expected: bool) -> None:
    place = rank_environment(environ)
    assert place is not None and place.one_host == expected
