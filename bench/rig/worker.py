"""Process of one rank, which trains on command and otherwise waits without using CPU time."""

from __future__ import annotations

import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rig.job import Job

_ROOF_ELEMENTS = 1 << 24  # 64 MiB of float32: far more than fits in a cache


def main(connection: Connection, job: Job, rank: int, meeting: str, kind: type[Worker] | None = None) -> None:
    """Answer commands (`(method, arguments)`) until `None` or the end of the connection.

    Args:
        meeting: path of a file for the rendezvous, which does not exist yet. kind: class whose methods are the
        commands; `Worker` by default.
    """
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    try:
        worker = (kind or Worker)(job, rank, meeting)
        while (told := connection.recv()) is not None:
            method, arguments = told
            connection.send((True, getattr(worker, method)(**arguments)))
    except EOFError:
        os._exit(1)  # the parent process has ended
    except Exception:
        connection.send((False, traceback.format_exc()))
    os._exit(0)  # without waiting for peers, which may have failed


class Worker:
    """Commands of a rank. Each method is collective."""

    def __init__(self, job: Job, rank: int, meeting: str) -> None:
        import torch
        import torch.distributed as dist
        import transformers

        torch.set_num_threads(job.threads)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=job.ranks)
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
        model = self._llama(
            self._config(
                hidden_size=size.hidden,
                intermediate_size=size.hidden * 8 // 3 // 64 * 64,
                num_hidden_layers=size.layers,
                num_attention_heads=size.hidden // 64,
                num_key_value_heads=size.hidden // 64,
                vocab_size=size.vocabulary,
                max_position_embeddings=512,
                tie_word_embeddings=False,
            )
        )
        parameters = sum(p.numel() for p in model.parameters())
        self._trainee = make_engine(
            job.engine, model, list(model.model.layers), BenchHyperparameters(job.lr, job.clip, size.batch), device
        )
        return {"parameters": parameters}

    def steps(self, count: int) -> dict[str, list[float]]:
        """Train. Return the seconds of each step, those of forward and backward, and its loss on this rank."""
        told: dict[str, list[float]] = {"seconds": [], "compute": [], "losses": [], "between": []}
        ended = time.perf_counter()
        for _ in range(count):
            tokens = self._batch()
            self._dist.barrier()
            start = time.perf_counter()
            loss = self._trainee.forward(input_ids=tokens, labels=tokens).loss
            self._trainee.backward(loss)
            computed = time.perf_counter()
            self._trainee.step()
            told["losses"].append(loss.item())
            told["between"].append(start - ended)
            ended = time.perf_counter()
            told["seconds"].append(ended - start)
            told["compute"].append(computed - start)
            del loss
        return told

    def memory(self) -> dict[str, Any]:
        """Return the peak bytes since `build` and the kind of the counter, and stop sampling."""
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
