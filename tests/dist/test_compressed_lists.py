"""Law: collectives on lists with error feedback bitwise equal their explicit computation from all ranks' tensors, and
move the expected bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from tests.dist.test_compressed_collectives import TIMEOUT, CountingChannel, world_group
from windlass.comm.choose_channel import choose_channel
from windlass.comm.codec import Codec, get_codec
from windlass.comm.compressed_lists import CompressedLists

NUMELS = (5, 3000, 0, 257)  # elements of the list's tensors; nonempty tensors for rank r have r more


def sizes(rank: int) -> list[int]:
    return [numel + rank if numel else 0 for numel in NUMELS]


def drawn(step: int, sender: int, receiver: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + sender * 10 + receiver)
    return [torch.randn(numel, generator=generator) for numel in sizes(receiver)]


def decoded(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a receiver decodes it."""
    out = torch.empty_like(tensor)
    if tensor.numel():
        encoded = torch.empty(codec.encoded_size(tensor.numel(), tensor.dtype), dtype=torch.uint8)
        codec.encode(tensor, encoded)
        codec.decode(encoded, out, tensor.dtype)
    return out


def aligned_bytes(codec: Codec, numels: list[int]) -> int:
    return sum(-(-codec.encoded_size(numel, torch.float32) // 16) * 16 for numel in numels)


def two_phases(transport: str, name: str) -> None:
    """Run three two-phase all-reduces with error feedback, and compare each with its simulation."""
    codec, rank, ranks = get_codec(name), dist.get_rank(), dist.get_world_size()
    channel = CountingChannel(choose_channel(transport, world_group(), torch.device("cpu"), timeout=TIMEOUT))
    calls = CompressedLists(channel, codec)
    worker = [[torch.zeros(n) for n in sizes(to)] for to in range(ranks)]
    server = [torch.zeros(n) for n in sizes(rank)]
    # errors of all ranks, by sender and receiver
    known = [[[torch.zeros(n) for n in sizes(to)] for to in range(ranks)] for _ in range(ranks)]
    known_server = [[torch.zeros(n) for n in sizes(to)] for to in range(ranks)]
    for step in range(3):
        sums = calls.reduce_scatter([drawn(step, rank, to) for to in range(ranks)], worker, factor=1 / ranks)
        outs = [[torch.empty(n) for n in sizes(to)] for to in range(ranks)]
        calls.all_gather(sums, outs, server)
        for to in range(ranks):
            for item in range(len(NUMELS)):
                total = torch.zeros(sizes(to)[item])
                for sender in range(ranks):
                    tensor = drawn(step, sender, to)[item] + known[sender][to][item]
                    message = decoded(codec, tensor)
                    known[sender][to][item] = tensor - message
                    total += message
                total = total * (1 / ranks) + known_server[to][item]
                message = decoded(codec, total)
                known_server[to][item] = total - message
                assert torch.equal(outs[to][item], message), (step, to, item)
                assert torch.equal(worker[to][item], known[rank][to][item])
        assert all(torch.equal(a, b) for a, b in zip(server, known_server[rank], strict=True))
    first = 3 * (ranks - 1) * aligned_bytes(codec, sizes(rank))
    second = 3 * sum(aligned_bytes(codec, sizes(other)) for other in range(ranks) if other != rank)
    assert channel.received == first + second
    assert calls.message_bytes(sizes(rank)) == aligned_bytes(codec, sizes(rank))
    moved = calls.traffic.bytes_moved
    assert moved["compressed_reduce_scatter"] == first and moved["compressed_all_gather"] == second


@pytest.mark.parametrize(
    ("ranks", "transport", "name"),
    [
        (2, "shm", "sign"),
        (2, "gloo", "int4"),
        (4, "gloo", "sign"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((4, "shm", "int8"), (2, "gloo", "topk"))),
    ],
)
def test_two_phases_with_error_feedback_equal_their_simulation(ranks: int, transport: str, name: str) -> None:
    run_ranks(two_phases, ranks, transport, name, transport=transport)
