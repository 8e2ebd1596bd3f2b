"""Messages between workers and servers: a header of integers, and tensors whose sizes both sides can tell.

A size or number from the other side is checked before memory is allocated for it or an index is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from windlass.base.errors import CommunicationError
from windlass.comm.pair_link import PairLink
from windlass.parameter_server.server_shard import ShardGradient

SPARSE_COUNTS = torch.int64
MOST_WORKERS = 1 << 20
_MOST_TEXT = 1 << 16  # bytes of a problem


class MessageKind(IntEnum):
    """First integer of a message."""

    HELLO = 1  # worker, version that it pulled last, its number of pushes, fingerprint of the model
    WELCOME = 2  # version
    PULL = 3  # least version, in synchronous mode
    PARAMETERS = 4  # version; then all elements of the shard
    PUSH = 5  # version that was pulled; then the gradient
    PUSHED = 6  # result, version
    BYE = 7
    PROBLEM = 8  # number of bytes; then a text


def refused(link: PairLink, found: str, expected: str) -> CommunicationError:
    """Close a link whose other side sent what this side does not accept, and return the error to raise."""
    link.close()
    return CommunicationError(
        f"{link.peer} sent {found}, and {expected} was expected: it is another program, or its memory is damaged; the "
        "connection is closed"
    )


def send_problem(link: PairLink, text: str) -> None:
    """Send a text that the worker raises as an error."""
    data = torch.frombuffer(bytearray(text.encode()[:_MOST_TEXT]), dtype=torch.uint8)
    link.send([MessageKind.PROBLEM, data.numel()], data)


def receive_text(link: PairLink, size: int) -> str:
    """Receive the text of a problem.

    Raises:
        CommunicationError: the size is none of a text.
    """
    if not 0 < size <= _MOST_TEXT:
        raise refused(link, f"a text of {size} bytes", f"1 to {_MOST_TEXT}")
    return bytes(link.receive(torch.empty(size, dtype=torch.uint8)).tolist()).decode(errors="replace")


def send_gradient(link: PairLink, pulled: int, gradient: ShardGradient) -> None:
    """Send a gradient: rows of sparse fragments, all elements of the others."""
    counts = torch.tensor([indices.numel() for indices, _ in gradient.rows], dtype=SPARSE_COUNTS)
    rows = [tensor.contiguous() for pair in gradient.rows for tensor in pair]
    link.send([MessageKind.PUSH, pulled], gradient.dense, counts, *rows)


def receive_gradient(
    link: PairLink, dense: int, sparse: Sequence[tuple[int, int]], dtype: torch.dtype
) -> ShardGradient:
    """Receive a gradient.

    Args:
        dense: elements of the dense fragments.
        sparse: rows and elements of a row, of each sparse fragment.

    Raises:
        CommunicationError: a number of rows or an index is not one of the fragment.
    """
    values = link.receive(torch.empty(dense, dtype=dtype))
    counts = link.receive(torch.empty(len(sparse), dtype=SPARSE_COUNTS)).tolist()
    for count, (most, _) in zip(counts, sparse, strict=True):
        if not 0 <= count <= most:
            raise refused(link, f"{count} rows of a fragment", f"0 to {most}")
    rows: list[tuple[Tensor, Tensor]] = []
    for count, (most, row) in zip(counts, sparse, strict=True):
        indices = link.receive(torch.empty(count, dtype=torch.int64))
        if count and not 0 <= int(indices.min()) <= int(indices.max()) < most:
            raise refused(link, f"rows {int(indices.min())} to {int(indices.max())}", f"0 to {most - 1}")
        rows.append((indices, link.receive(torch.empty(count, row, dtype=dtype))))
    return ShardGradient(values, rows)
