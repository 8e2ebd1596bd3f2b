"""Rank that trains a model larger than its memory limit, and records its memory."""

from __future__ import annotations

import json
import resource
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from windlass.observe.memory_usage import proportional_bytes

_EVERY_SECONDS = 0.4  # each sample makes the kernel walk all pages
_VOCABULARY = 256  # one token for each value of a byte


class Watch:
    """Recorder of this process's proportional set size over time.

    Attributes:
        samples: pairs of seconds since the start and bytes.
        marks: pairs of seconds since the start and the phase that began.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.samples: list[tuple[float, int]] = []
        self.marks: list[tuple[float, str]] = []
        threading.Thread(target=self._sample, daemon=True).start()

    def mark(self, what: str) -> None:
        """Record that a phase begins now."""
        self.marks.append((time.monotonic() - self._start, what))

    def _sample(self) -> None:
        while True:
            self.samples.append((time.monotonic() - self._start, proportional_bytes() or 0))
            time.sleep(_EVERY_SECONDS)


def main(folder: str) -> None:
    """Run the work in `folder`/work.json, and write the result next to it."""
    work = json.loads(Path(folder, "work.json").read_text())
    # Limit of private memory. It does not include shared memory, which `Watch` samples too.
    resource.setrlimit(resource.RLIMIT_DATA, (work["cap"], work["cap"]))
    watch = Watch()
    watch.mark("import")
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, LlamaConfig

    import windlass

    config = _config(work)
    watch.mark("build")
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=work["hidden"],
        intermediate_size=work["hidden"] * 11 // 4,
        num_hidden_layers=work["layers"],
        num_attention_heads=work["hidden"] // 64,
        max_position_embeddings=work["length"],
        use_cache=False,
    )
    with windlass.zero.Init(config_dict_or_path=config, remote_device="nvme"):
        model = AutoModelForCausalLM.from_config(llama, trust_remote_code=False)
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    watch.mark("initialize")
    engine, *_ = windlass.initialize(model=model, config=config)
    rank = dist.get_rank()
    batches = _batches(work, rank)
    losses, seconds, moved = [], [], []
    staging, disk = engine._sharded.tiers.staging, engine._sharded.tiers.disk
    for step in range(work["steps"]):
        watch.mark(f"step {step + 1}")
        disk.io_rates(reset=True)
        begun = time.monotonic()
        tokens = batches[step]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.monotonic() - begun)
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        rates = disk.io_rates()
        moved.append([rates.disk_read_bytes, rates.disk_write_bytes])
        if rank == 0:
            print(
                f"step {step + 1}/{work['steps']}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s, "
                f"{(proportional_bytes() or 0) / 1e9:.2f} GB of {work['cap'] / 1e9:.2f} GB",
                flush=True,
            )
    staging.wait_all()
    watch.mark("end")
    answer: dict[str, Any] = {
        "parameters": sum(unit["elements"] for unit in engine.report()["units"]),
        "samples": watch.samples,
        "marks": watch.marks,
        "losses": losses,
        "seconds": seconds,
        "disk": moved,
        "staging": [staging.limit, staging.peak],
        "path": disk.description(),
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(answer))
    dist.barrier()  # destroy() would restore the full model, which does not fit


def _config(work: dict[str, Any]) -> dict[str, Any]:
    block = 4 * work["hidden"] ** 2 + 3 * work["hidden"] * (work["hidden"] * 11 // 4)
    away = {"device": "nvme", "nvme_path": work["path"]}
    return {
        "train_micro_batch_size_per_gpu": work["batch"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": work["lr"]}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**away, "gradient_device": "nvme"},
            "offload_param": away,
            # By default a billion parameters may stay unsharded, more than this model has.
            "stage3_max_live_parameters": 4 * block,
            "stage3_max_reuse_distance": block,
            "stage3_prefetch_bucket_size": 2 * block,
        },
        "steps_per_print": 10**9,
    }


def _batches(work: dict[str, Any], rank: int) -> Any:
    """Return `[steps, batch, length]` bytes of the standard library's sources, different on each rank."""
    import torch

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    expected = work["steps"] * work["batch"] * work["length"]
    generator = torch.Generator().manual_seed(rank)
    results = []
    for first in torch.randint(len(text) - work["length"], (expected // work["length"],), generator=generator).tolist():
        results.append(torch.frombuffer(bytearray(text[first : first + work["length"]]), dtype=torch.uint8).long())
    return torch.stack(results).view(work["steps"], work["batch"], work["length"])


if __name__ == "__main__":
    main(sys.argv[1])
