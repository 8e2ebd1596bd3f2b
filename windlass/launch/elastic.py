"""Starts a run again when it lost ranks, with those that remain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.base.log import logger
from windlass.launch.outcome import Outcome
from windlass.launch.run import LaunchError, start

RESTARTS = "WINDLASS_RESTARTS"
"""How often the run was started again, in the ranks' environment."""


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

    A rank that a signal ended (`kill -9`, out of memory, a crash) counts as lost with what it ran on, and the run comes
    back with as many fewer. Where ranks ended by exit codes of their own, or were ended by their watchdog, as many
    come back. How a script goes on is its own matter: it calls `engine.load_checkpoint` at its start, which does
    nothing where there is no checkpoint yet.

    Args:
        max_restarts: 0: never.
        min_nproc: with fewer ranks it is not started again.
        env: set in the ranks' environment; `WINDLASS_RESTARTS` is too.
        options: of `start`.

    Raises:
        LaunchError: the ranks cannot be started, or the numbers make no sense.
    """
    if max_restarts < 0 or not 1 <= min_nproc <= nproc:
        raise LaunchError(
            f"--max-restarts {max_restarts} --min-nproc {min_nproc} with {nproc} ranks; write at least 0 restarts, and "
            f"a number of ranks from 1 to {nproc}"
        )
    for restarts in range(max_restarts + 1):
        outcome = start(entrypoint, nproc, env={**(env or {}), RESTARTS: str(restarts)}, **options)
        if outcome.code == 0 or outcome.interrupted_by is not None or restarts == max_restarts:
            return outcome
        lost = sum(failure.lost for failure in outcome.failures)
        told = "; ".join(map(str, outcome.failures))
        if nproc - lost < min_nproc:
            logger.warning("%s; not started again: ranks left are %d, fewer than %d", told, nproc - lost, min_nproc)
            return outcome
        nproc -= lost
        logger.warning("%s; started again on %d ranks (restart %d of %d)", told, nproc, restarts + 1, max_restarts)
    raise AssertionError("the last start returns")
