"""Warm pool of worker processes that run one function on every rank of a world."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.ports import free_port

POOL_SIZE = 4
START_SECONDS = 120.0  # import of torch on a slow, shared machine
GRACE_SECONDS = 10.0  # time for the peers of a failed rank to notice the failure
LOG_TAIL = 4000  # characters of a worker's output shown with a failure
KEPT_GROUPS = 6  # gloo groups that jobs may leave in a worker before the pool starts new workers


class RankError(AssertionError):
    """Exception of a rank. `kinds` holds the class names of the original exception, most derived first."""

    def __init__(self, rank: int, kinds: tuple[str, ...], text: str, others: str = "") -> None:
        super().__init__(f"rank {rank} raised:\n{text}{others}")
        self.rank = rank
        self.kinds = kinds


class RankTimeout(AssertionError):
    """Timeout of some ranks. The message holds every rank's Python stacks."""


@dataclass(frozen=True)
class Job:
    """Function and arguments for one rank."""

    function: Callable[..., Any]
    rank: int
    world: int
    number: int  # counts the pool's jobs
    store_port: int
    port: int
    args: tuple[Any, ...]
    env: Mapping[str, str]
    timeout: float
    backend: str


@dataclass(frozen=True)
class Outcome:
    """Result of one rank: a value, or the text of its exception.

    Attributes:
        groups: gloo groups that exist in the worker after the job.
    """

    value: Any = None
    kinds: tuple[str, ...] = ()
    text: str = ""
    groups: int = 0


# ---------------------------------------------------------------------------------------------------- in the worker


