"""Server of one shard: a thread for each worker, and one lock around the parameters."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.comm.pair_link import PairLink
from windlass.parameter_server.meeting import Meeting
from windlass.parameter_server.messages import MOST_WORKERS, MessageKind, receive_gradient, refused, send_problem
from windlass.parameter_server.model_layout import ModelLayout
from windlass.parameter_server.server_shard import MakeOptimizer, ServerShard, ShardGradient
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.update_clock import PushResult, UpdateClock

_PAUSE = 0.02


class ParameterServer:
    """Server of one shard, until all workers have left.

    Args:
        layout: the model's layout over `servers` servers.
        server: number of this one.
        workers: number of workers at the start.
        settings: those of the job.
        make_optimizer: builds the optimizer of the shard.
        meeting: the job's store.
    """

    def __init__(
        self,
        layout: ModelLayout,
        server: int,
        workers: int,
        settings: ParameterServerSettings,
        make_optimizer: MakeOptimizer,
        meeting: Meeting,
    ) -> None:
        self._layout, self._server, self._workers, self._settings = layout, server, workers, settings
        self._meeting = meeting
        self._clock = UpdateClock(settings, workers)
        self._changed = threading.Condition()
        self._pending: dict[int, ShardGradient] = {}
        self._live: dict[int, int] = {}  # ticket of the newest connection of each worker
        self._idle_since = time.monotonic()  # if there is none
        self._reason = ""  # for which no update can follow
        self._links: dict[int, PairLink] = {}
        self._ends = False
        self.dropped = 0
        self._here = meeting.register_server(server)
        self._shard = self._start_shard(make_optimizer)

    @property
    def version(self) -> int:
        """Number of updates."""
        return self._clock.version

    def serve(self) -> None:
        """Serve workers until all have left.

        Raises:
            CommunicationError: no worker came in time.
        """
        answered, began, threads = 0, time.monotonic(), []
        while not self._is_over(may_be_alone=bool(answered) or self._here.generation > 1):
            for ticket in range(answered + 1, self._meeting.count_calls(self._here) + 1):
                thread = threading.Thread(target=self._serve_worker, args=(ticket,), daemon=True)
                threads.append(thread)
                thread.start()
                answered = ticket
            if not answered and time.monotonic() - began > self._settings.connect_seconds:
                raise CommunicationError(
                    f"parameter server: no worker connected with {self._here} within "
                    f"{self._settings.connect_seconds:.0f} s; start the workers, or raise connect_seconds"
                )
            time.sleep(_PAUSE)
        if self._ends:
            return
        for thread in threads:
            thread.join(timeout=5)
        with self._changed:
            self._save()

    def abandon(self) -> None:
        """End at once, without a snapshot: the links of all workers close, as when the process is killed."""
        with self._changed:
            self._ends = True
            for link in self._links.values():
                link.close()

    def _start_shard(self, make_optimizer: MakeOptimizer) -> ServerShard:
        """Build the shard: from the snapshot, or from server 0's model."""
        layout, path = self._layout, self._snapshot
        own = layout.values(self._server)
        stored = path is not None and path.exists()
        if self._here.generation == 1 and len(layout.fragments) > 1:
            self._meeting.post(f"stored {self._server}", str(int(stored)))
            if self._server == 0:
                self._send_first_values()
            elif not stored:
                with_first = self._meeting.link_servers(self._server, first=False)
                with_first.receive(own)
                with_first.close()
        shard = ServerShard(layout.parameters, layout.fragments[self._server], own, make_optimizer, cuts=layout.cuts)
        if stored:
            assert path is not None
            self._clock.version = shard.load(path)
            if self._here.generation > 1:
                self._clock.retired = {one for one in range(self._workers) if self._meeting.has(f"left {one}")}
            logger.info("%s continues from version %d of %s", self._here, self._clock.version, path)
        elif self._here.generation > 1:
            raise CommunicationError(
                f"parameter server: {self._here} replaces a server that was lost, and there is no snapshot to continue "
                "from; set `snapshot`, and start the run again"
            )
        elif path is not None:
            shard.save(path, 0)
        return shard

    def _send_first_values(self) -> None:
        for server in range(1, len(self._layout.fragments)):
            if self._meeting.read(f"stored {server}", f"server {server}") == "0":
                link = self._meeting.link_servers(server, first=True)
                link.send_tensor(self._layout.values(server))
                link.close()

    @property
    def _snapshot(self) -> Path | None:
        folder = self._settings.snapshot
        return (
            None
            if folder is None
            else Path(folder) / f"server-{self._server}-of-{len(self._layout.fragments)}.safetensors"
        )

    def _save(self) -> None:
        if self._snapshot is not None:
            self._shard.save(self._snapshot, self._clock.version)

    def _is_over(self, *, may_be_alone: bool) -> bool:
        with self._changed:
            if self._live or self._ends:
                return self._ends
            alone = time.monotonic() - self._idle_since
        rest = [worker for worker in range(self._workers) if not self._meeting.has(f"left {worker}")]
        if not rest:
            return True
        # No connection ends with a worker that is killed before it connects, or while the shard has no server.
        if not may_be_alone or alone < self._settings.connect_seconds:
            return False
        logger.warning(
            "%s: no worker has been connected for %.0f s (connect_seconds), and worker %s did not say goodbye: it ends",
            self._here,
            alone,
            ", ".join(map(str, rest)),
        )
        return True

    def _serve_worker(self, ticket: int) -> None:
        worker, said_bye = -1, False
        try:
            link = self._meeting.answer_call(self._here, ticket)
            worker = self._welcome(link, ticket)
            if worker < 0:
                return
            while not said_bye:
                kind, number, *_ = link.receive_header()
                if kind == MessageKind.PULL:
                    self._answer_pull(link, worker, number)
                elif kind == MessageKind.PUSH:
                    self._answer_push(link, worker, number)
                elif kind == MessageKind.BYE:
                    said_bye = True
                else:
                    raise refused(link, f"message kind {kind}", "pull, push or bye")
        except CommunicationError as error:
            logger.warning("%s: worker %d has left: %s", self._here, worker, error)
        finally:
            if worker >= 0:
                self._remove(worker, ticket, retires=said_bye)

    def _welcome(self, link: PairLink, ticket: int) -> int:
        """Add the worker, and return its number; -1 if it cannot take part."""
        kind, worker, pulled, pushes, fingerprint, *_ = link.receive_header()
        if kind != MessageKind.HELLO or not 0 <= worker < MOST_WORKERS or pulled < 0 or pushes < 0:
            raise refused(link, f"{[kind, worker, pulled, pushes]}", f"a hello of worker 0 to {MOST_WORKERS - 1}")
        if fingerprint != self._layout.fingerprint:
            send_problem(
                link,
                f"worker {worker} has another model than {self._here}: names or shapes of the parameters differ; build "
                "the same model on all servers and workers",
            )
            return -1
        link.peer = f"worker {worker}"
        with self._changed:
            self._live[worker] = ticket
            self._links[worker] = link
            self._clock.join(worker, pulled if self._settings.mode == "synchronous" else pushes)
            self._changed.notify_all()
            version = self._clock.version
        link.send([MessageKind.WELCOME, version])
        return worker

    def _remove(self, worker: int, ticket: int, *, retires: bool) -> None:
        with self._changed:
            if self._live.get(worker) != ticket or self._ends:
                return  # it has connected again
            del self._live[worker]
            self._idle_since = time.monotonic()
            self._clock.leave(worker, retires=retires)
            if self._clock.is_complete:
                self._update()
            self._meeting.post(f"left {worker}")
            if self._live:  # else the run ends
                self._reason = self._clock.stuck_because()
            self._changed.notify_all()

    def _answer_pull(self, link: PairLink, worker: int, wanted: int) -> None:
        with self._changed:
            while not self._clock.may_pull(worker, wanted) and not self._reason:
                self._changed.wait()
            possible = self._clock.may_pull(worker, wanted)
            version, values = self._clock.version, self._shard.values()
        if possible:
            link.send([MessageKind.PARAMETERS, version], values)
        else:
            send_problem(link, f"{self._here} cannot make update {version + 1}: {self._reason}; start the run again")

    def _answer_push(self, link: PairLink, worker: int, pulled: int) -> None:
        layout, server = self._layout, self._server
        if pulled < 0:
            raise refused(link, f"a gradient of version {pulled}", "0 or more")
        gradient = receive_gradient(link, layout.dense_numel(server), layout.sparse_shapes(server), layout.dtype)
        with self._changed:
            result = self._clock.push(worker, pulled)
            if result in (PushResult.WAITS, PushResult.COMPLETES):
                self._pending[worker] = gradient
            elif result is PushResult.DROPPED:
                self.dropped += 1
            if result is PushResult.COMPLETES:
                self._update()
            self._changed.notify_all()
            version = self._clock.version
        link.send([MessageKind.PUSHED, result.value, version])

    def _update(self) -> None:
        """Make one update with the gradients that are here. The caller holds the lock."""
        # In the order of workers, so that the sum does not depend on which one came first.
        self._shard.update([self._pending[number] for number in sorted(self._pending)])
        self._pending.clear()
        self._clock.complete()
        if self._clock.version % self._settings.snapshot_every == 0:
            self._save()
