"""Tests of the arithmetic of the benchmark of slow links."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import typer

from tests.unit.bench.conftest import load_script


def test_shares_compare_a_step_with_bytes_over_the_rate_and_with_the_step_without_a_limit() -> None:
    bench = load_script("slow_links")
    rate = bench.GOAL_RATE
    ddp = bench.Timing("ddp", rate, 20.0, 1.0, 180 * 2**20, 1.0, 0.5)
    one_bit = bench.Timing("1-bit adam", rate, 4.0, 1.0, 5 * 2**20, 2.0, 0.5)
    assert ddp.at_rate == 18.0 and ddp.of_sum == 0.95 and ddp.of_rate == 0.9
    assert one_bit.at_rate == 0.5 and one_bit.of_sum == 0.625 and one_bit.of_rate == 0.125
    assert bench.factor(one_bit, [ddp, one_bit]) == 5.0 and bench.factor(one_bit, [one_bit]) is None
    assert bench.missed_goals([ddp, one_bit]) == [
        "1-bit adam at 10 MiB/s: 5.0 x as fast as DDP, not 8",
        "1-bit adam at 10 MiB/s: 62% of bytes / rate and free step",
    ]
    assert bench.Timing("ddp", 0, 2.0, 1.0, 1.0, 2.0, 0.5).at_rate == 0.0


def test_methods_are_named_one_by_one() -> None:
    from rig.chosen_names import choose_names

    bench = load_script("slow_links")
    assert choose_names("diloco; ddp", bench.METHODS, ";") == ["ddp", "diloco"]
    assert choose_names("zero++; stage 3; stage 1", bench.METHODS, ";") == ["stage 1", "stage 3", "zero++"]
    assert choose_names(";".join(bench.METHODS), bench.METHODS, ";") == list(bench.METHODS)
    with pytest.raises(typer.BadParameter, match="there are ddp"):
        choose_names("zip", bench.METHODS, ";")


def test_zero_is_compared_with_stage_3_and_by_the_bytes_of_a_host() -> None:
    bench, rate = load_script("slow_links"), 10 << 20
    rows = [
        bench.Timing(name, rate, seconds, 1.0, rate, 1.0, 0.5) for name, seconds in (("stage 3", 6.0), ("zero++", 4.0))
    ]
    assert bench.factor(rows[1], rows) == 1.5 and bench.factor(rows[1], rows[1:]) is None
    assert "zero++ at 10 MiB/s: 1.5 x as fast as stage 3, not 2" in bench.missed_goals(rows)
    assert bench.received_over_link("zero++", [1.0, 2.0, 5.0, 1.0]) == 6.0
    assert bench.received_over_link("ddp", [1.0, 2.0]) == 2.0


def test_a_measurement_continues_with_stored_rows_of_the_same_setting(tmp_path: Path) -> None:
    bench, path = load_script("slow_links"), tmp_path / "slow.json"
    size = bench.Size(batch=1, length=8, layers=2)
    setting = bench.setting_of(size, 1, ["stage 3"], in_spaces=True)
    rows = bench.Rows(path, setting)
    rows.read()
    for name, link in (("zero++", 0), ("ddp", 0), ("ddp", 5)):
        rows.add(bench.Timing(name, link, 2.0, 1.0, 10.0, 2.0, 1.0, "abc"))
    again = bench.Rows(path, bench.setting_of(size, 1, ["ddp"], in_spaces=False))
    again.read()
    assert again.timings == rows.timings and [item.name for item in again.timings] == ["ddp", "ddp", "zero++"]
    assert again.missing("ddp", [0, 5, 7]) == [7] and again.missing("zero++", [0, 5]) == [5]
    assert again.setting["hosts"] == "network namespaces"
    for other in (
        bench.setting_of(size, 2, ["ddp"], in_spaces=True),
        bench.setting_of(size, 1, ["zero++"], in_spaces=False),
    ):
        with pytest.raises(typer.BadParameter, match="slow.json has rows with"):
            bench.Rows(path, other).read()


def test_bytes_are_counted_by_connection() -> None:
    load_script("slow_links")
    from rig.link import connection_ends, received_bytes

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        ends = (one.getsockname(), one.getpeername())
        assert {ends, ends[::-1]} <= connection_ends()
        other.sendall(b"x" * 1000)
        assert len(one.recv(1000, socket.MSG_WAITALL)) == 1000
        assert received_bytes({ends}) == 1000 and received_bytes({ends[::-1]}) == received_bytes(set()) == 0


def test_bytes_beside_the_busiest_connection_are_refused() -> None:
    load_script("slow_links")
    from rig.link import require_one_link

    require_one_link([])
    require_one_link([10 << 20, 60 << 10, 0])
    with pytest.raises(RuntimeError, match="1048576 of 11534336 bytes came over other connections"):
        require_one_link([10 << 20, 1 << 20])
