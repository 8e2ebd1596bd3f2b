"""Tests that every rank's result of a collective equals a result computed in one process from all ranks' tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.dist.harness import RankError, run_ranks

FLOATS = ("float32", "float64", "bfloat16", "float16", "complex64", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "bool", "uint16", "uint32")
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
LOGICAL = ("LAND", "LOR", "LXOR")
BITWISE = ("BAND", "BOR", "BXOR")
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda t: t[:6],
    "matrix": lambda t: t[:6].view(2, 3),
    "transposed": lambda t: t[:6].view(2, 3).t(),
    "strided": lambda t: t[:12:2],
    "scalar": lambda t: t[0],
    "empty": lambda t: t[:0],
}
# Since torch 2.13 gloo supports operations that only NCCL had: 16-bit floats, averages.
NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
ABLE = ("gloo", "bare", "nccl") if NEW else ("gloo", "bare")
TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float8_e5m2": 0.3, "float32": 1e-6, "complex64": 1e-6}


def numbers(rank: int, dtype: str, count: int = 12) -> torch.Tensor:
    """Return the rank's numbers, small enough for products, with zeros, and with signs if the dtype has them."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype in INTEGERS:
        low = 0 if dtype.startswith("uint") else -4
        return torch.randint(low, 5, (count,), generator=generator).to(getattr(torch, dtype))
    values = torch.randint(-6, 7, (count,), generator=generator).double() / 4
    if dtype == "complex64":
        return torch.complex(values, values.flip(0)).to(torch.complex64)
    return values.to(getattr(torch, dtype))


