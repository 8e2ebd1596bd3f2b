"""Rank that measures the rates of its machine, and the step times of configurations."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from rig.link import pace
from rig.models import build, samples
from rig.simulated_cases import KERNELS, LARGE_ELEMENTS, LENGTH, MODEL, ONE_STAGE, SAMPLES, WIRE_ELEMENTS, TimedCase

_TIMED, _UNTIMED = 3, 1
_REPETITIONS, _SMALL_CALLS = 9, 10
_BLOCKING = ("tp", "sp")
"""Axes whose ranks compute nothing during a collective."""
_PRODUCTS = 4
"""Products before each collective: about as many as between two collectives of a layer."""


class TimedRank:
    """Worker of a `RankPool`. The constructor is collective.

    Args:
        meeting: rendezvous URL of the ranks.
    """

    def __init__(self, ranks: int, rank: int, meeting: str) -> None:
        from windlass.comm.bootstrap import init_distributed

        torch.set_num_threads(1)
        init_distributed(init_method=meeting)
        self._ranks, self._rank, self._link = ranks, rank, 0

    def limit(self, link: int) -> None:
        """Limit the connections between ranks, also of engines that are built later, to `link` bytes a second."""
        self._link = link
        pace(link)

    def measure(self, case: TimedCase) -> dict[str, list[float]]:
        """Return repeated measurements, in seconds, of kernels and of collectives in the groups of the case's mesh, on
        all ranks at once, and for a pipeline also on its first stage alone. Collective."""
        tokens, hidden, inner = SAMPLES * LENGTH, MODEL.hidden, MODEL.intermediate
        x, up, down = torch.randn(tokens, hidden), _weight(inner, hidden), _weight(hidden, inner)
        x.requires_grad_()

        def products() -> None:
            torch.nn.functional.linear(torch.nn.functional.linear(x, up), down).sum().backward()

        head = hidden // MODEL.heads
        q, k, v = (torch.randn(SAMPLES, MODEL.heads, LENGTH, head, requires_grad=True) for _ in range(3))

        def attention() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        y, z = torch.randn(tokens, inner), torch.randn(tokens, inner)

        def elementwise() -> None:
            torch.mul(y, z)
            torch.nn.functional.silu(y)

        a, b, c = (torch.zeros(LARGE_ELEMENTS) for _ in range(3))

        def large_tensors() -> None:
            torch.add(a, b, out=c)

        kernels = dict(zip(KERNELS, (products, attention, elementwise, large_tensors), strict=True))
        found: dict[str, list[float]] = {}
        for suffix, is_working in self._crowds(case).items():
            for name, work in kernels.items():
                found[f"{name}{suffix}"] = self._seconds(work if is_working else _nothing)
        return {**found, **self._measure_links(case)}

    def _crowds(self, case: TimedCase) -> dict[str, bool]:
        """Return each set of ranks to time, as `{suffix of the measurement's name: True if this rank is in the set}`.

        In a pipeline, the first stage is also timed alone, because waiting stages leave their share of the cores to it.
        """
        stages = case.axes.get("pp", 1)
        return {"": True} | ({ONE_STAGE: self._rank * stages < self._ranks} if stages > 1 else {})

    def _measure_links(self, case: TimedCase) -> dict[str, list[float]]:
        from windlass.comm.mesh import build_mesh
        from windlass.comm.mesh_shape import MeshShape

        sizes = {axis: case.axes.get(axis, 1) for axis in ("pp", "sp", "tp")}
        shard = self._ranks // (sizes["pp"] * sizes["sp"] * sizes["tp"])
        mesh = build_mesh(MeshShape(dp_shard=shard, **sizes))
        found: dict[str, list[float]] = {}
        for suffix, elements, numel, calls in (
            ("", WIRE_ELEMENTS, SAMPLES * LENGTH * MODEL.hidden, 1),
            (", one element", mesh.dense.data.size, 1, _SMALL_CALLS),
        ):
            works: dict[str, Callable[[], Any]] = {}
            if mesh.dense.data.size > 1:
                works["data"] = self._wire(mesh.dense.data, elements)
            works |= self._axes(mesh, numel)
            pace(self._link)
            for name, work in works.items():
                measure = self._seconds_between_products if name in _BLOCKING else self._seconds
                for crowd, is_working in self._crowds(case).items():
                    if name != "pp" or not crowd:
                        found[f"{name}{suffix}{crowd}"] = measure(work if is_working else _nothing, calls)
        mesh.close()
        return found

    def _axes(self, mesh: Any, numel: int) -> dict[str, Callable[[], Any]]:
        """Return an operation on activations along each axis of several ranks."""
        works: dict[str, Callable[[], Any]] = {}
        tp, sp, pp = mesh.tp, mesh.sp, mesh.pp
        activation = torch.zeros(numel)
        if tp.size > 1:
            works["tp"] = lambda: tp.all_reduce(activation)
        if sp.size > 1:
            rows = torch.zeros(sp.size, -(-numel // sp.size))
            works["sp"] = lambda: sp.all_to_all(rows)
        if pp.size > 1:
            is_sender = pp.index % 2 == 0
            other = pp.index + 1 if is_sender else pp.index - 1
            works["pp"] = lambda: (pp.group.send if is_sender else pp.group.receive)(activation, other)
        return works

    def _wire(self, group: Any, elements: int) -> Callable[[], None]:
        """Return a function that reduces and gathers among the data ranks, as the engine does."""
        from windlass.comm.choose_transport import choose_transport
        from windlass.comm.transport import BufferRequest, WireOptions

        cpu = torch.device("cpu")
        ours, _ = choose_transport("gloo", group, cpu, ways=WireOptions(), timeout=timedelta(minutes=5))
        elements -= elements % group.size
        need = BufferRequest(elements, torch.float32)
        gradients, parameters = ours.allocate([need, need], cpu, lanes=1)
        out = torch.zeros(elements // group.size)

        def both() -> None:
            reduction = ours.reduce(0, gradients, out, add=False, factor=1.0, elements=elements, wire=torch.float32)
            reduction.wait()
            ours.publish(parameters)
            ours.all_gather(parameters, elements=elements).wait()

        return both

    def _seconds(self, work: Callable[[], Any], calls: int = 1) -> list[float]:
        """Return repeated measurements of the mean seconds of `calls` calls in a row, which start at a barrier."""
        from windlass.comm.rank_group import world_group

        times = []
        for _ in range(_UNTIMED + _REPETITIONS):
            world_group().barrier()
            start = time.perf_counter()
            for _ in range(calls):
                work()
            times.append((time.perf_counter() - start) / calls)
        return times[_UNTIMED:]

    def _seconds_between_products(self, work: Callable[[], Any], calls: int) -> list[float]:
        """Return repeated measurements of the seconds that a collective adds to the products before it.

        Ranks that have just computed arrive at different times, and the threads that transfer have to be scheduled. A
        collective that follows another one waits for neither.
        """
        rows, weight = torch.randn(SAMPLES * LENGTH, MODEL.hidden), torch.randn(MODEL.hidden, MODEL.hidden)

        def products() -> None:
            for _ in range(_PRODUCTS if work is not _nothing else 0):
                torch.mm(rows, weight)

        def both() -> None:
            products()
            work()

        calls = max(calls, _SMALL_CALLS)
        pairs = zip(self._seconds(both, calls), self._seconds(products, calls), strict=True)
        return [max(0.0, together - alone) for together, alone in pairs]

    def train(self, case: TimedCase) -> list[float]:
        """Return the seconds of each timed step, from a barrier until all ranks have finished. Collective."""
        import windlass
        from windlass.comm.rank_group import world_group

        engine: Any = windlass.initialize(model=build(MODEL), config=case.config())[0]
        ids = samples(MODEL.vocabulary, SAMPLES, LENGTH, engine.data_loading_ranks[1])
        batches = [{"input_ids": ids, "labels": ids}] * case.micro_batches
        pace(self._link)
        times = []
        for step in range(_UNTIMED + _TIMED):
            world_group().barrier()
            start = time.perf_counter()
            if engine.mesh.pp.size > 1:
                engine.train_batch(iter(batches))
            else:
                for batch in batches:
                    engine.backward(engine(**batch).loss)
                    engine.step()
            world_group().barrier()
            if step >= _UNTIMED:
                times.append(time.perf_counter() - start)
        engine.destroy()
        return times


def _nothing() -> None:
    pass


def _weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, requires_grad=True)
