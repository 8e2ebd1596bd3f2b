"""Rank of transformers' Trainer on a small Llama, with or without DeepSpeed; writes the seconds and losses of steps."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCABULARY, BATCH, WARM = 2048, 4, 2


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Fixed random sequences."""

    def __init__(self, count: int, length: int) -> None:
        self.ids = torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Clock(TrainerCallback):
    """Recorder of the seconds of each step, and of the losses in the Trainer's logs."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.losses: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.perf_counter() - self._begun)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def main(folder: Path) -> None:
    """Run the work in `folder`/work.json."""
    work = json.loads((folder / "work.json").read_text())
    config = None
    if work["stage"] is not None:
        zero = {"stage": work["stage"], "stage3_param_persistence_threshold": 0, "overlap_comm": False}
        config = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": zero}
    clock = Clock()
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        deepspeed=config,
        use_cpu=config is None and not torch.cuda.is_available(),
        per_device_train_batch_size=BATCH,
        max_steps=work["steps"],
        learning_rate=1e-3,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    set_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=work["hidden_size"],
            intermediate_size=2 * work["hidden_size"],
            num_hidden_layers=work["layers"],
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=work["length"],
            use_cache=False,
        )
    )
    parameters = sum(p.numel() for p in model.parameters())
    data = Lines(BATCH * work["ranks"] * work["steps"], work["length"])
    Trainer(model=model, args=args, train_dataset=data, callbacks=[clock]).train()
    results = {"steps": clock.steps[WARM:], "losses": clock.losses, "parameters": parameters}
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
