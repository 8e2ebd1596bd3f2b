"""Collectives on lists of tensors with error feedback: one message for each peer, with separate scales for each tensor.

Two calls make an all-reduce in which every message is compressed (Tang et al., "1-bit Adam", arXiv:2102.02888, section
4.2): `reduce_scatter` with the errors of the senders, then `all_gather` of the sums with the errors of the ranks that
computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from windlass.comm.byte_channel import ByteChannel
from windlass.comm.codec import Codec
from windlass.comm.compressed_collectives import CompressedCollectives
from windlass.comm.error_feedback import add_decoded, begin_message, end_message
from windlass.comm.traffic import Traffic

_ALIGN = 16  # alignment of each tensor in bytes: a codec may view its message as any dtype

Tensors = Sequence[torch.Tensor]


class CompressedLists:
    """Collectives on lists of flat float32 tensors over one group. Construction is collective.

    As in `CompressedCollectives`, every value of a result went through the codec, including a rank's own values. Sums
    are computed in rank order. A group of one rank sends nothing, and its values stay exact.

    Args:
        channel: moves the bytes between the ranks of its group.
        codec: a codec, or its registered name.
        traffic: traffic counters; new ones by default.

    Raises:
        CodecError: as in `CompressedCollectives`.
    """

    def __init__(self, channel: ByteChannel, codec: Codec | str, traffic: Traffic | None = None) -> None:
        self._collectives = CompressedCollectives(channel, codec, traffic)
        self.codec, self.channel, self.group = self._collectives.codec, channel, channel.group
        self.traffic = self._collectives.traffic
        self._peers = [i for i in range(self.group.size) if i != self.group.index]

    def message_bytes(self, numels: Sequence[int]) -> int:
        """Return the number of bytes of a message with one tensor of each number of elements in `numels`."""
        return message_bytes(self.codec, numels)

    def reduce_scatter(
        self, parts: Sequence[Tensors], errors: Sequence[Tensors] | None = None, *, factor: float = 1.0
    ) -> list[torch.Tensor]:
        """Sum the lists that all ranks send to this rank.

        Args:
            parts: for each rank, the list of tensors to send to that rank. The sizes are equal on all ranks.
            errors: the error of each tensor of `parts`. The error is added to the tensor in place before the send, and
                replaced by the tensor's new error. None: no error feedback.
            factor: factor of the sums.

        Returns:
            `factor` times the sums of the tensors for this rank. With `errors` the sums overwrite this rank's list in
            `parts`; without `errors`, or on one rank, they are new tensors.
        """
        return self.start_reduce_scatter(parts, errors, factor=factor)()

    def start_reduce_scatter(
        self, parts: Sequence[Tensors], errors: Sequence[Tensors] | None = None, *, factor: float = 1.0
    ) -> Callable[[], list[torch.Tensor]]:
        """Start a `reduce_scatter`. Return a function that waits for the other ranks and returns the sums.

        All ranks start their collectives in the same order, and may wait for them in any order.
        """
        index, size = self.group.index, self.group.size
        if size == 1:
            sums = [part * factor for part in parts[0]]
            return lambda: sums
        if errors is None:
            messages, own = [self._encode(tensors) for tensors in parts], None
        else:
            messages = [self._begun(tensors, owed) for tensors, owed in zip(parts, errors, strict=True)]
            for rank in range(size):  # after the check of all values, so that all errors are changed or none
                self._end(messages[rank], parts[rank], errors[rank], decodes=rank == index)
            own = list(parts[index])
        received = {peer: torch.empty_like(messages[index]) for peer in self._peers}
        wait = self.channel.start_exchange({peer: messages[peer] for peer in self._peers}, received)
        self._count("compressed_reduce_scatter", received)

        def finish() -> list[torch.Tensor]:
            wait()
            return self._sums({**received, index: messages[index]}, parts[index], own, factor)

        return finish

    def _sums(
        self, messages: dict[int, torch.Tensor], like: Tensors, own: list[torch.Tensor] | None, factor: float
    ) -> list[torch.Tensor]:
        """Return `factor` times the sums of messages, in rank order, so that every channel gives the same bits.

        Args:
            own: decoded values of this rank's own message; the sums overwrite them. None: decode the message.
        """
        index, size = self.group.index, self.group.size
        if own is None or index > 1:  # a sum in rank order cannot begin with `own`
            sums = self._decoded(messages[0], like)
            for rank in range(1, size):
                if rank == index and own is not None:
                    for total, value in zip(sums, own, strict=True):
                        total.add_(value)
                else:
                    self._add_decoded(messages[rank], sums)
            if own is not None:
                for value, total in zip(own, sums, strict=True):
                    value.copy_(total)
                sums = own
        else:  # `own` can come first: a sum of two messages does not depend on their order
            sums = own
            for rank in range(size):
                if rank != index:
                    self._add_decoded(messages[rank], sums)
        return [total.mul_(factor) if factor != 1.0 else total for total in sums]

    def all_gather(self, own: Tensors, outs: Sequence[Tensors], errors: Tensors | None = None) -> None:
        """All-gather the lists of all ranks.

        Args:
            own: this rank's list.
            outs: for each rank, tensors of the sizes of its list, which receive the decoded values.
            errors: the error of each tensor of `own`, used as in `reduce_scatter`. With `errors`, `own` receives its
                decoded values.
        """
        self.start_all_gather(own, outs, errors)()

    def start_all_gather(
        self, own: Tensors, outs: Sequence[Tensors], errors: Tensors | None = None
    ) -> Callable[[], None]:
        """Start an `all_gather`. Return a function that waits for the other ranks and writes `outs`."""
        index = self.group.index
        if self.group.size == 1:
            _copy(own, outs[0])
            return lambda: None
        if errors is None:
            message = self._encode(own)
            self._decode_to(message, outs[index])
        else:
            message = self._begun(own, errors)
            self._end(message, own, errors, decodes=True)
            _copy(own, outs[index])
        received = {peer: self._empty(outs[peer]) for peer in self._peers}
        wait = self.channel.start_all_gather(message, received)
        self._count("compressed_all_gather", received)

        def finish() -> None:
            wait()
            for peer, other in received.items():
                self._decode_to(other, outs[peer])

        return finish

    def _empty(self, tensors: Tensors) -> torch.Tensor:
        device = tensors[0].device if tensors else torch.device("cpu")
        return torch.empty(self.message_bytes([one.numel() for one in tensors]), dtype=torch.uint8, device=device)

    def _places(self, message: torch.Tensor, tensors: Tensors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor that is not empty, with its part of a message."""
        start = 0
        for tensor in tensors:
            if tensor.numel():
                size = self.codec.encoded_size(tensor.numel(), torch.float32)
                yield tensor, message[start : start + size]
                start += -(-size // _ALIGN) * _ALIGN

    def _encode(self, tensors: Tensors) -> torch.Tensor:
        message = self._empty(tensors)
        for tensor, encoded in self._places(message, tensors):
            self.codec.encode(tensor, encoded)
        return message

    def _begun(self, tensors: Tensors, errors: Tensors) -> torch.Tensor:
        """Add the errors to the tensors, and return their partly encoded message; see `begin_message`."""
        message, owed = self._empty(tensors), (error for error in errors if error.numel())
        for (tensor, encoded), error in zip(self._places(message, tensors), owed, strict=True):
            begin_message(self.codec, tensor, error, encoded)
        return message

    def _end(self, message: torch.Tensor, tensors: Tensors, errors: Tensors, *, decodes: bool) -> None:
        """Complete a message; see `end_message`."""
        owed = (error for error in errors if error.numel())
        for (tensor, encoded), error in zip(self._places(message, tensors), owed, strict=True):
            end_message(self.codec, tensor, error, encoded, decodes=decodes)

    def _decoded(self, message: torch.Tensor, like: Tensors) -> list[torch.Tensor]:
        """Return the decoded tensors of a message, in float32. `like` has tensors of the same sizes."""
        values = [torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device) for tensor in like]
        self._decode_to(message, values)
        return values

    def _decode_to(self, message: torch.Tensor, outs: Tensors) -> None:
        """Decode a message to `outs`, which have the sizes of the tensors in the message."""
        for out, encoded in self._places(message, outs):
            self.codec.decode(encoded, out, torch.float32)

    def _add_decoded(self, message: torch.Tensor, sums: Tensors) -> None:
        for total, encoded in self._places(message, sums):
            add_decoded(self.codec, encoded, total)

    def _count(self, operation: str, received: dict[int, torch.Tensor]) -> None:
        self.traffic.add(operation, 0, sum(message.numel() for message in received.values()))


def message_bytes(codec: Codec, numels: Sequence[int]) -> int:
    """Return the number of bytes of a message with one tensor of each number of elements in `numels`.

    Each tensor starts at a multiple of 16 bytes.
    """
    sizes = [codec.encoded_size(numel, torch.float32) if numel else 0 for numel in numels]
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)


def _copy(sources: Tensors, targets: Tensors) -> None:
    for source, target in zip(sources, targets, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
