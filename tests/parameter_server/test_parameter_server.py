"""Tests of parameter servers: equality with plain training, staleness, loss of servers and workers, refused input."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.dist.harness import run_ranks
from tests.parameter_server.jobs import Job
from windlass.base.atomic_file import temporary_path_beside
from windlass.base.errors import CheckpointError, CommunicationError, ConfigError, ModelError
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.optim.lamb import Lamb
from windlass.parameter_server.job import role_of, start
from windlass.parameter_server.job_rendezvous import JobRendezvous, ServerAddress, StoreLostError
from windlass.parameter_server.messages import MessageKind, receive_gradient, receive_text, send_problem
from windlass.parameter_server.model_layout import layout_of
from windlass.parameter_server.parameter_partition import Fragment, PartitionedParameter, partition_parameters
from windlass.parameter_server.server import ParameterServer
from windlass.parameter_server.server_shard import ServerShard, check_versions, require_elementwise
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.update_clock import PushResult, UpdateClock
from windlass.parameter_server.worker import ParameterServerWorker, ServerLostError, StalePushError

STEPS = 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Bag(nn.Module):
    """Embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(40, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(ids).mean(1))


class Gated(nn.Module):
    """Model with a layer that only some batches use, and a layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return h + self.sometimes(h) if float(x[0, 0]) > 0 else h


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def batch(step: int, worker: int, model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    if isinstance(model, Bag):
        return torch.randint(0, 40, (6, 3), generator=generator)
    return torch.randn(6, 5, generator=generator)


def loss_of(model: nn.Module, step: int, worker: int) -> torch.Tensor:
    return model(batch(step, worker, model)).square().mean()


def train(
    model: nn.Module, worker: ParameterServerWorker, steps: Iterator[int] | range = range(STEPS)
) -> dict[str, torch.Tensor]:
    """Train as a script does, and return the parameters of the last update."""
    for step in steps:
        worker.pull()
        loss_of(model, step, worker.index).backward()
        worker.push()
    worker.pull()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def plain(
    model: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer], workers: int, steps: int = STEPS
) -> dict[str, torch.Tensor]:
    """Train in one process on the mean gradient of all workers, as DDP does."""
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        for worker in range(workers):
            (loss_of(model, step, worker) / workers).backward()
        optimizer.step()
    return dict(model.named_parameters())


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-6)


def run_synchronous(job: Job, **kinds: Any) -> list[dict[str, torch.Tensor]]:
    found: dict[int, dict[str, torch.Tensor]] = {}
    job.start_servers()
    for index in range(job.worker_count):
        job.start_worker(index, lambda model, worker: found.update({worker.index: train(model, worker)}))
    job.finish()
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    ("build", "make_optimizer", "servers", "workers"),
    [(mlp, sgd, 1, 2), (mlp, adamw, 3, 3), (Bag, sgd, 2, 2), (Gated, adamw, 2, 2)],
)
def test_synchronous_training_equals_data_parallel_training(
    build: Any, make_optimizer: Any, servers: int, workers: int
) -> None:
    """Training starts from the parameters of server 0, and all workers end with the same parameters."""
    job = Job(build, make_optimizer, ParameterServerSettings(), servers=servers, workers=workers)
    wanted = plain(job.build_from(0), make_optimizer, workers)
    for found in run_synchronous(job):
        close(found, wanted)
    assert {server.version for server in job.servers.values()} == {STEPS}


def data_parallel(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Train under torch's DistributedDataParallel from these parameters."""
    model = mlp()
    model.load_state_dict(state)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(list(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(parallel, step, torch.distributed.get_rank()).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def test_synchronous_training_equals_that_of_torch() -> None:
    job = Job(mlp, adamw, ParameterServerSettings(), servers=2, workers=2)
    (wanted, _) = run_ranks(data_parallel, 2, job.build_from(0).state_dict())
    for found in run_synchronous(job):
        close(found, wanted)


def test_a_worker_with_less_data_leaves_the_others() -> None:
    """After `close` of one worker, an update is the mean over the other workers."""
    job = Job(mlp, sgd, ParameterServerSettings(), servers=2, workers=2)
    reference = job.build_from(0)
    optimizer = sgd(list(reference.parameters()))
    for step in range(STEPS):
        there = (0, 1) if step < 2 else (0,)
        for worker in there:
            (loss_of(reference, step, worker) / len(there)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {}

    def work(model: nn.Module, worker: ParameterServerWorker) -> None:
        for step in range(STEPS if worker.index == 0 else 2):
            train_once(model, worker, step)
        if worker.index == 0:
            worker.pull()
            found.update(model.named_parameters())

    job.start_servers()
    for index in range(2):
        job.start_worker(index, work)
    job.finish()
    close(found, dict(reference.named_parameters()))


def test_sparse_gradients_send_rows_only() -> None:
    job = Job(Bag, sgd, ParameterServerSettings(), servers=2, workers=1)
    sizes = []

    def work(model: nn.Module, worker: ParameterServerWorker) -> None:
        worker.pull()
        ids = torch.tensor([[1, 1, 30]])
        model(ids).sum().backward()
        before = worker.bytes_sent
        worker.push()
        sizes.append(worker.bytes_sent - before)

    job.start_servers()
    job.start_worker(0, work)
    job.finish()
    dense, rows, headers, counts = 10 * 4, 2 * (8 + 4 * 4), 2 * 8 * 8, 4 * 8  # counts: one number for each fragment
    # 170 elements in two shards: row 1 is in the first, row 30 and the dense layer in the second
    assert sizes == [dense + rows + headers + counts]


def test_asynchronous_updates_are_made_in_the_order_of_pushes() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=2, workers=2)
    job.start_servers()
    (first, one), (second, two) = job.worker(0), job.worker(1)
    reference = job.build_from(0)
    optimizer = sgd(list(reference.parameters()))
    one.pull(), two.pull()
    stale = copy.deepcopy(reference)
    for model, worker, source in ((first, one, reference), (second, two, stale)):
        loss_of(model, 0, worker.index).backward()
        loss = loss_of(source, 0, worker.index)
        gradients = torch.autograd.grad(loss, list(source.parameters()))
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            parameter.grad = gradient
        worker.push()
        optimizer.step()
    assert one.pull() == 2 and two.version == 0
    close(dict(first.named_parameters()), dict(reference.named_parameters()))
    one.close(), two.close()
    job.finish()


def test_bounded_staleness_holds_the_fast_worker() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="bounded", staleness=2), servers=2, workers=2)
    job.start_servers()
    (fast_model, fast), (slow_model, slow) = job.worker(0), job.worker(1)
    for step in range(2):
        train_once(fast_model, fast, step)
    came = threading.Event()

    def third() -> None:
        train_once(fast_model, fast, 2)  # the fast worker is two steps ahead at its pull
        fast.pull()  # three steps ahead: waits for a push of the slow worker
        came.set()

    job.start(third)
    assert not came.wait(0.2)
    train_once(slow_model, slow, 0)
    assert came.wait(30)
    slow.close()  # the fast worker no longer waits for the slow one
    for step in range(3, 8):
        train_once(fast_model, fast, step)
    fast.close()
    job.finish()


