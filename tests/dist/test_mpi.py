"""Tests of the back end mpi: collectives have their expected results, and ranks train as one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.dist import parallel_runs
from tests.dist import test_collectives as collectives
from tests.dist import test_compressed_collectives as compressed
from tests.dist import test_compressed_lists as compressed_lists
from tests.dist import test_diloco as diloco
from tests.dist import test_one_bit_adam as one_bit
from tests.dist import test_one_bit_lamb as lamb
from tests.dist import test_power_sgd as power_sgd
from tests.dist import test_quantized_messages as zero_plus
from tests.dist import test_zero_one_adam as zero_one
from tests.dist.device_tensor import DeviceTensor, EmulatedGpu
from tests.dist.equivalence_runs import Setting, complaints, expected, train_rank
from tests.dist.harness import run_ranks
from tests.dist.mpi_ranks import MpiWorld
from tests.dist.quick_rows import in_shares
from tests.dist.test_gloo_collective_support import what_works
from tests.dist.test_one_bit_adam import one_thread  # noqa: F401 - a fixture
from tests.oracle import Recipe
from windlass.observe.environment.backend_support import collective_support, operator_support


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, MpiWorld]]:
    started: dict[int, MpiWorld] = {}
    yield started
    for world in started.values():
        world.close()


@pytest.fixture(params=[2, 4])
def mpi(request: pytest.FixtureRequest, worlds: dict[int, MpiWorld]) -> MpiWorld:
    if request.param not in worlds:
        worlds[request.param] = MpiWorld(request.param)
    return worlds[request.param]


def call_everything() -> int:
    """Run the tests of all collectives of `windlass.compat.collectives`, on every dtype and shape."""
    assert dist.get_backend() == "mpi4py"
    cases = collectives.reduce_everything("gloo", 0 if dist.get_world_size() == 2 else 7)
    collectives.locate()
    collectives.move_everything()
    collectives.exchange_everything()
    collectives.talk_in_pairs()
    collectives.premultiply()
    collectives.out_of_order()
    move_uneven()
    return cases


def test_collectives_equal_the_plain_ones(mpi: MpiWorld) -> None:
    assert mpi.run(call_everything)[0] > 15


@pytest.mark.slow
def test_every_operator_on_every_dtype_equals_the_plain_reduction(mpi: MpiWorld) -> None:
    assert mpi.run(collectives.reduce_everything, "gloo", timeout=300.0)[0] > 150


@pytest.mark.parametrize("mpi", [4], indirect=True)
def test_groups_use_global_ranks(mpi: MpiWorld) -> None:
    mpi.run(collectives.sub_groups)


@pytest.mark.parametrize("mpi", [2], indirect=True)
def test_invalid_arguments_are_refused_before_anything_is_sent(mpi: MpiWorld) -> None:
    mpi.run(collectives.refuse_everything)


def miss_a_barrier() -> str:
    """Return this rank's error of a monitored barrier in which the last rank does not take part."""
    from datetime import timedelta

    from windlass.compat import collectives as comm

    text = ""
    if comm.get_rank() < comm.get_world_size() - 1:
        with pytest.raises(RuntimeError) as caught:
            comm.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
        text = str(caught.value)
    comm.barrier()
    return text


@pytest.mark.parametrize("mpi", [2], indirect=True)
def test_monitored_barrier_names_the_missing_rank(mpi: MpiWorld) -> None:
    assert "missing after 0 s: rank 1" in mpi.run(miss_a_barrier)[0]


def move_uneven() -> None:
    """Gather and scatter tensors of rank + 1 elements, also into strided memory and asynchronously."""
    from windlass.compat import collectives as comm

    rank, size = comm.get_rank(), comm.get_world_size()
    for dtype, late in ((torch.float32, False), (torch.bfloat16, True)):
        parts = [torch.arange(i + 1).to(dtype) + 10 * i for i in range(size)]
        found = [torch.zeros(2 * (i + 1), dtype=dtype)[::2] for i in range(size)]
        root = size - 1
        work = comm.gatherv(parts[rank], found if rank == root else None, root, async_op=late)
        if late:
            work.wait()
        assert all(a.equal(b) for a, b in zip(found, parts, strict=True)) == (rank == root)
        own = torch.zeros(2 * (rank + 1), dtype=dtype)[::2]
        work = comm.scatterv(own, parts if rank == 0 else None, 0, async_op=late)
        if late:
            work.wait()
        assert own.equal(parts[rank])


