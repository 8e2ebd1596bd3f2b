"""Rank that measures the rates of its machine, and the step times of configurations."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from rig.link import pace
from rig.models import build, samples
from rig.simulated_cases import LENGTH, MODEL, SAMPLES, TimedCase

_TIMED, _UNTIMED = 3, 1


class TimedRank:
    """Worker of a `RankPool`. The constructor is collective.

    Args:
        meeting: URL at which the ranks find each other.
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

    def measure(self) -> dict[str, list[float]]:
        """Measure the rates of kernels and collectives while all ranks do the same, several times. Collective."""
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
            "product_rate": self._rates(12.0 * tokens * hidden * inner, products),
            "attention_rate": self._rates((0.5 * 4 + 0.5 * 8 * 1.25) * scores, attention),
            "memory_rate": self._rates(4.0 * 5 * tokens * inner, elementwise),
        }
        if self._ranks > 1:
            found |= self._measure_wire()
        return found

    def _measure_wire(self) -> dict[str, list[float]]:
        from windlass.comm.choose_transport import choose_transport
        from windlass.comm.rank_group import world_group
        from windlass.comm.transport import BufferRequest, WireOptions

        group, cpu, elements = world_group(), torch.device("cpu"), 2_400_000
        ways = WireOptions()
        ours, _ = choose_transport("gloo", group, cpu, ways=ways, timeout=timedelta(minutes=5))
        need = BufferRequest(elements, torch.float32)
        gradients, parameters = ours.allocate([need, need], cpu, lanes=1)
        out = torch.zeros(elements // self._ranks)
        pace(self._link)

        def both() -> None:
            reduction = ours.reduce(0, gradients, out, add=False, factor=1.0, elements=elements, wire=torch.float32)
            reduction.wait()
            ours.publish(parameters)
            ours.all_gather(parameters, elements=elements).wait()

        others = (self._ranks - 1) / self._ranks
        tiny, activation = torch.zeros(1), torch.zeros(SAMPLES * LENGTH * MODEL.hidden)
        return {
            "wire_rate": self._rates(2 * 4 * elements * others, both),
            "axis_rate": self._rates(2 * 4 * activation.numel() * others, lambda: group.all_reduce(activation)),
            "latency": self._seconds(lambda: group.all_reduce(tiny)),
        }

    def _rates(self, amount: float, work: Callable[[], Any]) -> list[float]:
        return [amount / seconds for seconds in self._seconds(work)]

    def _seconds(self, work: Callable[[], Any]) -> list[float]:
        from windlass.comm.rank_group import world_group

        times = []
        for _ in range(_UNTIMED + 2 * _TIMED):
            world_group().barrier()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return times[_UNTIMED:]

    def train(self, case: TimedCase) -> list[float]:
        """Return the seconds of each timed step, from a barrier until this rank has finished. Collective."""
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


def _weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, requires_grad=True)