def test_a_worker_that_has_yet_to_connect_holds_the_others_of_a_bounded_run() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="bounded", staleness=0), servers=1, workers=2)
    job.start_servers()
    model, early = job.worker(0)
    train_once(model, early, 0)
    assert not job.servers[0]._clock.may_pull(0, 0)
    other, late = job.worker(1)
    assert job.servers[0]._clock.steps == {0: 1, 1: 0}
    train_once(other, late, 0)
    train_once(model, early, 1)
    early.close(), late.close()
    job.finish()


def test_a_restored_server_and_a_worker_that_joins_do_not_hold_workers_for_each_other(tmp_path: Path) -> None:
    """Server 0 lets the new worker begin at step 0, as its snapshot says, and server 1 at step 3."""
    job = Job(mlp, sgd, ParameterServerSettings(mode="bounded", snapshot=tmp_path), servers=2, workers=1)
    job.start_servers()
    model, first = job.worker(0)
    for step in range(3):
        train_once(model, first, step)
    lose(job, 0)
    job.start_server(0)
    other, joined = job.worker(1)

    def finish(model: nn.Module, worker: ParameterServerWorker) -> None:
        with worker:
            train(model, worker, range(3, 8))

    job.start(lambda: finish(model, first))
    job.start(lambda: finish(other, joined))
    job.finish()


def test_a_worker_that_joins_a_restored_server_begins_at_the_step_of_the_slowest_worker(tmp_path: Path) -> None:
    """The snapshot, of step 0, does not have the steps of the first worker, which connects after the new one."""
    settings = ParameterServerSettings(mode="bounded", snapshot=tmp_path)
    job = Job(mlp, sgd, settings, servers=1, workers=1)
    job.start_servers()
    model, first = job.worker(0)
    for step in range(3):
        train_once(model, first, step)
    lose(job, 0)
    index, begins = job.rendezvous().next_worker(1), list[int]()
    job.start_server(0)
    job.start_worker(index, lambda model, worker: begins.append(worker._steps[0]))
    while 0 not in job.servers or index not in job.servers[0]._newcomers:
        time.sleep(0.01)
    train_once(model, first, 3)
    while not begins and not job.failures:  # a worker that has left is not counted
        time.sleep(0.01)
    first.close()
    job.finish()
    assert begins[0] >= 3


def test_a_worker_that_joins_keeps_a_restored_server_that_waits_for_a_lost_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="bounded", snapshot=tmp_path), servers=1, workers=1)
    job.start_servers()
    train_once(*job.worker(0), 0)
    lose(job, 0)  # the first worker ends now, unnoticed
    job.start_server(0)
    job.start_worker(job.rendezvous().next_worker(1), train)
    while 0 not in job.servers or 1 not in job.servers[0]._newcomers:
        time.sleep(0.01)
    job.servers[0]._settings = replace(job.settings, connect_seconds=0.1)
    job.finish()
    assert "worker 0 did not connect" in caplog.text and "worker 1 did not connect" not in caplog.text


def test_a_call_of_a_worker_that_has_called_again_is_not_answered() -> None:
    """A call that waits for replicas, or for workers, may be answered after the next one."""
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    layout, server = layout_of(model, 1), job.servers[0]
    hello = torch.tensor([MessageKind.HELLO, 0, 0, -1, layout.fingerprint, job.settings.fingerprint, 0, 0])
    earlier: Any = WrittenLink(hello)
    with pytest.raises(LinkClosedError, match="worker 0 has connected again"):
        server._welcome(earlier, 0)
    train(model, worker)
    worker.close()
    job.finish()
    assert server.version == STEPS


def test_a_restored_server_waits_for_a_worker_that_joined_after_the_snapshot(tmp_path: Path) -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="bounded", snapshot=tmp_path), servers=1, workers=1)
    job.start_servers()
    model, first = job.worker(0)
    other, joined = job.worker(job.rendezvous().next_worker(1))
    lose(job, 0)
    job.start_server(0)
    train_once(model, first, 0)
    assert not job.servers[0]._clock.may_pull(0, 0)
    train_once(other, joined, 0)
    first.pull()
    first.close(), joined.close()
    job.finish()


def train_once(model: nn.Module, worker: ParameterServerWorker, step: int) -> bool:
    worker.pull()
    loss_of(model, step, worker.index).backward()
    return worker.push()


def test_backup_workers_do_not_hold_up_an_update() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(backup_workers=1), servers=2, workers=2)
    job.start_servers()
    (fast_model, fast), (late_model, late) = job.worker(0), job.worker(1)
    late.pull()
    loss_of(late_model, 0, 1).backward()
    assert train_once(fast_model, fast, 0)
    assert fast.pull() == 1  # without the late gradient
    assert not late.push() and late.dropped == 1
    assert late.pull() == 1
    close(dict(late_model.named_parameters()), dict(fast_model.named_parameters()))
    fast.close(), late.close()
    job.finish()


def test_workers_whose_gradients_different_servers_dropped_do_not_wait_for_each_other() -> None:
    """Server 0 makes its first update with workers 0 and 2, server 1 with workers 1 and 2. Then worker 2 is killed."""
    job = Job(mlp, sgd, ParameterServerSettings(backup_workers=1), servers=2, workers=3)
    job.start_servers()
    workers = [job.worker(index) for index in range(3)]
    for model, worker in workers:
        worker.pull()
        loss_of(model, 0, worker.index).backward()
    for server in range(2):
        for _, worker in (workers[server], workers[2]):
            worker._last[server] = (0, worker._number + 1, worker._gradient_of(server))
            assert worker._push_to(server)[1] == (worker.index == 2)
        workers[server][1]._pull_from(server)
    for link in workers[2][1]._links.values():
        link.close()
    results = list[bool]()

    def finish(model: nn.Module, worker: ParameterServerWorker) -> None:
        with worker:
            worker._number += 1
            results.append(worker.push())
            for step in range(1, STEPS):
                train_once(model, worker, step)

    for model, worker in workers[:2]:
        job.start(lambda model=model, worker=worker: finish(model, worker))  # type: ignore[misc]
    job.finish()
    assert results == [False, False]


