"""Script that trains LoRA adapters of peft on tiny Llamas, plain or under DeepSpeed, and writes losses and logits.

peft_training.py OUT CASES       CASES: JSON, a list of {"name", "variant", "route", "config" or null, ...}; see `Case`
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from tests.compat.scripts.transformers_training import WORLD_BATCH, Lines, Losses

STEPS = 3
RATE = 5e-3
GROWN = 52
_LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
# Options of the adapter (`lora`). `tied`: the base shares embedding and head; `grown`: it gets new tokens.
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {}, "tied": True},
    "modules": {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}, "grown": True},
    "tied": {"lora": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, "tied": True, "grown": True},
    "tokens": {"lora": {"trainable_token_indices": [48, 49, 50]}, "tied": True, "grown": True},
    "dora": {"lora": {"use_dora": True}, "tied": True},
}


@dataclass
class Case:
    """Training of one adapter.

    Args:
        variant: key of `VARIANTS`.
        route: "trainer", or "engine": a direct call of `deepspeed.initialize`.
        config: DeepSpeed configuration; None: without DeepSpeed.
        sharded_init: at stage 3, construct the base after the configuration is known: under `zero.Init`.
    """

    name: str
    variant: str
    route: str
    config: dict[str, Any] | None = None
    ranks: int = 1
    sharded_init: bool = False


def base(out: Path, variant: str) -> LlamaForCausalLM:
    """Return the pretrained model, with new tokens if the variant is grown."""
    which = VARIANTS[variant]
    model = LlamaForCausalLM.from_pretrained(out / ("tied" if which.get("tied") else "untied"), dtype=torch.float32)
    if which.get("grown"):
        set_seed(7)
        model.resize_token_embeddings(GROWN)
    return model


def adapted(out: Path, variant: str) -> PeftModel:
    """Return the model with LoRA adapters, which have the same random values in every run."""
    model = base(out, variant)
    set_seed(5)
    return get_peft_model(model, LoraConfig(**_LORA, init_lora_weights="gaussian", **VARIANTS[variant]["lora"]))


def probe() -> torch.Tensor:
    """Return ids `[2, 24]` of tokens that every variant has."""
    return torch.arange(2, 50).view(2, 24) % 48


def logits(model: Any, grown: bool) -> torch.Tensor:
    """Return the logits of the probe. With `grown`, token ids are shifted by 4 to include new tokens."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=(probe() + 4 if grown else probe()).to(model.device)).logits.cpu()


def by_trainer(case: Case, out: Path, folder: Path) -> tuple[list[float], torch.Tensor]:
    """Train with transformers' Trainer. Return losses and final logits."""
    model = None if case.sharded_init else adapted(out, case.variant)
    losses = Losses()
    args = TrainingArguments(
        output_dir=str(folder),
        deepspeed=case.config,
        per_device_train_batch_size=WORLD_BATCH // case.ranks,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        use_cpu=not torch.cuda.is_available() and case.config is None,
    )
    model = model or adapted(out, case.variant)
    trainer = Trainer(model=model, args=args, train_dataset=Lines(vocabulary=limit(case)), callbacks=[losses])
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    result = logits(trainer.model_wrapped if case.config else trainer.model, grown(case))
    if case.config is not None:
        trainer.accelerator.free_memory()
    return [log["loss"] for log in losses.logs if "loss" in log], result


def by_engine(case: Case, out: Path, folder: Path) -> tuple[list[float], torch.Tensor]:
    """Train with an engine. Rank 0 saves the adapter while parameters are gathered, as DeepSpeed's users do."""
    known = HfDeepSpeedConfig(case.config) if case.sharded_init else None
    model = adapted(out, case.variant)
    del known
    data, losses = Lines(vocabulary=limit(case)), []
    full: Callable[..., Any] = lambda *_: nullcontext()  # noqa: E731
    if case.config is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
        run, backward, step = model, lambda loss: loss.backward(), optimizer.step
    else:
        import deepspeed

        config = {**case.config, "train_micro_batch_size_per_gpu": WORLD_BATCH // case.ranks}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}
        trained = [p for p in model.parameters() if p.requires_grad]
        run, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        backward, step, full = run.backward, run.step, deepspeed.zero.GatheredParameters
    rank, each = int(os.environ.get("RANK", "0")), WORLD_BATCH // case.ranks
    model.train()
    for number in range(STEPS):
        first = number * WORLD_BATCH
        ids = torch.stack([data[first + rank * each + i]["input_ids"] for i in range(each)])
        loss = run(input_ids=ids, labels=ids).loss
        backward(loss)
        if case.config is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step()
        if case.config is None:
            optimizer.zero_grad()
        losses.append(mean(loss.detach(), case.ranks))
    with full(list(model.parameters())):
        if rank == 0:
            model.save_pretrained(folder / "saved")
    result = logits(run, grown(case))
    if case.config is not None:
        run.destroy()
    return losses, result


def grown(case: Case) -> bool:
    """Return True if the variant has new tokens."""
    return bool(VARIANTS[case.variant].get("grown"))


def limit(case: Case) -> int:
    """Return the size of the data's vocabulary, including new tokens if there are any."""
    return GROWN if grown(case) else 48


def mean(value: torch.Tensor, ranks: int) -> float:
    """Return the mean over the ranks."""
    if ranks > 1:
        torch.distributed.all_reduce(value)
    return value.item() / ranks


def reloaded(out: Path, variant: str, saved: Path) -> torch.Tensor:
    """Return the logits of a saved adapter on a plain base without engine."""
    return logits(PeftModel.from_pretrained(base(out, variant), saved), "grown" in VARIANTS[variant])


def main(out: Path, cases: list[Case]) -> None:
    """Run all cases. Rank 0 writes the results and compares the saved adapters."""
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        gc.freeze()  # accelerate collects garbage often, and walking through all imports takes long
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
        folder = out / f"{case.name}-{case.ranks}"
        run = by_trainer if case.route == "trainer" else by_engine
        losses, result = run(case, out, folder)
        gc.collect()
        results[case.name] = {"losses": losses}
        if os.environ.get("RANK", "0") == "0":
            unset_hf_deepspeed_config()
            saved = folder / "saved"
            results[case.name] |= {
                "equal": torch.equal(reloaded(out, case.variant, saved), result),
                "bytes": (saved / "adapter_model.safetensors").stat().st_size,
                "moved": float((result - logits(base(out, case.variant), grown(case))).abs().max()),
            }
    if os.environ.get("RANK", "0") == "0":
        name = f"results-{cases[0].ranks}{'-plain' if cases[0].config is None else ''}.json"
        (out / name).write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**case) for case in json.loads(Path(sys.argv[2]).read_text())])
