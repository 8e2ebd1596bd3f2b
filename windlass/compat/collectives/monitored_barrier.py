"""Barrier that names missing ranks, for any backend: each rank sets a key in the rendezvous store."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from windlass.base.errors import CommunicationError
from windlass.compat.collectives.backend_capabilities import group_or_world, warn_unless_member
from windlass.compat.collectives.timed_calls import timed_op

_DEFAULT_TIMEOUT = timedelta(minutes=30)


@timed_op
def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: Any = None,
) -> None:
    """Block until every rank of the group reaches this call.

    Args:
        timeout: time that the group's first rank waits for all others; with `wait_all_ranks`, for each of them. None:
            30 minutes.
        wait_all_ranks: wait for all ranks and name every missing one, not only the first.

    Raises:
        CommunicationError: some rank is missing at the timeout. Raised on the ranks that arrived; names the missing
            ones.
    """
    if not warn_unless_member(group, "monitored_barrier"):
        return
    ranks = dist.get_process_group_ranks(group_or_world(group))
    patience = timeout or _DEFAULT_TIMEOUT
    name, rank = f"windlass monitored {','.join(map(str, ranks))}", dist.get_rank()
    # A new prefix for each barrier: keys of an earlier barrier must not count. The count of each rank's barriers is in
    # the store, so after a rank missed a barrier, a new default group, whose store is new, has equal counts again.
    count = _get_default_store().add(f"{name} of {rank}", 1)
    store = PrefixStore(f"{name} {count}", _get_default_store())
    if rank != ranks[0]:
        store.set(str(rank), "")
        # The first rank may arrive a timeout later, and it publishes the result after its own waits.
        _wait_for_result(store, ranks[0], patience * (len(ranks) if wait_all_ranks else 2))
        return
    missing = find_missing(store, ranks[1:], patience, wait_all_ranks=wait_all_ranks)
    store.set("verdict", ",".join(map(str, missing)))
    _raise_if_missing(missing, patience)


def find_missing(store: Any, ranks: list[int], timeout: timedelta, *, wait_all_ranks: bool) -> list[int]:
    """Return the ranks without a key in the store: the first one after `timeout`.

    With `wait_all_ranks`, return every such rank, and wait up to `timeout` for each. As in torch's barrier, the ranks
    otherwise share one timeout.
    """
    end = time.monotonic() + timeout.total_seconds()
    missing = []
    for rank in ranks:
        remaining = timeout if wait_all_ranks else timedelta(seconds=end - time.monotonic())
        if not _has_arrived(store, rank, remaining):
            missing.append(rank)
            if not wait_all_ranks:
                break
    return missing


def _has_arrived(store: Any, rank: int, timeout: timedelta) -> bool:
    if store.check([str(rank)]):
        return True
    if timeout < timedelta(milliseconds=1):  # torch truncates to milliseconds, and waits without limit for 0
        return False
    try:
        store.wait([str(rank)], timeout)
    except RuntimeError:  # the store raises different subclasses for different failures
        return False
    return True


def _wait_for_result(store: Any, first: int, timeout: timedelta) -> None:
    try:
        store.wait(["verdict"], timeout)
    except RuntimeError as error:
        raise CommunicationError(
            f"monitored_barrier: rank {first} did not arrive within {timeout.total_seconds():.0f} s; see its output"
        ) from error
    result = store.get("verdict").decode()
    _raise_if_missing([int(rank) for rank in result.split(",") if rank], timeout)


def _raise_if_missing(missing: list[int], timeout: timedelta) -> None:
    if missing:
        raise CommunicationError(
            f"monitored_barrier: missing after {timeout.total_seconds():.0f} s: rank "
            f"{', '.join(map(str, missing))}; see the output of these ranks"
        )