def test_a_restored_server_keeps_gradients_when_backup_workers_return_with_a_later_version(tmp_path: Path) -> None:
    """Server 0 continues from version 0. One worker returns with version 0, and waits at server 1 for the next gradient
    of the other one. The other one returns with version 1, and waits at server 0 for an update with both gradients.
    """
    job = Job(mlp, sgd, ParameterServerSettings(backup_workers=1, snapshot=tmp_path), servers=2, workers=3)
    job.start_servers()
    (model, ahead), (late_model, late), (third_model, third) = (job.worker(index) for index in range(3))
    late.pull()
    loss_of(late_model, 0, 1).backward()
    for step in range(2):
        train_once(model, ahead, step), train_once(third_model, third, step)
        if step == 0:
            assert not late.push()
    ahead._pull_from(1)
    for link in third._links.values():
        link.close()
    lose(job, 0)
    job.start_server(0)
    assert late.pull() == 0
    loss_of(late_model, 1, 1).backward()
    assert not late.push()  # server 0 has the first gradient again

    def finish(model: nn.Module, worker: ParameterServerWorker) -> None:
        with worker:
            train(model, worker, range(2, STEPS))

    job.start(lambda: finish(model, ahead))
    job.start(lambda: finish(late_model, late))
    job.finish()


@pytest.mark.parametrize("mode", ["asynchronous", "bounded"])
def test_workers_come_and_go(mode: Any) -> None:
    """A worker that dies silently does not hold up the others; one that joins later begins at their current step."""
    job = Job(mlp, sgd, ParameterServerSettings(mode=mode), servers=2, workers=2)
    job.start_servers()
    (model, stays), (other, dies) = job.worker(0), job.worker(1)
    train_once(model, stays, 0)
    train_once(other, dies, 0)
    for link in dies._links.values():
        link.close()
    for step in range(1, 4):
        train_once(model, stays, step)
    newcomer_model, newcomer = job.worker(2)
    train_once(newcomer_model, newcomer, 4)
    train_once(model, stays, 4)
    assert stays.pull() == 7
    stays.close(), newcomer.close()
    job.finish()


def test_the_connection_of_a_worker_that_left_is_closed() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=1, workers=1)
    job.start_servers()
    _, stays = job.worker(0)
    _, leaves = job.worker(1)
    assert job.servers[0]._links.keys() == {0, 1}
    link = job.servers[0]._links[1]
    leaves.close()
    while 1 in job.servers[0]._links:
        time.sleep(0.01)
    with pytest.raises(LinkClosedError, match="is closed"):
        link.send([0])
    stays.close()
    job.finish()


def require_refusal(worker: ParameterServerWorker) -> None:
    """Check that the server refuses a pull because one of two workers is missing, and close the worker."""
    with pytest.raises(CommunicationError, match="server 0 .* cannot make update 1: 1 of the 2 workers that a synchr"):
        worker.pull()
    worker.close()


def test_a_synchronous_update_without_enough_workers_is_refused() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=2)
    job.start_servers()
    (model, stays), (_, dies) = job.worker(0), job.worker(1)
    train_once(model, stays, 0)
    dies._links[0].close()
    require_refusal(stays)
    job.finish()


def test_a_worker_that_was_lost_before_the_others_connected_is_missing() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=2)
    job.start_servers()
    _, dies = job.worker(1)
    dies._links[0].close()
    while job.servers[0]._live:
        time.sleep(0.01)
    model, stays = job.worker(0)
    train_once(model, stays, 0)
    require_refusal(stays)
    job.finish()


def test_a_worker_that_never_connects_does_not_hold_up_a_pull_for_ever() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=2)
    job.start_servers()
    model, stays = job.worker(0)
    train_once(model, stays, 0)
    job.servers[0]._count_absent(is_late=True)
    require_refusal(stays)
    job.rendezvous().leave(1, retires=False)
    job.finish()


