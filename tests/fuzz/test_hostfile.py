"""Fuzz tests of hostfiles, filters, host lists and messages of other hosts."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import LONG
from tests.fuzz.texts import examples, mutants, outcome
from windlass.base.bounded_input import MAX_RANKS_PER_HOST
from windlass.base.errors import WindlassError
from windlass.comm.slurm import expand_counts, expand_hosts
from windlass.launch.agent_channel import _parse_line
from windlass.launch.hostfile import (
    HostError,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    parse_resource_filter,
)
from windlass.launch.launch_flags import build_run_parser, parse_flags
from windlass.launch.plan_from_flags import hosts_from_args
from windlass.launch.visible_devices import parse_numbers

SEEDS = [
    b"worker-0 slots=4\nworker-1 slots=2 # more\n\n# a comment\nuser@10.0.0.7 slots=8\n",
    b"\xef\xbb\xbfworker-0 slots=1\r\nworker-1\tslots=16\r\n",
]
COMMON = settings(
    max_examples=examples(100, 200),
    deadline=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)


def test_mutations_of_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    for data in mutants(SEEDS, 600):
        path.write_bytes(data)
        result = outcome(fetch_hostfile, path)
        if isinstance(result, WindlassError):
            continue
        text = data.decode("utf-8-sig")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        reported = [re.match(r"(\S+)\s+slots=(\d+)", line) for line in lines]
        assert result == {item[1]: int(item[2]) for item in reported if item}, data
        assert len(result) == len(lines) and all(0 <= slots <= MAX_RANKS_PER_HOST for slots in result.values())


@pytest.mark.parametrize("slots", ["99999999999999999999", "9" * 5000, "4097", "٣"])
def test_absurd_slot_counts(tmp_path: Path, slots: str) -> None:
    path = tmp_path / "hostfile"
    path.write_text(f"worker-0 slots={slots}\n")
    with pytest.raises(HostError, match=r"line 1: worker-0 has slots=.*at most 4,096") as caught:
        fetch_hostfile(path)
    assert len(str(caught.value)) < 300


FILTERS = st.text(alphabet="worke-0123456789@:,٣ \x1b", max_size=20)


@COMMON
@given(FILTERS, FILTERS, st.text(alphabet="0123456789-, x[]()n", max_size=24))
def test_filters_and_lists(include: str, exclude: str, listed: str) -> None:
    pool = {"worker-0": list(range(4)), "worker-1": list(range(2))}
    left = outcome(parse_resource_filter, pool, include, exclude)
    if not isinstance(left, WindlassError):
        assert all(set(slots) <= set(pool[name]) for name, slots in left.items())
    for reader in (expand_hosts, expand_counts, lambda text: parse_numbers(text, "--x"), decode_world_info):
        outcome(reader, listed)


@pytest.mark.parametrize("listed", ["n[0-99999999]", "n[0-9999][0-9999]", "0-99999999", "2(x99999999)", "9" * 5000])
def test_absurd_ranges(listed: str) -> None:
    for reader in (expand_hosts, expand_counts, lambda text: parse_numbers(text, "--x")):
        result = outcome(reader, listed)
        assert isinstance(result, WindlassError) or len(result) <= 1


def test_mutations_of_messages() -> None:
    world = encode_world_info({"worker-0": [0, 1], "worker-1": 2}).encode()
    for data in mutants([world], 500):
        outcome(decode_world_info, data.decode("latin-1"))
    for data in mutants([b'\x1ewindlass {"end": [0, 1], "text": "x"}'], 500):
        if b"\n" not in data:
            outcome(_parse_line, data)


NUMERIC = ["--nproc", "--num_gpus", "--nnodes", "--num_nodes", "--node_rank", "--master_port", "--ssh_port"]
NUMERIC += ["--max-restarts", "--min-nproc", "--grace", "--monitor_interval", "--tp", "--tokens"]
STRANGE = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e400",
    "99999999",
    "99999999999999999999",
    "9" * 5000,
    "",
    "٣",
    "1.5",
    "\x1b[1m",
]


@pytest.mark.parametrize("flag", NUMERIC)
def test_strange_numbers_in_options_are_refused_or_bounded(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "9" * 5000)
    for value in STRANGE:
        text = io.StringIO()
        args: argparse.Namespace | None = None
        with contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
            args = parse_flags(build_run_parser(), [f"{flag}={value}", "x.py"])
        assert len(text.getvalue()) < 20_000
        if args is None:
            assert flag in text.getvalue()
            continue
        result: Any = outcome(hosts_from_args, args)
        if not isinstance(result, WindlassError):
            assert sum(len(host.slots) for host in result[0]) <= 2**20
        for number in (args.grace, args.monitor_interval):
            assert 0 <= number < 10**9, (flag, value)
