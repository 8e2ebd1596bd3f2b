"""Restart of a run that lost ranks, with the remaining ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from windlass.base.log import logger
from windlass.base.text import plural
from windlass.launch.exit_status import LaunchExitStatus, RankFailure
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.local_launch import check_main_thread
from windlass.launch.rank_jobs import RESTARTS as RESTARTS
from windlass.launch.rank_placement import Host, place_ranks
from windlass.launch.supervisor import ReceivedSignals, capture_signals


def run_with_restarts(
    plan: LaunchPlan, start: Callable[[LaunchPlan], LaunchExitStatus], min_nproc: int = 1
) -> LaunchExitStatus:
    """Run `start(plan)`, and again after a failure, at most `plan.max_restarts` times, with at least `min_nproc` ranks.

    A rank that a signal other than SIGINT and SIGTERM ended (`kill -9`, out of memory, a crash) counts as lost together
    with its slot, and the run restarts without these ranks and without lost hosts. Ranks that exited by themselves, or
    that their watchdog ended, do not lower the number of ranks. A signal to this process forbids a restart. The script
    itself continues from a checkpoint: it calls `engine.load_checkpoint` at its start, which does nothing if there is
    no checkpoint yet.

    Raises:
        LaunchError: `max_restarts` is negative, or `min_nproc` is not between 1 and the number of ranks.
    """
    nproc = plan.world_size
    if plan.max_restarts < 0 or not 1 <= min_nproc <= nproc:
        raise LaunchError(
            f"--max-restarts {plan.max_restarts} --min-nproc {min_nproc} with {nproc} ranks; write at least 0 "
            f"restarts, and a number of ranks from 1 to {nproc}"
        )
    check_main_thread()
    with capture_signals(plan.signals) as received:
        return _run_attempts(plan, start, min_nproc, received)


def _run_attempts(
    plan: LaunchPlan, start: Callable[[LaunchPlan], LaunchExitStatus], min_nproc: int, received: ReceivedSignals
) -> LaunchExitStatus:
    for restarts in range(plan.max_restarts + 1):
        outcome = start(plan)
        if outcome.exit_code == 0 or outcome.interrupted_by is not None or restarts == plan.max_restarts:
            return outcome
        if received.numbers:  # a signal arrived after the last rank ended
            return replace(outcome, interrupted_by=received.numbers[0])
        failures_text = "; ".join(map(str, outcome.failures))
        hosts = drop_lost_slots(plan.hosts, outcome.failures)
        left = sum(len(host.slots) for host in hosts)
        if left < min_nproc:
            logger.warning("%s; not restarted: %s left, fewer than %d", failures_text, plural(left, "rank"), min_nproc)
            return outcome
        logger.warning(
            "%s; restarting on %s (restart %d of %d)",
            failures_text,
            plural(left, "rank"),
            restarts + 1,
            plan.max_restarts,
        )
        plan = plan.with_hosts(hosts, restarts + 1)
    raise AssertionError("the last start returns")


def drop_lost_slots(hosts: tuple[Host, ...], failures: tuple[RankFailure, ...]) -> tuple[Host, ...]:
    """Return the hosts without the slots of lost ranks. A host without slots is left out."""
    lost = {rank for one in failures if one.is_lost for rank in range(one.rank, one.rank + one.num_ranks)}
    left = []
    for host, places in zip(hosts, place_ranks(hosts), strict=True):
        slots = tuple(slot for slot, place in zip(host.slots, places, strict=True) if place.rank not in lost)
        if slots:
            left.append(Host(host.name, slots))
    return tuple(left)
