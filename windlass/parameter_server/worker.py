"""Worker of a parameter server job: pulls parameters into its model and pushes gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch

from windlass.base.errors import CommunicationError, ModelError
from windlass.base.log import logger
from windlass.comm.pair_link import LinkClosedError, LinkSilentError, PairLink
from windlass.parameter_server.heartbeat import receive_message
from windlass.parameter_server.job_rendezvous import JobRendezvous, ServerAddress, StoreLostError
from windlass.parameter_server.messages import MessageKind, receive_text, send_push
from windlass.parameter_server.model_layout import ModelLayout
from windlass.parameter_server.server_shard import ShardGradient
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.update_clock import PushResult

T = TypeVar("T")

_PAUSE = 0.02
_LEAST_WAIT = 1.0  # minimum seconds to wait for the answer to a call
_START_SHIFT = 40  # the numbers of the pushes of a worker's n-th process begin at n << 40
_FIRST_CALL_SHARE = 8
"""The first call to a server waits an eighth of `connect_seconds` for its answer; each further call waits twice as long
as the previous one, up to `connect_seconds`."""


class StalePushError(CommunicationError):
    """Error for a gradient that a server refused, because it was computed from parameters that are too old (`max_age`).

    Pull, and compute the gradient again.
    """


class ServerLostError(CommunicationError):
    """Error for a server that ended, or cannot be reached, and was not replaced in time."""


class ParameterServerWorker:
    """Worker that pulls parameters from the servers and pushes gradients to them. Use it as a context manager.

    ```python
    with worker:
        for batch in batches:
            worker.pull()
            loss(model, batch).backward()
            worker.push()
    ```

    Attributes:
        index: number of the worker.
        pushes: number of gradients pushed.
        dropped: number of pushed gradients that a server dropped (`backup_workers`).
    """

    def __init__(
        self, layout: ModelLayout, index: int, settings: ParameterServerSettings, rendezvous: JobRendezvous
    ) -> None:
        self.index, self.pushes, self.dropped = index, 0, 0
        self._layout, self._settings, self._rendezvous = layout, settings, rendezvous
        self._servers = range(len(layout.fragments))
        self._links: dict[int, PairLink] = {}
        self._addresses: dict[int, ServerAddress] = {}
        self._pulled = dict.fromkeys(self._servers, 0)
        # by server: number of pushes that the server has counted; -1: not connected yet
        self._steps = dict.fromkeys(self._servers, -1)
        # last push to each server, until the next pull: version pulled before the push, its number, its gradient
        self._last: dict[int, tuple[int, int, ShardGradient]] = {}
        self._was_late = False  # a server dropped the last push: its update was made without it (`backup_workers`)
        self._silent = set[int]()  # servers that were lost because no heartbeat came, and may still run
        # Larger than the numbers of an earlier process with this worker's number: a server that was restored may have
        # counted those.
        self._number = rendezvous.count_start(index) << _START_SHIFT
        self._closed_bytes, self._has_left = [0, 0], False
        for server in self._servers:
            self._connect(server, settings.connect_seconds, "")

    @property
    def version(self) -> int:
        """Number of updates in the parameters that were pulled last, on the server with the fewest updates."""
        return min(self._pulled.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all servers."""
        return self._closed_bytes[0] + sum(link.bytes_sent for link in self._links.values())

    @property
    def bytes_received(self) -> int:
        """Bytes received from all servers."""
        return self._closed_bytes[1] + sum(link.bytes_received for link in self._links.values())

    def pull(self) -> int:
        """Receive the parameters into the model, and return their version, as `version` does.

        In synchronous mode the call waits for the update to which this worker's last gradient belongs, unless a server
        has dropped that gradient because it had made the update before. In bounded mode it waits until the slowest
        worker is at most `staleness` steps behind.

        Raises:
            ServerLostError: a server was lost and not replaced.
            CommunicationError: too few workers remain for a synchronous update, or `close` was called.
        """
        for server in reversed(self._servers):  # in bounded mode the last server holds workers; pushes reach it last
            self._with_server(server, lambda server=server: self._pull_from(server))  # type: ignore[misc]
        return self.version

    def push(self) -> bool:
        """Send the gradients of the model's parameters to the servers, and clear them.

        Each server decides for its own shard: if one server drops or refuses its part of a gradient, or is lost, other
        servers may have used their parts.

        Returns:
            False if the gradient was dropped: a server has made the synchronous update already, or has an earlier
            gradient of this worker for the same update.

        Raises:
            ModelError: a gradient is not finite. Nothing was sent.
            StalePushError: more than `max_age` updates were made since the pull.
            ServerLostError: a server was lost and not replaced.
            CommunicationError: `close` was called.
        """
        self._check_gradients()
        gradients = [self._gradient_of(server) for server in self._servers]
        results = []
        # Count the push even if a server fails below: servers that have this gradient would treat a next one with the
        # same number as a repetition.
        self.pushes += 1
        self._number += 1
        for server in self._servers:
            self._last[server] = (self._pulled[server], self._number, gradients[server])
            results.append(self._with_server(server, lambda server=server: self._push_to(server)))  # type: ignore[misc]
        for tensor in self._layout.tensors:
            tensor.grad = None
        for server, (result, version) in enumerate(results):
            if result is PushResult.TOO_OLD:
                pulled = self._pulled[server]
                raise StalePushError(
                    f"push {self.pushes} of worker {self.index}: its parameters are of version {pulled}, and "
                    f"{self._addresses[server]} has {version}: {version - pulled} updates, "
                    f"where max_age = {self._settings.max_age} are allowed; pull more often, or raise max_age"
                )
        self._was_late = any(result is PushResult.DROPPED for result, _ in results)
        was_dropped = self._was_late or any(result is PushResult.EXTRA for result, _ in results)
        self.dropped += was_dropped
        return not was_dropped

    def close(self) -> None:
        """Leave the run. The servers end when all workers have left. A second call does nothing."""
        if self._has_left:
            return
        # record the end in the store too, for servers that do not receive BYE, e.g. a replica that takes over later
        try:
            self._rendezvous.leave(self.index, retires=True)
        except StoreLostError as error:  # no process reads the record
            logger.warning("worker %d leaves: %s", self.index, error)
        for link in self._links.values():
            try:
                link.send([MessageKind.BYE])
            except LinkClosedError as error:
                logger.warning("worker %d leaves: %s", self.index, error)
            self._forget(link)
        self._links, self._has_left = {}, True

    def __enter__(self) -> ParameterServerWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, server: int, seconds: float, cause: str) -> None:
        """Connect with the newest server of a shard within `seconds`.

        A lost server is not called again, unless only its heartbeats were missing: it may have been suspended. A server
        that does not answer a call in time is called again, since it may be slow, until another process replaces it.

        Args:
            cause: reason for which the last server was lost, for the error.
        """
        began, before, is_silent, calls = time.time(), self._addresses.get(server), server in self._silent, 0
        since = began - self._settings.heartbeat_seconds if is_silent else began
        lost = 0 if before is None else before.generation - is_silent
        if is_silent:
            self._require_store(server, since, cause)
        while True:
            left = max(0.0, began + seconds - time.time())
            try:
                address, is_over = self._rendezvous.find_server(server, lost, left), self._rendezvous.is_over(server)
            except StoreLostError as error:  # the lost process may have served the store
                cause = f"{cause or 'it has not started'}, and {self._silent_store}"
                raise self._lost(server, since, cause) from error
            if is_over:
                raise self._lost(server, since, "the run has ended there, without connected workers")
            if address is None or (calls and not left):
                raise self._lost(server, since, cause or "it has not started")
            # The first calls wait for a short time, since a server may end while it answers.
            wait = self._settings.connect_seconds / max(1, _FIRST_CALL_SHARE >> calls)
            if address == before:
                wait = min(wait, max(_LEAST_WAIT, left))
            try:
                self._greet(server, address, self._rendezvous.call_server(address, timedelta(seconds=wait)))
            except (LinkClosedError, StoreLostError) as error:
                cause, calls = cause if address == before else str(error), calls + 1
                time.sleep(_PAUSE)
                continue
            return

    def _require_store(self, server: int, since: float, cause: str) -> None:
        """Raise ServerLostError if the job's store does not answer: the lost process may have served the store."""
        if not self._rendezvous.has_store(self._settings.heartbeat_seconds):
            raise self._lost(server, since, f"{cause}, and {self._silent_store}")

    @property
    def _silent_store(self) -> str:
        return f"the job's store at {self._rendezvous.where} does not answer"

    def _lost(self, server: int, since: float, cause: str) -> ServerLostError:
        named, clock = self._addresses.get(server, f"server {server}"), time.strftime("%H:%M:%S", time.localtime(since))
        return ServerLostError(
            f"worker {self.index} cannot reach {named} since {clock} ({time.time() - since:.0f} s): {cause}; see its "
            "output; start it again with the same snapshot folder, or raise reconnect_seconds"
        )

    def _greet(self, server: int, address: ServerAddress, link: PairLink) -> None:
        synchronous, layout = self._settings.mode == "synchronous", self._layout
        pulled = self._pulled[server] if synchronous else 0
        step = self._steps[server]
        link.idle = timedelta(seconds=self._settings.heartbeat_seconds)
        link.send([MessageKind.HELLO, self.index, pulled, step, layout.fingerprint, self._settings.fingerprint])
        version, self._steps[server], *_ = self._receive(link, MessageKind.WELCOME)
        before, last = self._addresses.get(server), self._last.get(server)
        restored = None if before is None or synchronous else self._rendezvous.restored_version(before, address)
        if restored is not None:  # `max_age` counts the updates that were made after that version
            self._pulled[server] = min(self._pulled[server], restored)
            if last is not None:
                self._last[server] = (min(last[0], restored), *last[1:])
        # Set the address only after the answer, so that a server that is too slow now can be called again.
        self._addresses[server] = address
        self._links[server] = link
        self._silent.discard(server)
        if last is not None and synchronous and version <= last[0]:
            self._push_to(server)  # push again: only the lost server may have received it

    def _with_server(self, server: int, action: Callable[[], T]) -> T:
        """Run an exchange with a server. If the server is lost, connect with the one that replaces it, and repeat."""
        if self._has_left:
            raise CommunicationError(f"worker {self.index} has left the run by `close`; pull and push before it")
        cause = "it was lost in an earlier call"
        while True:
            if server not in self._links:
                self._connect(server, self._settings.reconnect_seconds, cause)
            try:
                return action()
            except LinkClosedError as error:
                logger.warning("worker %d: %s; waits for another process in its place", self.index, error)
                self._forget(self._links.pop(server))
                cause = str(error)
                if isinstance(error, LinkSilentError):
                    self._silent.add(server)

    def _forget(self, link: PairLink) -> None:
        self._closed_bytes = [self._closed_bytes[0] + link.bytes_sent, self._closed_bytes[1] + link.bytes_received]
        link.close()

    def _pull_from(self, server: int) -> None:
        link, layout = self._links[server], self._layout
        synchronous = self._settings.mode == "synchronous"
        last = self._last.get(server)
        # If a server dropped the last gradient, this worker waits at no server. Else it could wait at one server for
        # another worker, which waits at the server whose update needs the next gradient of this worker.
        wanted = last[0] + 1 if last is not None and synchronous and not self._was_late else 0
        link.send([MessageKind.PULL, wanted])
        version = self._receive(link, MessageKind.PARAMETERS, lambda: self._return_to_others(server))[0]
        values = link.receive(torch.empty(layout.numel(server), dtype=layout.dtype))
        begin = 0
        for fragment in layout.fragments[server]:
            layout.part(fragment).copy_(values[begin : begin + fragment.numel])
            begin += fragment.numel
        self._pulled[server] = version
        self._last.pop(server, None)

    def _push_to(self, server: int) -> tuple[PushResult, int]:
        pulled, number, gradient = self._last[server]
        link = self._links[server]
        send_push(link, pulled, number, gradient)
        result, version, *_ = self._receive(link, MessageKind.PUSHED)
        if self._settings.mode != "synchronous" and result != PushResult.TOO_OLD.value:
            self._steps[server] += 1
        return PushResult(result), version

    def _return_to_others(self, waits_for: int) -> None:
        """Connect with servers that have replaced lost ones, while a pull from server `waits_for` waits for other
        workers. One of those workers may itself wait at such a server, until this worker has connected with it.
        """
        if len(self._servers) == 1 or not self._rendezvous.has_store(self._settings.heartbeat_seconds):
            return
        wait = timedelta(seconds=self._settings.connect_seconds / _FIRST_CALL_SHARE)
        for server in self._servers:
            try:
                address, before = self._rendezvous.record(server).address, self._addresses[server]
                if server == waits_for or address is None or address.generation == before.generation:
                    continue
                if (link := self._links.pop(server, None)) is not None:
                    self._forget(link)
                self._greet(server, address, self._rendezvous.call_server(address, wait))
            except (LinkClosedError, StoreLostError) as error:  # called again at the next heartbeat or exchange
                logger.warning("worker %d: %s", self.index, error)

    def _receive(
        self, link: PairLink, expected: MessageKind, on_heartbeat: Callable[[], None] = lambda: None
    ) -> list[int]:
        kind, *numbers = receive_message(link, on_heartbeat)
        if kind == MessageKind.PROBLEM:
            raise CommunicationError(f"parameter server: {receive_text(link, numbers[0])}")
        if kind != expected:
            raise CommunicationError(
                f"parameter server: {link.peer} sent message {kind} instead of {expected.name}; run equal versions of "
                "windlass on all hosts"
            )
        return numbers

    def _check_gradients(self) -> None:
        for parameter, tensor in zip(self._layout.parameters, self._layout.tensors, strict=True):
            if tensor.grad is None:
                continue
            values = tensor.grad._values() if tensor.grad.is_sparse else tensor.grad
            if not bool(torch.isfinite(values).all()):
                what = "NaN" if bool(torch.isnan(values).any()) else "an infinity"
                raise ModelError(
                    f"gradient of {parameter.name} contains {what} at push {self.pushes + 1} of worker {self.index}; "
                    "nothing was sent; lower the learning rate, or look at this worker's batch"
                )

    def _gradient_of(self, server: int) -> ShardGradient:
        layout = self._layout
        dense: list[torch.Tensor | None] = []
        rows: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for fragment in layout.fragments[server]:
            parameter, tensor = layout.parameters[fragment.parameter], layout.tensors[fragment.parameter]
            grad = tensor.grad
            if parameter.is_sparse:
                begin, end = fragment.begin // parameter.row, fragment.end // parameter.row
                rows.append(None if grad is None else self._rows_of(grad, begin, end))
            elif grad is None:
                dense.append(None)
            else:
                part = grad.detach().to_dense().reshape(-1)[fragment.begin : fragment.end]
                dense.append(part.to("cpu", layout.dtype))
        return ShardGradient(dense, rows)

    def _rows_of(self, grad: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient's rows in `[begin, end)`: indices `[k]`, counted from `begin`, and values `[k, row]`."""
        grad = grad.coalesce() if grad.is_sparse else grad.to_sparse(1).coalesce()
        indices, values = grad.indices()[0].to("cpu"), grad.values().to("cpu", self._layout.dtype)
        inside = (indices >= begin) & (indices < end)
        return indices[inside] - begin, values[inside].contiguous()