@contextlib.contextmanager
def _environment(job: Job) -> Any:
    """Set the environment variables of a launcher and of the job, and restore all previous ones afterwards."""
    launcher = {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
    }
    before = dict(os.environ)
    os.environ.update(launcher)
    os.environ.update(job.env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(job: Job) -> Outcome:
    import torch
    import torch.distributed as dist

    with _environment(job):
        try:
            torch.manual_seed(0)
            dist.init_process_group(
                job.backend,
                store=_store_of(job),
                rank=job.rank,
                world_size=job.world,
                timeout=timedelta(seconds=job.timeout),
            )
            dist.barrier()  # no rank may fail, and so close its connections, while a peer still connects to it
            value = job.function(*job.args)
            dist.barrier()  # no rank may fail while a peer still communicates with it
            outcome = Outcome(value)
        except BaseException as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            outcome = Outcome(kinds=kinds, text=traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
    return outcome


# Connection of this process to the store of its pool, which the first worker serves. In a TCP store a wait for a key
# ends as soon as the key is set. A file store polls for the key every 10 ms, longer than most waits in a small job.
_store: Any = None


def _store_of(job: Job) -> Any:
    """Return the part of the pool's store that this job has for itself."""
    global _store
    from torch.distributed import PrefixStore, TCPStore

    if _store is None:
        _store = TCPStore("127.0.0.1", job.store_port, is_master=False, wait_for_workers=False)
    _store.set_timeout(timedelta(seconds=job.timeout))
    return PrefixStore(f"job {job.number}", _store)


def _serve_store() -> int:
    """Serve the store of the pool from this process, and return its port."""
    global _store
    from torch.distributed import TCPStore

    _store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(_store.port)


def _worker(connection: Connection, log: str, path: list[str], serves: bool) -> None:
    """Serve jobs until the parent closes the pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends workers by closing the pipe
    sys.path[:] = path
    import torch

    import tests.dist.worker_imports  # noqa: F401  (imported already in the fork server)
    from windlass.watchdog.control_store import ControlStore

    torch.set_num_threads(1)
    # Over a TCP store windlass would start a watchdog, which would end this process when a rank of a test fails.
    ControlStore.open = classmethod(lambda cls: None)  # type: ignore[assignment, method-assign]
    modules = 0
    connection.send_bytes(pickle.dumps(_serve_store() if serves else 0))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            outcome = _run(pickle.loads(request))
        except Exception as error:  # the function's module cannot be imported here
            outcome = Outcome(kinds=(type(error).__name__,), text=traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()  # remove the garbage of the job
        if len(sys.modules) > modules:  # freeze newly imported modules, so that later collections skip them
            gc.freeze()
            modules = len(sys.modules)
        connection.send_bytes(_packed(replace(outcome, groups=_count_groups())))


def _count_groups() -> int:
    """Return the number of gloo groups that this process holds, by their threads.

    Such a thread wakes 100 times a second. Groups remain where a module keeps the state of a script, such as the
    stand-in's current engine, and dozens of them would slow down all later tests.
    """
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            count += name.read_text().startswith("gloo_tcp_loop")
    return count


def _packed(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:  # a result that cannot be pickled is an error of the test: report it, and keep the worker
        return pickle.dumps(Outcome(kinds=("PicklingError",), text=traceback.format_exc()))


# ---------------------------------------------------------------------------------------------------- in the parent


@dataclass
class Worker:
    """Process of the pool, with its pipe."""

    process: BaseProcess
    connection: Connection
    log: Path
    read: int = 0  # bytes of the log that earlier jobs wrote

    def output(self) -> str:
        """Return the output of the worker since the current job began."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            return file.read().decode(errors="replace")


class Pool:
    """`size` processes that keep torch imported. Each job gets its own process group and part of the store."""

    def __init__(self, size: int = POOL_SIZE) -> None:
        self.size = size
        self._workers: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._count = 0
        self._store_port = 0

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        backend: str = "gloo",
    ) -> list[Any]:
        """Run `function(*args)` on ranks 0..world-1. Return the results by rank.

        Raises:
            RankError: a rank raised. The message holds the first error in full.
            RankTimeout: some rank did not finish within `timeout` seconds.
        """
        if world > self.size:
            raise ValueError(f"{world} ranks, and the pool has {self.size} processes")
        self._start()
        self._count += 1
        port = free_port()
        ranks = self._workers[:world]
        for rank, worker in enumerate(ranks):
            worker.read = worker.log.stat().st_size
            place = rank, world, self._count, self._store_port, port
            job = Job(function, *place, args, dict(env or {}), timeout, backend)
            worker.connection.send_bytes(pickle.dumps(job))
        try:
            outcomes, failed = self._collect(ranks, timeout)
        except BaseException:
            self.close()  # unread results would otherwise be taken for results of the next job
            raise
        if len(outcomes) < world:
            stacks = self._stacks(ranks, outcomes)
            self.close()
            if failed:
                raise _rank_error(failed, outcomes, ranks, f"\n\npeers that never came back:\n{stacks}")
            raise RankTimeout(
                f"ranks {sorted(set(range(world)) - set(outcomes))} gave no answer in {timeout} s\n{stacks}"
            )
        if failed:
            raise _rank_error(failed, outcomes, ranks)
        if max(outcome.groups for outcome in outcomes.values()) > KEPT_GROUPS:
            self.close()
        return [outcomes[rank].value for rank in range(world)]

    def _collect(self, ranks: list[Worker], timeout: float) -> tuple[dict[int, Outcome], list[int]]:
        """Return the results by rank, and the failed ranks in the order of their failures."""
        outcomes: dict[int, Outcome] = {}
        failed: list[int] = []
        until = time.monotonic() + timeout
        while len(outcomes) < len(ranks):
            open_ranks = {w.connection: rank for rank, w in enumerate(ranks) if rank not in outcomes}
            ready = wait(list(open_ranks), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = open_ranks[connection]  # type: ignore[index]
                outcomes[rank] = self._receive(ranks[rank])
                if outcomes[rank].kinds:
                    failed.append(rank)
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        return outcomes, failed

    def _receive(self, worker: Worker) -> Outcome:
        try:
            outcome = pickle.loads(worker.connection.recv_bytes())
            assert isinstance(outcome, Outcome)
            return outcome
        except (EOFError, OSError):
            worker.process.join(5)
            text = f"the process died with exit code {worker.process.exitcode}\n{worker.output()[-LOG_TAIL:]}"
            return Outcome(kinds=("ProcessDied",), text=text)

    def _stacks(self, ranks: list[Worker], outcomes: dict[int, Outcome]) -> str:
        """Return the Python stacks of all ranks, since the cause of a hang is often a peer that is at another place."""
        for worker in ranks:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        parts = []
        for rank, worker in enumerate(ranks):
            state = "answered" if rank in outcomes else "still running"
            parts.append(f"--- rank {rank} ({state})\n{worker.output()[-LOG_TAIL:]}")
        return "\n".join(parts)

    def _start(self) -> None:
        """Start the workers, unless all of them are alive."""
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.close()
        context = get_context("forkserver")
        with _quiet_environment():
            for server in _servers:  # both servers import at the same time; a server's first fork waits for its imports
                server.ensure_running()
            for index in range(self.size):
                ours, theirs = context.Pipe()
                log = Path(self._folder.name) / f"worker-{index}-{self._count}.log"
                log.touch()
                arguments = (theirs, str(log), list(sys.path), index == 0)
                process = context.Process(target=_worker, args=arguments, daemon=True)
                with _forked_from(index):
                    process.start()
                theirs.close()
                self._workers.append(Worker(process, ours, log))
        for worker in self._workers:
            if not worker.connection.poll(START_SECONDS):
                said = worker.output()
                self.close()  # a late worker's ready message would be taken for a result of the next job
                raise RankTimeout(f"a worker did not import torch within {START_SECONDS} s\n{said}")
            self._store_port = pickle.loads(worker.connection.recv_bytes()) or self._store_port

    def close(self) -> None:
        """End the workers. The pool starts new ones at the next job."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(0.5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
        self._store_port = 0

    def end(self) -> None:
        """End the workers for good and remove their logs."""
        self.close()
        self._folder.cleanup()


_servers = (forkserver.ForkServer(), forkserver.ForkServer())
for _server in _servers:
    _server.set_forkserver_preload(["tests.dist.worker_imports"])


@contextlib.contextmanager
def _forked_from(index: int) -> Any:
    """Fork ranks from two servers in turn.

    Processes forked from one server share the hash seed, but the order of a set has to differ between ranks, as it does
    for users.
    """
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _servers[index % 2].connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


@contextlib.contextmanager
def _quiet_environment() -> Any:
    """Set the variables that must be set before a worker imports torch."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")}
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _rank_error(failed: list[int], outcomes: dict[int, Outcome], ranks: list[Worker], more: str = "") -> RankError:
    """Return an error with the full text of the first failure and the last line of each other failure.

    Broken connections do not count as the first failure, since they follow from the failure of a peer.
    """
    first = next((rank for rank in failed if not _follows(outcomes[rank].text)), failed[0])
    lines = [f"\nrank {rank} then: {outcomes[rank].text.strip().splitlines()[-1]}" for rank in failed if rank != first]
    printed = ranks[first].output().strip()[-LOG_TAIL:]
    if printed:
        lines.append(f"\noutput of rank {first}:\n{printed}")
    return RankError(first, outcomes[first].kinds, outcomes[first].text, "".join(lines) + more)


def _follows(text: str) -> bool:
    return any(words in text for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


_pool: Pool | None = None


def shared_pool(ranks: int = POOL_SIZE) -> Pool:
    """Return the pool of this test session, with at least `ranks` processes. The pool ends with the interpreter."""
    global _pool
    if _pool is not None and _pool.size < ranks:
        atexit.unregister(_pool.end)
        _pool.end()
        _pool = None
    if _pool is None:
        _pool = Pool(max(ranks, POOL_SIZE))
        atexit.register(_pool.end)
    return _pool


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    transport: str | None = None,
) -> list[Any]:
    """Run `function(*args)` on each rank of a fresh world of `world` ranks. Return the results by rank.

    `function` must be a module-level function. `transport` sets WINDLASS_TRANSPORT.
    """
    variables = dict(env or {})
    if transport is not None:
        variables["WINDLASS_TRANSPORT"] = transport
    return shared_pool(world).run(function, world, *args, env=variables, timeout=timeout)
