"""Starts a run again when it lost ranks, with those that remain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from windlass.base.log import logger
from windlass.base.text import plural
from windlass.launch.conduct import Events
from windlass.launch.errors import LaunchError
from windlass.launch.jobs import RESTARTS as RESTARTS
from windlass.launch.local import start_here
from windlass.launch.outcome import Failure, Outcome
from windlass.launch.place import Host, places_of
from windlass.launch.plan import Plan
from windlass.launch.run import plan_here


def start_elastic(
    entrypoint: list[str],
    nproc: int,
    *,
    max_restarts: int,
    min_nproc: int = 1,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Outcome:
    """Like `launch.run.start`; after a failure all ranks are started again, at most `max_restarts` times.

    Args:
        max_restarts: 0: never.
        min_nproc: with fewer ranks it is not started again.
        env: set in the ranks' environment; `WINDLASS_RESTARTS` is too.
        options: of `start`.

    Raises:
        LaunchError: the ranks cannot be started, or the numbers make no sense.
    """
    plan = replace(plan_here(entrypoint, nproc, env=env, **options), max_restarts=max_restarts)
    return again_and_again(plan, lambda plan: start_here(plan, Events(None)), min_nproc)


def again_and_again(plan: Plan, begin: Callable[[Plan], Outcome], min_nproc: int = 1) -> Outcome:
    """`begin(plan)`, and again after a failure, at most `plan.max_restarts` times.

    A rank that a signal ended (`kill -9`, out of memory, a crash) counts as lost with what it ran on, and the run comes
    back with as many fewer; a host that was lost does not take part any more. Where ranks ended by exit codes of their
    own, or were ended by their watchdog, as many come back. How a script goes on is its own matter: it calls
    `engine.load_checkpoint` at its start, which does nothing where there is no checkpoint yet.

    Raises:
        LaunchError: the numbers make no sense.
    """
    nproc = plan.world_size
    if plan.max_restarts < 0 or not 1 <= min_nproc <= nproc:
        raise LaunchError(
            f"--max-restarts {plan.max_restarts} --min-nproc {min_nproc} with {nproc} ranks; write at least 0 "
            f"restarts, and a number of ranks from 1 to {nproc}"
        )
    for restarts in range(plan.max_restarts + 1):
        outcome = begin(plan)
        if outcome.code == 0 or outcome.interrupted_by is not None or restarts == plan.max_restarts:
            return outcome
        told = "; ".join(map(str, outcome.failures))
        hosts = without_lost(plan.hosts, outcome.failures)
        left = sum(len(host.slots) for host in hosts)
        if left < min_nproc:
            logger.warning("%s; not started again: ranks left are %d, fewer than %d", told, left, min_nproc)
            return outcome
        logger.warning(
            "%s; started again on %s (restart %d of %d)", told, plural(left, "rank"), restarts + 1, plan.max_restarts
        )
        plan = plan.on(hosts, restarts + 1)
    raise AssertionError("the last start returns")


def without_lost(hosts: tuple[Host, ...], failures: tuple[Failure, ...]) -> tuple[Host, ...]:
    """The hosts, without the slots of ranks that were lost; a host without slots is left out."""
    lost = {rank for one in failures if one.lost for rank in range(one.rank, one.rank + one.ranks)}
    left = []
    for host, places in zip(hosts, places_of(hosts), strict=True):
        slots = tuple(slot for slot, place in zip(host.slots, places, strict=True) if place.rank not in lost)
        if slots:
            left.append(Host(host.name, slots))
    return tuple(left)
