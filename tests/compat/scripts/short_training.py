"""Script that trains a tiny loaded Llama with transformers' Trainer for three steps, and writes the losses of each run.

short_training.py FOLDER plain|sharded        plain first: it saves the model
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

STAGES = {"plain": [None], "sharded": [2, 3]}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Fixed random sequences."""

    def __init__(self) -> None:
        self.ids = torch.randint(2, 48, (12, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def save(folder: Path) -> None:
    """Save a model without its last layer's input norm, which loading initializes to ones."""
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, max_position_embeddings=32, **sizes))
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.input_layernorm" not in name}
    model.save_pretrained(folder / "model", state_dict=state)


def configuration(stage: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration for the Trainer."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def train(folder: Path, stage: int | None, dtype: str) -> list[float]:
    """Return the losses of three steps over the same batches, for any number of ranks."""
    given: dict[str, Any] = {"deepspeed": configuration(stage)} if stage is not None else {}
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=dtype == "bf16" and stage is not None,
        **given,
    )
    set_seed(0)
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=DTYPES[dtype])
    trainer = Trainer(model=model, args=arguments, train_dataset=Lines())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: Path, kind: str) -> None:
    """Do the runs of one kind."""
    if kind == "plain":
        save(folder)
    for stage in STAGES[kind]:
        for dtype in DTYPES:
            losses = train(folder, stage, dtype)
            if int(os.environ.get("RANK", "0")) == 0:
                name = f"plain-{dtype}" if stage is None else f"zero{stage}-{dtype}"
                (folder / f"{name}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
