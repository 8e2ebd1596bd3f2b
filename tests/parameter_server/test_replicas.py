"""Laws of replicas of parameter servers: the loss of any process of a shard loses no update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parameter_server.jobs import Job
from tests.parameter_server.test_parameter_server import (
    STEPS,
    Bag,
    adamw,
    close,
    mlp,
    plain,
    sgd,
    train,
    train_once,
)
from windlass.base.errors import CommunicationError
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.parameter_server import server
from windlass.parameter_server.heartbeat import send_heartbeats
from windlass.parameter_server.job_rendezvous import ServerAddress, ShardRecord
from windlass.parameter_server.messages import MessageKind, receive_by_worker, receive_content
from windlass.parameter_server.model_layout import layout_of
from windlass.parameter_server.server import ParameterServer
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.worker import ServerLostError


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def has_replicas(job: Job, server: int, count: int) -> bool:
    return len(job.observer.record(server).replicas) == count


def lose(job: Job, server: int) -> None:
    """End the server of a shard as a kill does, and wait until its process is a replica, as after a new start."""
    before = job.observer.record(server).generation
    job.serving(server).abandon()
    wait_for(lambda: job.observer.record(server).generation > before and has_replicas(job, server, 1))


@pytest.mark.parametrize(
    ("mode", "build", "make_optimizer"),
    [("synchronous", mlp, adamw), ("asynchronous", mlp, adamw), ("bounded", mlp, sgd), ("synchronous", Bag, sgd)],
)
def test_a_replica_continues_where_its_server_was_lost(mode: Any, build: Any, make_optimizer: Any) -> None:
    """Repeated losses of a server without a snapshot do not change the training."""
    workers = 2 if mode == "synchronous" else 1
    job = Job(build, make_optimizer, ParameterServerSettings(mode=mode), servers=2, workers=workers)
    wanted = plain(job.build_from(0), make_optimizer, workers)
    job.start_processes(replicas=1)
    if workers == 2:
        job.start_worker(1, train)
    model, worker = job.worker(0)
    for step in range(STEPS):
        assert train_once(model, worker, step)
        if 0 < step < 3:
            lose(job, 1)
    assert worker.pull() == STEPS
    close(dict(model.named_parameters()), wanted)
    worker.close()
    job.finish()


def test_a_replica_waits_for_a_worker_that_joined() -> None:
    """The server is lost after all workers of the start have closed."""
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=1, workers=1)
    job.start_processes(replicas=1)
    _, first = job.worker(0)
    model, joined = job.worker(job.rendezvous().next_worker(1))
    first.close()
    wait_for(lambda: job.observer.has_left(0))
    train_once(model, joined, 0)
    job.serving(0).abandon()
    train_once(model, joined, 1)
    assert joined.pull() == 2
    joined.close()
    job.finish()


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_push_whose_answer_was_lost_counts_once(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode=mode), servers=1, workers=1)
    wanted = plain(job.build_from(0), sgd, 1)
    job.start_processes(replicas=1)
    model, worker = job.worker(0)
    update = ParameterServer._update

    def lost_after(server: ParameterServer) -> None:
        update(server)
        server.abandon()

    for step in range(STEPS):
        wait_for(lambda: has_replicas(job, 0, 1))
        with monkeypatch.context() as patch:
            if step == 2:
                patch.setattr(ParameterServer, "_update", lost_after)
            assert train_once(model, worker, step)
    assert worker.pull() == STEPS
    close(dict(model.named_parameters()), wanted)
    worker.close()
    job.finish()


def test_the_bound_holds_while_workers_come_back_to_a_replica() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="bounded", staleness=1), servers=1, workers=2)
    job.start_processes(replicas=1)
    (fast_model, fast), (slow_model, slow) = job.worker(0), job.worker(1)
    train_once(slow_model, slow, 0)
    for step in range(2):
        train_once(fast_model, fast, step)
    lose(job, 0)
    train_once(fast_model, fast, 2)
    clock = job.serving(0)._clock
    assert clock.absent == {1} and not clock.may_pull(0, 0)  # the slow worker, at step 1, is not back
    train_once(slow_model, slow, 1)
    fast.pull()
    assert clock.absent == set() and clock.steps == {0: 3, 1: 2}
    fast.close(), slow.close()
    job.finish()


def test_a_replica_that_was_lost_comes_back() -> None:
    """The server continues without the replica, and sends its whole content when the replica reconnects."""
    job = Job(mlp, adamw, ParameterServerSettings(), servers=1, workers=1)
    wanted = plain(job.build_from(0), adamw, 1)
    job.start_processes(replicas=1)
    model, worker = job.worker(0)
    for step in range(STEPS):
        if step == 1:
            next(iter(job.serving(0)._replicas.values())).close()
        if step == 2:
            wait_for(lambda: has_replicas(job, 0, 1))
            lose(job, 0)
        assert train_once(model, worker, step)
    worker.pull()
    close(dict(model.named_parameters()), wanted)
    worker.close()
    job.finish()


def test_a_server_that_was_replaced_while_it_ran_makes_no_update(caplog: pytest.LogCaptureFixture) -> None:
    """A server whose replica does not answer reads the shard's entry in the store, and ends if it was replaced."""
    job = Job(mlp, adamw, ParameterServerSettings(), servers=1, workers=1)
    wanted = plain(job.build_from(0), adamw, 1)
    job.start_processes(replicas=1)
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    old = job.serving(0)
    old._replicas[1].close()  # as if the connection broke: the replica takes over
    wait_for(lambda: job.observer.record(0).generation == 2)
    for step in range(1, STEPS):
        assert train_once(model, worker, step)
    worker.pull()
    close(dict(model.named_parameters()), wanted)
    assert old.version == 1 and "another process has taken the shard over" in caplog.text
    worker.close()
    job.finish()