@pytest.mark.parametrize("mode", ["synchronous", "bounded"])
def test_a_long_wait_of_a_pull_is_reported(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that hangs keeps its connection."""
    job = Job(mlp, sgd, ParameterServerSettings(mode=mode), servers=1, workers=2)
    job.start_servers()
    (model, waits), (other, hangs) = job.worker(0), job.worker(1)
    job.servers[0]._settings = replace(job.settings, connect_seconds=0.2)
    train_once(model, waits, 0)
    job.start(lambda: waits.pull())
    text = "a pull of worker 0 has waited 0 s for a push of these workers: 1"
    until = time.monotonic() + 60
    while text not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert text in caplog.text
    train_once(other, hangs, 0)
    hangs.close(), waits.close()
    job.finish()


def test_a_worker_that_closes_without_a_connection_retires() -> None:
    """The worker's server is lost, so the server that replaces it cannot read the worker's BYE message."""
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=2)
    job.start_servers()
    _, worker = job.worker(1)
    lose(job, 0)
    worker.close()
    worker.close()
    other = ParameterServer(layout_of(mlp(), 1), 0, 2, ParameterServerSettings(), sgd, _Left({1}))  # type: ignore[arg-type]
    assert job.observer.has_left(1, retired=True)
    other._clock.join(0, 0, -1)
    assert other._clock.needed == 2
    other._count_absent(is_late=False)
    assert other._clock.needed == 1 and other._clock.absent == set()
    job.finish()


class _Left:
    """Rendezvous store in which the given workers have retired."""

    def __init__(self, retired: set[int]) -> None:
        self.retired = retired

    def register_server(self, server: int, replica: int) -> ServerAddress:
        return ServerAddress(server, 1, "host", 1, replica)

    def has_left(self, worker: int, *, retired: bool = False) -> bool:
        return worker in self.retired


def lose(job: Job, server: int) -> None:
    """End a server silently, as a kill does: its links to workers close, and no message is sent."""
    lost = job.servers.pop(server)
    lost.abandon()


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_lost_server_continues_from_its_snapshot(mode: Any, tmp_path: Path) -> None:
    """With a snapshot at each update, the training equals one in which no server is lost."""
    settings = ParameterServerSettings(mode=mode, snapshot=tmp_path, snapshot_every=1)
    job = Job(mlp, adamw, settings, servers=2, workers=1)
    wanted = plain(job.build_from(0), adamw, 1)
    job.start_servers()
    model, worker = job.worker(0)
    for step in range(STEPS):
        assert train_once(model, worker, step)
        if step == 1:
            lose(job, 1)
            job.start_server(1)
    worker.pull()
    close(dict(model.named_parameters()), wanted)
    worker.close()
    job.finish()
    again = Job(mlp, adamw, settings, servers=2, workers=1)  # a new run continues from the snapshots too
    again.start_servers()
    model, worker = again.worker(0)
    assert worker.pull() == STEPS
    close(dict(model.named_parameters()), wanted)
    worker.close()
    again.finish()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_waits_at_one_server_returns_to_another_that_was_restored(lost: int, tmp_path: Path) -> None:
    """A server is lost after worker 0 has received its update 1, and before worker 1 has. Worker 0 then waits for
    update 2 of the other server. Worker 1 waits for update 1 of the restored server, which needs both gradients.
    """
    settings = ParameterServerSettings(snapshot=tmp_path, heartbeat_seconds=4.0, connect_seconds=240)
    job = Job(mlp, sgd, settings, servers=2, workers=2)
    job.start_servers()
    (model, ahead), (other, behind) = job.worker(0), job.worker(1)
    train_once(model, ahead, 0), train_once(other, behind, 0)
    train_once(model, ahead, 1)
    behind._pull_from(1 - lost)
    lose(job, lost)
    job.start_server(lost)

    def finish(model: nn.Module, worker: ParameterServerWorker, step: int) -> None:
        with worker:
            train(model, worker, range(step, STEPS))

    job.start(lambda: finish(model, ahead, 2))
    job.start(lambda: finish(other, behind, 1))
    job.finish()
    assert {server.version for server in job.servers.values()} == {STEPS}


def test_a_loss_costs_at_most_the_updates_since_the_snapshot(tmp_path: Path) -> None:
    settings = ParameterServerSettings(mode="asynchronous", snapshot=tmp_path, snapshot_every=3)
    job = Job(mlp, sgd, settings, servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    for step in range(5):
        train_once(model, worker, step)
    lose(job, 0)
    job.start_server(0)
    assert worker.pull() == 3
    close(dict(model.named_parameters()), plain(job.build_from(0), sgd, 1, steps=3))
    worker.close()
    job.finish()


def test_a_server_that_is_lost_before_it_answers_a_worker_is_replaced(tmp_path: Path) -> None:
    """The worker connects to the replacement at once, not after the longest wait for the lost server."""
    settings = ParameterServerSettings(mode="asynchronous", snapshot=tmp_path)
    job = Job(mlp, sgd, settings, servers=1, workers=1)
    job.start_server(0)
    while 0 not in job.servers:
        time.sleep(0.01)
    lose(job, 0)
    rendezvous = job.rendezvous()
    silent = rendezvous.register_server(0)
    job.start_worker(0, lambda model, worker: train_once(model, worker, 0))
    while not rendezvous.count_calls(silent):
        time.sleep(0.01)
    job.start_server(0)
    job.finish()
    assert job.servers[0].version == 1


def test_a_worker_that_joins_a_run_that_has_ended_raises_at_once() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    worker.close()
    job.finish()
    with pytest.raises(ServerLostError, match="worker 1 cannot reach server 0 .* the run has ended there"):
        job.worker(1)


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_server_that_was_lost_before_its_first_snapshot_is_named(has_folder: bool, tmp_path: Path) -> None:
    """A job that sets `snapshot` is not told to set it."""
    job = Job(mlp, sgd, ParameterServerSettings(snapshot=tmp_path if has_folder else None), servers=1, workers=1)
    job.rendezvous().register_server(0)
    job.start_server(0)
    path = tmp_path / "server-0-of-1.safetensors"
    wanted = (
        f"lost, and {path}, which a server writes before its first update, does not exist; start the run again"
        if has_folder
        else "lost, and there is no snapshot to continue from; set `snapshot` or start a replica of each server, and"
    )
    with pytest.raises(CommunicationError, match=re.escape(wanted)):
        job.finish()


def test_a_server_that_does_not_answer_a_call_in_time_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers late, as on a machine that was suspended, and no other process replaces it."""
    call, waits = JobRendezvous.call_server, list[float]()

    def fail_twice(self: JobRendezvous, address: Any, wait: Any = None) -> PairLink:
        waits.append(wait.total_seconds())
        if len(waits) <= 2:
            raise LinkClosedError("it did not answer")
        return call(self, address, wait)

    monkeypatch.setattr(JobRendezvous, "call_server", fail_twice)
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous", connect_seconds=240), servers=1, workers=1)
    job.start_servers()
    job.start_worker(0, lambda model, worker: train_once(model, worker, 0))
    job.finish()
    assert job.servers[0].version == 1 and waits == [30, 60, 120]


def test_a_server_whose_worker_was_killed_in_its_absence_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ParameterServerSettings(mode="asynchronous", snapshot=tmp_path, snapshot_every=1, reconnect_seconds=0.1)
    job = Job(mlp, sgd, settings, servers=1, workers=2)
    job.start_servers()
    (model, worker), (_, killed) = job.worker(0), job.worker(1)
    train_once(model, worker, 0)
    worker.close()
    lose(job, 0)
    job.settings = replace(settings, connect_seconds=0.5)
    job.start_server(0)
    job.finish()  # `killed` never comes back
    assert killed.index == 1 and "workers that ended without a message: 1" in caplog.text
    assert job.servers[0].version == 1


def test_a_server_that_is_not_replaced_is_named() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous", reconnect_seconds=0.1), servers=2, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    lose(job, 1)
    with pytest.raises(
        ServerLostError,
        match=r"worker 0 cannot reach server 1 \(process \d+ on .*\) since \d\d:\d\d:\d\d \(0 s\): the conn",
    ):
        worker.pull()
    with pytest.raises(ServerLostError, match="cannot reach server 1 .*: it was lost in an earlier call"):
        worker.pull()
    worker.close()
    with pytest.raises(CommunicationError, match="worker 0 has left the run by `close`"):
        worker.pull()
    job.finish()


def test_a_server_that_was_lost_together_with_the_store_is_named() -> None:
    """Without `windlass run`, server 0 serves the store."""
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous", reconnect_seconds=0.1), servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    text = r"worker 0 cannot reach server 0 .*: the connection .*, and the job's store at 127.0.0.1:\d+ does not answer"
    with pytest.raises(ServerLostError, match=text), worker:
        train_once(model, worker, 0)
        lose(job, 0)
        job.finish()
        job.end_store()
        worker.pull()
    worker.close()  # a second time


def test_a_worker_that_was_lost_and_came_back_is_awaited_by_a_new_server(tmp_path: Path) -> None:
    """A restored server has no connections, so it reads in the store whether the run has ended."""
    settings = ParameterServerSettings(mode="asynchronous", snapshot=tmp_path, snapshot_every=1, reconnect_seconds=60)
    job = Job(mlp, sgd, settings, servers=2, workers=2)
    job.start_servers()
    model, worker = job.worker(0)
    _, other = job.worker(1)
    train_once(model, worker, 0)
    for link in worker._links.values():  # the worker is killed
        link.close()
    store = job.rendezvous()
    until = time.monotonic() + 60
    while not store.has_left(0) and time.monotonic() < until:
        time.sleep(0.01)
    assert store.has_left(0)
    model, worker = job.worker(0)  # it is started again
    train_once(model, worker, 1)
    assert not store.has_left(0)
    other.close()
    lose(job, 1)
    job.start_server(1)
    train_once(model, worker, 2)
    worker.close()
    job.finish()


def test_servers_that_lose_the_store_name_it() -> None:
    """Without `windlass run`, the store of all servers ends with server 0."""
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=2, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    job.end_store()
    for thread in job.threads:
        thread.join(60)
    worker.close()
    texts = [str(failure) for failure in job.failures if isinstance(failure, StoreLostError)]
    assert len(texts) == 2, job.failures
    for text in texts:
        assert re.search(r"the job's store at 127.0.0.1:\d+ does not answer: .*; the process that serves it", text)


def test_a_server_that_was_too_slow_for_one_call_is_reached_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ParameterServerSettings(mode="asynchronous", snapshot=tmp_path, snapshot_every=1, reconnect_seconds=0.1)
    job = Job(mlp, sgd, settings, servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    lose(job, 0)
    job.start_server(0)
    while 0 not in job.servers:
        time.sleep(0.01)

    def fail(*_: Any) -> None:
        raise LinkClosedError("it is slow")

    with monkeypatch.context() as patch:
        patch.setattr(ParameterServerWorker, "_greet", fail)
        with pytest.raises(ServerLostError, match="it is slow"):
            worker.pull()
    assert worker.pull() == 1
    worker.close()
    job.finish()


def test_an_old_push_is_refused() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous", max_age=1), servers=1, workers=2)
    job.start_servers()
    (model, one), (old_model, old) = job.worker(0), job.worker(1)
    old.pull()
    loss_of(old_model, 0, 1).backward()
    for step in range(2):
        train_once(model, one, step)
    with pytest.raises(
        StalePushError, match="push 1 of worker 1: its parameters are of version 0, and server 0 .* has 2"
    ):
        old.push()
    assert train_once(old_model, old, 1)
    one.close(), old.close()
    job.finish()


@pytest.mark.parametrize(
    ("max_age", "steps", "losses", "says"),
    [
        (1, 2, 1, "server 0 .* has 5: 2 updates"),  # the snapshot is of version 3, and two other updates follow that
        (2, 3, 2, "server 0 .* has 6: 3 updates"),  # the second server continues from version 6
    ],
)
def test_the_age_of_a_push_counts_the_updates_since_the_first_loss(
    tmp_path: Path, max_age: int, steps: int, losses: int, says: str
) -> None:
    """The worker's parameters are of version 4. The first server that replaces the lost one begins with version 3, and
    counts their age from there.
    """
    settings = ParameterServerSettings(mode="asynchronous", max_age=max_age, snapshot=tmp_path, snapshot_every=3)
    job = Job(mlp, sgd, settings, servers=1, workers=2)
    job.start_servers()
    (model, one), (old_model, old) = job.worker(0), job.worker(1)
    for step in range(4):
        train_once(model, one, step)
    assert old.pull() == 4
    loss_of(old_model, 0, 1).backward()
    for loss in range(losses):
        lose(job, 0)
        job.start_server(0)
        if not loss:
            for step in range(4, 4 + steps):
                train_once(model, one, step)
    with pytest.raises(StalePushError, match=f"its parameters are of version 3, and {says}"):
        old.push()
    one.close(), old.close()
    job.finish()


def test_a_worker_that_returns_to_a_restored_server_keeps_the_age_of_its_parameters(tmp_path: Path) -> None:
    settings = ParameterServerSettings(mode="asynchronous", max_age=1, snapshot=tmp_path, snapshot_every=3)
    job = Job(mlp, sgd, settings, servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    train_once(model, worker, 0)
    lose(job, 0)
    job.start_server(0)
    for step in range(1, 4):
        train_once(model, worker, step)
    version = worker.pull()
    loss_of(model, 4, 0).backward()
    worker._links.pop(0).close()  # no heartbeat came in time
    worker._silent.add(0)
    assert worker.push() and worker.version == version
    worker.close()
    job.finish()


def test_a_gradient_that_is_not_finite_is_named_and_not_sent() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=1, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    worker.pull()
    loss_of(model, 0, 0).backward()
    model[2].weight.grad[1, 1] = float("nan")
    with pytest.raises(ModelError, match="gradient of 2.weight contains NaN at push 1 of worker 0; nothing was sent"):
        worker.push()
    assert worker.pull() == 0
    worker.close()
    job.finish()


def test_another_model_is_refused() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    job.start_servers()
    with pytest.raises(CommunicationError, match="worker 0 has another model than server 0"):
        job.worker(0, nn.Linear(2, 2))
    job.start_worker(0, lambda model, worker: worker.pull())
    job.finish()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "eager"}, "mode = 'eager' does not exist; use one of synchronous, asynchronous, bounded"),
        ({"staleness": -1}, "staleness = -1; use a whole number, 0 or more"),
        ({"mode": "bounded", "staleness": "3"}, "staleness = '3'; use a whole number, 0 or more"),
        ({"backup_workers": True}, "backup_workers = True; use a whole number, 0 or more"),
        ({"mode": "asynchronous", "max_age": 1.5}, "max_age = 1.5; use a whole number, 0 or more"),
        ({"staleness": 2}, "staleness = 2 is for mode = 'bounded'"),
        ({"mode": "bounded", "backup_workers": 1}, "backup_workers = 1 is for mode = 'synchronous'"),
        ({"max_age": 3}, "max_age = 3 needs a mode other than synchronous"),
        ({"snapshot_every": 0}, "snapshot_every = 0; use a whole number, 1 or more"),
        ({"snapshot": 3}, "snapshot = 3; use the path of a folder, or None"),
        ({"connect_seconds": 0}, "connect_seconds = 0; use a number of seconds above 0"),
        ({"reconnect_seconds": float("nan")}, "reconnect_seconds = nan; use a number of seconds above 0"),
    ],
)
def test_settings_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParameterServerSettings(**values)
    assert message in str(caught.value)


