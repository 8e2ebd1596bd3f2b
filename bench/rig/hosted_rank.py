"""Rank that trains at stage 3, with or without ZeRO++, on one of two hosts with a slow link between them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

from rig.job import Job
from rig.link import Ends, connection_ends, pace, received_bytes
from rig.method_rank import pin
from rig.models import Sizes
from rig.slow_link_rank import MODEL, SlowLinkRank
from rig.two_hosts import INTERFACE, TwoHosts, enter_host
from windlass.cli.benches.rank_pool import RankPool

HOSTED_RANKS, HOSTS = 4, 2
PER_HOST = HOSTED_RANKS // HOSTS
HOSTED: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "zero++": {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": PER_HOST,
        "zero_quantized_gradients": True,
    },
}
"""Keys of `zero_optimization` in addition to the stage, by name of the method."""
_TIMEOUT_S = 900.0  # limit for one command


def hosted_sizes(layers: int) -> Sizes:
    """Return the sizes of the model, which has half the layers of the model on two ranks."""
    return replace(MODEL, hidden=384, layers=max(1, layers // 2), heads=6, intermediate=1024)


class HostedRank(SlowLinkRank):
    """Worker of a `RankPool` for a method of `HOSTED`.

    Args:
        spaces: names of the hosts' network namespaces; None: all ranks are in the namespace of this
            process, and their connections with the other host are paced, each to an equal share.
    """

    def __init__(self, job: Job, spaces: tuple[str, ...] | None, rank: int, meeting: str) -> None:
        self._host = rank // PER_HOST
        if spaces is not None:
            enter_host(spaces[self._host])
        os.environ["LOCAL_RANK"] = str(rank % PER_HOST)
        pin(rank)
        super().__init__(job, rank, meeting)

    @property
    def sizes(self) -> Sizes:
        return hosted_sizes(self._job.size.layers)

    @property
    def dtype(self) -> Any:
        return self._torch.bfloat16

    def pace(self, rate: int) -> int:
        """Limit the connections with the other host."""
        return pace(-(-rate // PER_HOST), self._crossing())

    def steps(self, count: int) -> dict[str, Any]:
        """Train; `bytes` of the result counts only bytes that this rank received from the other host."""
        crossing = self._crossing()
        before = received_bytes(crossing)
        found = self.timed_steps(count)
        return {**found, "bytes": received_bytes(crossing) - before}

    def _crossing(self) -> set[Ends]:
        """Return the connections with ranks of the other host. Collective."""
        own = connection_ends()
        of_ranks: list[Any] = [None] * HOSTED_RANKS
        self._dist.all_gather_object(of_ranks, (self._host, own))
        there = {ends for host, of_rank in of_ranks if host != self._host for ends in of_rank}
        return {(here, peer) for here, peer in own if (peer, here) in there}

    def _sections(self) -> dict[str, Any]:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        return {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {**zero, **HOSTED[self._job.engine]},
            "bf16": {"enabled": True},
        }


def start_hosted_ranks(job: Job, hosts: TwoHosts | None) -> RankPool:
    """Start the ranks of a job on two hosts. `hosts` None: the ranks stay in this process's namespace."""
    env = {"LOCAL_WORLD_SIZE": str(PER_HOST)}
    if hosts is not None:
        env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": hosts.address(0)}
    spaces = hosts.names if hosts is not None else None
    return RankPool(partial(HostedRank, job, spaces), HOSTED_RANKS, label=job.engine, env=env, timeout_s=_TIMEOUT_S)
