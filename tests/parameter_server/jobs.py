"""Parameter server jobs with servers and workers in threads of one process, over the same links as processes."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from tests.ports import free_port
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.parameter_server.job_rendezvous import JobRendezvous
from windlass.parameter_server.model_layout import layout_of
from windlass.parameter_server.server import ParameterServer
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.shard_process import ShardProcess
from windlass.parameter_server.worker import ParameterServerWorker

CONNECT = timedelta(seconds=240)  # a test machine may be suspended
_RANDOM = threading.Lock()  # threads share torch's generator: one thread's seed must not reach another thread's model


class Job:
    """Servers and workers around one store. Failures of threads are raised by `finish`."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        settings: ParameterServerSettings,
        *,
        servers: int = 2,
        workers: int = 2,
    ) -> None:
        bind_gloo_to_loopback()
        self.build, self.make_optimizer, self.settings = build, make_optimizer, settings
        self.server_count, self.worker_count, self.port = servers, workers, free_port()
        # Serves the store; tests also read through it. For each new client torch looks up the name of an address, and a
        # name server that limits its rate delays a test that polls with new clients by 5 seconds.
        self.observer = JobRendezvous("127.0.0.1", self.port, serve=True, connect=CONNECT)
        self.servers: dict[int, ParameterServer] = {}
        self.processes: dict[tuple[int, int], ShardProcess] = {}
        self.failures: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start_servers(self) -> None:
        for server in range(self.server_count):
            self.start_server(server)

    def start_server(self, server: int) -> None:
        settings = self.settings  # bound here: a test may change the attribute for the workers

        def serve() -> None:
            layout = layout_of(self.build_from(server), self.server_count)
            made = ParameterServer(layout, server, self.worker_count, settings, self.make_optimizer, self.rendezvous())
            self.servers[server] = made
            made.serve()

        self.start(serve)

    def start_processes(self, replicas: int) -> None:
        """Start each server with replicas."""
        for server in range(self.server_count):
            for replica in range(1 + replicas):
                self.start_process(server, replica, replicas)

    def start_process(self, server: int, replica: int, replicas: int) -> None:
        layout, parts = (
            layout_of(self.build_from(10 * replica + server), self.server_count),
            (server, replica, replicas),
        )
        process = ShardProcess(layout, *parts, self.worker_count, self.settings, self.make_optimizer, self.rendezvous())
        self.processes[server, replica] = process
        self.start(process.run)

    def serving(self, server: int) -> ParameterServer:
        """Return the server that serves a shard with replicas."""
        address = self.observer.record(server).address
        assert address is not None
        found = self.processes[server, address.replica].serving
        assert found is not None
        return found

    def build_from(self, seed: int) -> nn.Module:
        """Build the model from a seed. Seeds of servers and workers differ; training starts from server 0's model."""
        with _RANDOM, torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build()

    def rendezvous(self) -> JobRendezvous:
        return JobRendezvous("127.0.0.1", self.port, serve=False, connect=CONNECT)

    def worker(self, index: int, model: nn.Module | None = None) -> tuple[nn.Module, ParameterServerWorker]:
        model = self.build_from(100 + index) if model is None else model
        return model, ParameterServerWorker(
            layout_of(model, self.server_count), index, self.settings, self.rendezvous()
        )

    def start_worker(self, index: int, work: Callable[[nn.Module, ParameterServerWorker], Any]) -> None:
        def run() -> None:
            model, worker = self.worker(index)
            with worker:
                work(model, worker)

        self.start(run)

    def start(self, function: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                function()
            except BaseException as error:
                traceback.print_exc()  # the main thread may wait for this one
                self.failures.append(error)

        self.threads.append(threading.Thread(target=guarded, daemon=True))
        self.threads[-1].start()

    def end_store(self) -> None:
        """End the store, as when its process is lost."""
        del self.observer
        gc.collect()

    def finish(self) -> None:
        until = time.monotonic() + 240
        while any(thread.is_alive() for thread in self.threads):
            if self.failures:  # other threads may wait for the failed one
                until = min(until, time.monotonic() + 5)
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        if self.failures:
            raise self.failures[0]
        assert not any(thread.is_alive() for thread in self.threads)
