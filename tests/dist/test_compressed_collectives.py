"""Tests that compressed collectives equal their explicit computation from all ranks' tensors, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import RankError, run_ranks
from tests.toy_codecs import BlockInt8Codec
from windlass.base.errors import CommunicationError
from windlass.comm.byte_channel import ByteChannel, ProcessGroupChannel
from windlass.comm.choose_channel import choose_channel
from windlass.comm.codec import Codec, accumulation_dtype, get_codec, list_codecs
from windlass.comm.compressed_collectives import CompressedCollectives
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_shape import MeshShape
from windlass.comm.mpi_library import BACKEND
from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory_channel import SharedMemoryChannel

PAGE = Path(__file__).parents[2] / "docs" / "compressed-communication.md"
WORLDS = [(1, "shm"), (1, "gloo"), (2, "shm"), (2, "gloo"), (4, "shm"), (4, "gloo")]
CODECS = ("identity", "bf16", "sign", "int4", BlockInt8Codec.name)
OTHER_CODECS = tuple(name for name in list_codecs() if name not in CODECS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "odd": lambda t: t[:37],
    "matrix": lambda t: t[:36].view(12, 3),
    "transposed": lambda t: t[:35].view(5, 7).t(),
    "strided": lambda t: t[:54:2],
    "fewer than ranks": lambda t: t[:1],
    "empty": lambda t: t[:0],
    "empty rows": lambda t: t[:0].view(3, 0),
}
TIMEOUT = timedelta(seconds=60)


def world_group() -> RankGroup:
    return RankGroup(dist.group.WORLD, tuple(range(dist.get_world_size())), dist.get_rank())  # type: ignore[arg-type]


class CountingChannel:
    """Channel that forwards everything and counts the received bytes."""

    def __init__(self, inner: ByteChannel) -> None:
        self.inner, self.name, self.group, self.received = inner, inner.name, inner.group, 0

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        self.received += sum(tensor.numel() for tensor in receives.values())
        self.inner.exchange(sends, receives)

    def all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> None:
        self.received += sum(tensor.numel() for tensor in receives.values())
        self.inner.all_gather(own, receives)

    def start_exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        self.received += sum(tensor.numel() for tensor in receives.values())
        return self.inner.start_exchange(sends, receives)

    def start_all_gather(self, own: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> Callable[[], None]:
        self.received += sum(tensor.numel() for tensor in receives.values())
        return self.inner.start_all_gather(own, receives)

    def broadcast(self, message: torch.Tensor, source: int) -> None:
        self.received += message.numel() if source != self.group.index else 0
        self.inner.broadcast(message, source)


def collectives(transport: str, codec: Codec) -> CompressedCollectives:
    """Return the collectives, with windows of 48 bytes in shared memory so that a message takes several windows."""
    channel = choose_channel(transport, world_group(), torch.device("cpu"), timeout=TIMEOUT)
    assert channel.name == ("alone" if channel.group.size == 1 else BACKEND if transport == "mpi" else transport)
    if transport == "shm" and channel.group.size > 1:
        channel = SharedMemoryChannel(world_group(), TIMEOUT, window=48)
    return CompressedCollectives(CountingChannel(channel), codec)


def of_ranks(shape: str, dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    """Return the tensor of each rank."""
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(40 + rank)
        made.append(SHAPES[shape](torch.randn(64, generator=generator).to(dtype)))
    return made


# ------------------------------------------------------------- expected results, computed from all tensors


def passed(codec: Codec, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the tensor after one message, in the dtype of sums. Computes bf16 and identity without the codec."""
    wide = accumulation_dtype(tensor.dtype)
    if codec.name == "identity" or ranks == 1:
        return tensor.to(wide)
    if codec.name == "bf16":
        return tensor.bfloat16().to(wide)
    flat, out = tensor.contiguous().view(-1), torch.empty(tensor.numel(), dtype=wide)
    if flat.numel():
        encoded = torch.empty(codec.encoded_size(flat.numel(), tensor.dtype), dtype=torch.uint8)
        codec.encode(flat, encoded)
        codec.decode(encoded, out, tensor.dtype)
    return out.view(tensor.shape)


def summed(codec: Codec, parts: list[torch.Tensor], factor: float) -> torch.Tensor:
    total = passed(codec, parts[0], len(parts)).clone()
    for part in parts[1:]:
        total = total + passed(codec, part, len(parts))
    return (total * factor).to(parts[0].dtype)


