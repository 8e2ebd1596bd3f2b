"""Script that trains tiny Llamas with the trainers of trl, plain or under DeepSpeed, and writes the losses.

trl_training.py OUT CASES       CASES: JSON, a list of {"name", "kind", "config" or null, ...}; see `Case`
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.compat.scripts.transformers_training import VOCABULARY, WORLD_BATCH, Losses, model_config

STEPS = 3
PAIRS = "pairs.json"


@dataclass
class Case:
    """Run of one trainer.

    Args:
        kind: "sft", "dpo" or "grpo".
        config: DeepSpeed configuration; None: without DeepSpeed.
        lora: train adapters.
        sharded_init: the trainer loads the model, at stage 3 under `zero.Init`. Otherwise the model is built
            before the configuration is known.
        options: further arguments of the trainer. `reference`: True loads a reference model.
    """

    name: str
    kind: str
    config: dict[str, Any] | None = None
    ranks: int = 1
    lora: bool = False
    sharded_init: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `w0` to `w45` and two special tokens."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(VOCABULARY - 2)}}
    plain = Tokenizer(WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def words(count: int, length: int, seed: int) -> list[str]:
    """Return fixed random texts."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY - 2, (count, length), generator=generator).tolist()
    return [" ".join(f"w{word}" for word in row) for row in rows]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the fraction of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def trainer_of(case: Case, out: Path, folder: Path, losses: Losses) -> Any:
    """Return the trainer of a case."""
    start = out / "start"
    known = None if case.sharded_init else LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    reference = LlamaForCausalLM.from_pretrained(out / "reference") if case.options.get("reference") else None
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "deepspeed": json.loads(json.dumps(case.config)) if case.config is not None else None,
        "per_device_train_batch_size": WORLD_BATCH // case.ranks,
        "max_steps": STEPS,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
        "use_cpu": not torch.cuda.is_available() and case.config is None,
        **{key: value for key, value in case.options.items() if key != "reference"},
    }
    if case.config is None and case.ranks > 1:
        common["ddp_backend"] = "gloo"
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if case.lora else None
    given: dict[str, Any] = {"processing_class": tokenizer(), "peft_config": lora, "callbacks": [losses]}
    if case.kind == "sft":
        args: Any = SFTConfig(**common, max_length=16)
        data = Dataset.from_dict({"text": words(32, 12, 1)})
        return SFTTrainer(model=known or str(start), args=args, train_dataset=data, **given)
    if case.kind == "dpo":
        args = DPOConfig(**common)
        data = Dataset.from_json(str(out / PAIRS), cache_dir=str(folder / "cache"))
        return DPOTrainer(model=known or str(start), ref_model=reference, args=args, train_dataset=data, **given)
    args = GRPOConfig(**common, num_generations=2, max_completion_length=6)
    data = Dataset.from_dict({"prompt": words(32, 6, 1)})
    return GRPOTrainer(model=known or str(start), reward_funcs=[reward], args=args, train_dataset=data, **given)


def write(out: Path) -> None:
    """Write the initial models of the cases and a file of preference pairs.

    The pairs are in a file, so that the ranks share the columns that trl adds through the cache of `datasets`.
    """
    config = model_config()
    config.tie_word_embeddings = False
    for name in ("start", "reference"):
        LlamaForCausalLM(config).save_pretrained(out / name)
    rows = zip(words(32, 6, 1), words(32, 6, 2), words(32, 6, 3), strict=True)
    texts = [
        {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"} for prompt, chosen, rejected in rows
    ]
    (out / PAIRS).write_text("\n".join(map(json.dumps, texts)))


_TOLD = ("loss", "grad_norm", "rewards/margins", "reward", "kl", "entropy", "mean_token_accuracy")


def train(case: Case, out: Path) -> dict[str, Any]:
    """Run a case."""
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    folder = out / f"{case.name}-{case.ranks}"
    losses = Losses()
    trainer = trainer_of(case, out, folder, losses)
    trainer.train()
    results = {key: [log[key] for log in losses.logs if "loss" in log and key in log] for key in _TOLD}
    if case.config is not None and case.config["zero_optimization"]["stage"] == 3:
        offload = trainer.deepspeed.optimizer.parameter_offload
        results["hooks"] = [len(offload.forward_hooks), len(offload.backward_hooks)]
    trainer.save_model(str(folder / "saved"))
    if case.config is not None:
        trainer.accelerator.free_memory()
    return results


def main(out: Path, cases: list[Case]) -> None:
    """Run all cases. Rank 0 writes the results."""
    results = {}
    for case in cases:
        gc.freeze()  # accelerate collects garbage often, and walking through all imports takes long
        results[case.name] = train(case, out)
        gc.collect()
    if os.environ.get("RANK", "0") == "0":
        name = f"results-{cases[0].ranks}{'-plain' if cases[0].config is None else ''}.json"
        (out / name).write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**case) for case in json.loads(Path(sys.argv[2]).read_text())])
