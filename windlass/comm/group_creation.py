"""Creation of process groups whose connections lead to processes of this user ([Note: owners of peers])."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world as torch_groups

from windlass.base.errors import CommunicationError
from windlass.comm.peer_owners import require_own_peers

_PURPOSE = "made for a process group"


def init_default_group(backend: str, **options: Any) -> None:
    """Create the default process group as `torch.distributed.init_process_group` does. Collective over all ranks.

    Raises:
        CommunicationError: a connection leads to a process of another user, or a rank left before all had checked
            their connections. As after every other error, no default group is left, and the call may be repeated.
    """
    try:
        with require_own_peers(_PURPOSE):
            dist.init_process_group(backend, **options)
        _wait_for_all_checks(dist.group.WORLD)
    except BaseException:
        _discard_default_group()
        raise


def new_process_group(
    ranks: Sequence[int] | None,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    use_local_synchronization: bool = False,
) -> Any:
    """Create a process group as `torch.distributed.new_group` does.

    Collective over all ranks; with `use_local_synchronization`, over `ranks` only.

    Raises:
        CommunicationError: a connection leads to a process of another user; the group is destroyed. Or a rank left
            before all had checked their connections; the group then still exists.
    """
    group: Any = dist.GroupMember.NON_GROUP_MEMBER
    try:
        with require_own_peers(_PURPOSE):
            group = dist.new_group(
                None if ranks is None else list(ranks),
                timeout=timeout,
                backend=backend,
                use_local_synchronization=use_local_synchronization,
            )
    except CommunicationError:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)  # ends the wait of the other ranks in `_wait_for_all_checks`
        raise
    _wait_for_all_checks(group)
    return group


def _discard_default_group() -> None:
    """Discard the remains of a failed creation of the default group.

    torch numbers groups from 0 in each process, also those whose creation fails, and ranks find each other by the
    number. Without the reset, a rank that failed once would wait for others that fail for the first time.
    """
    if dist.is_initialized():
        dist.destroy_process_group()  # resets the number too
    else:
        torch_groups.group_count = 0


def _wait_for_all_checks(group: Any) -> None:
    """Wait until all ranks of a gloo group have checked their connections.

    No rank may close a connection that its peer has not checked yet: the check would fail. An all-reduce is used
    because it sends no pickled object.

    Raises:
        CommunicationError: a rank has left the group, perhaps because its connections lead to another user.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER or "gloo" not in dist.get_backend_config(group):
        return
    if dist.get_world_size(group) > 1:
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:  # torch's error for every failure of gloo
            raise CommunicationError(
                f"a rank of a new process group left before all had joined it: {str(error).strip().splitlines()[0]}; "
                "see the output of the other ranks"
            ) from error
