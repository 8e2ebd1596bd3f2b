"""What ranks write: whole lines with labels, files, last lines; and what the table of `--watch` says."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.launch.channel import MARK, Lines, bytes_of, text_of
from windlass.launch.conduct import Events, last_words
from windlass.launch.console import LAST_LINES, Console, Route, write
from windlass.launch.flags import parse, parser_of_run
from windlass.launch.outcome import Failure, Outcome, outcome_of
from windlass.launch.ranks import ERR, OUT
from windlass.launch.routes import route_of
from windlass.launch.watch import Watch

ALL = Route()


def shown(route: Route = ALL, **options: bool) -> tuple[Console, list[tuple[str, bytes]]]:
    console = Console(route, lambda rank: f"[rank {rank}] ", lambda rank: rank % 2, **options)
    seen: list[tuple[str, bytes]] = []
    console.show = lambda stream, data: seen.append((stream, data))
    return console, seen


def test_lines_are_whole_and_labelled() -> None:
    console, seen = shown()
    console.wrote(1, OUT, b"one\ntw")
    console.wrote(0, OUT, b"zero\n")
    console.wrote(1, ERR, b"err\xff\n")
    console.wrote(1, OUT, b"o\n\nlast")
    console.finish(1)
    assert seen == [
        (OUT, b"[rank 1] one\n"),
        (OUT, b"[rank 0] zero\n"),
        (ERR, b"[rank 1] err\xff\n"),
        (OUT, b"[rank 1] two\n[rank 1] \n"),
        (OUT, b"[rank 1] last\n"),
    ]
    assert console.last_lines(1) == ["err\ufffd"] and console.last_lines(0) == ["zero"] and console.last_lines(5) == []


@given(st.lists(st.binary(max_size=9)))
def test_nothing_is_lost_or_moved(parts: list[bytes]) -> None:
    console, seen = shown()
    for part in parts:
        console.wrote(0, OUT, part)
    console.close()
    whole = b"".join(data for _, data in seen).replace(b"[rank 0] ", b"")
    assert whole.removesuffix(b"\n") == b"".join(parts).removesuffix(b"\n")


def test_a_progress_bar_is_shown_as_it_moves() -> None:
    console, seen = shown()
    console.wrote(0, ERR, b"\r 10%")
    console.wrote(0, ERR, b"\r 20%\r\n")
    assert [data for _, data in seen] == [b"[rank 0] \r", b"[rank 0]  10%\r[rank 0]  20%\r\n"]


def test_only_the_last_lines_are_kept() -> None:
    console, _ = shown()
    console.wrote(0, OUT, b"".join(b"%d\n" % line for line in range(100)))
    assert console.last_lines(0) == [str(line) for line in range(100 - LAST_LINES, 100)]


def routed(tmp_path: Path, *words: str) -> Route:
    return route_of(parse(parser_of_run(), [*words, "--log-dir", str(tmp_path), "script"]))


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
def test_where_streams_go(tmp_path: Path, words: tuple[str, ...], seen: dict[int, str], filed: dict[int, str]) -> None:
    console, shown_now = shown(routed(tmp_path, *words))
    for rank in (0, 1):
        console.wrote(rank, OUT, b"o\n")
        console.wrote(rank, ERR, b"e\n")
    console.close()
    for rank in (0, 1):
        mine = [data.decode() for _, data in shown_now if data.startswith(b"[rank %d]" % rank)]
        assert mine == [f"[rank {rank}] {letter}\n" for letter in seen[rank]]
        path = tmp_path / f"rank{rank}.log"
        assert (path.read_text() if path.exists() else "") == "".join(f"{letter}\n" for letter in filed[rank])


def test_a_restart_goes_on_in_the_same_files(tmp_path: Path) -> None:
    for append, expected in ((False, "x\n"), (True, "x\nx\n"), (False, "x\n")):
        console, _ = shown(routed(tmp_path), append=append)
        console.wrote(0, OUT, b"x\n")
        console.close()
        assert (tmp_path / "rank0.log").read_text() == expected


def test_last_words_are_of_the_rank_that_failed_first() -> None:
    console, _ = shown()
    console.wrote(0, ERR, b"follows\n")
    console.wrote(2, ERR, b"cause\n")
    outcome = outcome_of([Failure(2, 1, 10.0, "b"), Failure(0, 1, 10.2, "a")])
    assert outcome.first == Failure(2, 1, 10.0, "b")
    assert last_words(console, outcome, 3) == ["the last lines of rank 2:", "  cause"]
    assert last_words(console, Outcome(0), 3) == [] == last_words(None, outcome, 3) == last_words(console, outcome, 1)
    assert [str(one) for one in outcome.failures] == [
        "rank 0 on a ended with exit code 1",
        "rank 2 on b ended with exit code 1",
    ]


def test_a_lost_host_is_one_failure_of_all_its_ranks() -> None:
    events = Events(None, ["a", "b", "b"])
    events.lost("b", 1, 2, "its connection is gone (exit code 255)")
    outcome = outcome_of(events.failures)
    assert outcome.code == 128 + signal.SIGKILL and outcome.failures[0].lost and outcome.failures[0].ranks == 2
    assert str(outcome.failures[0]) == "b was lost with ranks 1 to 2: its connection is gone (exit code 255)"


def test_a_closed_output_is_written_to_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """`windlass run ... >&-`: Python has no standard output then."""
    monkeypatch.setattr(sys, "stdout", None)
    write(OUT, b"lost\n")


def test_the_table_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    console, _ = shown()
    watch = Watch(console, [], ["a", "b", "b"], here=False)
    watch.started(0, 11)
    watch.started(1, 12)
    watch.memory[0] = 5_000_000
    watch.wrote(0, OUT, b"[step] 7\n")
    watch.ended(1, -9)
    assert watch.rows() == [
        ("a", "0", "11", "runs", "5 MB", "[step] 7"),
        ("b", "1", "12", "signal 9", "-", ""),
        ("b", "2", "-", "starts", "-", ""),
    ]
    watch.finish()
    assert "a rank 0 pid 11 runs 5 MB | [step] 7" in capsys.readouterr().err


@given(st.lists(st.binary()), st.integers(1, 7))
def test_messages_and_other_lines_come_through_in_any_parts(outputs: list[bytes], size: int) -> None:
    import json

    sent = b"".join(MARK + json.dumps({"text": text_of(data)}).encode() + b"\n" + b"noise\n" for data in outputs)
    lines, found = Lines(), []
    for at in range(0, len(sent), size):
        found += lines.feed(sent[at : at + size])
    assert [bytes_of(one["text"]) for one in found if isinstance(one, dict)] == outputs
    assert [one for one in found if isinstance(one, bytes)] == [b"noise\n"] * len(outputs)