def test_a_server_that_was_replaced_becomes_a_replica_without_a_request() -> None:
    """The connection with its worker stays open, and the worker sends nothing."""
    job = Job(mlp, adamw, ParameterServerSettings(), servers=1, workers=1)
    wanted = plain(job.build_from(0), adamw, 1)
    job.start_processes(replicas=1)
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    job.serving(0)._replicas[1].close()  # as if the connection broke: the replica takes over
    wait_for(lambda: job.observer.record(0).generation == 2)
    wait_for(lambda: job.observer.record(0).replicas == {0})
    for step in range(1, STEPS):
        assert train_once(model, worker, step)
    worker.pull()
    close(dict(model.named_parameters()), wanted)
    worker.close()
    job.finish()


def test_a_server_that_was_replaced_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a suspension, the server counts the time without workers before it reads the shard's entry in the store."""
    is_late = threading.Event()
    monkeypatch.setattr(server, "_PLACE_CHECK_S", 3600.0)
    monkeypatch.setattr(ParameterServer, "_is_over", lambda self: is_late.is_set())
    job = Job(mlp, adamw, ParameterServerSettings(mode="asynchronous"), servers=1, workers=1)
    job.start_server(0)
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    job.rendezvous().register_server(0, replica=1)
    is_late.set()
    job.finish()
    assert not job.observer.is_over(0)


def test_a_shard_without_copies_continues_from_the_snapshot(tmp_path: Path) -> None:
    """The server of a shard without replicas is lost. Its process reads the snapshot, and serves as generation 2."""
    settings = ParameterServerSettings(mode="asynchronous", snapshot=tmp_path, snapshot_every=1)
    job = Job(mlp, adamw, settings, servers=1, workers=1)
    wanted = plain(job.build_from(0), adamw, 1)
    job.start_process(0, 0, replicas=0)
    model, worker = job.worker(0)
    for step in range(STEPS):
        assert train_once(model, worker, step)
        if step == 1:
            job.serving(0).abandon()
    worker.pull()
    close(dict(model.named_parameters()), wanted)
    assert job.observer.record(0).generation == 2
    worker.close()
    job.finish()


