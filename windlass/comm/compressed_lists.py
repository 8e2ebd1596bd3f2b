"""Collectives on lists of tensors with error feedback: one message for each peer, in which each tensor has its own
scales.

[Note: error feedback] The part of a tensor that a message leaves out is its error. A sender adds the error of its last
message to the next tensor, so that the sum of all messages equals the sum of all tensors, up to the last error. Errors
belong to the caller, which passes them to each call and saves them.

Two phases make an all-reduce in which every message is compressed (Tang et al., "1-bit Adam", arXiv:2102.02888, section
4.2): `reduce_scatter` with the errors of the senders, then `all_gather` of the sums with the errors of the ranks that
summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windlass.comm.byte_channel import ByteChannel
from windlass.comm.codec import Codec
from windlass.comm.compressed_collectives import CompressedCollectives
from windlass.comm.traffic import Traffic

_ALIGN = 16  # bytes: a codec may view its message as any dtype

Tensors = Sequence[torch.Tensor]


class CompressedLists:
    """Collectives on lists of flat float32 tensors over one group. Construction is collective.

    As in `CompressedCollectives`, every value of a result went through the codec, a rank's own too, sums are in rank
    order, and a group of one rank sends nothing and stays exact.

    Args:
        channel: moves the bytes between the ranks of its group. codec: a codec, or its registered name. traffic:
        traffic counters; new ones by default.
    """

    def __init__(self, channel: ByteChannel, codec: Codec | str, traffic: Traffic | None = None) -> None:
        self._collectives = CompressedCollectives(channel, codec, traffic)
        self.codec, self.channel, self.group = self._collectives.codec, channel, channel.group
        self.traffic = self._collectives.traffic
        self._peers = [i for i in range(self.group.size) if i != self.group.index]

    def message_bytes(self, numels: Sequence[int]) -> int:
        """Return the bytes of a message of tensors of these sizes. Each starts at a multiple of 16 bytes."""
        sizes = [self.codec.encoded_size(numel, torch.float32) if numel else 0 for numel in numels]
        return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)

    def reduce_scatter(
        self, parts: Sequence[Tensors], errors: Sequence[Tensors] | None = None, *, factor: float = 1.0
    ) -> list[torch.Tensor]:
        """Sum the lists that all ranks have for this rank.

        Args:
            parts: by rank, the list for it; its tensors have equal sizes on all ranks. errors: the error of each tensor
            of `parts`, which is added to it in place before it is sent, and replaced by its new error. factor: factor
            of the sums.

        Returns:
            `factor` times the sums of the tensors for this rank, as new tensors.
        """
        index, size = self.group.index, self.group.size
        if size == 1:
            return [part * factor for part in parts[0]]
        if errors is not None:
            for tensors, owed in zip(parts, errors, strict=True):
                _add(tensors, owed)
        messages = [self._encode(tensors) for tensors in parts]
        own: list[torch.Tensor] | None = None
        for rank in range(size) if errors is not None else ():
            assert errors is not None
            values = self._write_errors(messages[rank], parts[rank], errors[rank])
            own = values if rank == index else own
        received = {peer: torch.empty_like(messages[index]) for peer in self._peers}
        self.channel.exchange({peer: messages[peer] for peer in self._peers}, received)
        self._count("compressed_reduce_scatter", received)
        received[index] = messages[index]
        sums: list[torch.Tensor] = []
        for rank in range(size):  # in rank order: every channel gives the same bits
            decoded = own if rank == index and own is not None else self._decoded(received[rank], parts[index])
            for total, value in zip(sums, decoded, strict=True) if sums else ():
                total.add_(value)
            sums = sums or decoded
        return [total.mul_(factor) if factor != 1.0 else total for total in sums]

    def all_gather(self, own: Tensors, outs: Sequence[Tensors], errors: Tensors | None = None) -> None:
        """All-gather the lists of all ranks.

        Args:
            own: this rank's list. outs: by rank, tensors of the sizes of its list, which receive the decoded values.
            errors: as in `reduce_scatter`, of `own`.
        """
        if self.group.size == 1:
            for out, tensor in zip(outs[0], own, strict=True):
                out.copy_(tensor)
            return
        if errors is not None:
            _add(own, errors)
        message = self._encode(own)
        kept = self._write_errors(message, own, errors) if errors is not None else None
        received = {peer: self._empty(outs[peer]) for peer in self._peers}
        self.channel.all_gather(message, received)
        self._count("compressed_all_gather", received)
        received[self.group.index] = message
        for rank, tensors in enumerate(outs):
            if rank == self.group.index and kept is not None:
                for out, value in zip(tensors, kept, strict=True):
                    out.copy_(value)
            else:
                self._decode_to(received[rank], tensors)

    def _empty(self, tensors: Tensors) -> torch.Tensor:
        device = tensors[0].device if tensors else torch.device("cpu")
        return torch.empty(self.message_bytes([one.numel() for one in tensors]), dtype=torch.uint8, device=device)

    def _encode(self, tensors: Tensors) -> torch.Tensor:
        message, start = self._empty(tensors), 0
        for tensor in tensors:
            if tensor.numel():
                size = self.codec.encoded_size(tensor.numel(), torch.float32)
                self.codec.encode(tensor, message[start : start + size])
                start += -(-size // _ALIGN) * _ALIGN
        return message

    def _decoded(self, message: torch.Tensor, like: Tensors) -> list[torch.Tensor]:
        """Return the float32 values of a message of tensors of the sizes of `like`."""
        values = [torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device) for tensor in like]
        self._decode_to(message, values)
        return values

    def _decode_to(self, message: torch.Tensor, outs: Tensors) -> None:
        """Write the values of a message to tensors of the sizes of its own."""
        start = 0
        for out in outs:
            if out.numel():
                size = self.codec.encoded_size(out.numel(), torch.float32)
                self.codec.decode(message[start : start + size], out, torch.float32)
                start += -(-size // _ALIGN) * _ALIGN

    def _write_errors(self, message: torch.Tensor, sent: Tensors, errors: Tensors) -> list[torch.Tensor]:
        """Write the parts of tensors that their message leaves out; return the values of the message."""
        values = self._decoded(message, sent)
        for error, tensor, value in zip(errors, sent, values, strict=True):
            torch.sub(tensor, value, out=error)
        return values

    def _count(self, operation: str, received: dict[int, torch.Tensor]) -> None:
        self.traffic.add(operation, 0, sum(message.numel() for message in received.values()))


def _add(tensors: Tensors, errors: Tensors) -> None:
    for tensor, error in zip(tensors, errors, strict=True):
        tensor.add_(error)
