"""Ranks that run one model together: their groups, the leader's commands, and errors that reach every rank.

[Note: inference ranks] The ranks along tp, ep and pp hold parts of one model and compute the same batches. The first
rank, the leader, schedules and samples; the other ranks receive each batch. Ranks along tp and ep compute a batch in
lockstep, because their layers communicate. Along pp the leader has the last stage; it keeps one step for each stage in
flight, and no sequence is in two of these steps, so that all stages compute at the same time.

A rank that fails posts its error in the rendezvous store, and closes its process groups. So the collectives in which
the other ranks wait fail at once instead of at their time-out, and these ranks raise a PeerError with the posted text.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import CommunicationError, ConfigError, PeerError, WindlassError
from windlass.comm.bootstrap import init_distributed
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.point_to_point import as_bytes, wait_for_transfers
from windlass.comm.rank_group import RankGroup, create_rank_group
from windlass.comm.store_notes import StoreNotes
from windlass.inference.step_batch import StepBatch
from windlass.inference.step_message import decode_batch, encode_batch

T = TypeVar("T")

_HEADER = 1024  # integers in the header of a message; the batch of a small decode step fits into it
_IDLE = timedelta(days=365)  # time-out of the control group: workers of an idle server wait for the next request


class RankCommand(IntEnum):
    """Kind of message that the leader sends to the other ranks."""

    RUN = 0
    """A batch; the workers run it."""
    CALL = 1
    """Function that takes the model, or name of an operation of the runner, with arguments; the workers call it."""
    RESULT = 2
    """Result or error of the leader's call; `RankWorker.take_part` returns or raises it on the workers."""
    CLOSE = 3
    """The engine is closed; the workers stop. Has no content."""