def test_backup_workers_leave_one() -> None:
    with pytest.raises(ConfigError, match="backup_workers = 2 of 2 workers leave none"):
        ParameterServerSettings(backup_workers=2).check_workers(2)


def test_a_complex_parameter_is_refused() -> None:
    model = mlp()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ModelError, match="parameter phase is torch.complex64, and servers update real numbers"):
        layout_of(model, 1)


def test_partition_is_even_and_keeps_rows_whole() -> None:
    parameters = [PartitionedParameter("a", 10), PartitionedParameter("rows", 40, row=4), PartitionedParameter("b", 11)]
    for servers in range(1, 70):
        shards = partition_parameters(parameters, servers)
        covered = [(f.parameter, at) for shard in shards for f in shard for at in range(f.begin, f.end)]
        assert covered == [(i, at) for i, p in enumerate(parameters) for at in range(p.numel)]
        assert all(f.begin % 4 == f.end % 4 == 0 for shard in shards for f in shard if f.parameter == 1)
        sizes = [sum(f.numel for f in shard) for shard in shards]
        assert max(sizes) <= -(-61 // servers) + 4


def test_a_restored_server_takes_the_version_of_its_workers() -> None:
    clock = UpdateClock(ParameterServerSettings(), workers=2, version=3)
    clock.join(0, 5, 0)
    assert clock.version == 5 and clock.push(0, 5, 6) is PushResult.WAITS
    assert clock.push(0, 5, 6) is PushResult.WAITS  # the same gradient again
    clock.join(1, 6, 0)  # worker 1 has received an update that worker 0 has not
    assert clock.push(0, 5, 6) is PushResult.DROPPED and clock.may_pull(0, 6)


def test_a_worker_that_has_not_connected_yet_can_still_take_part() -> None:
    clock = UpdateClock(ParameterServerSettings(), workers=3)
    clock.join(0, 0, -1)
    clock.join(1, 0, -1)
    clock.leave(1, retires=True)
    assert clock.stuck_because() == ""  # worker 2 may still connect
    clock.leave(2, retires=False)
    assert clock.stuck_because().startswith("1 of the 2 workers")
    clock.join(2, 0, -1)
    assert clock.stuck_because() == ""
    clock.steps.clear()
    clock.take_over(range(3), {1})
    clock.join(2, 0, 0)
    assert clock.absent == {0} and clock.stuck_because() == ""


def test_workers_that_come_back_keep_their_steps() -> None:
    """After a restore the slowest worker limits the others, in any order of their return."""
    clock = UpdateClock(ParameterServerSettings(mode="bounded", staleness=2), workers=2, version=13)
    clock.join(0, 0, 10)
    clock.join(1, 0, 3)
    assert not clock.may_pull(0, 0) and clock.may_pull(1, 0)
    clock.join(2, 0, -1)  # a new worker
    assert clock.steps == {0: 10, 1: 3, 2: 3}


def test_a_process_that_takes_over_waits_for_the_slowest_worker() -> None:
    settings = ParameterServerSettings(mode="bounded", staleness=2)
    shard = ServerShard([PartitionedParameter("a", 1)], [Fragment(0, 0, 1)], torch.zeros(1), sgd)
    content = shard.content(UpdateClock(settings, workers=3, steps={0: 10, 1: 3, 2: 8, 5: 9}))
    clock = UpdateClock(settings, workers=3)
    shard.restore(content, clock)
    clock.take_over(range(7), {2, 3, 4})
    clock.join(0, 0, 11)
    # worker 6 joined after the snapshot
    assert clock.absent == {1, 5, 6} and clock.steps == {0: 11, 1: 3, 5: 9, 6: 3} and not clock.may_pull(0, 0)
    clock.leave(1, retires=False)  # workers 1 and 6 do not come back
    clock.leave(6, retires=False)
    assert clock.may_pull(0, 0)


def test_a_push_that_is_in_an_update_counts_once() -> None:
    clock = UpdateClock(ParameterServerSettings(mode="asynchronous"), workers=1)
    clock.join(0, 0, -1)
    assert clock.push(0, 0, 1) is PushResult.COMPLETES
    clock.complete({0: 1})
    assert clock.push(0, 0, 1) is PushResult.COUNTED and clock.push(0, 1, 2) is PushResult.COMPLETES


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_worker_that_was_started_again_pushes_to_a_server_that_was_restored(mode: Any, tmp_path: Path) -> None:
    """The snapshot has the number of the last push of the worker's first process."""
    settings = ParameterServerSettings(mode=mode, snapshot=tmp_path, snapshot_every=1)
    job = Job(mlp, sgd, settings, servers=1, workers=1)
    wanted = plain(job.build_from(0), sgd, 1)
    job.start_servers()
    model, worker = job.worker(0)
    for step in range(2):
        train_once(model, worker, step)
    worker._links[0].close()  # the worker is killed
    model, worker = job.worker(0)
    lose(job, 0)
    job.start_server(0)
    for step in range(2, STEPS):
        train_once(model, worker, step)
    assert worker.pull() == STEPS
    close(dict(model.named_parameters()), wanted)
    worker.close()
    job.finish()


class WrittenLink:
    """Link from which the given tensors can be received."""

    peer = "worker 3"

    def __init__(self, *sent: torch.Tensor) -> None:
        self.sent, self.is_closed = list(sent), False

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.sent.pop(0)) if tensor.numel() else tensor

    def receive_header(self) -> list[int]:
        return self.sent.pop(0).tolist()

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("counts", "indices", "text"),
    [
        ([1, 1, 1 << 60], [], r"worker 3 sent 1152921504606846976 rows of a fragment, and -1 \(no gradient\) to 4"),
        ([1, 1, -2], [], r"-2 rows"),
        ([1, 1, 2], [1, 4], r"rows 1 to 4, and 0 to 3"),
        ([1, 1, 2], [-7, 1], r"rows -7 to 1"),
        ([1 << 60, 1, 2], [0, 1], r"\[1152921504606846976, 1\] for the fragments that have a gradient"),
    ],
)
def test_sizes_and_rows_from_the_wire_are_checked(counts: list[int], indices: list[int], text: str) -> None:
    link: Any = WrittenLink(torch.tensor(counts), torch.zeros(3), torch.tensor(indices), torch.zeros(2, 2))
    with pytest.raises(CommunicationError, match=text):
        receive_gradient(link, [2, 1], [(4, 2)], torch.float32)
    assert link.is_closed


