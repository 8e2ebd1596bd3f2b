"""Tests of rank output: whole labelled lines, files, last lines, and the table of `--watch`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.launch.agent_channel import MESSAGE_PREFIX, MessageReader, bytes_to_text, text_to_bytes
from windlass.launch.exit_status import LaunchExitStatus, RankFailure, combine_failures
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_flags import build_run_parser, parse_flags
from windlass.launch.live_rank_table import LiveRankTable
from windlass.launch.output_flags import output_routing_from_args
from windlass.launch.rank_output import MAX_KEPT_LINES, OutputRouting, RankConsole, write_stream
from windlass.launch.rank_processes import ERR, OUT
from windlass.launch.supervisor import RankEvents, failure_output_lines

ALL = OutputRouting()


def shown(route: OutputRouting = ALL, **options: bool) -> tuple[RankConsole, list[tuple[str, bytes]]]:
    console = RankConsole(route, lambda rank: f"[rank {rank}] ", lambda rank: rank % 2, **options)
    seen: list[tuple[str, bytes]] = []
    console.emit = lambda stream, data: seen.append((stream, data))
    return console, seen


def test_lines_are_complete_and_labelled() -> None:
    console, seen = shown()
    console.feed(1, OUT, b"one\ntw")
    console.feed(0, OUT, b"zero\n")
    console.feed(1, ERR, b"err\xff\n")
    console.feed(1, OUT, b"o\n\nlast")
    console.flush_rank(1)
    assert seen == [
        (OUT, b"[rank 1] one\n"),
        (OUT, b"[rank 0] zero\n"),
        (ERR, b"[rank 1] err\xff\n"),
        (OUT, b"[rank 1] two\n[rank 1] \n"),
        (OUT, b"[rank 1] last\n"),
    ]
    assert console.last_lines(1) == ["err\ufffd"] and console.last_lines(0) == ["zero"] and console.last_lines(5) == []


@given(st.lists(st.binary(max_size=9)))
def test_output_keeps_every_byte_in_order(parts: list[bytes]) -> None:
    console, seen = shown()
    for part in parts:
        console.feed(0, OUT, part)
    console.close()
    full = b"".join(data for _, data in seen).replace(b"[rank 0] ", b"")
    assert full.removesuffix(b"\n") == b"".join(parts).removesuffix(b"\n")


def test_progress_bar_is_forwarded_as_it_moves() -> None:
    console, seen = shown()
    console.feed(0, ERR, b"\r 10%")
    console.feed(0, ERR, b"\r 20%\r\n")
    assert [data for _, data in seen] == [b"[rank 0] \r", b"[rank 0]  10%\r[rank 0]  20%\r\n"]


def test_only_the_last_lines_are_kept() -> None:
    console, _ = shown()
    console.feed(0, OUT, b"".join(b"%d\n" % line for line in range(100)))
    assert console.last_lines(0) == [str(line) for line in range(100 - MAX_KEPT_LINES, 100)]


def routed(tmp_path: Path, *words: str) -> OutputRouting:
    return output_routing_from_args(parse_flags(build_run_parser(), [*words, "--log-dir", str(tmp_path), "script"]))


@pytest.mark.parametrize(
    ("words", "seen", "filed"),
    [
        ((), {0: "oe", 1: "oe"}, {0: "oe", 1: "oe"}),
        (("--redirects", "3"), {0: "", 1: ""}, {0: "oe", 1: "oe"}),
        (("-r", "1"), {0: "e", 1: "e"}, {0: "o", 1: "o"}),
        (("-t", "2"), {0: "oe", 1: "oe"}, {0: "e", 1: "e"}),
        (("-r", "3", "-t", "2"), {0: "e", 1: "e"}, {0: "oe", 1: "oe"}),
        (("-r", "0:1,1:2"), {0: "e", 1: "o"}, {0: "o", 1: "e"}),
        (("--local-ranks-filter", "1"), {0: "", 1: "oe"}, {0: "oe", 1: "oe"}),
    ],
)
def test_streams_are_redirected(
    tmp_path: Path, words: tuple[str, ...], seen: dict[int, str], filed: dict[int, str]
) -> None:
    console, shown_now = shown(routed(tmp_path, *words))
    for rank in (0, 1):
        console.feed(rank, OUT, b"o\n")
        console.feed(rank, ERR, b"e\n")
    console.close()
    for rank in (0, 1):
        local = [data.decode() for _, data in shown_now if data.startswith(b"[rank %d]" % rank)]
        assert local == [f"[rank {rank}] {letter}\n" for letter in seen[rank]]
        path = tmp_path / f"rank{rank}.log"
        assert (path.read_text() if path.exists() else "") == "".join(f"{letter}\n" for letter in filed[rank])


def test_restart_appends_to_the_same_files(tmp_path: Path) -> None:
    for append, expected in ((False, "x\n"), (True, "x\nx\n"), (False, "x\n")):
        console, _ = shown(routed(tmp_path), append=append)
        console.feed(0, OUT, b"x\n")
        console.close()
        assert (tmp_path / "rank0.log").read_text() == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to Linux's /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    console, _ = shown(OutputRouting(directory=tmp_path))
    with pytest.raises(LaunchError, match=f"{tmp_path}/rank0.log: No space left on device"):
        console.feed(0, OUT, b"text\n")
    console.close()


def test_last_lines_are_of_the_first_failed_rank() -> None:
    console, _ = shown()
    console.feed(0, ERR, b"follows\n")
    console.feed(2, ERR, b"cause\n")
    outcome = combine_failures([RankFailure(2, 1, 10.0, "b"), RankFailure(0, 1, 10.2, "a")])
    assert outcome.first_failure == RankFailure(2, 1, 10.0, "b")
    assert failure_output_lines(console, outcome, 3) == ["the last lines of rank 2:", "  cause"]
    assert (
        failure_output_lines(console, LaunchExitStatus(0), 3)
        == []
        == failure_output_lines(None, outcome, 3)
        == failure_output_lines(console, outcome, 1)
    )
    assert [str(item) for item in outcome.failures] == [
        "rank 0 on a ended with exit code 1",
        "rank 2 on b ended with exit code 1",
    ]


def test_a_lost_host_is_one_failure_of_all_its_ranks() -> None:
    events = RankEvents(None, ["a", "b", "b"])
    events.on_host_lost("b", 1, 2, "its connection ended (exit code 255)")
    outcome = combine_failures(events.failures)
    assert (
        outcome.exit_code == 128 + signal.SIGKILL and outcome.failures[0].is_lost and outcome.failures[0].num_ranks == 2
    )
    assert str(outcome.failures[0]) == "b was lost with ranks 1 to 2: its connection ended (exit code 255)"


def test_closed_output_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output to a closed stream is dropped: under `windlass run ... >&-` Python has no standard output."""
    monkeypatch.setattr(sys, "stdout", None)
    write_stream(OUT, b"lost\n")


