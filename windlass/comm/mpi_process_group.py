"""Process group of `torch.distributed` over MPI, through mpi4py: the methods that torch calls on every backend.

All operations but reductions send bytes, so they support every dtype. No operation blocks
([Note: one MPI call at a time]). GPU tensors are copied through host memory unless the MPI library
is CUDA-aware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.comm.mpi_elements import (
    MpiElements,
    bytes_to_receive,
    bytes_to_send,
    elements_to_reduce,
    mpi_operator,
    mpi_spec,
    new_memory,
    reduce_dtype,
    reduce_spec,
    write_result,
)
from windlass.comm.mpi_library import BACKEND, MPI_LOCK
from windlass.comm.mpi_work import MpiWork, release_abandoned

Tensors = Sequence[torch.Tensor]
_TorchProcessGroup: Any = dist.ProcessGroup  # Any: torch passes arguments by position, so their names may differ


class MpiProcessGroup(_TorchProcessGroup):
    """Process group of the ranks of one MPI communicator. A rank has the same number in both.

    Args:
        mpi: the module `mpi4py.MPI`.
        communicator: MPI communicator, which the group frees in `shutdown`.
        cuda_aware: True if the library reads and writes GPU memory.
        timeout: longest wait of an operation for the other ranks.
        group_name: torch's name of the group.
    """

    def __init__(self, mpi: Any, communicator: Any, cuda_aware: bool, timeout: timedelta, group_name: str = "") -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._group_name = group_name
        self._mpi, self._comm, self._cuda_aware, self._timeout = mpi, communicator, cuda_aware, timeout
        self._largest_tag = int(communicator.Get_attr(mpi.TAG_UB) or 32767)

    def getBackendName(self) -> str:
        """Return the name of the backend, for torch."""
        return BACKEND

    def name(self) -> str:
        """Return the name of the backend, for torch."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Name of the group, by which torch's functional collectives find it."""
        return self._group_name

    def shutdown(self) -> None:
        """Free the communicator, for `destroy_process_group`. Collective.

        MPI libraries allow only some thousands of communicators. Operations in flight end as usual.
        """
        with MPI_LOCK:
            if self._comm != self._mpi.COMM_NULL and not self._mpi.Is_finalized():
                release_abandoned(self._mpi)
                self._comm.Free()

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Reduce the tensors in place."""
        tensors, op = _as_list(tensors), _operator(opts)
        memory, operator = self._elements(tensors, op)
        return self._start(
            "all_reduce",
            lambda: self._comm.Iallreduce(self._mpi.IN_PLACE, reduce_spec(self._mpi, memory), operator),
            tensors,
            lambda: write_result(memory, tensors, op, self.size()),
            memory,
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce the tensors in place, each by a separate operation."""
        return self._joined("all_reduce_coalesced", [self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> MpiWork:
        """Reduce into the root's tensors. The tensors of other ranks are unchanged."""
        tensors, op = _as_list(tensors), _operator(opts)
        memory, operator = self._elements(tensors, op)
        if self.rank() != opts.rootRank:
            return self._start(
                "reduce",
                lambda: self._comm.Ireduce(reduce_spec(self._mpi, memory), None, operator, opts.rootRank),
                tensors,
                None,
                memory,
            )
        return self._start(
            "reduce",
            lambda: self._comm.Ireduce(self._mpi.IN_PLACE, reduce_spec(self._mpi, memory), operator, opts.rootRank),
            tensors,
            lambda: write_result(memory, tensors, op, self.size()),
            memory,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Reduce part i of every rank's inputs into rank i's output. The parts may differ in size."""
        output, parts = _first(outputs), _lists(inputs)[0]
        self._require_own("reduce_scatter", parts, output)
        return self._scatter_sum(output, parts, [part.numel() for part in parts], _operator(opts))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> MpiWork:
        """Reduce part i of every rank's tensor into rank i's output. The parts have equal sizes."""
        _require("reduce_scatter", output, source, source.numel() == output.numel() * self.size())
        return self._scatter_sum(output, [source], [output.numel()] * self.size(), _operator(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        """Reduce several tensors, each as `reduce_scatter_single`."""
        pairs = zip(outputs, inputs, strict=True)
        return self._joined("reduce_scatter", [self.reduce_scatter_single(out, one, opts) for out, one in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Copies

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Copy the root's tensors to the tensors of the other ranks."""
        tensors = _as_list(tensors)
        if self.rank() == opts.rootRank:
            elements = MpiElements(bytes_to_send(tensors, self._cuda_aware))
        else:
            elements = bytes_to_receive(tensors, self._cuda_aware)
        return self._start(
            "broadcast",
            lambda: self._comm.Ibcast(mpi_spec(self._mpi, elements.memory), opts.rootRank),
            tensors,
            elements.finish,
            elements.memory,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Copy every rank's tensor to the outputs of all ranks. The tensors may differ in size."""
        return self._gather_all(_lists(outputs)[0], _first(inputs))

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> MpiWork:
        """Copy every rank's tensor to its part of every rank's output."""
        _require("all_gather", source, output, output.numel() == source.numel() * self.size())
        elements = bytes_to_receive([output], self._cuda_aware)
        own = bytes_to_send([source], self._cuda_aware)
        # Gather in place if the caller's input is its part of the output, since buffers of MPI must not overlap.
        part = elements.memory.chunk(self.size())[self.rank()] if elements.memory.numel() else own
        given: Any = self._mpi.IN_PLACE if part.data_ptr() == own.data_ptr() else mpi_spec(self._mpi, own)
        return self._start(
            "all_gather",
            lambda: self._comm.Iallgather(given, mpi_spec(self._mpi, elements.memory, own.numel())),
            [output],
            elements.finish,
            elements.memory,
            own,
        )

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> MpiWork:
        """Copy several tensors of every rank to the outputs of all ranks."""
        pairs = zip(outputs, inputs, strict=True)
        return self._joined("all_gather_coalesced", [self._gather_all(list(out), one) for out, one in pairs])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        """Copy several tensors of every rank to their parts of every rank's outputs."""
        pairs = zip(outputs, inputs, strict=True)
        return self._joined("all_gather_coalesced", [self.all_gather_single(out, one) for out, one in pairs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Copy every rank's tensor to the root's outputs, which may differ in size."""
        source = _first(inputs)
        own = bytes_to_send([source], self._cuda_aware)
        if self.rank() != opts.rootRank:
            return self._start(
                "gather", lambda: self._comm.Igatherv(mpi_spec(self._mpi, own), None, opts.rootRank), [], None, own
            )
        targets = list(_lists(outputs)[0])
        self._require_own("gather", targets, source)
        elements = bytes_to_receive(targets, self._cuda_aware)
        into = mpi_spec(self._mpi, elements.memory, _nbytes(targets))
        return self._start(
            "gather",
            lambda: self._comm.Igatherv(mpi_spec(self._mpi, own), into, opts.rootRank),
            targets,
            elements.finish,
            elements.memory,
            own,
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Copy the root's inputs, which may differ in size, to the ranks' outputs."""
        target = _first(outputs)
        elements = bytes_to_receive([target], self._cuda_aware)
        sends, memory = None, None
        if self.rank() == opts.rootRank:
            parts = _lists(inputs)[0]
            self._require_own("scatter", parts, target)
            memory = bytes_to_send(parts, self._cuda_aware)
            sends = mpi_spec(self._mpi, memory, _nbytes(parts))
        return self._start(
            "scatter",
            lambda: self._comm.Iscatterv(sends, mpi_spec(self._mpi, elements.memory), opts.rootRank),
            [target],
            elements.finish,
            elements.memory,
            memory,
        )

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: Any, input_splits: Any, *_: Any
    ) -> MpiWork:
        """Exchange rows with each rank: equal numbers of rows, or the numbers in the splits."""
        elements = bytes_to_receive([output], self._cuda_aware)
        sent = bytes_to_send([source], self._cuda_aware)
        counts = [
            _row_bytes(tensor, splits, self.size())
            for tensor, splits in ((source, input_splits), (output, output_splits))
        ]
        return self._exchange("all_to_all_single", sent, counts[0], elements, counts[1], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Exchange a tensor with each rank. All sizes may differ."""
        self._require_own("all_to_all", list(outputs), list(inputs)[self.rank()])
        elements = bytes_to_receive(list(outputs), self._cuda_aware)
        sent = bytes_to_send(list(inputs), self._cuda_aware)
        return self._exchange("all_to_all", sent, _nbytes(inputs), elements, _nbytes(outputs), list(outputs))

    # Point to point, and the barrier

    def send(self, tensors: Tensors, target: int, tag: int) -> MpiWork:
        """Send a tensor to a rank of the group."""
        memory = bytes_to_send([_first(tensors)], self._cuda_aware)
        return self._start(
            f"send to rank {target} of the group",
            lambda: self._comm.Isend(mpi_spec(self._mpi, memory), target, self._tag(tag)),
            list(tensors),
            None,
            memory,
        )

    def recv(self, tensors: Tensors, source: int, tag: int) -> MpiWork:
        """Receive a tensor from a rank of the group."""
        elements = bytes_to_receive([_first(tensors)], self._cuda_aware)
        return self._start(
            "recv" if source == self._mpi.ANY_SOURCE else f"recv from rank {source} of the group",
            lambda: self._comm.Irecv(mpi_spec(self._mpi, elements.memory), source, self._tag(tag)),
            list(tensors),
            elements.finish,
            elements.memory,
        )

    def recv_anysource(self, tensors: Tensors, tag: int) -> MpiWork:
        """Receive a tensor from any rank of the group."""
        return self.recv(tensors, self._mpi.ANY_SOURCE, tag)

    def barrier(self, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Return a work object that completes when every rank of the group has called `barrier`."""
        return self._start("barrier", self._comm.Ibarrier, [], None)

    # Internals

    def _elements(self, tensors: Tensors, op: Any) -> tuple[torch.Tensor, Any]:
        operator = mpi_operator(self._mpi, op, tensors[0].dtype)
        return elements_to_reduce(tensors, self._cuda_aware), operator

    def _scatter_sum(self, output: torch.Tensor, parts: Tensors, counts: list[int], op: Any) -> MpiWork:
        memory, operator = self._elements(parts, op)
        own = new_memory(counts[self.rank()], reduce_dtype(output.dtype), memory.device)
        return self._start(
            "reduce_scatter",
            lambda: self._comm.Ireduce_scatter(
                reduce_spec(self._mpi, memory), reduce_spec(self._mpi, own), counts, operator
            ),
            [output],
            lambda: write_result(own, [output], op, self.size()),
            memory,
            own,
        )

    def _gather_all(self, outputs: Tensors, source: torch.Tensor) -> MpiWork:
        self._require_own("all_gather", outputs, source)
        elements = bytes_to_receive(outputs, self._cuda_aware)
        own = bytes_to_send([source], self._cuda_aware)
        if len(outputs) == 1 and elements.memory.data_ptr() == own.data_ptr():  # MPI's buffers must not overlap
            own = bytes_to_send([own.clone()], self._cuda_aware)
        into = mpi_spec(self._mpi, elements.memory, _nbytes(outputs))
        return self._start(
            "all_gather",
            lambda: self._comm.Iallgatherv(mpi_spec(self._mpi, own), into),
            list(outputs),
            elements.finish,
            elements.memory,
            own,
        )

    def _exchange(
        self,
        name: str,
        sent: torch.Tensor,
        sent_counts: list[int],
        elements: MpiElements,
        counts: list[int],
        outputs: list[torch.Tensor],
    ) -> MpiWork:
        return self._start(
            name,
            lambda: self._comm.Ialltoallv(
                mpi_spec(self._mpi, sent, sent_counts), mpi_spec(self._mpi, elements.memory, counts)
            ),
            outputs,
            elements.finish,
            sent,
            elements.memory,
        )

    def _require_own(self, name: str, parts: Tensors, own: torch.Tensor) -> None:
        """Raise CommunicationError unless `parts` has one tensor per rank, this rank's of dtype and size of `own`."""
        if len(parts) != self.size():
            raise CommunicationError(
                f"{name} over MPI: {len(parts)} tensors for {self.size()} ranks; pass one for each"
            )
        part = parts[self.rank()]
        _require(name, own, part, part.numel() == own.numel())

    def _tag(self, tag: int) -> int:
        return tag % (self._largest_tag + 1)  # MPI limits tags; sender and receiver compute the same remainder

    def _start(
        self, name: str, start: Callable[[], Any], outputs: Tensors, finish: Callable[[], None] | None, *keeps: Any
    ) -> MpiWork:
        with MPI_LOCK:
            release_abandoned(self._mpi)
            request = start()
        # The request keeps mpi4py's description of the buffers alive, and `keeps` keeps their memory alive.
        return MpiWork(self._mpi, self._describe(name), [request], outputs, finish, keeps, self._timeout)

    def _joined(self, name: str, works: list[MpiWork]) -> MpiWork:
        outputs = [tensor for work in works for tensor in work.outputs]
        return MpiWork(self._mpi, self._describe(name), [], outputs, None, (), self._timeout, works)

    def _describe(self, name: str) -> str:
        return f"{name} of rank {self.rank()} in a group of {self.size()}"


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _first(tensors: Any) -> torch.Tensor:
    return _as_list(tensors)[0]


def _lists(tensors: Any) -> list[list[torch.Tensor]]:
    """Return a list of lists of tensors. torch passes `[[a, b]]`, or `[a, b]` in short overloads of a method."""
    return [list(tensors)] if isinstance(tensors[0], torch.Tensor) else [list(each) for each in tensors]


def _operator(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _nbytes(tensors: Tensors) -> list[int]:
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def _require(name: str, one: torch.Tensor, other: torch.Tensor, fits: bool) -> None:
    """Check that two tensors of one call fit each other. MPI would write beyond the end of a tensor that is too small.

    Raises:
        CommunicationError: `fits` is False, or the dtypes differ.
    """
    if not fits or one.dtype != other.dtype:
        raise CommunicationError(
            f"{name} over MPI: a tensor of shape {list(one.shape)} and {one.dtype} does not fit one of shape "
            f"{list(other.shape)} and {other.dtype}; give both the same dtype, and every rank a part of equal size"
        )


def _row_bytes(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Return the number of bytes of the rows for each rank.

    Raises:
        CommunicationError: the splits are not `size` numbers that add up to the rows; or there are no splits, and
            `size` does not divide the rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    counts = list(splits) if splits else [rows // size] * size
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise CommunicationError(
            f"all_to_all_single over MPI: {counts} are not {size} numbers that add up to the {rows} rows of a tensor; "
            "pass split sizes that do"
        )
    row = tensor.numel() * tensor.element_size() // rows if rows else 0
    return [count * row for count in counts]