def test_a_gradient_of_all_rows_is_received() -> None:
    sent = torch.tensor([1, 0, 2]), torch.ones(3), torch.tensor([0, 3]), torch.full((2, 2), 7.0)
    link: Any = WrittenLink(*sent)
    gradient = receive_gradient(link, [3, 5], [(4, 2)], torch.float32)
    assert gradient.dense[0] is not None and gradient.dense[0].tolist() == [1.0] * 3 and gradient.dense[1] is None
    assert (
        gradient.rows[0] is not None
        and gradient.rows[0][0].tolist() == [0, 3]
        and float(gradient.rows[0][1].sum()) == 28.0
    )


def test_the_size_of_a_text_is_checked() -> None:
    link: Any = WrittenLink()
    with pytest.raises(CommunicationError, match="a text of 1099511627776 bytes"):
        receive_text(link, 1 << 40)


def test_rules_that_need_whole_parameters_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(4))]
    require_elementwise(Lamb(parameters), splits_parameters=False)
    with pytest.raises(ConfigError, match="Lamb is scaled by the norm of a whole parameter.*start one server"):
        require_elementwise(Lamb(parameters), splits_parameters=True)
    with pytest.raises(ConfigError, match="LBFGS reads the shape"):
        require_elementwise(torch.optim.LBFGS(parameters), splits_parameters=False)
    require_elementwise(torch.optim.AdamW(parameters), splits_parameters=True)


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server-0-of-1.safetensors").write_bytes(b"no snapshot")
    job = Job(mlp, sgd, ParameterServerSettings(snapshot=tmp_path), servers=1, workers=1)
    job.start_servers()
    with pytest.raises(CheckpointError, match="server-0-of-1.safetensors is not a snapshot of a parameter server"):
        job.finish()