def split(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return list(torch.tensor_split(tensor, ranks))


def nbytes(codec: Codec, tensor: torch.Tensor) -> int:
    return codec.encoded_size(tensor.numel(), tensor.dtype) if tensor.numel() else 0


def same(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (what, found.shape, wanted.shape)
    assert torch.equal(found.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)), (
        what
    )


class Case:
    """One tensor per rank, with the expected results and received bytes of each collective."""

    def __init__(self, calls: CompressedCollectives, codec: Codec, shape: str, dtype: torch.dtype) -> None:
        self.calls, self.codec, self.what = calls, codec, (codec.name, shape, dtype)
        self.ranks, self.rank = calls.size, calls.group.index
        self.tensors = of_ranks(shape, dtype, self.ranks)
        self.own, self.dtype = self.tensors[self.rank], dtype

    def check(self) -> None:
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
            before = self.own.clone()
            self.received(getattr(self, name), name)
            same(self.own, before, (self.what, name, "changed its input"))

    def received(self, check: Callable[[], list[int]], name: str) -> None:
        """Run the check, and compare received and reported bytes with the sizes by sender that the check returns."""
        counter, key = self.calls.channel, f"compressed_{name}"
        assert isinstance(counter, CountingChannel)
        counter.received, counted = 0, self.calls.traffic.bytes_moved[key]
        expected = sum(size for sender, size in enumerate(check()) if sender % self.ranks != self.rank)
        assert counter.received == expected, (self.what, name, counter.received, expected)
        assert self.calls.traffic.bytes_moved[key] - counted == expected, (self.what, name)

    def all_reduce(self) -> list[int]:
        flat = [split(tensor.contiguous().view(-1), self.ranks) for tensor in self.tensors]
        sums = [summed(self.codec, [parts[i] for parts in flat], 0.5) for i in range(self.ranks)]
        expected = torch.cat([passed(self.codec, part, self.ranks).to(self.dtype) for part in sums])
        actual = self.own.clone(memory_format=torch.preserve_format)
        assert self.calls.all_reduce(actual, factor=0.5) is actual
        same(actual, expected.view(self.own.shape), self.what)
        return [nbytes(self.codec, flat[0][self.rank])] * self.ranks + [nbytes(self.codec, part) for part in sums]

    def reduce_scatter(self) -> list[int]:
        parts = [split(tensor, self.ranks)[self.rank] for tensor in self.tensors]
        same(self.calls.reduce_scatter(self.own, factor=0.25), summed(self.codec, parts, 0.25), self.what)
        sizes = [0] * (self.ranks - 1) + [self.own.shape[0]]  # all rows go to the last rank
        local = [tensor.split(sizes)[self.rank] for tensor in self.tensors]
        same(self.calls.reduce_scatter(self.own, sizes), summed(self.codec, local, 1.0), self.what)
        return [nbytes(self.codec, parts[0])] * self.ranks + [nbytes(self.codec, local[0])] * self.ranks

    def all_gather(self) -> list[int]:
        lengths = [max(0, self.own.shape[0] - rank) for rank in range(self.ranks)]
        parts = [tensor[:length] for tensor, length in zip(self.tensors, lengths, strict=True)]
        expected = torch.cat([passed(self.codec, part, self.ranks).to(self.dtype) for part in parts])
        same(self.calls.all_gather(parts[self.rank], lengths), expected, self.what)
        full = torch.cat([passed(self.codec, tensor, self.ranks).to(self.dtype) for tensor in self.tensors])
        same(self.calls.all_gather(self.own), full, self.what)
        return [nbytes(self.codec, part) for part in (*parts, *self.tensors)]

    def all_to_all(self) -> list[int]:
        tables = [[cut_.shape[0] for cut_ in split(self.own, self.ranks)]] * self.ranks
        tables = [row[rank:] + row[:rank] for rank, row in enumerate(tables)]  # rows from each rank to each rank
        from_each = [self.tensors[rank].split(tables[rank])[self.rank] for rank in range(self.ranks)]
        expected = torch.cat([passed(self.codec, part, self.ranks).to(self.dtype) for part in from_each])
        actual = self.calls.all_to_all(self.own, tables[self.rank], [row[self.rank] for row in tables])
        same(actual, expected, self.what)
        return [nbytes(self.codec, part) for part in from_each]

    def broadcast(self) -> list[int]:
        source = self.ranks - 1
        actual = self.own.clone(memory_format=torch.preserve_format)
        expected = passed(self.codec, self.tensors[source], self.ranks).to(self.dtype)
        same(self.calls.broadcast(actual, source), expected, self.what)
        return [0] * source + [nbytes(self.codec, self.own)]


def all_cases(transport: str, names: tuple[str, ...]) -> int:
    count = 0
    for name in names:
        codec = BlockInt8Codec() if name == BlockInt8Codec.name else get_codec(name)
        calls = collectives(transport, codec)
        for shape in SHAPES:
            for dtype in DTYPES:
                Case(calls, codec, shape, dtype).check()
                count += 1
    return count


# Four ranks are slow here; the tests of the identity codec and of axes below have four ranks too.
@pytest.mark.parametrize(
    ("ranks", "transport", "codecs"),
    [
        *((*world, CODECS) for world in WORLDS if world[0] < 4),
        *(pytest.param(*world, CODECS, marks=pytest.mark.slow) for world in WORLDS if world[0] == 4),
        *(pytest.param(*world, OTHER_CODECS, marks=pytest.mark.slow) for world in WORLDS),
    ],
)
def test_collectives_equal_their_explicit_computation(ranks: int, transport: str, codecs: tuple[str, ...]) -> None:
    expected = len(codecs) * len(SHAPES) * len(DTYPES)
    assert run_ranks(all_cases, ranks, transport, codecs, transport=transport, timeout=120.0) == [expected] * ranks


def integer_sums() -> None:
    calls, ranks = collectives("gloo", get_codec("identity")), dist.get_world_size()
    for dtype in (torch.int64, torch.int32, torch.uint8):
        own = torch.arange(1, 5).to(dtype)
        wanted = (own.long() * ranks * 0.5).to(dtype)
        same(calls.reduce_scatter(own, factor=0.5), split(wanted, ranks)[dist.get_rank()], dtype)
        same(calls.all_reduce(own.clone(), factor=0.5), wanted, dtype)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_factor_keeps_an_integer_dtype_on_any_number_of_ranks(ranks: int) -> None:
    run_ranks(integer_sums, ranks, transport="gloo")


# ------------------------------------------------------------------- identity codec against plain collectives


def beside_plain(transport: str) -> float:
    """Return the largest relative difference of codec identity from gloo's all-reduce, which sums in another order."""
    calls, ranks = collectives(transport, get_codec("identity")), dist.get_world_size()
    own = torch.randn(1003, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain = own.clone()
    dist.all_reduce(plain)
    result = calls.all_reduce(own.clone())
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(gathered, own)
    same(calls.all_gather(own), torch.cat(gathered), "all_gather")
    # torch conjugates this view only when it is read
    waves = [torch.view_as_complex(one[:6].view(3, 2)).conj() for one in (own, *gathered)]
    assert torch.equal(calls.all_gather(waves[0]), torch.cat(waves[1:]).resolve_conj())
    rows = own[:1000].view(ranks * 2, -1).clone()
    swapped = torch.empty_like(rows)
    dist.all_to_all_single(swapped, rows)
    same(calls.all_to_all(rows), swapped, "all_to_all")
    counts = torch.arange(7) * (dist.get_rank() + 1)
    assert torch.equal(calls.all_reduce(counts.clone()), torch.arange(7) * ranks * (ranks + 1) // 2)
    return float(((result - plain).abs() / plain.abs().clamp(min=1e-3)).max())


@pytest.mark.parametrize(("ranks", "transport"), WORLDS)
def test_identity_codec_equals_the_plain_collective(ranks: int, transport: str) -> None:
    # two addends have only one order, so the sums are bitwise equal
    limit = 0.0 if ranks <= 2 else 1e-3
    assert max(run_ranks(beside_plain, ranks, transport, transport=transport)) <= limit


# --------------------------------------------------------- axes, point-to-point, round trips and errors


def along_axes_and_rings(transport: str) -> None:
    """Send messages along one axis of a mesh, and around a ring in which only rank 0 sends before it receives."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = build_mesh(MeshShape(tp=2, dp_shard=ranks // 2))
    calls = CompressedCollectives(ProcessGroupChannel(mesh.tp.group, "axis tp"), "bf16", mesh.tp.traffic)
    values = torch.full((5,), 1.001 + rank)
    together = torch.full((5,), 1.001 + rank // 2 * 2).bfloat16().float()
    together = (together + torch.full((5,), 1.001 + rank // 2 * 2 + 1).bfloat16().float()).bfloat16().float()
    same(calls.all_reduce(values.clone()), together, "over an axis")
    own, others = (3, 2) if rank % 2 == 0 else (2, 3)
    assert mesh.tp.traffic.bytes_moved["compressed_all_reduce"] == 2 * own + 2 * others
    ring = collectives(transport, get_codec("bf16"))
    if rank == 0:
        ring.send(values.repeat(100), 1)
        received = ring.recv(torch.empty(500), ranks - 1)
    else:
        received = ring.recv(torch.empty(500), rank - 1)
        ring.send(values.repeat(100), (rank + 1) % ranks)
    same(received, torch.full((500,), 1.001 + (rank - 1) % ranks).bfloat16().float(), "around a ring")
    assert ring.traffic.bytes_moved["compressed_recv"] == 1000


@pytest.mark.parametrize(("ranks", "transport"), [(2, "shm"), (2, "gloo"), (4, "shm")])
def test_axes_and_point_to_point(ranks: int, transport: str) -> None:
    run_ranks(along_axes_and_rings, ranks, transport, transport=transport)


def round_trips(transport: str) -> None:
    calls = collectives(transport, BlockInt8Codec())
    own = torch.randn(100, generator=torch.Generator().manual_seed(dist.get_rank()))
    gathered = calls.all_gather(own).view(2, 100)[dist.get_rank()]
    same(calls.round_trip(own), gathered, "one message")
    assert not torch.equal(own, gathered)
    swapped = calls.all_to_all(own, [30, 70], [30, 30] if dist.get_rank() == 0 else [70, 70])
    parts = calls.round_trip(own, [30, 70]).split([30, 70])
    local = swapped.view(2, -1)[dist.get_rank()]
    same(local, parts[dist.get_rank()], "cut as the collective cuts")
    parameter = torch.nn.Parameter(own.clone())
    same(calls.all_reduce(parameter).detach(), calls.all_reduce(own.clone()), "a parameter")


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_round_trip_shows_what_peers_decode(transport: str) -> None:
    run_ranks(round_trips, 2, transport, transport=transport)


def sent_by_the_page(transport: str) -> None:
    page: dict[str, Any] = {"__name__": "codec_page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), page)
    assert page["channel"].name == transport
    same(page["total"], torch.full((5,), 1.5), "the mean of equal tensors")
    assert page["collectives"].traffic.bytes_moved["compressed_all_reduce"] == 2 * 5


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_documented_example_sends(transport: str) -> None:
    run_ranks(sent_by_the_page, 2, transport, transport=transport)


def absent(case: str) -> str:
    """Return the error on rank 0 when a peer does not take part."""
    group = world_group()
    channel = SharedMemoryChannel(group, timedelta(seconds=1), window=48)
    calls = CompressedCollectives(channel, "identity")
    text = ""
    if group.index == 0:
        cases: dict[str, Callable[[], Any]] = {
            "recv": lambda: calls.recv(torch.empty(5), 1),
            "send": lambda: calls.send(torch.zeros(500), 1),
            "all_reduce": lambda: calls.all_reduce(torch.zeros(5)),
        }
        try:
            cases[case]()
        except CommunicationError as error:
            text = str(error)
    dist.barrier()
    return text


@pytest.mark.parametrize("case", ["recv", "send", "all_reduce"])
def test_missing_peer_is_named(case: str) -> None:
    text, nothing = run_ranks(absent, 2, case)
    assert "did not join a compressed collective in shared memory within 1 s" in text and text.startswith("rank 1")
    assert nothing == ""


def wrong(case: str) -> None:
    group = world_group()
    channel = choose_channel("auto", group, torch.device("cpu"), timeout=TIMEOUT)
    if case == "codecs":
        CompressedCollectives(channel, "bf16" if group.index else "identity")
    calls = CompressedCollectives(channel, "bf16")
    cases: dict[str, Callable[[], Any]] = {
        "dtype": lambda: calls.all_reduce(torch.zeros(3, 2, dtype=torch.int32)),
        "name": lambda: CompressedCollectives(channel, "zip"),
        "sizes": lambda: calls.reduce_scatter(torch.zeros(5), [2, 2]),
        "own": lambda: calls.all_gather(torch.zeros(5), [4, 4]),
        "rows": lambda: calls.all_to_all(torch.zeros(5)),
        "receives": lambda: calls.all_to_all(torch.zeros(4), [2, 2], [3, 1]),
        "source": lambda: calls.broadcast(torch.zeros(2), 5),
        "peer": lambda: calls.send(torch.zeros(5), group.index),
        "scalar": lambda: calls.all_gather(torch.tensor(1.0)),
    }
    try:
        cases[case]()
    except Exception:
        # An exchange still works, so no message is left in the channel.
        total = CompressedCollectives(channel, "identity").all_reduce(torch.ones(3))
        assert torch.equal(total, torch.full((3,), float(group.size)))
        raise


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("codecs", "CodecError", "different codecs (rank 0: 'identity', rank 1: 'bf16')"),
        ("dtype", "CodecError", "codec 'bf16' does not accept a tensor of torch.int32 and shape (3, 2)"),
        ("name", "CodecError", "there is no codec named 'zip'"),
        ("sizes", "CollectiveArgumentError", "5 rows cannot be split into parts of [2, 2] for 2 ranks"),
        ("own", "CollectiveArgumentError", "has 5 rows"),
        ("rows", "CollectiveArgumentError", "all_to_all cannot split 5 rows into 2 equal parts"),
        ("receives", "CollectiveArgumentError", "`receives` is [3, 1] and `sends` is [2, 2]"),
        ("source", "CollectiveArgumentError", "group index 5 is not a peer"),
        ("peer", "CollectiveArgumentError", "is not a peer of rank"),
        ("scalar", "CollectiveArgumentError", "a scalar has no rows"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(case: str, kind: str, text: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(wrong, 2, case)
    assert kind in caught.value.kinds and text in str(caught.value)
