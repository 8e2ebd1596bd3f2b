"""Diagnosis of a run from the states of all ranks.

[Note: proofs] The watchdog ends a run before `timeout` only with a proof that it can't continue: a process that other
ranks wait for is dead or about to end; a collective failed on some ranks, and all others wait; or every rank has waited
for `deadlock_after` seconds, and the ranks wait in different operations. A rank that is alive and does not wait may
still join the collective, and a stopped rank may be continued: such cases are only reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.watchdog.heartbeat import ProgramEnd
from windlass.watchdog.peer_status import PeerState, PeerStatus
from windlass.watchdog.watchdog_limits import WatchdogLimits


@dataclass(frozen=True)
class HangDiagnosis:
    """Problem of a run as a sentence. `fatal`: the watchdog ends the run."""

    headline: str
    fatal: bool


def diagnose(statuses: list[PeerStatus], limits: WatchdogLimits) -> HangDiagnosis | None:
    """Diagnose the run. Return None if there is nothing to report."""
    waiting = [one for one in statuses if one.is_participating and one.wait_s >= limits.check_peers_after]
    disconnected = [
        one for one in statuses if one.heartbeat is not None and one.heartbeat.program_end is ProgramEnd.FAILED_IN_WAIT
    ]
    hurt = [*waiting, *(one for one in disconnected if one.state is not PeerState.DEAD)]
    return (
        _diagnose_dead(statuses, [one.rank for one in hurt])
        or _diagnose_early_end(statuses, hurt)
        or _diagnose_broken_connections(disconnected, hurt, statuses)
        or _diagnose_deadlock(statuses, limits)
        or _diagnose_long_wait(statuses, limits)
    )


def _diagnose_dead(statuses: list[PeerStatus], affected_ranks: list[int]) -> HangDiagnosis | None:
    """Diagnose a process that failed or died while other ranks wait for it."""
    failed = [
        one.rank for one in statuses if one.heartbeat is not None and one.heartbeat.program_end is ProgramEnd.FAILED
    ]
    dead = [
        one.rank
        for one in statuses
        if one.state is PeerState.DEAD
        and (
            not one.has_ended or (one.heartbeat is not None and one.heartbeat.program_end is ProgramEnd.FAILED_IN_WAIT)
        )
    ]
    affected_ranks = [rank for rank in affected_ranks if rank not in failed and rank not in dead]
    if not affected_ranks or not (failed or dead):
        return None
    if failed:
        return HangDiagnosis(
            f"{format_ranks(failed)} ended with an exception, and {_describe_waiting(affected_ranks)} for it", True
        )
    return HangDiagnosis(
        f"the process of {format_ranks(dead)} is gone (killed, or out of memory), and "
        f"{_describe_waiting(affected_ranks)} for it",
        True,
    )


def _diagnose_early_end(statuses: list[PeerStatus], affected: list[PeerStatus]) -> HangDiagnosis | None:
    """Diagnose a program that ended without an error on some ranks while all other ranks wait."""
    done = [one.rank for one in statuses if one.heartbeat is not None and one.heartbeat.program_end is ProgramEnd.DONE]
    others = [one for one in statuses if one.rank not in done]
    if not done or not others or not all(one in affected for one in others):
        return None
    ranks_left = [one.rank for one in others]
    return HangDiagnosis(
        f"the program of {format_ranks(done)} ended early, without an error, and {_describe_waiting(ranks_left)} for "
        "it",
        True,
    )


def _diagnose_broken_connections(
    failed_in_wait: list[PeerStatus], affected: list[PeerStatus], statuses: list[PeerStatus]
) -> HangDiagnosis | None:
    """Diagnose a collective that failed on some ranks while all other ranks wait."""
    if not failed_in_wait or any(one not in affected for one in statuses if one.state is not PeerState.DEAD):
        return None
    if (different := _diagnose_different_collectives(statuses)) is not None:
        return different
    error = next(
        (one.heartbeat.error for one in failed_in_wait if one.heartbeat is not None and one.heartbeat.error), ""
    )
    why = f": {error.strip().splitlines()[-1]}" if error else ""
    return HangDiagnosis(f"a collective failed on {format_ranks([one.rank for one in failed_in_wait])}{why}", True)


def _diagnose_deadlock(statuses: list[PeerStatus], limits: WatchdogLimits) -> HangDiagnosis | None:
    """Diagnose that all ranks wait, but not all in the same operation. See [Note: proofs]."""
    if any(one.wait_s < limits.deadlock_after for one in statuses):
        return None
    return _diagnose_different_collectives(statuses)


def _diagnose_different_collectives(statuses: list[PeerStatus]) -> HangDiagnosis | None:
    groups: dict[tuple[str, str], list[int]] = {}
    for one in statuses:
        assert one.heartbeat is not None
        place = one.heartbeat.location
        groups.setdefault((place.operation, place.parameter_names[0] if place.parameter_names else ""), []).append(
            one.rank
        )
    if len(groups) < 2:
        return None
    operations = "; ".join(
        f"{format_ranks(ranks)} in {operation}{f' of {name}' if name else ''}"
        for (operation, name), ranks in groups.items()
    )
    left = "; ".join(
        f"rank {one.rank} left its collective after an error: {one.heartbeat.caught_error}"
        for one in statuses
        if one.heartbeat and one.heartbeat.caught_error
    )
    cause = f". {left}. Its script caught the error; uncaught, it would have ended the run at once" if left else ""
    return HangDiagnosis(f"ranks wait in different collectives and can never finish: {operations}{cause}", True)


def _diagnose_long_wait(statuses: list[PeerStatus], limits: WatchdogLimits) -> HangDiagnosis | None:
    """Diagnose a long wait of any cause."""
    waiting = [one for one in statuses if one.wait_s >= limits.report_after]
    if not waiting:
        return None
    longest = max(one.wait_s for one in waiting)
    ranks = [one.rank for one in waiting]
    stragglers = [one for one in statuses if one.is_participating and one.wait_s < limits.check_peers_after]
    if not stragglers:
        headline = f"{_describe_waiting(ranks)} for {longest:.0f} s now, all in the same operation"
    else:
        headline = f"{_describe_waiting(ranks)} for {longest:.0f} s now, for {_describe_stragglers(stragglers)}"
    if longest >= limits.timeout:
        return HangDiagnosis(f"{headline}; watchdog.timeout_s = {limits.timeout:g} has passed", True)
    return HangDiagnosis(f"{headline}; ranks are ended when watchdog.timeout_s = {limits.timeout:g} has passed", False)


def _describe_stragglers(statuses: list[PeerStatus]) -> str:
    words = {
        PeerState.ALIVE: "alive and not in the collective (a straggler)",
        PeerState.SILENT: "alive, but none of its Python threads runs (native code holds the GIL, or the host is "
        "overloaded)",
        PeerState.STOPPED: "stopped (SIGSTOP; `kill -CONT` continues it)",
        PeerState.NOT_STARTED: "not started yet: it has constructed no engine",
    }
    parts = []
    for state, text in words.items():
        who = [one.rank for one in statuses if one.state is state]
        if who:
            parts.append(f"{format_ranks(who)}, which {'is' if len(who) == 1 else 'are'} {text}")
    return "; and for ".join(parts)


def _describe_waiting(waiting_ranks: list[int]) -> str:
    return f"{format_ranks(waiting_ranks)} wait{'s' if len(waiting_ranks) == 1 else ''}"


def format_ranks(numbers: list[int]) -> str:
    """Format rank numbers as `rank 3` or `ranks 0-2, 5`."""
    return f"rank{'s' * (len(numbers) > 1)} {format_rank_ranges(numbers)}"


def format_rank_ranges(numbers: list[int]) -> str:
    """Format numbers as `0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