def one_shard(make_optimizer: Any) -> ServerShard:
    return ServerShard([PartitionedParameter("a", 3)], [Fragment(0, 0, 3)], torch.ones(3), make_optimizer)


def test_files_of_killed_snapshots_are_removed(tmp_path: Path) -> None:
    path, clock = tmp_path / "server-0-of-2.safetensors", UpdateClock(ParameterServerSettings(), 1)
    killed = temporary_path_beside(path)
    other = temporary_path_beside(tmp_path / "server-1-of-2.safetensors")
    killed.touch(), other.touch()
    one_shard(sgd).save(path, clock)
    assert set(tmp_path.iterdir()) == {path, other}


def test_a_new_run_keeps_the_hyper_parameters_that_its_script_changed(tmp_path: Path) -> None:
    path, clock = tmp_path / "a", UpdateClock(ParameterServerSettings(), 1)
    first = one_shard(adamw)
    assert first._optimizer is not None
    first._optimizer.param_groups[0]["weight_decay"] = 0.5  # a change by the optimizer, which the snapshot restores
    first.save(path, clock)
    again = one_shard(lambda own: torch.optim.AdamW(own, lr=0.75))
    again.load(path, clock)
    assert again._optimizer is not None
    group = again._optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.75, 0.5)
    other, before = one_shard(sgd), path.read_bytes()
    with pytest.raises(CheckpointError, match=r"states of optimizer torch.optim.adamw.AdamW, .* makes torch.optim.sgd"):
        other.load(path, clock)
    assert path.read_bytes() == before


def test_hyper_parameters_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    """Learning rates often come from `np.logspace`. In a snapshot they are Python's numbers, which count as equal."""
    path, clock = tmp_path / "a", UpdateClock(ParameterServerSettings(), 1)

    options: dict[str, Any] = {"lr": np.float64(0.25), "betas": (np.float64(0.5), 0.75), "eps": np.float32(0.5)}

    def make(own: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(own, **options)

    first = one_shard(make)
    assert first._optimizer is not None
    first._optimizer.param_groups[0]["lr"] = 0.125  # a change by the optimizer, which the snapshot restores
    first.save(path, clock)
    again = one_shard(make)
    again.load(path, clock)
    assert again._optimizer is not None
    group = again._optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.125, (0.5, 0.75), 0.5)


def test_snapshots_of_a_new_run_have_to_belong_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_versions([-1, -1], tmp_path, 10)
    check_versions([0, -1], tmp_path, 10)  # the first run ended at its start
    check_versions([10, 20], tmp_path, 10)
    assert not caplog.records
    check_versions([10, 21], tmp_path, 10)
    assert "of versions 10, 21, which differ by more than snapshot_every = 10" in caplog.text
    with pytest.raises(CheckpointError, match="version 7 of server 1 and none of server 0, 2, which would"):
        check_versions([-1, 7, -1], tmp_path, 10)


def test_a_new_run_with_one_trained_shard_is_refused(tmp_path: Path) -> None:
    settings = ParameterServerSettings(mode="asynchronous", snapshot=tmp_path)
    job = Job(mlp, sgd, settings, servers=2, workers=1)
    layout, rendezvous = layout_of(job.build_from(0), 2), job.rendezvous()
    shard = ServerShard(layout.parameters, layout.fragments[0], layout.values(0), sgd)
    shard.save(tmp_path / "server-0-of-2.safetensors", UpdateClock(settings, 1, version=5))
    rendezvous.post("stored 1", "-1")
    with pytest.raises(CheckpointError, match="version 5 of server 0 and none of server 1"):
        ParameterServer(layout, 0, 1, settings, sgd, rendezvous)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def assert_a_failure_is_named(job: Job, cause: str) -> None:
    """Check that the failure of a job's only server is raised on its worker and by `Job.finish`."""
    job.start_servers()
    model, worker = job.worker(0)
    with pytest.raises(CommunicationError, match=f"server 0 .* failed: RuntimeError: {cause}"):
        train_once(model, worker, 0)
    with pytest.raises(RuntimeError, match=cause):
        job.finish()


def test_a_failed_update_ends_the_server_and_names_the_cause() -> None:
    """Adam takes no sparse gradients. The worker raises instead of waiting for an answer."""
    job = Job(Bag, adam, ParameterServerSettings(mode="asynchronous"), servers=1, workers=1)
    assert_a_failure_is_named(job, "Adam does not support sparse")


