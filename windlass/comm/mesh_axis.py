"""Mesh axis: the peers of a rank along one axis, and the collectives over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.collective_activity import WaitScope
from windlass.base.pending import DONE, FinishingPending, Pending
from windlass.comm.point_to_point import as_bytes, exchange_tensors
from windlass.comm.rank_group import RankGroup
from windlass.comm.traffic import Traffic

_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Dtypes that gloo rejects: they are moved as bytes, and summed in a dtype that holds their sums modulo their size.
_SUM_DTYPES = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}

_checks: list[Callable[[], None]] = []


def before_next_collective(check: Callable[[], None]) -> None:
    """Call `check` once, before the next collective of any `MeshAxis` or byte channel.

    If `check` raises, the collective does not start.
    """
    _checks.append(check)


def run_pending_checks() -> None:
    """Run the checks that must pass before the next collective starts."""
    while _checks:
        _checks.pop()()


class MeshAxis:
    """Ranks along one axis, and their collectives. All of these ranks start the same collectives in the same order.

    `traffic.bytes_moved` counts, by operation, the minimum number of bytes that a rank receives. For an all-reduce of B
    bytes over n ranks this is `2 B (n - 1) / n`; for an all-gather and an all-to-all, the parts of the other ranks; for
    a reduce-scatter, the rank's own part `n - 1` times. On an axis of one rank nothing is sent, and the results
    are the inputs.

    Args:
        name: Name of the axis ("tp", ...), for messages.
        group: This rank's group along the axis.
        traffic: Traffic counters; new ones by default.
    """

    def __init__(self, name: str, group: RankGroup, traffic: Traffic | None = None) -> None:
        self.name, self.group, self.traffic = name, group, traffic if traffic is not None else Traffic()

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def index(self) -> int:
        """Index of this rank along the axis."""
        return self.group.index

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce the contiguous `tensor` in place over the axis, and return it."""
        self.start_all_reduce(tensor, op).wait()
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
        """Start `all_reduce`.

        `tensor`, which must be contiguous, has the result once the returned operation is finished.
        """
        if self.size == 1:
            return DONE
        run_pending_checks()
        self._count("all_reduce", 2 * _nbytes(tensor) * (self.size - 1) // self.size)
        return self._start_sum(tensor, op)

    def all_gather(self, tensor: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """All-gather `tensor`: return the tensors of all ranks, concatenated along `dim`.

        Args:
            sizes: Size of each rank's tensor along `dim`, if they differ.
        """
        if self.size == 1:
            return tensor
        run_pending_checks()
        moved = tensor.movedim(dim, 0)
        lengths = list(sizes) if sizes is not None else [moved.shape[0]] * self.size
        row = moved[:1].numel() if moved.shape[0] else moved.new_empty((1, *moved.shape[1:])).numel()
        self._count("all_gather", (sum(lengths) - lengths[self.index]) * row * tensor.element_size())
        longest = max(lengths)
        own = moved.contiguous()
        # The collective needs equal sizes: pad to the longest, and remove the padding afterwards.
        if moved.shape[0] < longest:
            own = torch.cat([own, own.new_zeros((longest - moved.shape[0], *moved.shape[1:]))])
        full = own.new_empty((self.size * longest, *moved.shape[1:]))
        self._fill_gathered(full, own)
        if len(set(lengths)) > 1:
            parts = full.view(self.size, longest, *moved.shape[1:])
            full = torch.cat([parts[rank, :length] for rank, length in enumerate(lengths)])
        return full.movedim(0, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Sum the tensors of all ranks, and return this rank's part along `dim`.

        Args:
            sizes: Size of each rank's part along `dim`; equal by default.

        Raises:
            ValueError: the size along `dim` is not the sum of `sizes`, or not a multiple of the axis size.
        """
        if self.size == 1:
            return tensor
        run_pending_checks()
        moved = tensor.movedim(dim, 0)
        lengths = list(sizes) if sizes is not None else [moved.shape[0] // self.size] * self.size
        if sum(lengths) != moved.shape[0]:
            raise ValueError(
                f"{moved.shape[0]} rows cannot be split into parts of {lengths} over {self.name}; pass sizes that add "
                "up to the rows"
            )
        longest, row = max(lengths), moved[:1].numel()
        self._count("reduce_scatter", lengths[self.index] * row * tensor.element_size() * (self.size - 1))
        full = moved.contiguous()
        # The collective needs equal parts: pad each to the longest.
        if len(set(lengths)) > 1:
            padded = full.new_zeros((self.size, longest, *moved.shape[1:]))
            for rank, part in enumerate(full.split(lengths)):
                padded[rank, : part.shape[0]] = part
            full = padded.view(self.size * longest, *moved.shape[1:])
        own = full.new_empty((longest, *moved.shape[1:]))
        self._fill_scattered(own, full)
        return own[: lengths[self.index]].movedim(0, dim)

    def all_to_all(
        self, tensor: torch.Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send rows to the other ranks and receive theirs.

        Args:
            tensor: `[sum(sends), ...]`, the rows for rank 0 first.
            sends: Number of rows for each rank; equal by default.
            receives: Number of rows from each rank; `sends` by default.

        Returns:
            `[sum(receives), ...]`, the rows from rank 0 first.

        Raises:
            ValueError: the number of rows is not the sum of `sends`, or not a multiple of the axis size.
        """
        if self.size == 1:
            return tensor
        run_pending_checks()
        sends = list(sends) if sends is not None else [tensor.shape[0] // self.size] * self.size
        receives = list(receives) if receives is not None else list(sends)
        if sum(sends) != tensor.shape[0]:
            raise ValueError(
                f"{tensor.shape[0]} rows can't be sent as {sends} over {self.name}; pass sends that add up to the rows"
            )
        out = tensor.new_empty((sum(receives), *tensor.shape[1:]))
        row = tensor.element_size() * tensor.shape[1:].numel()
        self._count("all_to_all", (sum(receives) - receives[self.index]) * row)
        self._fill_exchanged(out, tensor.contiguous(), receives, sends)
        return out

    def exchange_counts(
        self, counts: torch.Tensor, spans: Sequence[tuple[int, int]], most: int
    ) -> tuple[torch.Tensor, list[int]]:
        """Exchange numbers of rows, and read them on the host. Synchronizes with the device once.

        Args:
            counts: `[n]`, integers: rows of this rank for each of n receivers, such as experts.
            spans: `[first, end)` of the receivers on each rank.
            most: Largest possible sum of `counts`; used only by `PlannedAxis`, as the sum on each rank.

        Returns:
            `[size x local receivers]`, each rank's numbers of rows for the receivers on this rank, rank 0 first; and a
            list on the host with `counts` followed by these numbers.
        """
        here = spans[self.index][1] - spans[self.index][0]
        arriving = self.all_to_all(counts, [end - first for first, end in spans], [here] * self.size)
        return arriving, self._read_counts(counts, arriving, spans, most)

    def shift(self, tensors: Sequence[torch.Tensor], by: int = 1) -> list[torch.Tensor]:
        """Send tensors to the rank `by` places ahead on the ring, and return those of the rank `by` places behind.

        Tensors must have the same sizes on all ranks.
        """
        if self.size == 1 or by % self.size == 0:
            return list(tensors)
        run_pending_checks()
        received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        to, source = (self.index + by) % self.size, (self.index - by) % self.size
        self._fill_shifted(received, [tensor.contiguous() for tensor in tensors], to, source)
        self._count("pass_on", sum(_nbytes(tensor) for tensor in received))
        return received

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Broadcast the values of the rank at index `source` into the contiguous `tensor`, and return it."""
        if self.size > 1:
            run_pending_checks()
            self._count("broadcast", _nbytes(tensor) if self.index != source else 0)
            self._fill_broadcast(tensor, source)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """All-gather a plain Python value, in the order of the axis."""
        if self.size == 1:
            return [value]
        run_pending_checks()
        return self._gather_objects(value)

    # Communication. `PlannedAxis` overrides these methods and sends nothing.

    def _start_sum(self, tensor: torch.Tensor, op: Any) -> Pending:
        total = tensor.to(_SUM_DTYPES.get(tensor.dtype, tensor.dtype))
        work = dist.all_reduce(total, op=op, group=self.group.process_group, async_op=True)

        def finish() -> None:
            if total is not tensor:
                tensor.copy_(total)

        return _pending(work, self._what(), finish)

    def _fill_gathered(self, full: torch.Tensor, own: torch.Tensor) -> None:
        if own.dtype in _SUM_DTYPES:
            full, own = as_bytes(full), as_bytes(own)
        with self._what():
            _ALL_GATHER(full, own, group=self.group.process_group)

    def _fill_scattered(self, own: torch.Tensor, full: torch.Tensor) -> None:
        wide = _SUM_DTYPES.get(own.dtype, own.dtype)
        total = own if wide == own.dtype else torch.empty_like(own, dtype=wide)
        with self._what():
            _REDUCE_SCATTER(total, full.to(wide), group=self.group.process_group)
        if total is not own:
            own.copy_(total)

    def _fill_exchanged(self, out: torch.Tensor, tensor: torch.Tensor, receives: list[int], sends: list[int]) -> None:
        if out.dtype in _SUM_DTYPES:
            row = out.element_size() * out.shape[1:].numel()
            out, tensor = (as_bytes(rows).view(rows.shape[0], row) for rows in (out, tensor))
        with self._what():
            dist.all_to_all_single(out, tensor, receives, sends, group=self.group.process_group)

    def _fill_shifted(
        self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], to: int, source: int
    ) -> None:
        with self._what():
            exchange_tensors(
                self.group,
                [(to, tensor.view(-1)) for tensor in sent],
                [(source, tensor.view(-1)) for tensor in received],
            )

    def _fill_broadcast(self, tensor: torch.Tensor, source: int) -> None:
        with self._what():
            # Send bytes, because gloo does not support every dtype of a batch, such as int16.
            self.group.broadcast(as_bytes(tensor), source)

    def _gather_objects(self, value: Any) -> list[Any]:
        with self._what():
            return self.group.all_gather_object(value)

    def _read_counts(
        self, counts: torch.Tensor, arriving: torch.Tensor, spans: Sequence[tuple[int, int]], most: int
    ) -> list[int]:
        found: list[int] = torch.cat([counts, arriving]).tolist()
        return found

    def _count(self, operation: str, nbytes: int) -> None:
        self.traffic.add(operation, 0, nbytes)

    def _what(self) -> WaitScope:
        return WaitScope(f"a collective along {self.name}")


def single_rank_axis(name: str, rank: int = 0) -> MeshAxis:
    """Return an axis of one rank."""
    return MeshAxis(name, RankGroup(None, (rank,), 0))  # type: ignore[arg-type]  # it never communicates


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _pending(work: Any, what: WaitScope, finish: Callable[[], None]) -> Pending:
    def block() -> None:
        with what:
            work.wait()

    return FinishingPending(work.is_completed, block, finish)


def axis_from_process_group(group: dist.ProcessGroup, name: str = "sp") -> MeshAxis:
    """Return a process group as a mesh axis."""
    return MeshAxis(name, RankGroup.of(group))
