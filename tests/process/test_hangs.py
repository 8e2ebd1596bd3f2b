"""Tests that a fault of one rank that blocks the others is reported with its cause, and ends the run if it remains."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.hanging_runs import TIMEOUT_S
from windlass.base.processes import WATCHDOG_EXIT_CODE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the processes in Linux's /proc")

LINE = r"tests/process/hanging_runs\.py:\d+ in \w+: "


@dataclass(frozen=True)
class Rank:
    """Exit code, run time and output of a rank."""

    code: int
    seconds: float
    text: str


def run(folder: Path, faults: list[str], transport: str, faulty: int) -> dict[str, list[Rank]]:
    """Run all `faults` at once, each in its own run. Return the ranks of each run by fault."""
    names = [f"{fault}:{transport}:{faulty}" for fault in faults]
    command = [sys.executable, "-m", "tests.process.hanging_runs", str(folder), *names]
    subprocess.run(command, check=True, timeout=280)
    return {fault: [_rank(folder / name, rank) for rank in (0, 1)] for fault, name in zip(faults, names, strict=True)}


def _rank(folder: Path, rank: int) -> Rank:
    code, seconds = (folder / f"rank{rank}.status").read_text().split()
    return Rank(int(code), float(seconds), (folder / f"rank{rank}.out").read_text())


def rows(text: str) -> dict[str, str]:
    """Return the rows of the last table in `text`, by rank."""
    table = text.rpartition("hang report:")[2].splitlines()[2:]
    return {match[1]: match[2] for line in table if (match := re.match(r"  (\d+) +(.*)", line))}


def check(fault: str, ranks: list[Rank], transport: str, faulty: int) -> None:
    """Check the output and the exit codes of a run whose rank `faulty` had the fault `fault`."""
    well = 1 - faulty
    if fault == "pause":
        assert [rank.code for rank in ranks] == [0, 0], ranks
        assert all("finished" in rank.text and "hang report:" not in rank.text for rank in ranks), ranks
        return
    results = next((rank for rank in ranks if "hang report:" in rank.text), ranks[0])
    if fault == "stop":  # once continued, the stopped rank may report the other one as dead
        results = ranks[well]
    assert "hang report:" in results.text, (fault, ranks)
    table = rows(results.text)
    headline = results.text.rpartition("hang report:")[2].splitlines()[0]
    if fault == "slow":
        assert [rank.code for rank in ranks] == [0, 0], ranks
        assert all("finished" in rank.text for rank in ranks)
        assert f"for rank {faulty}, which is alive and not in the collective (a straggler)" in headline
        assert re.search(rf"alive +\d+ s  outside the engine +- +{LINE}time\.sleep\(SLOW_S\)", table[str(faulty)])
    else:
        assert not any("finished" in rank.text for rank in ranks)
        assert ranks[well].code == WATCHDOG_EXIT_CODE, ranks
        operation = r"(gather|reduce|barrier|step|forward|agreed order: [^(]+?|a collective along tp)( \(\w+\))?"
        where = r"\S+\.py:\d+ in \w+: " if fault == "caught" else LINE  # in a layer of transformers
        assert re.search(rf"{operation} +(-|\d\.weight.*\(\d\)) +{where}\w", table[str(well)]), table
    if fault == "save":  # the engine detects the different calls, and both ranks raise
        assert "a collective failed on ranks 0-1: " in headline
        assert "ranks wait for each other in different calls" in headline and f"rank {faulty} is at" in headline
        assert re.search(rf"save +- +{LINE}engine\.save_checkpoint", table[str(faulty)]), table
        assert ranks[faulty].code == WATCHDOG_EXIT_CODE
    elif fault == "caught":
        assert "ranks wait in different collectives and can never finish" in headline
        assert (
            f"rank {faulty} left its collective after an error: its forward raised ValueError: no such token"
            in headline
        )
        assert "caught no such token" in ranks[faulty].text and ranks[faulty].code == WATCHDOG_EXIT_CODE
    elif fault in ("eval", "gather"):
        assert "ranks wait in different collectives and can never finish" in headline
        assert ranks[faulty].code == WATCHDOG_EXIT_CODE
        what = {
            "eval": r"forward without gradients \(evaluation\) +- +" + LINE + "engine.eval_batch",
            "gather": r"an all-gather of full parameters \(GatheredParameters\) +[\w.]+ \(\d+\) +"
            + LINE
            + "with windlass",
        }
        assert re.search(what[fault], table[str(faulty)]), table
    elif fault in ("raise", "told", "hook"):
        assert f"rank {faulty} ended with an exception, and rank {well} waits for it" in headline
        assert fault == "told" or "ValueError: one rank is unwell" in ranks[faulty].text
        assert results.text.index("ValueError: one rank is unwell") < results.text.index("hang report:")
        assert "RuntimeError" not in results.text.partition("hang report:")[0], "its own error goes before the cause"
        assert ranks[faulty].code == 1 or (results is ranks[faulty] and ranks[faulty].code == WATCHDOG_EXIT_CODE)
        assert re.search(r"failed +\d+ s  outside the engine +- +" + LINE + "raise ValueError", table[str(faulty)])
    elif fault == "return":
        assert f"the program of rank {faulty} ended early, without an error, and rank {well} waits" in headline
        assert ranks[faulty].code == 0
    elif fault in ("kill", "early"):
        assert f"the process of rank {faulty} is gone (killed, or out of memory), and rank {well} waits" in headline
        assert ranks[faulty].code == -9
        where = LINE if fault == "kill" else ""
        assert re.search(rf"dead +\d+ s  last seen: .*{where}", table[str(faulty)])
    elif fault == "stop":
        assert f"for rank {faulty}, which is stopped (SIGSTOP; `kill -CONT` continues it)" in headline
        assert f"watchdog.timeout_s = {TIMEOUT_S['stop']:g} has passed" in headline
        assert ranks[faulty].code in (1, WATCHDOG_EXIT_CODE), "it was left behind"


def test_each_fault_is_diagnosed_by_its_cause(tmp_path: Path) -> None:
    """All runs start at once, to take only as long as the longest of them."""
    faults = ["save", "eval", "gather", "return", "raise", "kill", "stop", "slow"]
    for fault, ranks in run(tmp_path, faults, "gloo", 1).items():
        check(fault, ranks, "gloo", 1)


@pytest.mark.slow
def test_error_caught_inside_a_collective_computation(tmp_path: Path) -> None:
    """An error caught on one of two ranks along tp ends the run; an error caught on both does not.

    A collective of one call is never matched with a collective of another call.
    """
    result = run(tmp_path, ["caught", "alike"], "gloo", 1)
    check("caught", result["caught"], "gloo", 1)
    for rank in result["alike"]:
        assert rank.code == 0 and "finished" in rank.text and "caught no such token" in rank.text, rank


@pytest.mark.slow
def test_call_left_out_along_ep_with_sharded_parameters_ends_all_ranks(tmp_path: Path) -> None:
    """A rank catches an error between forward and backward. The other rank's backward needs this rank for all-gathers.

    So the ranks cannot drop the batch. Both end before `timeout_s`: a rank that detects the different calls raises, and
    the watchdog ends a rank that waits.
    """
    ranks = run(tmp_path, ["left out"], "gloo", 1)["left out"]
    for rank in ranks:
        assert rank.code in (1, WATCHDOG_EXIT_CODE) and "finished" not in rank.text, ranks
        assert rank.code != 1 or "start the run again from its last checkpoint" in rank.text, ranks
    assert "caught no such label" in ranks[1].text
    assert any("hang report:" in rank.text or "skipped the backward of forward" in rank.text for rank in ranks), ranks


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "faulty"), [("shm", 1), ("shm", 0), ("gloo", 0)])
def test_faults_on_either_transport_and_rank(transport: str, faulty: int, tmp_path: Path) -> None:
    """A fault of rank 0 differs from one of rank 1, because rank 0 hosts the store with all heartbeats."""
    faults = ["save", "return", "raise", "kill", "stop", "slow"]
    for fault, ranks in run(tmp_path, faults, transport, faulty).items():
        check(fault, ranks, transport, faulty)


@pytest.mark.slow
def test_other_exits_and_a_suspended_run(tmp_path: Path) -> None:
    """Ranks that end in other ways are reported with their cause, and a suspended run continues.

    A rank may be killed at once, report its own error, or have another exception hook. Ranks that are all stopped for
    longer than `timeout_s`, as by Ctrl-Z, do not count that time as waiting.
    """
    for fault, ranks in run(tmp_path, ["early", "pause", "told", "hook"], "gloo", 1).items():
        check(fault, ranks, "gloo", 1)