def test_the_table_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    console, _ = shown()
    watch = LiveRankTable(console, [], ["a", "b", "b"], is_local=False)
    watch.on_started(0, 11)
    watch.on_started(1, 12)
    watch.memory_of_rank[0] = 5_000_000
    watch.on_output(0, OUT, b"[step] 7\n")
    watch.on_ended(1, -9)
    assert watch.table_rows() == [
        ("a", "0", "11", "runs", "5 MB", "[step] 7"),
        ("b", "1", "12", "signal 9", "-", ""),
        ("b", "2", "-", "starts", "-", ""),
    ]
    watch.close()
    assert "a rank 0 pid 11 runs 5 MB | [step] 7" in capsys.readouterr().err


@given(st.lists(st.binary()), st.integers(1, 7))
def test_messages_and_lines_are_parsed_in_any_split(outputs: list[bytes], size: int) -> None:
    import json

    sent = b"".join(
        MESSAGE_PREFIX + json.dumps({"text": bytes_to_text(data)}).encode() + b"\n" + b"noise\n" for data in outputs
    )
    lines, result = MessageReader(), []
    for at in range(0, len(sent), size):
        result += lines.feed(sent[at : at + size])
    assert [text_to_bytes(item["text"]) for item in result if isinstance(item, dict)] == outputs
    assert [item for item in result if isinstance(item, bytes)] == [b"noise\n"] * len(outputs)
