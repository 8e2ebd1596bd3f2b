"""Process of a shard: its server, or a replica that replaces a lost server."""

from __future__ import annotations

import time

from windlass.base.errors import CommunicationError
from windlass.parameter_server.job_rendezvous import JobRendezvous, ShardRecord
from windlass.parameter_server.model_layout import ModelLayout
from windlass.parameter_server.server import ParameterServer, TakenShard
from windlass.parameter_server.server_shard import MakeOptimizer
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.shard_replica import ShardReplica

_PAUSE = 0.02


class ShardProcess:
    """One process of a shard. It acts as the shard's server or as a replica of it, until the run ends.

    The first process begins as the server, the others as its replicas. A process that is started again becomes a
    replica. If it was the server, and no replica is complete, it becomes the server again, from the snapshot.

    Args:
        layout: the model's layout.
        server: number of the shard.
        replica: number of this process among the processes of the shard.
        replicas: number of replicas at the start.
        workers: number of workers at the start.
        settings: settings of the job.
        make_optimizer: function that builds the optimizer of the shard.
        rendezvous: connection to the job's store.

    Attributes:
        serving: the server in this process; None: this process has not been the server.
        following: the replica in this process, which copies the shard of another process's server.
    """

    def __init__(
        self,
        layout: ModelLayout,
        server: int,
        replica: int,
        replicas: int,
        workers: int,
        settings: ParameterServerSettings,
        make_optimizer: MakeOptimizer,
        rendezvous: JobRendezvous,
    ) -> None:
        self._layout, self._server, self._replica, self._replicas = layout, server, replica, replicas
        self._workers, self._settings, self._make_optimizer, self._rendezvous = (
            workers,
            settings,
            make_optimizer,
            rendezvous,
        )
        self.serving: ParameterServer | None = None
        self.following = ShardReplica(layout, server, replica, workers, settings, make_optimizer, rendezvous)

    def run(self) -> None:
        """Act as the shard's server, or follow that server as a replica, until the run ends.

        Raises:
            CommunicationError: another process did not connect in time, or no server was found in time.
        """
        # an earlier process with this number may still be listed, but its copy of the shard ended with it
        self._rendezvous.remove_replica(self._server, self._replica)
        last_contact = time.monotonic()
        while not self._rendezvous.is_over(self._server):
            record = self._rendezvous.record(self._server)
            if self._is_server_of(record):
                self._serve(None)
                last_contact = time.monotonic()
            elif record.address is not None and record.address.replica != self._replica:
                taken = self.following.follow(record.address)
                if taken is not None:
                    self._serve(taken)
                if self.following.has_copy:
                    last_contact = time.monotonic()
            if time.monotonic() - last_contact > self._settings.connect_seconds:
                raise CommunicationError(
                    f"parameter server: replica {self._replica} of server {self._server} found no server for "
                    f"{self._settings.connect_seconds:.0f} s ({record.address or 'none was started'}); see its output, "
                    "or raise connect_seconds"
                )
            time.sleep(_PAUSE)

    def _is_server_of(self, record: ShardRecord) -> bool:
        """Return True if this process becomes the server without a copy of the previous server's shard."""
        if record.address is None:
            return self._replica == 0
        return record.address.replica == self._replica and not record.replicas

    def _serve(self, taken: TakenShard | None) -> None:
        self.serving = ParameterServer(
            self._layout,
            self._server,
            self._workers,
            self._settings,
            self._make_optimizer,
            self._rendezvous,
            replica=self._replica,
            replicas=self._replicas,
            taken=taken,
        )
        self.serving.serve()