def test_a_failed_update_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the connection does not repeat the failed update: the shard may be half updated."""
    tries = []

    def fail(shard: ServerShard, gradient: Any) -> None:
        tries.append(gradient)
        raise RuntimeError("no such step")

    monkeypatch.setattr(ServerShard, "update", fail)
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    assert_a_failure_is_named(job, "no such step")
    assert len(tries) == 1


def test_the_worker_of_a_failed_update_gets_the_cause_before_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shard: ServerShard, gradient: Any) -> None:
        raise RuntimeError("no such step")

    def send_later(link: PairLink, text: str) -> None:
        time.sleep(0.2)  # the server checks for failures several times meanwhile
        send_problem(link, text)

    monkeypatch.setattr(ServerShard, "update", fail)
    monkeypatch.setattr("windlass.parameter_server.server.send_problem", send_later)
    job = Job(mlp, sgd, ParameterServerSettings(reconnect_seconds=0.1), servers=1, workers=1)
    assert_a_failure_is_named(job, "no such step")


class NarrowTables(nn.Module):
    """Embedding with rows of one element, and an embedding bag, both with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.bag = nn.Embedding(40, 1, sparse=True), nn.EmbeddingBag(40, 3, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.narrow(ids).sum(1) + self.bag(ids)


def test_narrow_embeddings_and_bags_push_rows() -> None:
    def batches(step: int, worker: int) -> torch.Tensor:
        return torch.randint(0, 40, (2, 3), generator=torch.Generator().manual_seed(100 * step + worker))

    job = Job(NarrowTables, sgd, ParameterServerSettings(), servers=2, workers=1)
    wanted = job.build_from(0)
    optimizer = sgd(list(wanted.parameters()))
    job.start_servers()
    model, worker = job.worker(0)
    for step in range(STEPS):
        worker.pull()
        for one in (model, wanted):
            one(batches(step, 0)).square().mean().backward()
        worker.push()
        optimizer.step()
        optimizer.zero_grad()
    worker.pull()
    close(dict(model.named_parameters()), dict(wanted.named_parameters()))
    assert worker.bytes_sent < STEPS * 160 * 4
    worker.close()
    job.finish()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # raised inside torch's Adagrad
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        torch.optim.SparseAdam,
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.5),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    ],
    ids=["SparseAdam", "Adagrad", "SGD", "Nesterov"],
)
def test_a_shard_without_rows_of_a_batch_makes_the_step(make_optimizer: Any, is_lost: bool, tmp_path: Path) -> None:
    """Adam's bias correction, Adagrad's decay of the learning rate and momentum depend on all steps of a parameter."""
    settings = ParameterServerSettings(snapshot=tmp_path if is_lost else None, snapshot_every=1)
    job = Job(lambda: nn.Embedding(40, 4, sparse=True), make_optimizer, settings, workers=1)
    wanted = job.build_from(0)
    optimizer = make_optimizer(list(wanted.parameters()))
    job.start_servers()
    model, worker = job.worker(0)
    for step, ids in enumerate(([1, 30], [2, 1], [3, 2], [30, 2])):
        if step == 3 and is_lost:
            lose(job, 1)
            job.start_server(1)
        worker.pull()
        for one in (model, wanted):
            one(torch.tensor(ids)).square().sum().backward()
        worker.push()
        optimizer.step()
        optimizer.zero_grad()
    worker.pull()
    close(dict(model.named_parameters()), dict(wanted.named_parameters()))
    worker.close()
    job.finish()


def test_sparse_adam_is_for_sparse_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(4, 2))]
    require_elementwise(torch.optim.SparseAdam(parameters), splits_parameters=True)
    with pytest.raises(ConfigError, match="SparseAdam takes sparse gradients only, and that of out.bias is dense"):
        require_elementwise(torch.optim.SparseAdam(parameters), splits_parameters=True, dense="out.bias")


def test_only_the_dtype_of_messages_has_to_be_equal() -> None:
    """Each process converts bf16 parameters itself; float64 parameters change the size of messages."""
    fingerprint = layout_of(mlp(), 1).fingerprint
    assert layout_of(mlp().bfloat16(), 1).fingerprint == fingerprint != layout_of(mlp().double(), 1).fingerprint


def test_a_push_after_one_that_failed_on_a_server_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(mlp, sgd, ParameterServerSettings(mode="asynchronous"), servers=2, workers=1)
    job.start_servers()
    model, worker = job.worker(0)
    send = ParameterServerWorker._push_to

    def fail(self: ParameterServerWorker, server: int) -> Any:
        if server == 1:
            raise CommunicationError("server 1 failed")
        return send(self, server)

    with monkeypatch.context() as patch:
        patch.setattr(ParameterServerWorker, "_push_to", fail)
        with pytest.raises(CommunicationError, match="server 1 failed"):
            train_once(model, worker, 0)
    train_once(model, worker, 1)
    assert job.servers[0].version == 2 and job.servers[1].version == 1
    worker.close()
    job.finish()


def test_other_settings_are_refused() -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    job.start_servers()
    job.settings = ParameterServerSettings(mode="asynchronous")
    with pytest.raises(CommunicationError, match="worker 0 has other settings than server 0"):
        job.worker(0)
    job.settings = ParameterServerSettings()
    job.start_worker(0, lambda model, worker: worker.pull())
    job.finish()


def test_no_worker_joins_a_synchronous_run(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"WINDLASS_SERVERS": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "WINDLASS_JOINS": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="WINDLASS_JOINS is set, and a synchronous update"):
        start(mlp(), sgd)


def test_a_second_job_in_the_store_of_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(mlp, sgd, ParameterServerSettings(), servers=1, workers=1)
    job.start_servers()
    environ = {"WINDLASS_SERVERS": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(job.port)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    worker = start(job.build_from(0), sgd)
    assert worker is not None
    train(mlp(), worker, range(0))
    worker.close()
    job.finish()
    with pytest.raises(CommunicationError, match=f"`start` was called before .* 127.0.0.1:{job.port} has the entries"):
        start(mlp(), sgd)


ENVIRONMENT = {"WINDLASS_SERVERS": "2", "RANK": "3", "WORLD_SIZE": "6", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (False, 1)),
        ({"RANK": "1"}, (True, 1)),
        ({"RANK": "0", "WINDLASS_JOINS": "1"}, (False, -1)),
    ],
)
def test_the_first_ranks_are_servers(changes: dict[str, str], expected: tuple[bool, int]) -> None:
    role = role_of({**ENVIRONMENT, **changes})
    assert (role.is_server, role.index) == expected and (role.servers, role.workers) == (2, 4)


@pytest.mark.parametrize(
    ("rank", "expected"), [("1", (True, 1, 0)), ("2", (True, 0, 1)), ("3", (True, 1, 1)), ("4", (False, 0, 0))]
)
def test_replicas_follow_the_servers(rank: str, expected: tuple[bool, int, int]) -> None:
    role = role_of({**ENVIRONMENT, "RANK": rank, "WINDLASS_REPLICAS": "1"})
    assert (role.is_server, role.index, role.replica) == expected and (role.servers, role.workers) == (2, 2)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "the environment has no numbers in WINDLASS_SERVERS, RANK, WORLD_SIZE, MASTER_PORT"),
        (
            {**ENVIRONMENT, "WINDLASS_SERVERS": "6"},
            "WINDLASS_SERVERS = 6 and WINDLASS_REPLICAS = 0 of 6 ranks; at least one server and one worker",
        ),
    ],
)
def test_an_incomplete_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(CommunicationError) as caught:
        role_of(environ)
    assert message in str(caught.value)