def test_process_takes_over_the_entry_with_its_own_replica_number() -> None:
    """A process finds an entry with its own replica number, registers as generation 2, and then finds no snapshot."""
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    rendezvous = job.rendezvous()
    rendezvous.register_server(0, replica=1)
    job.start_process(0, 1, replicas=1)
    with pytest.raises(CommunicationError, match="no snapshot to continue from"):
        job.finish()
    address = rendezvous.record(0).address
    assert address is not None and (address.generation, address.replica) == (2, 1)


def test_missing_replicas_are_named() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    job.start_process(0, 0, replicas=2)
    job.start_process(0, 1, replicas=2)
    wait_for(lambda: has_replicas(job, 0, 1))
    for process in (job.serving(0), job.processes[0, 1]):  # the wait ends once one of the replicas is connected
        process._settings = replace(process._settings, connect_seconds=0.1)
    with pytest.raises(CommunicationError, match="1 of 2 replicas of server 0 .* did not connect within 0 s"):
        job.finish()


def test_a_worker_that_is_killed_before_the_answer_to_its_hello_leaves() -> None:
    """The server answers when its replica has connected, and cannot send the answer."""
    job = Job(mlp, sgd, ParameterServerSettings(mode="bounded"), servers=1, workers=2)
    job.start_process(0, 0, replicas=1)
    rendezvous, layout = job.rendezvous(), layout_of(job.build_from(0), 1)
    address = rendezvous.find_server(0, 0, 60)
    assert address is not None
    link = rendezvous.call_server(address)
    link.send([MessageKind.HELLO, 1, 0, -1, layout.fingerprint, job.settings.fingerprint])
    wait_for(lambda: bool(job.serving(0)._changed._waiters))  # type: ignore[attr-defined]
    link.close()
    job.start_process(0, 1, replicas=1)
    model, worker = job.worker(0)
    for step in range(STEPS):
        train_once(model, worker, step)
    worker.close()
    job.finish()


@pytest.mark.parametrize(("awaited", "seconds"), [(1, 300.0), (0, 60.0)])
def test_a_new_replica_that_stalls_blocks_the_workers_for_reconnect_seconds(awaited: int, seconds: float) -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    layout, settings = layout_of(job.build_from(0), 1), job.settings
    server = ParameterServer(layout, 0, 1, settings, sgd, job.rendezvous(), replicas=awaited)
    waits = []

    class Stalled:
        peer, idle = "", timedelta(days=7)

        def send(self, header: Any, *tensors: Any) -> None:
            waits.append(self.idle.total_seconds())
            raise LinkClosedError("it stalls")

    with pytest.raises(LinkClosedError):
        server._add_replica(Stalled(), 1, layout.fingerprint, settings.fingerprint)  # type: ignore[arg-type]
    assert waits == [seconds]


def test_only_a_complete_replica_takes_over() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    rendezvous = job.rendezvous()
    first = rendezvous.register_server(0)
    assert rendezvous.take_over(first, 1) is None
    assert rendezvous.set_replicas(first, frozenset({1, 2}))
    rendezvous.remove_replica(0, 2)
    assert rendezvous.take_over(first, 2) is None
    second = rendezvous.take_over(first, 1)
    assert second is not None and (second.generation, second.replica) == (2, 1)
    assert not rendezvous.set_replicas(first, frozenset()) and rendezvous.take_over(first, 1) is None
    assert rendezvous.record(0) == ShardRecord(second)


@pytest.mark.parametrize("replicas", [frozenset(), frozenset({1, 12})])
def test_an_entry_is_read_as_it_was_written(replicas: frozenset[int]) -> None:
    record = ShardRecord(ServerAddress(3, 7, "a host", 4711, 1), replicas)
    assert ShardRecord.from_text(3, record.to_text()) == record


