"""From what is seen of all ranks to whether the run can go on.

[Note: proofs] A run is ended before `timeout` only where it is proved that it cannot go on: a process that others wait
for is gone or about to go, or every rank is in a wait, none of them has moved for `proof_after` seconds, and they are
in different ones. A rank that lives and waits for nobody may come any moment, and a stopped one may be continued: that
is reported and nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.watchdog.record import End
from windlass.watchdog.settings import Limits
from windlass.watchdog.sight import Sight, State


@dataclass(frozen=True)
class Verdict:
    """What is wrong, in a sentence, and whether it ends the run."""

    headline: str
    fatal: bool


def judge(sights: list[Sight], limits: Limits) -> Verdict | None:
    """What is to be said now; None while nothing is."""
    waiting = [one for one in sights if one.living and one.waits_s >= limits.look_after]
    cut_off = [one for one in sights if one.record is not None and one.record.end is End.CUT_OFF]
    hurt = [*waiting, *(one for one in cut_off if one.state is not State.DEAD)]
    return (
        _gone(sights, [one.rank for one in hurt])
        or _left(sights, hurt)
        or _cut_off(cut_off, hurt, sights)
        or _apart(sights, limits)
        or _long(sights, limits)
    )


def _gone(sights: list[Sight], hurt: list[int]) -> Verdict | None:
    """A process that failed or died, which others wait for."""
    failed = [one.rank for one in sights if one.record is not None and one.record.end is End.FAILED]
    dead = [
        one.rank
        for one in sights
        if one.state is State.DEAD and (not one.ended or (one.record is not None and one.record.end is End.CUT_OFF))
    ]
    hurt = [rank for rank in hurt if rank not in failed and rank not in dead]
    if not hurt or not (failed or dead):
        return None
    if failed:
        return Verdict(f"{ranks(failed)} ended with an exception, and {_wait(hurt)} for it", True)
    return Verdict(f"the process of {ranks(dead)} is gone (killed, or out of memory), and {_wait(hurt)} for it", True)


def _left(sights: list[Sight], hurt: list[Sight]) -> Verdict | None:
    """A program that ended well on one rank while all others wait."""
    done = [one.rank for one in sights if one.record is not None and one.record.end is End.DONE]
    others = [one for one in sights if one.rank not in done]
    if not done or not others or not all(one in hurt for one in others):
        return None
    ranks_left = [one.rank for one in others]
    return Verdict(f"the program of {ranks(done)} ended early, without an error, and {_wait(ranks_left)} for it", True)


def _cut_off(cut_off: list[Sight], hurt: list[Sight], sights: list[Sight]) -> Verdict | None:
    """Connections that broke under ranks that all wait."""
    if not cut_off or any(one not in hurt for one in sights if one.state is not State.DEAD):
        return None
    if (different := _differ(sights)) is not None:
        return different
    told = next((one.record.error for one in cut_off if one.record is not None and one.record.error), "")
    why = f": {told.strip().splitlines()[-1]}" if told else ""
    return Verdict(f"a collective failed on {ranks([one.rank for one in cut_off])}{why}", True)


def _apart(sights: list[Sight], limits: Limits) -> Verdict | None:
    """Every rank waits, and in another operation. See [Note: proofs]."""
    if any(one.waits_s < limits.proof_after for one in sights):
        return None
    return _differ(sights)


def _differ(sights: list[Sight]) -> Verdict | None:
    groups: dict[tuple[str, str], list[int]] = {}
    for one in sights:
        assert one.record is not None
        place = one.record.place
        groups.setdefault((place.operation, place.names[0] if place.names else ""), []).append(one.rank)
    if len(groups) < 2:
        return None
    told = "; ".join(f"{ranks(who)} in {what}{f' of {name}' if name else ''}" for (what, name), who in groups.items())
    left = "; ".join(
        f"rank {one.rank} has left theirs: {one.record.left}" for one in sights if one.record and one.record.left
    )
    cause = f". {left}. Its script caught that; without it this run would have ended at once" if left else ""
    return Verdict(f"ranks are in different collectives and will never meet: {told}{cause}", True)


def _long(sights: list[Sight], limits: Limits) -> Verdict | None:
    """A wait that is long, for whatever reason."""
    waiting = [one for one in sights if one.waits_s >= limits.report_after]
    if not waiting:
        return None
    longest = max(one.waits_s for one in waiting)
    who = [one.rank for one in waiting]
    for_whom = [one for one in sights if one.living and one.waits_s < limits.look_after]
    if not for_whom:
        said = f"{_wait(who)} for {longest:.0f} s now, all in the same operation"
    else:
        said = f"{_wait(who)} for {longest:.0f} s now, for {_stragglers(for_whom)}"
    if longest >= limits.timeout:
        return Verdict(f"{said}; watchdog.timeout_s = {limits.timeout:g} has passed", True)
    return Verdict(f"{said}; ranks are ended when watchdog.timeout_s = {limits.timeout:g} has passed", False)


def _stragglers(sights: list[Sight]) -> str:
    words = {
        State.ALIVE: "alive and elsewhere (a straggler)",
        State.SILENT: "alive, but no thread of its Python runs (native code holds its lock, or the host is overloaded)",
        State.STOPPED: "stopped (SIGSTOP; `kill -CONT` continues it)",
        State.ABSENT: "not there yet: no engine was made on it",
    }
    parts = []
    for state, text in words.items():
        who = [one.rank for one in sights if one.state is state]
        if who:
            parts.append(f"{ranks(who)}, which {'is' if len(who) == 1 else 'are'} {text}")
    return "; and for ".join(parts)


def _wait(who: list[int]) -> str:
    return f"{ranks(who)} wait{'s' if len(who) == 1 else ''}"


def ranks(who: list[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    return f"rank{'s' * (len(who) > 1)} {spans(who)}"


def spans(numbers: list[int]) -> str:
    """`0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
