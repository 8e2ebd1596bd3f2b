"""Choice of the channel of compressed collectives, by the rules of `choose_transport`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch

from windlass.comm.bootstrap import default_timeout
from windlass.comm.byte_channel import ByteChannel, ProcessGroupChannel
from windlass.comm.choose_transport import choose_transport_name
from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory_channel import SharedMemoryChannel


def choose_channel(
    requested: str,
    group: RankGroup,
    device: torch.device,
    *,
    timeout: timedelta | None = None,
    what: str = "a process group",
) -> ByteChannel:
    """Return the channel for `group`. Collective.

    Args:
        requested: auto, shm, gloo, nccl or mpi. The environment variable `WINDLASS_TRANSPORT` overrides it.
        device: device of the tensors.
        timeout: maximum wait for a peer in shared memory; None: `default_timeout()`. Other channels have the time-out
            of the process group.
        what: name of the group in reports of the watchdog.

    Raises:
        ConfigError: the name does not exist, or the transport does not support this device or these ranks.
    """
    name, _ = choose_transport_name(requested, group, device)
    if name == "shm" and group.size > 1:
        return SharedMemoryChannel(group, default_timeout() if timeout is None else timeout)
    if name == "gloo":
        group = replace(group, process_group=group.cpu_group)
    return ProcessGroupChannel(group, what)
