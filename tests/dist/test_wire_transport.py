"""Law: a reduction over gloo gives the same sum and the same sum of squares in chunks as in one message."""

from __future__ import annotations

import torch

from tests.dist.harness import run_ranks
from windlass.comm.rank_group import world_group
from windlass.comm.transport import BufferRequest, WireOptions, local_shard
from windlass.comm.wire_transport import GlooTransport

NUMEL = 2 * 150_000  # a shard is longer than the parts in which `ordered_sum` adds squares


def _sums() -> list[tuple[torch.Tensor, float]]:
    results = []
    for chunk in (500_000_000, 2 * 40_007):
        group = world_group()
        transport = GlooTransport(group, WireOptions(reduce_chunk=chunk))
        buffer = transport.allocate([BufferRequest(NUMEL, torch.float32)], torch.device("cpu"))[0]
        buffer.local.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(group.index)))
        out = local_shard(buffer.local, group.index, group.size)
        reduction = transport.reduce(
            0, buffer, out, add=False, factor=0.5, elements=NUMEL, wire=torch.float32
        )  # fmt: skip
        reduction.wait()
        assert reduction.squares is not None
        results.append((out.clone(), float(reduction.squares)))
    return results


def test_chunks_do_not_change_the_sum_of_squares() -> None:
    for whole, chunked in run_ranks(_sums, 2):
        assert torch.equal(whole[0], chunked[0])
        assert whole[1] == chunked[1] > 0