def test_uneven_gather_and_scatter_over_gloo() -> None:
    run_ranks(move_uneven, 3)


def call_torch() -> None:
    """Call `torch.distributed` itself: 16-bit sums, groups, works, futures, DDP and functional collectives."""
    from torch.distributed import _functional_collectives as functional
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.bfloat16, torch.float16, torch.int16, torch.complex64, torch.bool):
        own = torch.full((3, 2), rank + 1).to(dtype)
        work = dist.all_reduce(own.t(), async_op=True)  # not contiguous, so values pass through a buffer
        assert len(work.get_future().wait()) == 1
        assert work.is_success() and work.exception() is None, dtype
        assert own.eq(torch.tensor(size * (size + 1) // 2).to(dtype)).all(), dtype
    average = torch.tensor([rank, -7 * rank])
    dist.all_reduce(average, dist.ReduceOp.AVG)
    total = size * (size - 1) // 2
    assert average.tolist() == [total // size, int(-7 * total / size)]
    for dtype in (torch.uint8, torch.uint16, torch.uint64):
        average = torch.tensor([rank, 2 * rank + 1]).to(dtype)
        dist.all_reduce(average, dist.ReduceOp.AVG)
        assert average.tolist() == [total // size, (2 * total + size) // size], dtype

    groups = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    again = dist.new_group([0, 1])  # a second group of the same ranks has messages of its own
    own = torch.ones(1)
    dist.all_reduce(own, group=groups[rank // 2])
    assert own == 2 and dist.get_backend(groups[rank // 2]) == "mpi4py"
    if rank < 2:
        works = [dist.isend(torch.full((1,), float(i)), 1 - rank, group=g) for i, g in ((1, again), (0, groups[0]))]
        both = torch.zeros(2, 1)
        dist.recv(both[0], 1 - rank, group=groups[0])
        assert dist.recv(both[1], None, group=again) == 1 - rank
        assert both.tolist() == [[0], [1]]
        for work in works:
            work.wait()

    uneven = [torch.zeros(i + 1) for i in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in uneven] == [[float(i)] * (i + 1) for i in range(size)]
    parts = torch.zeros(size)
    dist.all_to_all_single(parts, torch.arange(size) + 10.0 * rank)
    assert parts.tolist() == [10.0 * other + rank for other in range(size)]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": other} for other in range(size)]
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[(size - 1) / 2] * 2]
    assert functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).tolist() == [size]
    for _ in range(2):  # destroying a group frees its communicator
        group = dist.new_group(list(range(size)), backend="mpi4py")
        dist.destroy_process_group(group)


def test_torch_distributed_over_mpi(mpi: MpiWorld) -> None:
    mpi.run(call_torch)


def misfit() -> list[str]:
    """Return the error messages of `torch.distributed`'s calls with tensors that do not fit each other."""
    from windlass.base.errors import CommunicationError

    calls: list[Any] = [
        lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2)),
        lambda: dist.all_gather_into_tensor(torch.empty(4, dtype=torch.float64), torch.ones(2)),
        lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(4)),
        lambda: dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(2)),
        lambda: dist.all_gather([torch.empty(2)], torch.ones(2)),
        lambda: dist.all_to_all_single(torch.empty(5), torch.ones(5)),
        lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [3, 3], [3, 3]),
        lambda: dist.all_to_all([torch.empty(1), torch.empty(1)], [torch.ones(2), torch.ones(2)]),
    ]
    texts = []
    for call in calls:
        with pytest.raises(CommunicationError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("mpi", [2], indirect=True)
def test_tensors_that_do_not_fit_are_refused_before_mpi_writes_to_them(mpi: MpiWorld) -> None:
    texts = mpi.run(misfit)[1]
    assert texts[0].startswith("all_gather over MPI: a tensor of shape [2] and torch.float32 does not fit one of")
    assert texts[4] == "all_gather over MPI: 1 tensors for 2 ranks; pass one for each"
    assert texts[6].startswith("all_to_all_single over MPI: [3, 3] are not 2 numbers that add up to the 4 rows")


Put = Callable[[torch.Tensor], torch.Tensor]


def device_calls(group: Any, put: Put, dtype: torch.dtype) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the name and the outputs of every method of the process group that moves tensors. `put` moves its inputs
    and outputs to a device."""
    rank, size = group.rank(), group.size()
    last, before, following = size - 1, (rank - 1) % size, (rank + 1) % size
    average, reduce, root = dist.AllreduceOptions(), dist.ReduceOptions(), dist.BroadcastOptions()
    average.reduceOp, reduce.rootRank, root.rootRank = dist.ReduceOp.AVG, last, last

    def own(*shape: int) -> torch.Tensor:
        return put((torch.arange(torch.Size(shape).numel()) + 3.0 * rank).view(shape).to(dtype))

    def blank(*shape: int) -> torch.Tensor:
        return put(torch.zeros(shape, dtype=dtype))

    def each(make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        return [make(3) for _ in range(size)]

    def wait(name: str, work: Any, *outputs: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
        work.wait()
        return name, list(outputs)

    for name, tensor in (("all_reduce", own(2, 3)), ("all_reduce of columns", own(2, 3).t())):
        yield wait(name, group.allreduce([tensor]), tensor)
    tensor = own(3)
    yield wait("average", group.allreduce([tensor], average), tensor)
    tensor = own(3)
    yield wait("reduce", group.reduce([tensor], reduce), tensor)
    tensor = blank(3)
    yield wait("reduce_scatter", group.reduce_scatter([tensor], [each(own)]), tensor)
    tensor = blank(3)
    yield wait("reduce_scatter_tensor", group.reduce_scatter_single(tensor, own(size, 3)), tensor)
    tensor = own(3)
    yield wait("broadcast", group.broadcast([tensor], root), tensor)
    parts = each(blank)
    yield wait("all_gather", group.allgather([parts], [own(3)]), *parts)
    tensor = blank(size, 3)
    yield wait("all_gather_into_tensor", group.all_gather_single(tensor, own(3)), tensor)
    tensor = blank(3, size).t()
    yield wait("all_gather into columns", group.all_gather_single(tensor, own(3)), tensor)
    parts = each(blank)
    yield wait("gather", group.gather([parts] if rank == last else [], [own(3)], root), *parts)
    tensor = blank(3)
    yield wait("scatter", group.scatter([tensor], [each(own)] if rank == last else [], root), tensor)
    tensor = blank(size, 2)
    yield wait("all_to_all_single", group.all_to_all_single(tensor, own(size, 2), [], []), tensor)
    parts = each(blank)
    yield wait("all_to_all", group.alltoall(parts, each(own)), *parts)
    sent, tensor = group.send([own(3)], following, 0), blank(3)
    yield wait("recv", group.recv([tensor], before, 0), tensor)
    sent.wait()


def stage(cuda_aware: bool) -> None:
    """Check the results for tensors of an emulated GPU, and that MPI uses host memory unless it is CUDA-aware."""
    from datetime import timedelta

    from mpi4py import MPI

    from windlass.comm import mpi_elements, mpi_process_group

    group = mpi_process_group.MpiProcessGroup(MPI, MPI.COMM_WORLD.Dup(), cuda_aware, timedelta(seconds=20))
    spec, where = mpi_elements.mpi_spec, ""

    def checked(mpi: Any, memory: torch.Tensor, *counts: Any) -> Any:
        assert isinstance(memory, DeviceTensor) == cuda_aware, (where, "memory for MPI")
        assert not (cuda_aware and gpu.pending), (where, "MPI does not wait for the stream")
        return spec(mpi, memory, *counts)

    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        wanted = dict(device_calls(group, lambda tensor: tensor, dtype))
        with (
            EmulatedGpu() as gpu,
            patch.object(mpi_elements, "mpi_spec", checked),
            patch.object(mpi_process_group, "mpi_spec", checked),
        ):
            calls = device_calls(group, gpu.put, dtype)
            for where in wanted:
                gpu.copies.clear()
                name, outputs = next(calls)
                assert name == where and bool(gpu.copies) != cuda_aware, (where, gpu.copies)
                assert all(tensor.device.type == "cuda" for tensor in outputs)
                for found, expected in zip(outputs, wanted[where], strict=True):
                    assert found.tolist() == expected.tolist(), (where, dtype)
    group.shutdown()


@pytest.mark.parametrize("mpi", [2], indirect=True)
@pytest.mark.parametrize("cuda_aware", [False, True])
def test_gpu_tensors_are_staged_unless_mpi_is_cuda_aware(mpi: MpiWorld, cuda_aware: bool) -> None:
    mpi.run(stage, cuda_aware)


def train(recipe: Recipe) -> list[Any]:
    """Train at every stage over MPI."""
    over_mpi = (("comm", {"backend": "mpi", "transport": "mpi"}),)
    return [train_rank("tied", recipe, Setting(stage=stage, config=over_mpi)) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_train_as_one_process(mpi: MpiWorld, precision: str) -> None:
    recipe = Recipe(ranks=mpi.world, steps=2, accumulation=2, precision=precision)
    wanted = expected("tied", recipe)
    for actual in zip(*mpi.run(train, recipe), strict=True):
        assert not complaints(list(actual), wanted, recipe)


PARALLEL = [
    parallel_runs.Case("llama", (("pp", 2),), stage=1, accumulation=2),
    parallel_runs.Case("gpt2", (("tp", 2),), stage=3, tied=True),
    parallel_runs.Case("llama", (("sp", 2),), stage=2),
    parallel_runs.Case("llama", (("sp", 2),), stage=3, sequence="ring"),
    parallel_runs.Case("mixtral", (("ep", 2),), stage=2),
    parallel_runs.Case("llama", (("pp", 2), ("tp", 2)), stage=3, tied=True, accumulation=2),
    parallel_runs.Case("mixtral", (("ep", 2), ("sp", 2)), stage=3, sequence="ring"),
    parallel_runs.Case("llama", (("pp", 2),), stage=2, world=4, accumulation=4),
]


# Call of MPI that carries the messages of an axis.
MESSAGES = {"pp": "send", "tp": "all_reduce", "ulysses": "all_to_all_single", "ring": "send", "ep": "all_to_all_single"}


def train_parallel(case: parallel_runs.Case) -> tuple[parallel_runs.Found, set[str]]:
    """Train two steps. Return the trace, and the names of the calls of MPI."""
    from windlass.comm.mpi_process_group import MpiProcessGroup

    calls, start = set[str](), MpiProcessGroup._start

    def noted(group: MpiProcessGroup, name: str, *more: Any) -> Any:
        calls.add(name.split()[0])
        return start(group, name, *more)

    with patch.object(MpiProcessGroup, "_start", noted):
        return parallel_runs.train(case, 2), calls


@pytest.mark.parametrize(
    ("mpi", "case"),
    [
        pytest.param(case.ranks, replace(case, transport="mpi"), marks=[pytest.mark.slow] if number else [])
        for number, case in enumerate(PARALLEL)
    ],
    indirect=["mpi"],
    ids=str,
)
def test_parallel_ranks_train_as_one_process(mpi: MpiWorld, case: parallel_runs.Case) -> None:
    by_rank = mpi.run(train_parallel, case)
    parallel_runs.hold_all(case, [found for found, _ in by_rank], parallel_runs.plain, 2)
    for axis, _ in case.axes:
        call = MESSAGES[case.sequence if axis == "sp" else axis]
        assert all(call in calls for _, calls in by_rank), (axis, by_rank[0][1])


# ------------------------------------------------------------------------------------------------ compressed messages


@pytest.mark.parametrize(
    ("mpi", "codecs"),
    [
        (2, ("identity", "sign")),
        *(
            pytest.param(ranks, (*compressed.CODECS, *compressed.OTHER_CODECS), marks=pytest.mark.slow)
            for ranks in (2, 4)
        ),
    ],
    indirect=["mpi"],
)
def test_compressed_collectives_equal_their_explicit_computation(mpi: MpiWorld, codecs: tuple[str, ...]) -> None:
    counts = mpi.run(compressed.all_cases, "mpi", codecs, timeout=240.0)
    assert counts == [len(codecs) * len(compressed.SHAPES) * len(compressed.DTYPES)] * mpi.world
    assert max(mpi.run(compressed.beside_plain, "mpi")) <= (0.0 if mpi.world == 2 else 1e-3)
    mpi.run(compressed.along_axes_and_rings, "mpi")


@pytest.mark.parametrize(
    ("mpi", "codec"),
    [(2, "sign"), *(pytest.param(4, codec, marks=pytest.mark.slow) for codec in ("sign", "int4", "int8", "topk"))],
    indirect=["mpi"],
)
def test_compressed_lists_with_error_feedback_equal_their_simulation(mpi: MpiWorld, codec: str) -> None:
    mpi.run(compressed_lists.two_phases, "mpi", codec)


ZERO_PLUS: dict[str, tuple[list[zero_plus.Case], Callable[..., None]]] = {
    "lossless": (zero_plus.EXACT, partial(zero_plus.require_exact, zero_plus.EXACT)),
    "lossy": (zero_plus.LOSSY, partial(zero_plus.require_bounds, zero_plus.LOSSY)),
    "one lossy": (zero_plus.LOSSY[:2], partial(zero_plus.require_bounds, zero_plus.LOSSY[:2])),
    "bytes": (zero_plus.TWO_HOPS, zero_plus.require_bytes),
}


@pytest.mark.parametrize(
    ("mpi", "law"),
    [
        (2, "one lossy"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((2, "lossless"), (2, "lossy"), (4, "bytes"))),
    ],
    indirect=["mpi"],
)
def test_quantized_messages_are_exact_or_within_their_bounds(mpi: MpiWorld, law: str) -> None:
    cases, require = ZERO_PLUS[law]
    require(mpi.run(zero_plus.run_cases, [replace(case, transport="mpi") for case in cases], timeout=120.0))


# The quick row runs the first two cases of each optimizer.
OPTIMIZERS: dict[str, list[one_bit.Case]] = {
    "one_bit": [one_bit.Case(0), one_bit.Case(2, accumulation=2), one_bit.Case(1, clipping=0.1)],
    "zero_one": [replace(zero_one.CASE, stage=stage) for stage in (0, 1, 2)],
    "lamb": [replace(lamb.CASE, stage=stage) for stage in (0, 2, 1)],
    "diloco": [
        diloco.CASE,
        diloco.with_params(diloco.CASE, codec="identity", fragments=2, overlap_steps=2, mixing=0.5),
    ],
}
LAWS: dict[str, Any] = {
    "one_bit": one_bit.require_law,
    "zero_one": zero_one.require_law,
    "lamb": lamb.require_law,
    "diloco": diloco.require_law,
}


def train_compressed(cases: dict[str, list[one_bit.Case]], folder: str) -> dict[str, Any]:
    return {
        "one_bit": one_bit.run_cases(cases["one_bit"], folder),
        "zero_one": one_bit.run_cases(cases["zero_one"], folder),
        "lamb": [lamb.run_lamb(case, folder) for case in cases["lamb"]],
        "diloco": diloco.run_all(cases["diloco"]),
        "power_sgd": power_sgd.with_hook(5, "mpi"),
    }


@pytest.mark.parametrize(
    ("mpi", "every"),
    [(2, False), *(pytest.param(ranks, True, marks=pytest.mark.slow) for ranks in (2, 4))],
    indirect=["mpi"],
)
def test_compressed_optimizers_equal_their_simulations(mpi: MpiWorld, every: bool, tmp_path: Path) -> None:
    cases = {
        name: [replace(case, transport="mpi", ranks=mpi.world) for case in (of_one if every else of_one[:2])]
        for name, of_one in OPTIMIZERS.items()
    }
    by_rank = mpi.run(train_compressed, cases, str(tmp_path), timeout=240.0)
    for name, require_law in LAWS.items():
        for number, case in enumerate(cases[name]):
            require_law(case, [found[name][number] for found in by_rank])
    power_sgd.require_hook([found["power_sgd"] for found in by_rank])


@pytest.mark.parametrize(
    ("mpi", "case"),
    [
        (2, one_bit.Case(2)),
        pytest.param(4, one_bit.Case(0, ranks=4), marks=pytest.mark.slow),
        pytest.param(2, diloco.OVERLAPPED, marks=pytest.mark.slow),
    ],
    indirect=["mpi"],
)
def test_a_resumed_run_is_exact(mpi: MpiWorld, case: one_bit.Case, tmp_path: Path) -> None:
    case = replace(case, transport="mpi")
    at = one_bit.FREEZE + 2
    one_bit.require_equal_runs(*(mpi.run(run, case, str(tmp_path), at) for run in (one_bit.save, one_bit.resume)))


@pytest.mark.parametrize("mpi", [2], indirect=True)
@in_shares
def test_a_nan_is_named_and_never_enters_the_error_feedback(mpi: MpiWorld, every: bool) -> None:
    cases = [replace(case, transport="mpi") for case in (one_bit.BAD if every else one_bit.BAD[:1])]
    one_bit.require_a_named_nan(cases, mpi.run(one_bit.errors_around_a_nan, cases))


def fail() -> list[str]:
    """Return the error messages of calls that cannot work."""
    from datetime import timedelta

    from windlass.base.errors import WindlassError
    from windlass.comm import mpi_library
    from windlass.comm.choose_transport import choose_transport_name
    from windlass.comm.rank_group import world_group

    texts = []

    def note(call: Any) -> None:
        try:
            call()
        except WindlassError as error:
            texts.append(str(error))

    mpi = mpi_library.load_mpi()
    note(lambda: choose_transport_name("gloo", world_group(), torch.device("cpu")))
    note(lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND))
    peer = 1 - dist.get_rank()  # the peer receives four bytes into three
    sent = dist.isend(torch.ones(1), peer)
    note(lambda: dist.recv(torch.ones(3, dtype=torch.int8), peer))
    sent.wait()
    note(lambda: mpi_library.check_world(mpi, "torchrun", dist.get_rank(), 7))
    if dist.get_rank() == 0:
        note(lambda: dist.irecv(torch.ones(1), 1, tag=9).wait(timedelta(seconds=0.05)))
    dist.barrier()
    if dist.get_rank() == 1:  # MPI writes this message to the memory of the dropped work
        dist.send(torch.ones(1), 0, tag=9)
    dist.barrier()
    return texts


@pytest.mark.parametrize("mpi", [2], indirect=True)
def test_errors_name_the_call_and_the_fix(mpi: MpiWorld) -> None:
    first = mpi.run(fail)[0]
    for text, words in zip(
        first,
        (
            "comm.transport = 'gloo', but the ranks are connected by MPI",
            "MPI has no operator ReduceOp.BAND for torch.float32",
            "recv from rank 1 of the group of rank 0 in a group of 2 over MPI failed: Message truncated",
            "torchrun started rank 0 of 7, but MPI (MPICH",
            "recv from rank 1 of the group of rank 0 in a group of 2 over MPI waited 0 s for the other ranks",
        ),
        strict=True,
    ):
        assert words in text


@pytest.mark.parametrize("mpi", [2], indirect=True)
def test_mpi_column_matches_mpi(mpi: MpiWorld) -> None:
    names = [
        name for table in (collective_support(), operator_support()) for name, have in table.items() if have["mpi"]
    ]
    for works in mpi.run(what_works):
        assert works == names
