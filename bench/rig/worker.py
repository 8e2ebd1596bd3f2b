"""Rank of a job, which trains on command and otherwise waits without using CPU time."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from rig.job import Job
from windlass.cli.benches.rank_pool import RankPool

_TIMEOUT_S = 900.0  # limit for one command
_ROOF_ELEMENTS = 1 << 24  # 64 MiB of float32: far more than fits in a cache


class Worker:
    """Worker of a `RankPool` for a job. Methods are commands; each is collective.

    Args:
        meeting: rendezvous URL of the ranks.
    """

    def __init__(self, job: Job, rank: int, meeting: str) -> None:
        import torch
        import torch.distributed as dist
        import transformers

        from windlass.comm.bootstrap import init_distributed

        torch.set_num_threads(job.threads)
        init_distributed("gloo", init_method=meeting)
        self._torch, self._dist, self._job, self._rank = torch, dist, job, rank
        self._llama, self._config = transformers.LlamaForCausalLM, transformers.LlamaConfig
        self._taken = 0

    def build(self, watch: bool) -> dict[str, Any]:
        """Build the full model, then the engine. With `watch`, memory is sampled from the start."""
        from windlass.cli.benches.bench_engines import BenchHyperparameters, make_engine
        from windlass.cli.benches.memory_sampler import MemorySampler

        job, size = self._job, self._job.size
        self._dist.barrier()
        device = self._torch.device("cpu")
        self._watch = MemorySampler(device) if watch else None
        self._torch.manual_seed(0)
        model = self._llama(self._config(**size.plain()))
        parameters = sum(p.numel() for p in model.parameters())
        self._trainee = make_engine(
            job.engine, model, list(model.model.layers), BenchHyperparameters(job.lr, job.clip, size.batch), device
        )
        return {"parameters": parameters}

    def steps(self, count: int) -> dict[str, list[float]]:
        """Train. Return for each step its seconds, the seconds of its forward and backward (`compute`), the seconds
        since the step before it (`between`), and this rank's loss."""
        results: dict[str, list[float]] = {"seconds": [], "compute": [], "losses": [], "between": []}
        ended = time.perf_counter()
        for _ in range(count):
            tokens = self._batch()
            self._dist.barrier()
            start = time.perf_counter()
            loss = self._trainee.forward(input_ids=tokens, labels=tokens).loss
            self._trainee.backward(loss)
            computed = time.perf_counter()
            self._trainee.step()
            results["losses"].append(loss.item())
            results["between"].append(start - ended)
            ended = time.perf_counter()
            results["seconds"].append(ended - start)
            results["compute"].append(computed - start)
            del loss
        return results

    def memory(self) -> dict[str, Any]:
        """Stop sampling. Return the name of the counter, the baseline in bytes, and the peak since `build` above it."""
        assert self._watch is not None
        return {"kind": self._watch.counter_name, "base": self._watch.baseline_bytes, "peak": self._watch.stop()}

    def traffic(self) -> dict[str, Any] | None:
        """Return the bytes that windlass reports for the last step, and its transport; None for rivals."""
        if self._trainee.engine is None:
            return None
        report = self._trainee.engine.report()
        return {key: report[key] for key in ("transport", "payload_elements", "bytes_moved")}

    def roofs(self) -> dict[str, float]:
        """Return the bytes per second of this rank while all ranks do the same: plain memory traffic, and torch's fused
        AdamW."""
        torch = self._torch
        source, other, target = (torch.ones(_ROOF_ELEMENTS) for _ in range(3))
        copy = 8 * _ROOF_ELEMENTS / self._seconds(lambda: target.copy_(source))
        triad = 12 * _ROOF_ELEMENTS / self._seconds(lambda: torch.add(source, other, out=target))
        source.requires_grad_(True).grad = other
        adam = torch.optim.AdamW([source], lr=1e-4, fused=True)
        return {"memory": max(copy, triad), "adam": 28 * _ROOF_ELEMENTS / self._seconds(adam.step)}

    def _seconds(self, work: Any) -> float:
        """Return the median seconds of `work`, without first touches of memory."""
        times = []
        for _ in range(8):
            self._dist.barrier()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[3]

    def _batch(self) -> Any:
        """Return the next batch of this rank, `[batch, length]`: the same under every engine."""
        draw = self._torch.Generator().manual_seed(1_000_003 * self._rank + self._taken)
        self._taken += 1
        size = self._job.size
        return self._torch.randint(0, size.vocabulary, (size.batch, size.length), generator=draw)


def start_ranks(job: Job, kind: type[Worker] = Worker) -> RankPool:
    """Start the ranks of a job; `kind` is the class of each."""
    return RankPool(partial(kind, job), job.ranks, label=job.engine, timeout_s=_TIMEOUT_S)
