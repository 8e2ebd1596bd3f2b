"""Messages between workers and servers: a header of integers, and tensors whose sizes both sides can tell."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from windlass.comm.pair_link import PairLink
from windlass.parameter_server.server_shard import ShardGradient

SPARSE_COUNTS = torch.int64


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


def send_problem(link: PairLink, text: str) -> None:
    """Send a text that the worker raises as an error."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    link.send([MessageKind.PROBLEM, data.numel()], data)


def receive_text(link: PairLink, size: int) -> str:
    """Receive the text of a problem."""
    return bytes(link.receive(torch.empty(size, dtype=torch.uint8)).tolist()).decode(errors="replace")


def send_gradient(link: PairLink, pulled: int, gradient: ShardGradient) -> None:
    """Send a gradient: rows of sparse fragments, all elements of the others."""
    counts = torch.tensor([indices.numel() for indices, _ in gradient.rows], dtype=SPARSE_COUNTS)
    rows = [tensor.contiguous() for pair in gradient.rows for tensor in pair]
    link.send([MessageKind.PUSH, pulled], gradient.dense, counts, *rows)


def receive_gradient(link: PairLink, dense: int, sparse_rows: list[int], dtype: torch.dtype) -> ShardGradient:
    """Receive a gradient.

    Args:
        dense: elements of the dense fragments.
        sparse_rows: elements of a row, of each sparse fragment.
    """
    values = link.receive(torch.empty(dense, dtype=dtype))
    counts = link.receive(torch.empty(len(sparse_rows), dtype=SPARSE_COUNTS)).tolist()
    rows: list[tuple[Tensor, Tensor]] = []
    for count, row in zip(counts, sparse_rows, strict=True):
        indices = link.receive(torch.empty(count, dtype=torch.int64))
        rows.append((indices, link.receive(torch.empty(count, row, dtype=dtype))))
    return ShardGradient(values, rows)
