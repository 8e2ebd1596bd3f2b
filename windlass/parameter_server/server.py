"""Server of one shard: a thread for each worker, and one lock around the parameters.

[Note: replicas of a shard] When a replica of a shard connects, its server sends it the shard's content. After that, it
gets the mean gradient of every update before any worker receives the updated parameters. The replica makes the same
update with an optimizer of its own. So no worker has parameters that a replica lacks, and a replica that takes over
continues with the next update. Workers repeat pushes that were not answered. Pushes are numbered, so that a repeated
push counts once.

[Note: bound on staleness] In bounded mode only the last server lets workers wait. While a worker joins, reconnects or
has a push refused (`max_age`), servers count its steps differently. If two servers let workers wait, one could let
worker A wait for B, and the other one worker B for A. A worker pushes to the last server last, and pulls from it first.
So when the last server answers a pull, all servers have the gradients of the steps that it has counted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.parameter_server.heartbeat import send_heartbeats
from windlass.parameter_server.job_rendezvous import JobRendezvous, ServerAddress
from windlass.parameter_server.messages import (
    MOST_WORKERS,
    MessageKind,
    receive_gradient,
    refused,
    send_content,
    send_problem,
    send_update,
)
from windlass.parameter_server.model_layout import ModelLayout
from windlass.parameter_server.server_shard import (
    MakeOptimizer,
    ServerShard,
    ShardGradient,
    check_versions,
    mean_gradient,
    read_version,
)
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.update_clock import PushResult, UpdateClock

_PAUSE = 0.02
_PLACE_CHECK_S = 0.5
_RETURN_S = 1.0  # seconds in which a worker may connect again before it counts as lost


@dataclass(frozen=True)
class TakenShard:
    """Shard that a replica has taken over from its server."""

    address: ServerAddress
    shard: ServerShard
    clock: UpdateClock


class ParameterServer:
    """Server of one shard of the parameters. Answers pulls and pushes until all workers have left.

    Args:
        layout: the model's layout over `servers` servers.
        server: index of this server.
        workers: number of workers at the start.
        settings: settings of the job.
        make_optimizer: function that builds the optimizer of the shard.
        rendezvous: connection to the job's store.
        replica: index of this process among the processes of the shard.
        replicas: number of replicas that must have the shard's content before the first worker is answered.
        taken: shard that this process has taken over as its replica; None: build the shard from the snapshot or model.
    """

    def __init__(
        self,
        layout: ModelLayout,
        server: int,
        workers: int,
        settings: ParameterServerSettings,
        make_optimizer: MakeOptimizer,
        rendezvous: JobRendezvous,
        *,
        replica: int = 0,
        replicas: int = 0,
        taken: TakenShard | None = None,
    ) -> None:
        self._layout, self._server, self._workers, self._settings = layout, server, workers, settings
        self._rendezvous = rendezvous
        # see [Note: bound on staleness]
        self._holds_workers = settings.mode == "synchronous" or (
            settings.mode == "bounded" and server == len(layout.fragments) - 1
        )
        self._clock = UpdateClock(settings, workers) if taken is None else taken.clock
        self._changed = threading.Condition()
        self._pending: dict[int, ShardGradient] = {}
        self._live: dict[int, int] = {}  # number (ticket) of the newest connection of each worker
        self._idle_since = time.monotonic()  # start of the time without connected workers
        self._links: dict[int, PairLink] = {}
        self._replicas: dict[int, PairLink] = {}
        self._awaited_replicas = replicas
        self._had_worker = self._ends = False
        self._newcomers = set[int]()  # new workers whose hello waits for an answer
        self._failure: BaseException | None = None  # error that ends the server
        self._failed_update: BaseException | None = None  # sent to the worker that pushed; then ends the server
        self.dropped = 0
        self._here = rendezvous.register_server(server, replica) if taken is None else taken.address
        self._shard = self._start_shard(make_optimizer) if taken is None else taken.shard
        if self._here.generation > 1 and taken is None:
            rendezvous.record_restored(self._here, self._clock.version)
        if self._here.generation > 1:
            self._awaited_replicas = 0
            everyone = range(workers + rendezvous.count_joined())
            self._clock.take_over(everyone, {one for one in everyone if rendezvous.has_left(one, retired=True)})

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._clock.version

    def serve(self) -> bool:
        """Serve workers until all have left. Returns False if a replica has taken the shard over, else True.

        Raises:
            CommunicationError: no worker, or not all replicas, connected in time.
        """
        answered, began, threads = 0, time.monotonic(), []
        checked = began
        try:
            while not self._is_over():
                # While this process was suspended, a replica may have taken the shard over. Threads that wait for a
                # worker do not detect this.
                if time.monotonic() - checked > _PLACE_CHECK_S:
                    self._check_place()
                    checked = time.monotonic()
                for ticket in range(answered + 1, self._rendezvous.count_calls(self._here) + 1):
                    thread = threading.Thread(target=self._answer, args=(ticket,), daemon=True)
                    threads.append(thread)
                    thread.start()
                    answered = ticket
                if not self._had_worker and time.monotonic() - began > self._settings.connect_seconds:
                    self._refuse_to_wait()
                self._count_absent(is_late=time.monotonic() - began > self._settings.connect_seconds)
                time.sleep(_PAUSE)
        except BaseException:
            self.abandon()
            raise
        # `_is_over` counts a suspension of this process as time without workers, but a replica may have taken over.
        if self._ends or not self._check_place():
            return False
        for thread in threads:
            thread.join(timeout=5)
        with self._changed:
            self._save()
        self._rendezvous.end(self._server)
        for link in self._replicas.values():  # the end of the link shows replicas that the run has ended
            link.close()
        return True

    def abandon(self) -> None:
        """Stop the server at once, without a snapshot. The links of all workers and replicas close, as when the process
        is killed.
        """
        with self._changed:
            self._ends = True
            for link in (*self._links.values(), *self._replicas.values()):
                link.close()
            self._changed.notify_all()

    def _refuse_to_wait(self) -> None:
        """Raise CommunicationError if replicas are missing, or if no worker has ever connected with this shard."""
        seconds, missing = self._settings.connect_seconds, self._awaited_replicas - len(self._replicas)
        if missing > 0:
            raise CommunicationError(
                f"parameter server: {missing} of {self._awaited_replicas} replicas of {self._here} did not connect "
                f"within {seconds:.0f} s; see their output, or raise connect_seconds"
            )
        if self._here.generation == 1:
            raise CommunicationError(
                f"parameter server: no worker connected with {self._here} within {seconds:.0f} s; start the workers, "
                "or raise connect_seconds"
            )

    def _start_shard(self, make_optimizer: MakeOptimizer) -> ServerShard:
        """Build the shard from its snapshot or, at the start of a run without one, from server 0's model."""
        layout, path = self._layout, self._snapshot
        own = layout.values(self._server)
        stored = path is not None and path.exists()
        if self._here.generation == 1 and len(layout.fragments) > 1:
            version = -1 if path is None or not stored else read_version(path)
            self._rendezvous.post(f"stored {self._server}", str(version))
            if self._server == 0:
                self._send_first_values(version)
            elif not stored:
                with_first = self._rendezvous.link_servers(self._server, first=False)
                with_first.receive(own)
                with_first.close()
        shard = ServerShard(
            layout.parameters,
            layout.fragments[self._server],
            own,
            make_optimizer,
            splits_parameters=layout.splits_parameters,
        )
        if stored:
            assert path is not None
            shard.load(path, self._clock)
            logger.info("%s continues from version %d of %s", self._here, self._clock.version, path)
        elif self._here.generation > 1:
            cause = "there is no snapshot to continue from; set `snapshot` or start a replica of each server, and"
            if path is not None:  # lost at its start: it writes a snapshot before it answers a worker
                cause = f"{path}, which a server writes before its first update, does not exist;"
            raise CommunicationError(
                f"parameter server: {self._here} replaces a server that was lost, and {cause} start the run again"
            )
        if self._here.generation == 1:
            self._clock.begin()  # the step counts in a snapshot are of an earlier run's workers
        if path is not None and not stored:
            shard.save(path, self._clock)
        return shard

    def _send_first_values(self, version: int) -> None:
        """Send each server without a snapshot the values of its shard, from this server's model.

        Args:
            version: version of this server's snapshot; -1: no snapshot.

        Raises:
            CheckpointError: some servers have trained parameters, and others would start from the untrained model.
        """
        others = range(1, len(self._layout.fragments))
        versions = [version, *(int(self._rendezvous.read(f"stored {other}", f"server {other}")) for other in others)]
        if self._settings.snapshot is not None:
            check_versions(versions, self._settings.snapshot, self._settings.snapshot_every)
        for server in others:
            if versions[server] < 0:
                link = self._rendezvous.link_servers(server, first=True)
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
            try:
                self._shard.save(self._snapshot, self._clock)
            except FileNotFoundError:  # a process that took the shard over removed the unfinished file
                if self._rendezvous.record(self._server).address == self._here:
                    raise
                self.abandon()
                self._require_place()

    def _is_over(self) -> bool:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._live or self._newcomers or self._ends:
                return self._ends
            alone, may_be_alone = time.monotonic() - self._idle_since, self._had_worker or self._here.generation > 1
        # A worker that joined the run may be about to connect, after its server was lost.
        workers = self._workers + self._rendezvous.count_joined()
        rest = [worker for worker in range(workers) if not self._rendezvous.has_left(worker)]
        if not rest:
            return True
        # The end of a worker that is killed before it connects, or while the shard has no server, is not detected.
        # So the server ends after `connect_seconds` without a connected worker.
        if not may_be_alone or alone < self._settings.connect_seconds:
            return False
        logger.warning(
            "%s ends: no worker has been connected for %.0f s (connect_seconds); workers that ended without a "
            "message: %s",
            self._here,
            alone,
            ", ".join(map(str, rest)),
        )
        return True

    def _answer(self, ticket: int) -> None:
        """Serve one connection. Any error except a failure of the connection ends the server."""
        try:
            self._serve_caller(ticket)
        except BaseException as error:
            with self._changed:
                if not self._ends:
                    self._failure = self._failure or self._failed_update or error

    def _serve_caller(self, ticket: int) -> None:
        worker, said_bye, link = -1, False, None
        try:
            link = self._rendezvous.answer_call(self._here, ticket)
            send_heartbeats(link, self._settings.heartbeat_seconds)
            worker, version, step = self._welcome(link, ticket)
            if worker < 0:
                return
            # send inside the `try`: if this fails, the worker is removed below
            link.send([MessageKind.WELCOME, version, step])
            while not said_bye:
                kind, *numbers = link.receive_header()
                if kind == MessageKind.PULL:
                    self._answer_pull(link, worker, numbers[0])
                elif kind == MessageKind.PUSH:
                    self._answer_push(link, worker, ticket, numbers[0], numbers[1])
                elif kind == MessageKind.BYE:
                    said_bye = True
                else:
                    raise refused(link, f"message kind {kind}", "pull, push or bye")
        except CommunicationError as error:
            if link is not None:
                link.close()  # ends the heartbeats on the link
            if not self._ends:
                who = f"worker {worker} has left" if worker >= 0 else "a connection has ended"
                logger.warning("%s: %s: %s", self._here, who, error)
        except Exception as error:
            if link is not None:
                with contextlib.suppress(CommunicationError):  # a worker that has left must not hide the failure
                    send_problem(link, f"{self._here} failed: {type(error).__name__}: {error}")
                link.close()
            raise
        finally:
            if worker >= 0:
                self._remove(worker, ticket, retires=said_bye)

    def _welcome(self, link: PairLink, ticket: int) -> tuple[int, int, int]:
        """Add the caller, and return its number if it is a worker (-1: a replica, or a worker that is refused), the
        version, and the step of the worker.
        """
        kind, *numbers = link.receive_header()
        if kind == MessageKind.FOLLOW:
            self._add_replica(link, *numbers[:3])
            return -1, 0, 0
        worker, pulled, step, model, settings, *_ = numbers
        if kind != MessageKind.HELLO or not 0 <= worker < MOST_WORKERS or pulled < 0 or step < -1:
            raise refused(link, f"{[kind, worker, pulled, step]}", f"a hello of worker 0 to {MOST_WORKERS - 1}")
        if not self._is_alike(link, f"worker {worker}", model, settings):
            return -1, 0, 0
        link.peer = f"worker {worker}"
        with self._changed:
            while len(self._replicas) < self._awaited_replicas and not self._ends:
                self._changed.wait()
            self._await_steps(worker, is_new=step < 0)
            self._require_place()
            if self._live.get(worker, 0) > ticket:
                raise LinkClosedError(f"worker {worker} has connected again")
            # a server that is started later would otherwise end without waiting for this worker
            self._rendezvous.come_back(worker)
            self._awaited_replicas = 0
            self._live[worker] = ticket
            self._links[worker] = link
            self._had_worker = True
            self._clock.join(worker, pulled, step)
            self._pending = {one: gradient for one, gradient in self._pending.items() if one in self._clock.waiting}
            self._changed.notify_all()
            return worker, self._clock.version, self._clock.steps[worker]

    def _await_steps(self, worker: int, *, is_new: bool) -> None:
        """Let a new worker of a bounded run wait until the workers of the server that this one replaces have connected.
        They have made more steps than the snapshot records, and the new worker begins at the step of the slowest of
        them. The caller holds the lock.
        """
        if not is_new or self._settings.mode != "bounded" or not self._holds_workers or self._here.generation == 1:
            return
        self._newcomers.add(worker)
        self._clock.steps.pop(worker, None)  # an assumed count, or one of an earlier process: no worker may wait for it
        self._changed.notify_all()
        while self._clock.absent - self._newcomers and not self._ends:
            self._changed.wait()
        self._newcomers.discard(worker)

    def _is_alike(self, link: PairLink, caller: str, model: int, settings: int) -> bool:
        """Return True if the caller has the same model and settings; else send it a text about the difference."""
        problem = ""
        if model != self._layout.fingerprint:
            problem = (
                f"{caller} has another model than {self._here}: names or shapes of the parameters differ, or some are "
                "float64 on one side only; build the same model on all servers and workers"
            )
        elif settings != self._settings.fingerprint:
            problem = (
                f"{caller} has other settings than {self._here}: mode, staleness, backup_workers, max_age and "
                "heartbeat_seconds must be equal on all servers and workers"
            )
        if problem:
            send_problem(link, problem)
            link.close()
        return not problem

    def _add_replica(self, link: PairLink, replica: int, model: int, settings: int) -> None:
        """Send the content of the shard to a replica, which gets every update from now on."""
        link.peer = f"replica {replica} of server {self._server}"
        if not 0 <= replica < MOST_WORKERS:
            raise refused(link, f"replica {replica}", f"0 to {MOST_WORKERS - 1}")
        if not self._is_alike(link, link.peer, model, settings):
            return
        with self._changed:
            self._require_place()
            # A replica that does not answer blocks the workers for `reconnect_seconds` only. At the start they wait for
            # all replicas in any case.
            starts = len(self._replicas) < self._awaited_replicas
            link.idle = timedelta(
                seconds=self._settings.connect_seconds if starts else self._settings.reconnect_seconds
            )
            send_content(link, self._shard.content(self._clock))
            self._await_done(link)
            link.idle = timedelta(seconds=self._settings.reconnect_seconds)
            self._replicas[replica] = link
            self._note_replicas()
            self._changed.notify_all()

    def _await_done(self, link: PairLink) -> None:
        if (kind := link.receive_header()[0]) != MessageKind.DONE:
            raise refused(link, f"message kind {kind}", "done")

    def _note_replicas(self) -> None:
        """Record in the store which replicas have the shard's content. The caller holds the lock.

        Raises:
            LinkClosedError: a replica has taken the shard over; this process no longer serves the shard.
        """
        if not self._rendezvous.set_replicas(self._here, frozenset(self._replicas)):
            self._leave_place()
            self._require_place()

    def _require_place(self) -> None:
        if self._ends or self._failed_update is not None:  # the shard may be half updated
            raise LinkClosedError(f"{self._here} no longer serves the shard")

    def _check_place(self) -> bool:
        """Abandon the shard, and return False, if another process has taken it over; else return True."""
        if self._rendezvous.record(self._server).address == self._here:
            return True
        self._leave_place()
        return False

    def _leave_place(self) -> None:
        with self._changed:
            if not self._ends:
                logger.warning("%s: another process has taken the shard over", self._here)
                self.abandon()

    def _remove(self, worker: int, ticket: int, *, retires: bool) -> None:
        with self._changed:
            if not retires:  # a worker that lost its connection connects again at once
                self._changed.wait_for(lambda: self._live.get(worker) != ticket or self._ends, _RETURN_S)
            # the worker has connected again, or no further update can be made
            if self._live.get(worker) != ticket or self._ends or self._failed_update is not None:
                return
            if not self._check_place():
                return  # another process serves the shard now: the worker has not left the run
            del self._live[worker]
            self._links.pop(worker).close()
            self._idle_since = time.monotonic()
            self._leave_clock(worker, retires=retires)
            self._rendezvous.leave(worker, retires=retires)

    def _leave_clock(self, worker: int, *, retires: bool) -> None:
        """Stop waiting for a worker. Make the update if only this worker was missing. The caller holds the lock."""
        self._clock.leave(worker, retires=retires)
        if self._clock.is_complete:
            self._update()
        self._changed.notify_all()

    def _count_absent(self, *, is_late: bool) -> None:
        """Stop waiting for absent workers that have left the run or, if `is_late`, for all absent workers.

        No thread of this server detects the end of a worker that has no connection with the server.
        """
        synchronous = self._settings.mode == "synchronous"
        if self._settings.mode == "asynchronous":
            return  # no pull waits for a worker
        with self._changed:
            absent = sorted(self._clock.absent - self._newcomers)
        # A server that was replaced may record a worker as lost although the worker now connects with this server. In a
        # synchronous run a lost worker ends the run, so there only workers that left by `close` count. In a bounded run
        # the mistake ends when the worker connects.
        left = {worker for worker in absent if self._rendezvous.has_left(worker, retired=synchronous)}
        late = set(absent) - left if is_late else set()
        with self._changed:
            for worker in sorted((left | late) & self._clock.absent):
                if self._ends or self._failed_update is not None:
                    return
                if worker in late:
                    logger.warning(
                        "%s: worker %d did not connect within %.0f s (connect_seconds): no pull waits for it",
                        self._here,
                        worker,
                        self._settings.connect_seconds,
                    )
                try:
                    self._leave_clock(worker, retires=synchronous and worker in left)
                except LinkClosedError:
                    if not self._ends:  # else a replica has taken the shard over, and `serve` returns
                        raise

    def _may_pull(self, worker: int, wanted: int) -> bool:
        return not self._holds_workers or self._clock.may_pull(worker, wanted)

    def _answer_pull(self, link: PairLink, worker: int, wanted: int) -> None:
        reason, began, waited = "", time.monotonic(), 0.0
        with self._changed:
            # Compute this anew each time: a worker that connects later may make updates possible again.
            while not (possible := self._may_pull(worker, wanted)) and not self._ends:
                if reason := self._clock.stuck_because():
                    break
                # A worker that hangs keeps its connections, so nothing else reports the wait.
                if (waits := time.monotonic() - began) >= waited + self._settings.connect_seconds:
                    waited = waits
                    awaited = ", ".join(map(str, self._clock.awaited_by(worker)))
                    logger.warning(
                        "%s: a pull of worker %d has waited %.0f s for a push of these workers: %s",
                        self._here,
                        worker,
                        waited,
                        awaited,
                    )
                self._changed.wait(self._settings.connect_seconds)
            self._require_place()
            version, values = self._clock.version, self._shard.values()
        if possible:
            link.send([MessageKind.PARAMETERS, version], values)
        else:
            send_problem(link, f"{self._here} cannot make update {version + 1}: {reason}; start the run again")

    def _answer_push(self, link: PairLink, worker: int, ticket: int, pulled: int, number: int) -> None:
        layout, server = self._layout, self._server
        if pulled < 0 or number < 1:
            raise refused(link, f"push {number} of version {pulled}", "a push from 1, of version 0 or more")
        gradient = receive_gradient(link, layout.dense_sizes(server), layout.sparse_shapes(server), layout.dtype)
        with self._changed:
            self._require_place()
            if self._live.get(worker) != ticket:
                raise LinkClosedError(f"worker {worker} has connected again, and sends push {number} there")
            result = self._clock.push(worker, pulled, number)
            if result in (PushResult.WAITS, PushResult.COMPLETES):
                self._pending[worker] = gradient
            elif result in (PushResult.DROPPED, PushResult.EXTRA):
                self.dropped += 1
            if result is PushResult.COMPLETES:
                self._update()
            self._changed.notify_all()
            version = self._clock.version
        link.send([MessageKind.PUSHED, result.value, version])

    def _update(self) -> None:
        """Make one update with the received gradients. The caller holds the lock. A failed update is not repeated."""
        try:
            self._make_update()
        except BaseException as error:
            if not self._ends:  # else a replica has taken the shard over
                self._failed_update = error
            raise

    def _make_update(self) -> None:
        """Make one update, on the replicas too."""
        # Add in the order of worker numbers, so that the sum does not depend on the order of arrival.
        gradient = mean_gradient([self._pending[number] for number in sorted(self._pending)])
        counted, lost = dict(self._clock.waiting), set()
        for replica, link in self._replicas.items():
            try:
                send_update(link, self._clock.version, gradient, counted, self._clock.steps)
            except LinkClosedError as error:
                logger.warning("%s continues without %s: %s", self._here, link.peer, error)
                lost.add(replica)
        self._shard.update(gradient)
        for replica, link in self._replicas.items():
            try:
                if replica not in lost:
                    self._await_done(link)
            except CommunicationError as error:
                logger.warning("%s continues without %s: %s", self._here, link.peer, error)
                lost.add(replica)
        if lost:
            self._replicas = {replica: link for replica, link in self._replicas.items() if replica not in lost}
            self._note_replicas()
        self._pending.clear()
        self._clock.complete(counted)
        if self._clock.version % self._settings.snapshot_every == 0:
            self._save()
