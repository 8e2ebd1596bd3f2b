"""Messages between workers, servers and replicas: a header of integers, then tensors or text.

The receiver checks every size, count and index of a message before it allocates memory or uses the index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from windlass.base.errors import CommunicationError
from windlass.comm.pair_link import PairLink
from windlass.parameter_server.server_shard import ShardGradient
from windlass.parameter_server.snapshot import decode_content, encode_content
from windlass.storage.safetensors_header import CODES, DTYPES

COUNTS = torch.int64
MOST_WORKERS = 1 << 20
_MOST_TEXT = 1 << 16  # maximum bytes of the text of a problem
_MOST_CONTENT = 1 << 26  # maximum bytes of the JSON text of a shard's content; its tensors are not counted


class MessageKind(IntEnum):
    """Kind of a message: the first integer of its header.

    Each comment lists the other integers of the header and, after "then", the tensors or text that follow the header.
    """

    # worker, version of its last pull, number of its pushes (-1: first connection), fingerprints of model and settings
    HELLO = 1
    WELCOME = 2  # version, number of the worker's pushes as the server counts them
    PULL = 3  # lowest version that the worker accepts, in synchronous mode
    PARAMETERS = 4  # version; then all elements of the shard
    PUSH = 5  # version that was pulled, number of the push; then the gradient
    PUSHED = 6  # value of a `PushResult`, version
    BYE = 7
    PROBLEM = 8  # number of bytes; then a text
    FOLLOW = 9  # replica, fingerprints of the model and the settings
    CONTENT = 10  # number of bytes of a text, number of tensors; then both
    # version before the update, number of pushes in the update, number of workers; then the mean gradient, a pair
    # (worker, number of its push) for each push in the update, and a pair (worker, count of its pushes) for each worker
    UPDATE = 11
    DONE = 12  # a replica has received the content, or applied an update
    ALIVE = 13  # heartbeat of a server


def refused(link: PairLink, found: str, expected: str) -> CommunicationError:
    """Close a link whose other side sent an invalid message, and return the error to raise."""
    link.close()
    return CommunicationError(
        f"{link.peer} sent {found}, and {expected} was expected: it is another program, or its memory is damaged; the "
        "connection is closed"
    )


def send_problem(link: PairLink, text: str) -> None:
    """Send a text that the receiver raises as an error."""
    data = torch.frombuffer(bytearray(text.encode()[:_MOST_TEXT]), dtype=torch.uint8)
    link.send([MessageKind.PROBLEM, data.numel()], data)


def receive_text(link: PairLink, size: int) -> str:
    """Receive the text of a problem.

    Raises:
        CommunicationError: the size is below 1 or above the maximum size of a text.
    """
    if not 0 < size <= _MOST_TEXT:
        raise refused(link, f"a text of {size} bytes", f"1 to {_MOST_TEXT}")
    return bytes(link.receive(torch.empty(size, dtype=torch.uint8)).tolist()).decode(errors="replace")


def send_content(link: PairLink, content: dict[str, Any]) -> None:
    """Send the content of a shard to a replica."""
    data, tensors = encode_content(content)
    here = [tensor.detach().to("cpu").contiguous() for tensor in tensors.values()]
    sizes = [(name, CODES[one.dtype], list(one.shape)) for name, one in zip(tensors, here, strict=True)]
    text = torch.frombuffer(bytearray(json.dumps([data, sizes]).encode()), dtype=torch.uint8)
    link.send([MessageKind.CONTENT, text.numel(), len(here)], text, *here)


def receive_content(link: PairLink, size: int, count: int, most: int) -> dict[str, Any]:
    """Receive the content of a shard.

    Args:
        size, count: number of bytes of the text, and number of tensors, from the header of the message.
        most: number of elements of the shard, and so the maximum number of elements of one tensor.

    Raises:
        CommunicationError: a size is out of the range of a shard, or the description of the tensors is damaged.
    """
    if not 0 < size <= _MOST_CONTENT or not 0 <= count <= size:
        raise refused(link, f"a content of {size} bytes and {count} tensors", f"1 to {_MOST_CONTENT} bytes")
    text = link.receive(torch.empty(size, dtype=torch.uint8)).numpy().tobytes()
    try:
        data, sizes = json.loads(text)
        known = len(sizes) == count and all(code in DTYPES for _, code, _ in sizes)
    except (ValueError, TypeError):
        known = False
    if not known:
        raise refused(link, f"a damaged description of {size} bytes", f"names, dtypes and shapes of {count} tensors")
    tensors = {}
    for name, code, shape in sizes:
        if math.prod(shape) > max(1, most) or min(shape, default=0) < 0:
            raise refused(link, f"a state of shape {shape}", f"at most {most} elements")
        tensors[name] = link.receive(torch.empty(shape, dtype=DTYPES[code]))
    return decode_content(data, tensors)


def send_update(
    link: PairLink, version: int, gradient: ShardGradient, counted: Mapping[int, int], steps: Mapping[int, int]
) -> None:
    """Send an update to a replica.

    Args:
        version: version before the update.
        counted: for each worker whose push is part of the update, the number of that push.
        steps: for each worker, the number of its pushes so far.
    """
    pairs = [torch.tensor(list(numbers.items()), dtype=torch.int64).view(-1, 2) for numbers in (counted, steps)]
    _send_gradient(link, [MessageKind.UPDATE, version, len(counted), len(steps)], gradient, *pairs)


def receive_by_worker(link: PairLink, count: int, what: str) -> dict[int, int]:
    """Receive the `count` pairs (worker, number) of an update, as a dict. They follow the gradient.

    Args:
        what: description of the numbers, for the error.

    Raises:
        CommunicationError: `count` is negative or above the maximum number of workers.
    """
    if not 0 <= count <= MOST_WORKERS:
        raise refused(link, f"{count} {what} of an update", f"0 to {MOST_WORKERS}")
    return {worker: number for worker, number in link.receive(torch.empty(count, 2, dtype=torch.int64)).tolist()}


def send_push(link: PairLink, pulled: int, number: int, gradient: ShardGradient) -> None:
    """Send a gradient to a server.

    Args:
        pulled: version of the parameters from which the gradient was computed.
        number: number of the push, larger than those of the worker's earlier pushes.
    """
    _send_gradient(link, [MessageKind.PUSH, pulled, number], gradient)


def _send_gradient(link: PairLink, header: Sequence[int], gradient: ShardGradient, *after: Tensor) -> None:
    """Send a message with a gradient: all elements of dense fragments with a gradient, and rows of sparse fragments."""
    present = [fragment for fragment in gradient.dense if fragment is not None]
    numbers = [int(fragment is not None) for fragment in gradient.dense]
    numbers += [-1 if pair is None else pair[0].numel() for pair in gradient.rows]
    rows = [tensor.contiguous() for pair in gradient.rows if pair is not None for tensor in pair]
    dense = [torch.cat(present)] if present else []
    link.send(header, torch.tensor(numbers, dtype=COUNTS), *dense, *rows, *after)


def receive_gradient(
    link: PairLink, dense: Sequence[int], sparse: Sequence[tuple[int, int]], dtype: torch.dtype
) -> ShardGradient:
    """Receive a gradient.

    Args:
        dense: number of elements of each dense fragment.
        sparse: `(maximum number of rows, elements per row)` of each sparse fragment.

    Raises:
        CommunicationError: a sparse fragment has more rows than its maximum, or a row index outside the fragment; or
            the flag of a dense fragment (1: it has a gradient) is not 0 or 1.
    """
    numbers = link.receive(torch.empty(len(dense) + len(sparse), dtype=COUNTS)).tolist()
    present, counts = numbers[: len(dense)], numbers[len(dense) :]
    if any(flag not in (0, 1) for flag in present):
        raise refused(link, f"{present} for the fragments that have a gradient", "0 or 1 for each")
    for count, (most, _) in zip(counts, sparse, strict=True):
        if not -1 <= count <= most:
            raise refused(link, f"{count} rows of a fragment", f"-1 (no gradient) to {most}")
    sizes = [numel for numel, flag in zip(dense, present, strict=True) if flag]
    fragments = iter(link.receive(torch.empty(sum(sizes), dtype=dtype)).split(sizes))
    values = [next(fragments) if flag else None for flag in present]
    rows: list[tuple[Tensor, Tensor] | None] = []
    for count, (most, row) in zip(counts, sparse, strict=True):
        if count < 0:
            rows.append(None)
            continue
        indices = link.receive(torch.empty(count, dtype=torch.int64))
        if count and not 0 <= int(indices.min()) <= int(indices.max()) < most:
            raise refused(link, f"rows {int(indices.min())} to {int(indices.max())}", f"0 to {most - 1}")
        rows.append((indices, link.receive(torch.empty(count, row, dtype=dtype))))
    return ShardGradient(values, rows)
