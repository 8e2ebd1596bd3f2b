"""Law: the results of RankGroup's methods equal a direct computation from the values of all ranks of the group."""

from __future__ import annotations

import contextlib
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from windlass.base.errors import CommunicationError
from windlass.comm import peer_owners
from windlass.comm.byte_channel import ProcessGroupChannel
from windlass.comm.compressed_collectives import CompressedCollectives
from windlass.comm.group_creation import new_process_group
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.peer_owners import ForeignPeer
from windlass.comm.point_to_point import start_exchange, wait_for_transfers
from windlass.comm.rank_group import RankGroup, create_rank_group, world_group


def value_of(rank: int) -> torch.Tensor:
    return torch.tensor([rank + 1.0, -2.0 * rank])


def results(group: RankGroup) -> dict[str, Any]:
    """Return the results of every method on this rank. Collective."""
    rank, last = group.ranks[group.index], group.size - 1
    result: dict[str, Any] = {
        "ranks": group.ranks,
        "sum": group.all_reduce(value_of(rank)),
        "max": group.all_reduce(value_of(rank), dist.ReduceOp.MAX),
        "first": group.broadcast(value_of(rank)),
        "last": group.broadcast(value_of(rank), last),
        "objects": group.all_gather_object({"rank": rank}),
        "to first": group.gather_object(rank),
        "to last": group.gather_object(rank, last),
        "object of first": group.broadcast_object(f"rank {rank}"),
        "object of last": group.broadcast_object(f"rank {rank}" if group.index == last else None, last),
    }
    group.barrier()
    if group.size > 1:
        if group.index == 0:
            group.send(value_of(rank), last)
            group.send_object(("from", rank), last)
        elif group.index == last:
            result["received"] = group.receive(torch.zeros(2), 0)
            result["received object"] = group.receive_object(0)
        following, before = (group.index + 1) % group.size, (group.index - 1) % group.size
        passed = torch.zeros(2, 1, dtype=torch.bfloat16)
        sent = value_of(rank).view(2, 1).bfloat16()
        wait_for_transfers(start_exchange(group, [(following, sent)], [(before, passed)], tag=3, on_cpu=True))
        result["passed"] = passed
    return result


def expected(ranks: tuple[int, ...], rank: int) -> dict[str, Any]:
    values = torch.stack([value_of(item) for item in ranks])
    index, size = ranks.index(rank), len(ranks)
    results: dict[str, Any] = {
        "ranks": ranks,
        "sum": values.sum(0),
        "max": values.amax(0),
        "first": values[0],
        "last": values[-1],
        "objects": [{"rank": item} for item in ranks],
        "to first": list(ranks) if index == 0 else [],
        "to last": list(ranks) if index == size - 1 else [],
        "object of first": f"rank {ranks[0]}",
        "object of last": f"rank {ranks[-1]}",
    }
    if size > 1:
        if index == size - 1:
            results |= {"received": values[0], "received object": ("from", ranks[0])}
        results["passed"] = values[(index - 1) % size].view(2, 1).bfloat16()
    return results


def on_world_and_parts(parts: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Return the results in the group of all ranks, and in this rank's group of a partition."""
    group = create_rank_group(parts)
    result = [(item.ranks, results(item)) for item in (world_group(), group, RankGroup.of(group.process_group))]
    group.destroy()
    with pytest.raises(KeyError):
        dist.get_process_group_ranks(group.process_group)
    group.destroy()  # a second call does nothing
    return result


@pytest.mark.parametrize("parts", [[(0,)], [(0, 1)], [(0,), (1,)], [(0,), (2, 1)]], ids=str)
def test_every_method_equals_its_computation(parts: list[tuple[int, ...]]) -> None:
    world = sum(map(len, parts))
    for rank, actual in enumerate(run_ranks(on_world_and_parts, world, parts)):
        own = next(tuple(sorted(part)) for part in parts if rank in part)
        assert [ranks for ranks, _ in actual] == [tuple(range(world)), own, own]
        for ranks, values in actual:
            for name, value in expected(ranks, rank).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(values.pop(name), value), (name, ranks, rank)
                else:
                    assert values.pop(name) == value, (name, ranks, rank)
            assert not values


def moved_along_an_axis() -> None:
    """Move dtypes that gloo does not support, and tensors of one element whose stride is not 1."""
    axis = MeshAxis("sp", world_group())
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.bool, torch.complex64):
        sent = torch.arange(2.0).add(axis.index).to(dtype)
        assert axis.broadcast(sent, 1).float().tolist() == ([True, True] if dtype is torch.bool else [1, 2]), dtype
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2):
        sent = torch.arange(6.0).add(axis.index).view(2, 3).to(dtype)
        both = torch.stack([torch.arange(6.0).view(2, 3).add(rank) for rank in range(2)])
        assert axis.all_gather(sent).float().equal(both.flatten(0, 1)), dtype
        assert axis.all_gather(sent, 1, [3, 3]).float().equal(torch.cat([*both], 1)), dtype
        assert axis.all_to_all(sent).float().equal(both[:, axis.index]), dtype
        mine = [2, 0] if axis.index == 0 else [0, 2]
        kept = axis.all_to_all(sent, mine, mine)  # a rank may send and receive nothing
        assert kept.float().equal(both[axis.index]), dtype
        total = both.sum(0).to(dtype).float()
        assert axis.reduce_scatter(sent).float().equal(total[axis.index : axis.index + 1]), dtype
        assert axis.all_reduce(sent) is sent and sent.float().equal(total), dtype
    single = torch.arange(2.0).add(axis.index)[1::2]
    assert single.stride() == (2,) and axis.shift([single])[0].tolist() == [2.0 - axis.index]
    codes = CompressedCollectives(ProcessGroupChannel(axis.group), "identity")
    assert codes.all_gather(single).tolist() == [1, 2]


def test_an_axis_moves_every_dtype_and_stride() -> None:
    run_ranks(moved_along_an_axis, 2, transport="gloo")


def left_out() -> str:
    with pytest.raises(CommunicationError) as raised:
        create_rank_group([(1,)] if dist.get_rank() == 0 else [(0,)])
    return str(raised.value)


def test_a_rank_outside_the_partition_raises() -> None:
    assert "rank 0 is in none of the groups [(1,)]" in run_ranks(left_out, 2)[0]


def test_without_a_process_group_the_world_raises() -> None:
    assert not dist.is_initialized()
    with pytest.raises(CommunicationError, match=r"call windlass\.init_distributed\(\)"):
        world_group()


def refused_group() -> str:
    """Create a group while rank 0 finds that a connection leads to another user's process. Return the error."""
    if dist.get_rank() == 0:
        stranger = ForeignPeer("127.0.0.1:1", "127.0.0.1:2", 12345)
        found = {"have_own_peers": lambda opened: False, "foreign_peers": lambda inodes, connections: [stranger]}
        context: Any = patch.multiple(peer_owners, **found)
    else:
        context = contextlib.nullcontext()
    with context:
        try:
            new_process_group([0, 1])
        except CommunicationError as error:
            return str(error)
    return ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_group_with_another_user_is_refused_on_all_ranks() -> None:
    own, other = run_ranks(refused_group, 2)
    assert own.startswith(
        "the other end of this process's connection 127.0.0.1:1 with 127.0.0.1:2, made for a process group"
    )
    assert "belongs to uid 12345" in own and "nothing was received over it" in own
    assert other.startswith("a rank of a new process group left before all had joined it")
