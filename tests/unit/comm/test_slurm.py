"""Tests of parsing Slurm's host lists, counts and ports."""

from __future__ import annotations

import pytest

from windlass.base.errors import CommunicationError
from windlass.comm.slurm import allocated_hosts, expand_counts, expand_hosts, port_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("gpu[07-08]", ["gpu07", "gpu08"]),
        ("n[01-03,7]-ib,b1", ["n01-ib", "n02-ib", "n03-ib", "n7-ib", "b1"]),
        ("a,b[9-10]", ["a", "b9", "b10"]),
        ("gpu[3,5-6],login", ["gpu3", "gpu5", "gpu6", "login"]),
        ("rack[1-2]n[04,06]", ["rack1n04", "rack1n06", "rack2n04", "rack2n06"]),
        ("n-1-[2-3].site.org", ["n-1-2.site.org", "n-1-3.site.org"]),
    ],
)
def test_host_lists_are_expanded(text: str, expected: list[str]) -> None:
    assert expand_hosts(text) == expected


def test_invalid_host_lists_are_refused() -> None:
    for text in ("", "n[1", "n]1", "n[x]", "n[1-]", "n[3-1]", "a;b", "a,,b", "a b", "$(a)"):
        with pytest.raises(CommunicationError, match="not a Slurm host list"):
            expand_hosts(text)
    with pytest.raises(CommunicationError, match="not a Slurm list of counts"):
        expand_counts("2(x3")
    with pytest.raises(CommunicationError, match="'99999999' of Slurm's list of counts .* exceeds"):
        expand_counts("2,99999999")
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def test_hosts_of_a_job() -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}
    assert allocated_hosts(job) == {"n1": 4, "n2": 4, "n3": 2}
    assert allocated_hosts({**job, "SLURM_NTASKS_PER_NODE": "8"}) == {"n1": 8, "n2": 8, "n3": 8}
    assert allocated_hosts({"SLURM_JOB_NODELIST": "a"}) == {"a": 1}
    assert allocated_hosts({}) == {}


def test_steps_of_a_job_have_ports_of_their_own() -> None:
    ports = {port_of(job, step) for job in (1, 2) for step in (0, 1)}
    assert len(ports) == 4 and all(15000 <= port < 32768 for port in ports)
    assert port_of(0, 0) == 15000
