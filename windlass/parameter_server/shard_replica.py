"""Replica of a shard: repeats each update of its server, and replaces a lost server ([Note: replicas of a shard])."""

from __future__ import annotations

from datetime import timedelta

from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.parameter_server.heartbeat import receive_message
from windlass.parameter_server.job_rendezvous import JobRendezvous, ServerAddress
from windlass.parameter_server.messages import (
    MessageKind,
    receive_by_worker,
    receive_content,
    receive_gradient,
    receive_text,
    refused,
)
from windlass.parameter_server.model_layout import ModelLayout
from windlass.parameter_server.server import TakenShard
from windlass.parameter_server.server_shard import MakeOptimizer, ServerShard
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.update_clock import UpdateClock


class ShardReplica:
    """Copy of a shard in another process than its server.

    Args:
        layout: the model's layout.
        server: number of the shard.
        replica: number of this process among the processes of the shard.
        workers: number of workers at the start.
        settings: settings of the job.
        make_optimizer: function that builds the optimizer of the shard.
        rendezvous: connection to the job's store.
    """

    def __init__(
        self,
        layout: ModelLayout,
        server: int,
        replica: int,
        workers: int,
        settings: ParameterServerSettings,
        make_optimizer: MakeOptimizer,
        rendezvous: JobRendezvous,
    ) -> None:
        self._layout, self._server, self._replica, self._workers = layout, server, replica, workers
        self._settings, self._make_optimizer, self._rendezvous = settings, make_optimizer, rendezvous
        self._shard: ServerShard | None = None
        self._clock = UpdateClock(settings, workers)

    @property
    def has_copy(self) -> bool:
        """True if the content of the shard has arrived from the server that was followed last."""
        return self._shard is not None

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._clock.version

    def follow(self, address: ServerAddress) -> TakenShard | None:
        """Repeat the updates of a server until the server is lost.

        Returns:
            The shard, if this process has taken it over. None if another process has taken it over, if the run has
            ended, or if the server was lost before the shard's content had arrived.

        Raises:
            CommunicationError: the server has another model or other settings, or sent an invalid message.
        """
        self._shard = None
        try:
            link = self._rendezvous.call_server(address)
            link.idle = timedelta(seconds=self._settings.heartbeat_seconds)
            self._shard = self._receive_shard(link)
            link.send([MessageKind.DONE])
            while True:
                self._make_update(link, self._shard)
        except LinkClosedError as error:
            cause = error
        if self._shard is None or self._rendezvous.is_over(self._server):
            return None
        here = self._rendezvous.take_over(address, self._replica)
        if here is None:
            return None
        logger.warning("%s takes over at version %d: %s", here, self.version, cause)
        return TakenShard(here, self._shard, self._clock)

    def _receive_shard(self, link: PairLink) -> ServerShard:
        layout, server = self._layout, self._server
        link.send([MessageKind.FOLLOW, self._replica, layout.fingerprint, self._settings.fingerprint])
        kind, size, count, *_ = receive_message(link)
        if kind == MessageKind.PROBLEM:
            raise CommunicationError(f"parameter server: {receive_text(link, size)}")
        if kind != MessageKind.CONTENT:
            raise refused(link, f"message kind {kind}", "the content of the shard")
        content = receive_content(link, size, count, layout.numel(server))
        shard = ServerShard(
            layout.parameters,
            layout.fragments[server],
            layout.values(server),
            self._make_optimizer,
            splits_parameters=layout.splits_parameters,
        )
        if not shard.has_fragments_of(content):
            raise refused(link, "a shard of other fragments", "those of this one")
        self._clock = UpdateClock(self._settings, self._workers)
        shard.restore(content, self._clock)
        return shard

    def _make_update(self, link: PairLink, shard: ServerShard) -> None:
        layout, server = self._layout, self._server
        kind, version, pushes, workers, *_ = receive_message(link)
        if kind != MessageKind.UPDATE or version != self._clock.version:
            raise refused(link, f"message {kind} at version {version}", f"an update of version {self._clock.version}")
        gradient = receive_gradient(link, layout.dense_sizes(server), layout.sparse_shapes(server), layout.dtype)
        counted = receive_by_worker(link, pushes, "pushes")
        self._clock.steps = receive_by_worker(link, workers, "steps")
        shard.update(gradient)
        self._clock.complete(counted)
        link.send([MessageKind.DONE])