def meaning(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """Compute the reduction independently of the library: over a stack of all parts, in wide arithmetic."""
    dtype = parts[0].dtype
    if op in LOGICAL:
        truths = torch.stack([part.to(torch.complex128) != 0 for part in parts])
        counts = truths.sum(0)
        result = {"LAND": counts == len(parts), "LOR": counts > 0, "LXOR": counts % 2 == 1}[op]
        return result.to(dtype)
    if dtype is torch.bool:
        counts = torch.stack(parts).sum(0)
        expected = {"SUM": counts > 0, "MAX": counts > 0, "BOR": counts > 0, "BXOR": counts % 2 == 1}
        return expected.get(op, counts == len(parts))
    if op in BITWISE:
        stack = [part.long() for part in parts]
        result = stack[0]
        for part in stack[1:]:
            result = {"BAND": result & part, "BOR": result | part, "BXOR": result ^ part}[op]
        return result.to(dtype)
    full = not dtype.is_floating_point and not dtype.is_complex
    wide = torch.complex128 if dtype.is_complex else torch.int64 if full else torch.float64
    stack_of_all = torch.stack([part.to(wide) for part in parts])
    if op == "AVG":
        total = stack_of_all.sum(0)
        return (torch.div(total, len(parts), rounding_mode="trunc") if full else total / len(parts)).to(dtype)
    reduced: dict[str, Callable[[], torch.Tensor]] = {
        "SUM": lambda: stack_of_all.sum(0),
        "PRODUCT": lambda: stack_of_all.prod(0),
        "MIN": lambda: stack_of_all.amin(0),
        "MAX": lambda: stack_of_all.amax(0),
    }
    return reduced[op]().to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
    tolerance = TOLERANCE.get(str(wanted.dtype).removeprefix("torch."), 0.0)
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    torch.testing.assert_close(
        found.to(wide), wanted.to(wide), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def operators(dtype: str) -> Iterator[str]:
    """Yield the operators that are defined for the dtype."""
    yield from LOGICAL
    yield from ("SUM", "PRODUCT")
    if dtype != "bool":
        yield "AVG"
    if dtype != "complex64":
        yield from ("MIN", "MAX")
    if dtype in INTEGERS:
        yield from BITWISE


def pretend(able: str) -> Any:
    """Set gloo's declared capabilities to its real ones, none, or those of NCCL. Return the previous ones."""
    from windlass.compat.collectives import backend_capabilities

    before = backend_capabilities.BACKEND_CAPABILITIES["gloo"]
    if able == "bare":
        backend_capabilities.BACKEND_CAPABILITIES["gloo"] = backend_capabilities.BackendCapabilities(
            {}, receives_from_any=True
        )
    elif able == "nccl":  # new gloo supports NCCL's operations, but its reduce may change inputs
        backend_capabilities.BACKEND_CAPABILITIES["gloo"] = replace(
            backend_capabilities.BACKEND_CAPABILITIES["nccl"], preserves_reduce_inputs=False
        )
    return before


# --------------------------------------------------------------------------------------------------------- reductions


def reduce_everything(able: str, share: int | None = None) -> int:
    """Run all cases, or part number `share` of nine. Return the number of cases that ran."""
    from windlass.compat import collectives as comm
    from windlass.compat.collectives import backend_capabilities

    before = pretend(able)
    rank, size, cases = comm.get_rank(), comm.get_world_size(), 0
    try:
        for dtype in FLOATS + INTEGERS:
            for op in operators(dtype):
                if share is not None and hash_of(dtype, op) % 9 != share:
                    continue
                shapes = SHAPES if dtype in ("float32", "int16") else {"flat": SHAPES["flat"]}
                for (shape, cut), late in itertools.product(shapes.items(), (False, True)):
                    what = (dtype, op, shape, late)
                    everyone = [cut(numbers(other, dtype)) for other in range(size)]
                    expected = meaning(everyone, op)
                    local = cut(numbers(rank, dtype))
                    work = comm.all_reduce(local, getattr(comm.ReduceOp, op), async_op=late)
                    assert (work is not None) == late, what
                    if late:
                        work.wait()
                        assert work.is_completed(), what
                    close(local, expected, what)
                    reduce_one(comm, op, cut, dtype, expected, everyone, late)
                    cases += 1
                scatter_both(comm, op, dtype)
    finally:
        backend_capabilities.BACKEND_CAPABILITIES["gloo"] = before
    return cases


def hash_of(dtype: str, op: str) -> int:
    """Return a number of the case, equal in every process. Its remainder modulo 9 is the number of the case's part."""
    return (FLOATS + INTEGERS).index(dtype) + 5 * (ARITHMETIC + LOGICAL + BITWISE).index(op)


def reduce_one(comm: Any, op: str, cut: Any, dtype: str, wanted: Any, everyone: Any, late: bool) -> None:
    """Reduce to the last rank; other ranks' tensors are unchanged."""
    rank, dst = comm.get_rank(), comm.get_world_size() - 1
    local = cut(numbers(rank, dtype))
    work = comm.reduce(local, dst, getattr(comm.ReduceOp, op), async_op=late)
    if late:
        work.wait()
    close(local, wanted if rank == dst else everyone[rank], ("reduce", dtype, op))


def scatter_both(comm: Any, op: str, dtype: str) -> None:
    """Run reduce_scatter_tensor on equal parts, and reduce_scatter on parts of rank + 1 elements."""
    rank, size = comm.get_rank(), comm.get_world_size()
    kind = getattr(comm.ReduceOp, op)
    everyone = [numbers(other, dtype, 2 * size).view(size, 2) for other in range(size)]
    output = torch.zeros(2, dtype=everyone[0].dtype)
    comm.reduce_scatter_tensor(output, everyone[rank].clone(), kind)
    close(output, meaning([full[rank] for full in everyone], op), ("reduce_scatter_tensor", dtype, op))
    lists = [[numbers(10 * other + i, dtype, i + 1) for i in range(size)] for other in range(size)]
    output = torch.zeros(rank + 1, dtype=everyone[0].dtype)
    comm.reduce_scatter(output, lists[rank], kind, async_op=True).wait()
    close(output, meaning([parts[rank] for parts in lists], op), ("reduce_scatter", dtype, op))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("able", ABLE)
def test_every_operator_on_every_dtype_equals_the_plain_reduction(world: int, able: str) -> None:
    """Each pair of dtype and operator runs in at most one row; `test_full_product` runs all pairs in each row."""
    assert run_ranks(reduce_everything, world, able, 3 * (world - 2) + ABLE.index(able))[0] > 15


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("able", ABLE)
def test_full_product(world: int, able: str) -> None:
    assert run_ranks(reduce_everything, world, able, timeout=300)[0] > 150


def test_a_world_of_one_reduces_too() -> None:
    assert run_ranks(reduce_everything, 1, "gloo")[0] > 150


def pairs(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, with ties between ranks and one NaN, and their indices, which are higher on lower ranks."""
    values = torch.tensor([1.0, rank, -rank, 2.0, rank % 2], dtype=dtype)
    if dtype.is_floating_point and rank == 1:
        values[3] = float("nan")
    return values, torch.arange(5) + 10 * (9 - rank)


def locate() -> None:
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    for dtype, name in itertools.product((torch.float32, torch.int32, torch.bfloat16), ("MINLOC", "MAXLOC")):
        op = getattr(comm.ReduceOp, name)
        everyone = [pairs(other, dtype) for other in range(size)]
        sign = 1 if name == "MINLOC" else -1
        chosen = []
        for element in range(5):
            candidates = [(float(v[element]), int(i[element])) for v, i in everyone]
            chosen.append(min(candidates, key=lambda pair: (pair[0] == pair[0], sign * pair[0], pair[1])))
        expected = torch.tensor([value for value, _ in chosen], dtype=dtype), torch.tensor([i for _, i in chosen])
        for late in (False, True):
            values, indices = pairs(rank, dtype)
            work = comm.all_reduce((values, indices), op, async_op=late)
            if late:
                work.wait()
            torch.testing.assert_close((values, indices), expected, rtol=0, atol=0, equal_nan=True)
            values, indices = pairs(rank, dtype)
            work = comm.reduce((values, indices), 1, op, async_op=late)
            if late:
                work.wait()
            torch.testing.assert_close(
                (values, indices), expected if rank == 1 else pairs(rank, dtype), rtol=0, atol=0, equal_nan=True
            )
            scattered(comm, op, dtype, late)
        together = torch.stack([part.to(torch.float64) for part in pairs(rank, dtype)], dim=-1)
        comm.all_reduce(together, op)
        torch.testing.assert_close(together[:, 0].to(dtype), expected[0], rtol=0, atol=0, equal_nan=True)
        assert together[:, 1].tolist() == expected[1].tolist()


def scattered(comm: Any, op: Any, dtype: torch.dtype, late: bool) -> None:
    """Scatter reductions of pairs of values and indices. The values of a rank are equal; the last rank's win."""
    rank, size = comm.get_rank(), comm.get_world_size()
    sign = 1 if op is comm.ReduceOp.MINLOC else -1
    values = torch.full((size, 2), sign * (5 - rank), dtype=dtype)
    indices = torch.arange(2 * size).view(size, 2) + 100 * rank
    for scatter, source in (
        (comm.reduce_scatter_tensor, (values, indices)),
        (comm.reduce_scatter, list(zip(values, indices, strict=True))),
    ):
        best, place = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        work = scatter((best, place), source, op, async_op=late)
        if late:
            work.wait()
        assert best.tolist() == [sign * (6 - size)] * 2
        assert place.tolist() == [2 * rank + 100 * (size - 1), 2 * rank + 1 + 100 * (size - 1)]


@pytest.mark.parametrize("world", [2, 4])
def test_minloc_and_maxloc(world: int) -> None:
    run_ranks(locate, world)


def premultiply() -> None:
    import torch.distributed as dist

    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        local = torch.full((3,), 2.0, dtype=dtype)
        comm.all_reduce(local, comm.premul_sum(rank + 1.0))
        assert local.tolist() == [float(size * (size + 1))] * 3
        for dims in range(3):  # dimensions of the factor, a tensor of one element
            of_tensor = comm.premul_sum(torch.full((1,) * dims, rank + 1.0, dtype=torch.float64))
            local, part = torch.full((3,), 2.0, dtype=dtype), torch.zeros((), dtype=dtype)
            comm.all_reduce(local, of_tensor)
            comm.reduce_scatter(part, list(torch.full((size,), 2.0, dtype=dtype)), of_tensor)
            assert local.tolist() == [float(size * (size + 1))] * 3 and part.item() == size * (size + 1), (dtype, dims)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.SUM), comm.ReduceOp.SUM, comm.ReduceOp.PROD):
        local = torch.tensor([2.0])
        comm.all_reduce(local, op)
        assert local.item() == (2.0 * size if op is not comm.ReduceOp.PROD else 2.0**size)
    local = torch.full((), 3.0, requires_grad=True)
    assert comm.inference_all_reduce(local) is local and local.item() == 3.0 * size
    several = [torch.ones(2), torch.ones((), dtype=torch.bfloat16)]
    comm.all_reduce_coalesced(several, async_op=True).wait()
    assert several[0].tolist() == [size] * 2 and several[1].item() == size


def test_premul_sum_and_torch_operators() -> None:
    run_ranks(premultiply, 3)


def test_a_factor_for_each_element_is_refused() -> None:
    from windlass.base.errors import CommunicationError
    from windlass.compat import collectives as comm

    with pytest.raises(CommunicationError, match=r"PREMUL_SUM is a tensor of shape \[2, 3\].*reduce it with"):
        comm.premul_sum(torch.ones(2, 3))


# -------------------------------------------------------------------------------------------------------------- moves


def move_everything() -> None:
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    last = size - 1
    for dtype, (shape, cut), late in itertools.product(FLOATS + INTEGERS, SHAPES.items(), (False, True)):
        what = (dtype, shape, late)
        everyone = [cut(numbers(other, dtype)) for other in range(size)]
        local = cut(numbers(rank, dtype))

        def over(work: Any, late: bool = late) -> None:
            assert (work is not None) == late
            if late:
                work.wait()

        def blank(everyone: list[torch.Tensor] = everyone, cut: Any = cut, dtype: str = dtype) -> list[torch.Tensor]:
            return [cut(torch.zeros_like(numbers(0, dtype))) for _ in everyone]

        over(comm.broadcast(local, last, async_op=late))
        same(local, everyone[last], what)
        local, each = cut(numbers(rank, dtype)), blank()
        over(comm.all_gather(each, local, async_op=late))
        for actual, expected in zip(each, everyone, strict=True):
            same(actual, expected, what)
        each = blank()
        over(comm.gather(local, each if rank == last else None, last, async_op=late))
        for actual, expected in zip(each, everyone, strict=True):
            same(actual, expected if rank == last else torch.zeros_like(expected), what)
        actual = blank()[0]
        over(comm.scatter(actual, everyone if rank == last else None, last, async_op=late))
        same(actual, everyone[rank], what)
        full = torch.zeros((size, *local.shape), dtype=local.dtype)
        over(comm.all_gather_into_tensor(full, local, async_op=late))
        same(full, torch.stack(everyone), what)


def same(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
    assert found.tolist() == wanted.tolist() if wanted.dtype.itemsize > 1 else found.float().equal(wanted.float()), what


def exchange_everything() -> None:
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    for dtype, late in itertools.product(("float32", "bfloat16", "bool", "complex64"), (False, True)):
        # rank r sends (r + i) % 3 rows to rank i, sometimes none
        rows = [[(r + i) % 3 for i in range(size)] for r in range(size)]
        sent = [[numbers(10 * r + i, dtype, 2 * rows[r][i]).view(-1, 2) for i in range(size)] for r in range(size)]
        expected = [sent[r][rank] for r in range(size)]
        output = torch.zeros((sum(rows[r][rank] for r in range(size)), 2), dtype=sent[0][0].dtype)
        work = comm.all_to_all_single(
            output, torch.cat(sent[rank]), [rows[r][rank] for r in range(size)], rows[rank], async_op=late
        )
        if late:
            work.wait()
        same(output, torch.cat(expected), (dtype, late))
        # outputs that are not contiguous
        each = [torch.zeros((2, rows[r][rank]), dtype=output.dtype).t() for r in range(size)]
        work = comm.all_to_all(each, sent[rank], async_op=late)
        if late:
            work.wait()
        for actual, part in zip(each, expected, strict=True):
            same(actual, part, (dtype, late))
    even = torch.zeros(size)
    comm.all_to_all_single(even, torch.arange(float(size)) + 10 * rank)
    assert even.tolist() == [10 * r + rank for r in range(size)]
    uneven = [torch.zeros(i) for i in range(size)]
    comm.all_gather(uneven, torch.full((rank,), float(rank)))
    assert [part.tolist() for part in uneven] == [[float(i)] * i for i in range(size)]
    objects: list[Any] = [None] * size
    comm.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    text = [f"of {rank}"]
    comm.broadcast_object_list(text, size - 1)
    assert text == [f"of {size - 1}"]
    outputs = [torch.zeros(size), torch.zeros(size, 2, dtype=torch.bool)]
    comm.all_gather_coalesced(outputs, [torch.tensor(float(rank)), torch.ones(2, dtype=torch.bool)])
    assert outputs[0].tolist() == list(range(size)) and bool(outputs[1].all())


def talk_in_pairs() -> None:
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    following, before = (rank + 1) % size, (rank - 1) % size
    local, result = numbers(rank, "bfloat16"), torch.zeros(24, dtype=torch.bfloat16)[::2]
    works = [comm.isend(local, following, tag=3), comm.irecv(result, before, tag=3)]
    for work in works:
        work.wait()
    same(result, numbers(before, "bfloat16"), "isend")
    result.zero_()
    operations = [comm.P2POp(comm.isend, local, following), comm.P2POp(comm.irecv, result, before)]
    for work in comm.batch_isend_irecv(operations):
        work.wait()
    same(result, numbers(before, "bfloat16"), "batch")
    if rank == 0:
        item = torch.zeros(())
        assert sorted(comm.recv(item, tag=other) for other in range(1, size)) == list(range(1, size))
    else:
        comm.send(torch.tensor(1.0), 0, tag=rank)
    comm.barrier()
    assert comm.barrier(async_op=True).wait() is not None
    comm.monitored_barrier()
    comm.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_dtype_and_strides_are_transferred(world: int) -> None:
    run_ranks(move_everything, world)
    run_ranks(exchange_everything, world)
    if world > 1:
        run_ranks(talk_in_pairs, world)


# ------------------------------------------------------------------------------------------- groups, order and refusals


def sub_groups() -> None:
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    members = [1, size - 1]
    group = comm.new_group(members)
    local = torch.tensor([rank], dtype=torch.int32)
    if rank not in members:
        with pytest.warns(UserWarning, match="on a group that it is not in"):
            assert comm.all_reduce(local, comm.ReduceOp.BOR, group=group, async_op=True) is None
        assert comm.get_rank(group) == -1 == comm.get_world_size(group) and local.item() == rank
        return
    assert comm.get_all_ranks_from_group(group) == members and comm.get_global_rank(group, 1) == size - 1
    for op, expected in (("LXOR", 0), ("BOR", 1 | (size - 1)), ("AVG", size // 2), ("MAX", size - 1)):
        local = torch.tensor([rank], dtype=torch.int32)
        comm.all_reduce(local, getattr(comm.ReduceOp, op), group=group)
        assert local.item() == expected, op
    local = torch.tensor([float(rank)])
    comm.reduce(local, size - 1, group=group)
    assert local.item() == (size if rank == size - 1 else 1)
    comm.broadcast(local, 1, group=group)
    assert local.item() == 1
    each = [torch.zeros(1), torch.zeros(1)]
    comm.all_gather(each, torch.tensor([float(rank)]), group=group)
    assert [part.item() for part in each] == members
    with pytest.raises(RuntimeError, match="src = 0 is not in"):
        comm.broadcast(local, 0, group=group)


def test_groups_use_global_ranks() -> None:
    run_ranks(sub_groups, 4)


def out_of_order() -> None:
    """Wait for works in any order, poll them, and turn them into futures, while the rank does other work."""
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    ops = [comm.ReduceOp.LXOR, comm.ReduceOp.SUM, comm.ReduceOp.AVG, comm.ReduceOp.BAND, comm.ReduceOp.PRODUCT]
    tensors = [torch.full((3,), rank + 1, dtype=dtype) for dtype in (torch.int16, torch.complex64, torch.bfloat16)]
    tensors += [torch.full((3,), rank + 1, dtype=torch.int8), torch.full((2,), rank + 1.0).to(torch.float8_e5m2)]
    works = [comm.all_reduce(item, op, async_op=True) for item, op in zip(tensors, ops, strict=True)]
    if rank == 0:
        comm.send(torch.zeros(1), 1)
    elif rank == 1:
        comm.recv(torch.zeros(1), 0)
    order = works if rank % 2 else works[::-1]
    order[0].wait()
    future = order[1].get_future()
    future.wait()
    while not order[2].is_completed():
        pass
    for work in works:
        work.wait()
        assert work.wait(timedelta(seconds=5)) is not False
    results = [item.to(torch.complex64)[0].real.item() for item in tensors]
    assert results == [size % 2, size * (size + 1) / 2, (size + 1) / 2, 0, math.factorial(size)]


def test_asynchronous_works_complete_in_any_order() -> None:
    run_ranks(out_of_order, 3)


REFUSED = {
    "BAND of a torch.float32": lambda comm, t: comm.all_reduce(t, comm.ReduceOp.BAND),
    "AVG of a torch.bool": lambda comm, t: comm.all_reduce(t > 0, comm.ReduceOp.AVG),
    "MAX of a torch.complex64": lambda comm, t: comm.all_reduce(t.to(torch.complex64), comm.ReduceOp.MAX),
    "no factor": lambda comm, t: comm.all_reduce(t, comm.ReduceOp.PREMUL_SUM),
    "MINLOC needs pairs": lambda comm, t: comm.all_reduce(t, comm.ReduceOp.MINLOC),
    "an integer dtype": lambda comm, t: comm.all_reduce((t, t), comm.ReduceOp.MAXLOC),
    "got 2 tensors": lambda comm, t: comm.all_reduce((t, t)),
    "is not a reduction operator": lambda comm, t: comm.all_reduce(t, "sum"),
    "placeholder": lambda comm, t: comm.reduce(t, 0, comm.ReduceOp.UNUSED),
    "UINT64".lower(): lambda comm, t: comm.all_reduce(t.to(torch.uint64)),
    "cannot be sent": lambda comm, t: comm.broadcast(t.to_sparse(), 0),
    "got a float": lambda comm, t: comm.broadcast(1.0, 0),
    "dst = 7": lambda comm, t: comm.reduce(t, 7),
    "holds nothing": lambda comm, t: comm.gather(t, None, comm.get_rank()),
    "holds 1 tensors": lambda comm, t: comm.all_gather([t], t),
    "cannot hold the elements": lambda comm, t: comm.all_gather([t[:1], t[:1]], t),
    "is not 2 times the output": lambda comm, t: comm.reduce_scatter_tensor(t, t),
    "is not 2 times the input": lambda comm, t: comm.all_gather_into_tensor(t, t),
    "BXOR of a torch.float32": lambda comm, t: comm.all_reduce_coalesced([t.int(), t], comm.ReduceOp.BXOR),
    r"is not 2 times the input, \[1\]": lambda comm, t: comm.all_gather_coalesced([torch.zeros(6), t], [t, t[:1]]),
    "got 1 output_tensors and 2 input_tensors": lambda comm, t: comm.all_gather_coalesced([torch.zeros(6)], [t, t]),
    "do not split over": lambda comm, t: comm.all_to_all_single(t, t),
    "add up to the 3 rows": lambda comm, t: comm.all_to_all_single(t, t, [1, 1], [2, 1]),
    "has no rows": lambda comm, t: comm.all_to_all_single(t[0], t[0]),
    "neither isend nor irecv": lambda comm, t: comm.P2POp(comm.send, t, 0),
    "no backend for meta": lambda comm, t: comm.all_reduce(t.to("meta")),
}


def refuse_everything() -> None:
    from windlass.base.errors import CommunicationError
    from windlass.compat import collectives as comm

    if comm.get_rank() == 0:  # a message of one rank would be received by the other rank's next collective
        for words, call in REFUSED.items():
            with pytest.raises(CommunicationError, match=words):
                call(comm, torch.arange(3.0))
    local = torch.ones(1)
    comm.all_reduce(local)  # the refused calls have sent nothing
    assert local.item() == 2


def test_invalid_arguments_are_refused_before_anything_is_sent() -> None:
    run_ranks(refuse_everything, 2)


def late_for_the_barrier() -> None:
    from windlass.compat import collectives as comm

    if comm.get_rank() != 2:
        comm.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    comm.barrier()


def on_time_for_the_barrier() -> None:
    from windlass.compat import collectives as comm

    comm.monitored_barrier(timeout=timedelta(seconds=20))


def test_monitored_barrier_names_missing_ranks() -> None:
    with pytest.raises(RankError, match="missing after 1 s: rank 2"):
        run_ranks(late_for_the_barrier, 3, timeout=30)
    run_ranks(on_time_for_the_barrier, 3, timeout=30)  # the same worker processes still work