class RankChannel:
    """Messages between the leader and the other ranks of one model.

    Args:
        control: group of all ranks of the model.
        axes: mesh axes of the model, by name.
        owns_axes: close the process groups of the axes when the channel closes.
    """

    def __init__(self, control: RankGroup, axes: Mapping[str, MeshAxis], *, owns_axes: bool) -> None:
        self.axes = dict(axes)
        self._control, self._owns_axes = control, owns_axes
        self._notes = StoreNotes.numbered(f"inference on {min(control.ranks)}", control.ranks[control.index])
        self._failed = self._closes_groups = self._keeps_axes = False
        self._started: deque[list[tuple[Any, torch.Tensor]]] = deque()  # broadcasts of batches in flight, oldest first
        self._cleanups: list[Callable[[], None]] = []

    @property
    def stages(self) -> int:
        """Number of ranks along pp."""
        return self.axes["pp"].size if "pp" in self.axes else 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._control.size

    @property
    def index(self) -> int:
        """Index of this rank; the leader's is 0."""
        return self._control.index

    @property
    def is_leader(self) -> bool:
        """True on the rank that schedules and samples."""
        return self._control.index == 0

    @property
    def failed(self) -> bool:
        """True after an error in a collective call: the ranks are no longer synchronized."""
        return self._failed

    @property
    def pipeline(self) -> MeshAxis | None:
        """The mesh axis pp; None if it has one rank."""
        return self.axes["pp"] if self.stages > 1 else None

    # messages

    def start_batch(self, batch: StepBatch) -> None:
        """Start the broadcast of a batch. Called on the leader; workers receive messages in the order they are sent."""
        tensors = self._encode(RankCommand.RUN, encode_batch(batch))
        self._started.append([(self._control.start_broadcast(tensor), tensor) for tensor in tensors])

    def finish_batch(self) -> None:
        """Wait for the oldest broadcast of a batch. Called on the leader."""
        wait_for_transfers([work for work, _ in self._started.popleft() if work is not None])

    def send(self, command: RankCommand, value: Any = None) -> None:
        """Broadcast a command other than RUN, with a Python value unless it is CLOSE. Called on the leader."""
        for tensor in self._encode(command, torch.empty(0, dtype=torch.long)):
            self._control.broadcast(tensor)
        if command is not RankCommand.CLOSE:
            self._control.broadcast_object(value)

    def receive(self) -> tuple[RankCommand, Any]:
        """Wait for the next message, and return its command with the batch or the value. Called on the workers."""
        header = torch.empty(_HEADER, dtype=torch.long)
        self._control.broadcast(header)
        command, length = RankCommand(int(header[0])), int(header[1])
        if command is RankCommand.CLOSE:
            return command, None
        if command is not RankCommand.RUN:
            return command, self._control.broadcast_object()
        body = header[2 : 2 + length]
        if length > _HEADER - 2:
            body = torch.empty(length, dtype=torch.long)
            self._control.broadcast(body)
        return command, decode_batch(body)

    def share(self, value: T | None = None) -> T:
        """Return the leader's value on all ranks. Collective."""
        return self._control.broadcast_object(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on the leader, and an empty list on the others. Collective."""
        return self._control.gather_object(value)

    def minimum(self, value: int) -> int:
        """Return the smallest value of all ranks. Collective."""
        return int(self._control.all_reduce(torch.tensor([value]), dist.ReduceOp.MIN).item())

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the leader's parameters and buffers to all ranks. Collective."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.numel():
                    values = tensor.detach().contiguous().cpu()
                    self._control.broadcast(as_bytes(values))
                    tensor.copy_(values)

    def _encode(self, command: RankCommand, body: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a message: a header, and the body if it does not fit into the header."""
        header = torch.zeros(_HEADER, dtype=torch.long)
        header[0], header[1] = int(command), len(body)
        if len(body) > _HEADER - 2:
            return [header, body]
        header[2 : 2 + len(body)] = body
        return [header]

    # errors

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Make all ranks raise if one of them raises inside the `with` block. After an error the ranks cannot be used.

        Raises:
            PeerError: another rank failed first; the text has the error of that rank.
            CommunicationError: the ranks have failed before.
        """
        if self._failed:
            raise CommunicationError(
                "the ranks of this model have failed before and are no longer in step; load the model anew"
            )
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Post an error for the other ranks, close the process groups, and raise the error. If another rank has posted
        an error, post none, and raise a PeerError with the text of the other rank's error."""
        self._failed = True
        own = self._control.index
        others = [index for index in range(self.size) if index != own]
        found = next((index for index in others if self._notes.wait_for_keys([str(index)], "", 0) == ""), None)
        if found is None:
            text = str(error).strip().split("\n")[0]
            self._notes.post(str(own), f"{type(error).__name__}: {text}")
        self.close()
        if found is not None:
            text = self._notes.read(str(found))
            raise PeerError(f"rank {self._control.ranks[found]} of the inference ranks failed: {text}") from error
        raise error

    def close_with_engine(self, *, keeps_axes: bool) -> None:
        """Let `end` close the process groups when the engine is closed.

        Args:
            keeps_axes: leave the groups of the axes open, because the layers of a live module still communicate over
                them.
        """
        self._closes_groups, self._keeps_axes = True, keeps_axes

    def end(self) -> None:
        """Close the process groups if `close_with_engine` was called. Collective; called when the engine is closed."""
        if self._closes_groups and not self._failed:
            with self.guard():
                self._control.barrier()  # a rank that closes first would break the last message to the others
            self._owns_axes = self._owns_axes and not self._keeps_axes
            self.close()

    def on_close(self, function: Callable[[], None]) -> None:
        """Call `function` before the process groups are closed. `function` must drop operations in flight, because they
        keep the sockets of the groups open.
        """
        self._cleanups.append(function)

    def close(self) -> None:
        """Close the channel's process groups and, if the channel owns the axes, those of the axes."""
        self._started.clear()
        while self._cleanups:
            self._cleanups.pop()()
        closing: list[Any] = [self, *(self.axes.values() if self._owns_axes else ())]
        for holder in closing:
            name = "_control" if holder is self else "group"
            group = getattr(holder, name)
            if isinstance(group, RankGroup):
                # Sockets close when the last reference to the process group is dropped. `MeshAxis.group`, which the
                # layers use, is one of the references.
                setattr(holder, name, ClosedRankGroup(group))
                group.destroy()
                del group


class ClosedRankGroup:
    """Placeholder for a group whose process groups are closed. A collective raises CommunicationError."""

    def __init__(self, group: RankGroup) -> None:
        self.ranks, self.index, self.size = group.ranks, group.index, group.size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CommunicationError(
            f"the inference engine of the ranks {list(self.ranks)} is closed, and with it the groups of its layers; "
            "load the model anew"
        )


def open_channel(*, tp: int, ep: int, pp: int = 1, axes: Mapping[str, MeshAxis] | None = None) -> RankChannel:
    """Create the process groups of a model, and return the channel of its ranks. Collective over all ranks.

    Consecutive ranks hold one model. A larger world holds several models, which serve requests independently.

    Args:
        tp, ep, pp: number of ranks along each axis.
        axes: axes of a model that is sharded already; None: the axes are created here.

    Raises:
        ConfigError: the world size is not a multiple of the number of ranks of a model.
    """
    init_distributed()
    world, count, inner = dist.get_world_size(), tp * ep * pp, tp * ep
    if world % count:
        sizes = {name: size for name, size in (("tp", tp), ("ep", ep), ("pp", pp)) if size > 1}
        text = f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}"
        raise ConfigError(
            f"{text} needs a multiple of {count} ranks, and {world} run; start the script by "
            f"`windlass run --nproc {count} script.py`"
        )
    starts = range(0, world, count)
    owns = axes is None
    if axes is None:
        axes = {
            "tp": _axis("tp", [tuple(range(first, first + tp)) for first in range(0, world, tp)]),
            "ep": _axis("ep", [tuple(range(s + t, s + inner, tp)) for s in range(0, world, inner) for t in range(tp)]),
            "pp": _reversed(_axis("pp", [tuple(range(s + i, s + count, inner)) for s in starts for i in range(inner)])),
        }
    control = create_rank_group([tuple(range(start, start + count)) for start in starts], backend="gloo", timeout=_IDLE)
    control.barrier()  # connects all ranks now: once a rank has failed and closed its groups, no other could connect
    return RankChannel(control, axes, owns_axes=owns)


def _axis(name: str, partition: list[tuple[int, ...]]) -> MeshAxis:
    if len(partition[0]) == 1:
        rank = dist.get_rank()
        return MeshAxis(name, RankGroup(None, (rank,), 0))  # type: ignore[arg-type]  # one rank never communicates
    return MeshAxis(name, create_rank_group(partition))


def _reversed(axis: MeshAxis) -> MeshAxis:
    """Return the axis with its ranks numbered from the last, see [Note: stages from the last rank]."""
    group = axis.group
    return MeshAxis(axis.name, RankGroup(group.process_group, group.ranks[::-1], group.size - 1 - group.index))


def portable_error(error: BaseException) -> BaseException:
    """Return an error that can be pickled: `error`, or a WindlassError with its type and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class may define its pickling, which may raise anything
        return WindlassError(f"{type(error).__name__}: {error}")
    return error
