"""Rank that trains a few steps and measures its peak memory."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import torch

from rig.plan_cases import VOCABULARY, MemoryCase

STEPS = 3


class MemoryRank:
    """Worker of a `RankPool`. The constructor is collective.

    Args:
        meeting: rendezvous URL of the ranks.
    """

    def __init__(self, case: MemoryCase, rank: int, meeting: str) -> None:
        from windlass.comm.bootstrap import init_distributed

        self._case = case
        torch.set_num_threads(1)
        init_distributed(init_method=meeting)

    def run(self) -> dict[str, Any]:
        """Train `STEPS` steps. Return the peak up to the end of each phase, in bytes above the memory in use before
        the model is built."""
        import windlass
        from windlass.cli.benches.bench_engines import preload_engine_modules
        from windlass.cli.benches.memory_sampler import MemorySampler
        from windlass.comm.rank_group import world_group
        from windlass.parallel.model_checkpointing import enable_checkpointing

        case = self._case
        preload_engine_modules("windlass")
        _warm_up(case)
        world_group().barrier()
        sampler = MemorySampler(torch.device(case.device))
        torch.manual_seed(0)
        with windlass.zero.Init(enabled=case.sharded_init):
            model = case.build().train()
        if case.checkpointing:
            enable_checkpointing(model)
        peaks = {"init": sampler.peak_bytes()}
        with tempfile.TemporaryDirectory(dir=".") as folder:
            engine = windlass.initialize(model=model, config=case.config(folder))[0]
            peaks["load"] = sampler.peak_bytes()
            ids = torch.randint(0, VOCABULARY, (case.micro, case.length), device=case.device)
            for step in range(STEPS):
                if case.axis == "pp":
                    engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * case.accumulation))
                for _ in range(case.accumulation if case.axis != "pp" else 0):
                    loss = engine(input_ids=ids, labels=ids).loss
                    engine.backward(loss)
                    del loss
                    engine.step()
                peaks[f"step {step}"] = sampler.peak_bytes()
            peaks["run"] = sampler.stop()
            engine.destroy()
        return {"kind": sampler.counter_name, "peaks": peaks}


def _warm_up(case: MemoryCase) -> None:
    """Train a tiny model of the same family and dtype, so that libraries and kernels that load at the first use, and
    their workspaces, are part of the baseline."""
    from windlass.parallel.model_checkpointing import enable_checkpointing

    model = case.build(tiny=True).to(case.device, torch.bfloat16 if case.dtype == "bf16" else torch.float32)
    if case.checkpointing:
        enable_checkpointing(model)
    ids = torch.zeros((1, 16), dtype=torch.long, device=case.device)
    with torch.autocast(case.device, torch.bfloat16, enabled=case.dtype == "autocast"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.AdamW(trained, fused=True).step()
    del model, trained, loss
    gc.collect()