class WrittenLink:
    """Link whose other side has sent these tensors."""

    peer = "server 0"

    def __init__(self, *sent: torch.Tensor) -> None:
        self.sent, self.is_closed = list(sent), False

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.sent.pop(0))

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("shape", ["[1099511627776]", "[-1, -1]"])
def test_sizes_of_a_content_are_checked(shape: str) -> None:
    text = torch.frombuffer(bytearray(b'["{}", [["tensor.0", "F32", ' + shape.encode() + b"]]]"), dtype=torch.uint8)
    link: Any = WrittenLink(text)
    with pytest.raises(CommunicationError, match="a state of shape .* at most 10 elements"):
        receive_content(link, text.numel(), 1, 10)
    assert link.is_closed
    with pytest.raises(CommunicationError, match="a content of -1 bytes"):
        receive_content(WrittenLink(), -1, 1, 10)  # type: ignore[arg-type]
    with pytest.raises(CommunicationError, match="1073741824 pushes of an update"):
        receive_by_worker(WrittenLink(), 1 << 30, "pushes")  # type: ignore[arg-type]


@pytest.mark.parametrize("damaged", [b"x", b"[1]", b"[{}, 3]", b'["{}", [["a", "Z9", [1]]]]', b'["{}", []]'])
def test_a_damaged_description_of_a_content_is_named(damaged: bytes) -> None:
    link: Any = WrittenLink(torch.frombuffer(bytearray(damaged), dtype=torch.uint8))
    with pytest.raises(CommunicationError, match=f"a damaged description of {len(damaged)} bytes"):
        receive_content(link, len(damaged), 1, 10)


def test_the_modules_of_a_replica_may_have_other_values() -> None:
    """The content of the server replaces the values of the replica."""
    job = Job(lambda: nn.Linear(3, 2), sgd, ParameterServerSettings(), servers=1, workers=1)
    job.start_processes(replicas=2)
    model, worker = job.worker(0)
    worker.pull()
    close(dict(model.named_parameters()), dict(job.build_from(0).named_parameters()))
    worker.close()
    job.finish()


def test_a_server_that_waits_is_not_lost() -> None:
    """A server waits for another worker, or for its own lock, which an update holds while it waits for a replica."""
    job = Job(mlp, adamw, ParameterServerSettings(heartbeat_seconds=1.5), servers=1, workers=2)
    job.start_processes(replicas=1)
    (model, worker), (other_model, other) = job.worker(0), job.worker(1)
    link, generation = worker._links[0], job.observer.record(0).generation
    train_once(model, worker, 0)
    job.start(lambda: train_once(model, worker, 1))
    time.sleep(1.0)
    with job.serving(0)._changed:
        time.sleep(1.0)
    train_once(other_model, other, 0)
    train_once(other_model, other, 1)
    worker.pull()
    assert worker._links[0] is link and job.observer.record(0).generation == generation
    worker.close(), other.close()
    job.finish()


@pytest.mark.parametrize("continues", [False, True])
def test_a_server_without_heartbeats_is_called_again(continues: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test imitates a stopped server: it holds the server's lock, and sends no heartbeats on the first link."""
    links = list[PairLink]()

    def send(link: PairLink, seconds: float) -> None:
        links.append(link)
        if continues and len(links) > 1:
            send_heartbeats(link, seconds)

    monkeypatch.setattr("windlass.parameter_server.server.send_heartbeats", send)
    limit, again = (1.0, 60.0) if continues else (0.3, 0.1)
    settings = ParameterServerSettings(mode="bounded", heartbeat_seconds=limit, reconnect_seconds=again)
    job = Job(mlp, sgd, settings, servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    link = worker._links[0]
    with job.servers[0]._changed:
        if not continues:
            text = r"cannot reach server 0 \(process .* since .*: server 0 .* sent or received nothing for 0 s"
            with pytest.raises(ServerLostError, match=text):
                worker.pull()
            job.servers[0].abandon()
        else:
            job.start(lambda: train_once(model, worker, 1))
            wait_for(lambda: worker._links.get(0) is not link)
    if continues:  # the gradient counts once, and the worker has not left meanwhile
        wait_for(lambda: job.servers[0]._clock.steps == {0: 2} and 0 in worker._links)
        assert worker.pull() == 2 and not job.observer.has_left(0)
    worker.close()
    job.finish()
