"""Collectives whose messages pass through a codec, over any channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from windlass.base.errors import CodecError, CollectiveArgumentError
from windlass.comm.byte_channel import ByteChannel
from windlass.comm.codec import Codec, accumulation_dtype, get_codec
from windlass.comm.traffic import Traffic


class CompressedCollectives:
    """Collectives over one group, with one codec for all messages. Construction is collective.

    Every value of a result went through the codec, including a rank's own values: a result depends neither on the rank
    that computes it nor on the channel. On a group of one rank nothing is sent, and values stay exact. A sum is
    computed in float32 (wider and integer dtypes: in their own), in rank order, then rounded to the dtype of the
    tensor. Tensors need not be contiguous; no gradient flows through a collective of several ranks. A tensor is split
    along its first dimension into one part for each rank; by default the first `rows % size` ranks have one row more
    than the others, as in `torch.tensor_split`.

    `traffic.bytes_moved` counts, by operation, the encoded bytes that this rank received.

    Args:
        channel: moves the bytes between the ranks of its group.
        codec: a codec, or its registered name.
        traffic: traffic counters; new ones by default.

    Raises:
        CodecError: the codec does not exist, or ranks have codecs of different names. From a collective: the codec does
            not accept the dtype of the tensor, or a value.
        CollectiveArgumentError: from a collective whose tensor, sizes or peer do not fit the group.
    """

    def __init__(self, channel: ByteChannel, codec: Codec | str, traffic: Traffic | None = None) -> None:
        self.channel, self.group = channel, channel.group
        self.codec = get_codec(codec) if isinstance(codec, str) else codec
        self.traffic = traffic if traffic is not None else Traffic()
        self._index, self._peers = self.group.index, [i for i in range(self.group.size) if i != self.group.index]
        self._compare_codecs()

    @property
    def size(self) -> int:
        return self.group.size

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate the tensors of all ranks along their first dimension.

        Args:
            tensor: `[rows, ...]`.
            sizes: number of rows of each rank's tensor; by default all have as many as `tensor`.

        Returns:
            `[sum(sizes), ...]`, a new tensor (`tensor` itself on one rank).
        """
        self._check_rows(tensor)
        if self.size == 1:
            return tensor
        lengths = list(sizes) if sizes is not None else [tensor.shape[0]] * self.size
        if len(lengths) != self.size or lengths[self._index] != tensor.shape[0]:
            raise CollectiveArgumentError(
                f"all_gather got sizes {lengths}, but rank {self._index} of {self.size} has {tensor.shape[0]} rows; "
                "pass the number of rows of each rank"
            )
        full = tensor.new_empty((sum(lengths), *tensor.shape[1:]))
        self._gather_parts(self._encode(tensor), list(full.split(lengths)), "all_gather")
        return full

    def reduce_scatter(
        self, tensor: torch.Tensor, sizes: Sequence[int] | None = None, *, factor: float = 1.0
    ) -> torch.Tensor:
        """Sum the tensors of all ranks and return this rank's part.

        Args:
            tensor: `[rows, ...]`, of the same size on every rank.
            sizes: number of rows of each rank's part.
            factor: factor of the sum.

        Returns:
            `[sizes[index], ...]` of the tensor's dtype, `factor` times the sum; `tensor` itself on one rank
            if `factor` is 1.
        """
        self._check_rows(tensor)
        if self.size == 1:
            return _scaled(tensor, factor).to(tensor.dtype)  # an integer times the factor is a float
        parts = list(tensor.split(self._lengths(tensor, sizes)))
        total = self._sum_of_parts(parts, "reduce_scatter", factor)
        return total.to(tensor.dtype).view(parts[self._index].shape)

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        """Sum the tensors of all ranks in place, and return the tensor.

        Two steps: each rank receives its part of every rank's tensor, encoded, and sums these parts; the sums, rounded
        to the tensor's dtype and encoded again, are all-gathered. All ranks end with the same bits. A part may end at
        any element, not only at the end of a row.

        Args:
            tensor: tensor of the same size on every rank.
            factor: factor of the sum.
        """
        self._check_dtype(tensor)
        if self.size == 1:
            return tensor if factor == 1.0 else tensor.copy_(tensor * factor)
        flat = tensor.contiguous().view(-1)
        parts = list(flat.split(self._lengths(flat, None)))
        total = self._sum_of_parts(parts, "all_reduce", factor)
        self._gather_parts(self._encode(total.to(tensor.dtype)), parts, "all_reduce")
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def all_to_all(
        self, tensor: torch.Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send rows to the other ranks and receive theirs.

        Args:
            tensor: `[sum(sends), ...]`, the rows for rank 0 first.
            sends: number of rows for each rank. By default all are equal, and the number of ranks must divide the rows.
            receives: number of rows from each rank; `sends` by default.

        Returns:
            `[sum(receives), ...]`, the rows of rank 0 first (`tensor` itself on one rank).
        """
        self._check_rows(tensor)
        if self.size == 1:
            return tensor
        if sends is None and tensor.shape[0] % self.size:
            raise CollectiveArgumentError(
                f"all_to_all cannot split {tensor.shape[0]} rows into {self.size} equal parts; pass `sends` and "
                "`receives`"
            )
        rows_out = self._lengths(tensor, sends)
        rows_in = list(receives) if receives is not None else rows_out
        if len(rows_in) != self.size or rows_in[self._index] != rows_out[self._index]:
            raise CollectiveArgumentError(
                f"all_to_all: `receives` is {rows_in} and `sends` is {rows_out} on index {self._index} of {self.size} "
                f"ranks; write a number of rows for each rank, with {rows_out[self._index]} for this one in both"
            )
        out = tensor.new_empty((sum(rows_in), *tensor.shape[1:]))
        encoded = self._exchange_parts(list(tensor.split(rows_out)), list(out.split(rows_in)), "all_to_all")
        for message, part in zip(encoded, out.split(rows_in), strict=True):
            self._decode(message, part.view(-1), tensor.dtype)
        return out

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Set `tensor` on every rank, in place, to the decoded values of the rank with group index `source`."""
        self._check_dtype(tensor)
        if self.size == 1:
            return tensor
        if source != self._index:
            self._check_peer(source)
        message = self._encode(tensor) if source == self._index else self._empty_message(tensor)
        self.channel.broadcast(message, source)
        self._count("broadcast", 0 if source == self._index else message.numel())
        return self._decode_into(message, tensor)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send `tensor` to the rank with group index `to`, which calls `recv`.

        Blocks the caller in the same way as `torch.distributed.send`.
        """
        self._check_peer(to)
        self._check_dtype(tensor)
        self.channel.exchange({to: self._encode(tensor)}, {})

    @torch.no_grad()
    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive from the rank with group index `source`, in place. `tensor` has the sender's shape and dtype."""
        self._check_peer(source)
        self._check_dtype(tensor)
        message = self._empty_message(tensor)
        self.channel.exchange({}, {source: message})
        self._count("recv", message.numel())
        return self._decode_into(message, tensor)

    def round_trip(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the values that the peers would decode from a message of `tensor`; nothing is sent.

        The difference to `tensor` is the error of this rank's message, for error feedback.

        Args:
            tensor: `[rows, ...]`.
            sizes: number of rows of each message into which a collective splits the tensor; one message by default.
        """
        self._check_dtype(tensor)
        if self.size == 1:
            return tensor.clone()
        decoded = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        lengths = list(sizes) if sizes is not None else [tensor.shape[0]]
        for part, out in zip(tensor.split(lengths), decoded.split(lengths), strict=True):
            self._decode(self._encode(part), out.view(-1), tensor.dtype)
        return decoded

    def _sum_of_parts(self, parts: list[torch.Tensor], operation: str, factor: float) -> torch.Tensor:
        """Exchange the parts. Return `factor` times the sum of this rank's part, `[n]` in the accumulation dtype."""
        own, dtype = parts[self._index], parts[self._index].dtype
        encoded = self._exchange_parts(parts, [own] * self.size, operation)
        wide = accumulation_dtype(dtype)
        total = torch.empty(own.numel(), dtype=wide, device=own.device)
        scratch = torch.empty_like(total)
        for rank, message in enumerate(encoded):  # in rank order: every channel gives the same bits
            self._decode(message, scratch if rank else total, dtype)
            if rank:
                total.add_(scratch)
        return total if factor == 1.0 else _scaled(total, factor)

    def _exchange_parts(
        self, parts: list[torch.Tensor], like: list[torch.Tensor], operation: str
    ) -> list[torch.Tensor]:
        """Send part `i` to rank `i`. Return the encoded messages of all ranks, including this rank's own.

        Args:
            like: for each rank, a tensor of the size that this rank receives from that rank.
        """
        sends = {peer: self._encode(parts[peer]) for peer in self._peers}
        receives = {peer: self._empty_message(like[peer]) for peer in self._peers}
        self.channel.exchange(sends, receives)
        self._count(operation, sum(message.numel() for message in receives.values()))
        receives[self._index] = self._encode(parts[self._index])
        return [receives[rank] for rank in range(self.size)]

    def _gather_parts(self, own: torch.Tensor, outs: list[torch.Tensor], operation: str) -> None:
        """All-gather encoded messages and decode them into `outs`, contiguous tensors in rank order."""
        receives = {peer: self._empty_message(outs[peer]) for peer in self._peers}
        self.channel.all_gather(own, receives)
        self._count(operation, sum(message.numel() for message in receives.values()))
        for rank, out in enumerate(outs):
            self._decode(own if rank == self._index else receives[rank], out.view(-1), out.dtype)

    def _encode(self, tensor: torch.Tensor) -> torch.Tensor:
        message = self._empty_message(tensor)
        if tensor.numel():
            # a codec reads memory, where torch conjugates or negates a view only when it is read
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            # one element may have any stride, and torch then refuses a view of its bytes
            self.codec.encode(flat.as_strided((flat.numel(),), (1,)), message)
        return message

    def _decode(self, message: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        if out.numel():
            self.codec.decode(message, out, dtype)

    def _decode_into(self, message: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Decode a message into `tensor`, which need not be contiguous, and return `tensor`."""
        out = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._decode(message, out.view(-1), tensor.dtype)
        return tensor if out is tensor else tensor.copy_(out)

    def _empty_message(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = self.codec.encoded_size(tensor.numel(), tensor.dtype) if tensor.numel() else 0
        return torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)

    def _lengths(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> list[int]:
        """Return the number of rows of each rank's part."""
        rows = tensor.shape[0]
        if sizes is None:
            return [rows // self.size + (rank < rows % self.size) for rank in range(self.size)]
        if len(sizes) != self.size or sum(sizes) != rows:
            raise CollectiveArgumentError(
                f"{rows} rows cannot be split into parts of {list(sizes)} for {self.size} ranks; pass one size "
                "for each rank, which add up to the rows"
            )
        return list(sizes)

    def _check_dtype(self, tensor: torch.Tensor) -> None:
        if not self.codec.accepts(tensor.dtype):
            raise CodecError(
                f"codec {self.codec.name!r} does not accept a tensor of {tensor.dtype} and shape "
                f"{tuple(tensor.shape)}; use codec 'identity' for it"
            )

    def _check_rows(self, tensor: torch.Tensor) -> None:
        self._check_dtype(tensor)
        if tensor.dim() == 0:
            raise CollectiveArgumentError("a scalar has no rows to gather or to send; pass `tensor.view(1)`")

    def _check_peer(self, index: int) -> None:
        if index not in self._peers:
            raise CollectiveArgumentError(
                f"group index {index} is not a peer of rank {self._index} in a group of {self.size}; pass a group "
                "index, not a global rank"
            )

    def _compare_codecs(self) -> None:
        """Raise on every rank if the codecs have different names, because the sizes of their messages would differ."""
        if self.size == 1:
            return
        names: list[str] = [""] * self.size
        dist.all_gather_object(names, self.codec.name, group=self.group.cpu_group)
        if len(set(names)) > 1:
            listed = ", ".join(f"rank {rank}: {name!r}" for rank, name in zip(self.group.ranks, names, strict=True))
            raise CodecError(f"the ranks of a group use different codecs ({listed}); use the same codec on all of them")

    def _count(self, operation: str, nbytes: int) -> None:
        self.traffic.add(f"compressed_{operation}", 0, nbytes)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else tensor * factor
