"""Rank that measures the rates of its machine, and the step times of configurations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from rig.models import build, samples
from rig.simulated_cases import LENGTH, MODEL, SAMPLES, TimedCase

_TIMED, _UNTIMED = 5, 2


class TimedRank:
    """Worker of a `RankPool`. The constructor is collective.

    Args:
        meeting: URL at which the ranks find each other.
    """

    def __init__(self, ranks: int, rank: int, meeting: str) -> None:
        from windlass.comm.bootstrap import init_distributed

        torch.set_num_threads(1)
        init_distributed(init_method=meeting)
        self._ranks, self._rank = ranks, rank

    def measure(self) -> dict[str, float]:
        """Measure the rates of kernels and collectives while all ranks do the same. Collective."""
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

        scores = SAMPLES * MODEL.heads * LENGTH * LENGTH * head
        found = {
            "product_rate": 12.0 * tokens * hidden * inner / self._seconds(products),
            "attention_rate": (0.5 * 4 + 0.5 * 8 * 1.25) * scores / self._seconds(attention),
            "memory_rate": 4.0 * 5 * tokens * inner / self._seconds(elementwise),
        }
        if self._ranks > 1:
            found |= self._measure_wire()
        return found

    def _measure_wire(self) -> dict[str, float]:
        from windlass.comm.choose_transport import choose_transport
        from windlass.comm.rank_group import world_group
        from windlass.comm.transport import BufferRequest, WireOptions

        group, cpu, elements = world_group(), torch.device("cpu"), 2_400_000
        ways = WireOptions()
        ours, _ = choose_transport("gloo", group, cpu, ways=ways, timeout=timedelta(minutes=5))
        need = BufferRequest(elements, torch.float32)
        gradients, parameters = ours.allocate([need, need], cpu, lanes=1)
        out = torch.zeros(elements // self._ranks)

        def both() -> None:
            reduction = ours.reduce(0, gradients, out, add=False, factor=1.0, elements=elements, wire=torch.float32)
            reduction.wait()
            ours.publish(parameters)
            ours.all_gather(parameters, elements=elements).wait()

        received = 2 * 4 * elements * (self._ranks - 1) / self._ranks
        tiny = torch.zeros(1)
        return {
            "wire_rate": received / self._seconds(both),
            "latency": self._seconds(lambda: group.all_reduce(tiny)),
        }

    def _seconds(self, work: Callable[[], Any]) -> float:
        from windlass.comm.rank_group import world_group

        times = []
        for number in range(_UNTIMED + 2 * _TIMED):
            world_group().barrier()
            start = time.perf_counter()
            work()
            if number >= _UNTIMED:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def train(self, case: TimedCase) -> list[float]:
        """Return the seconds of each timed step, from a barrier until this rank has finished. Collective."""
        import windlass
        from windlass.comm.rank_group import world_group

        engine: Any = windlass.initialize(model=build(MODEL), config=case.config())[0]
        ids = samples(MODEL.vocabulary, SAMPLES, LENGTH, engine.data_loading_ranks[1])
        batches = [{"input_ids": ids, "labels": ids}] * case.micro_batches
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


def _weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, requires_grad=True)
