"""Script that trains tiny Llamas with transformers' Trainer, plain or under DeepSpeed, and writes the losses.

transformers_training.py OUT CASES       CASES: JSON, a list of {"name", "config" or null, ...}; see `Case`
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
import transformers.training_args
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

WORLD_BATCH = 4
LENGTH = 12
VOCABULARY = 48


@dataclass
class Case:
    """Run of one Trainer.

    Args:
        config: DeepSpeed configuration; None: the plain Trainer.
        ranks: number of ranks of the run.
        readers: number of data-loading ranks over which a step's samples are spread; 0: all.
        sequences: sequence-parallel degree, in accelerate's configuration.
        resume: train half of the steps, and continue from the checkpoint in a new Trainer.
        resize: new number of rows of the embeddings; 0: unchanged.
    """

    name: str
    config: dict[str, Any] | None = None
    ranks: int = 1
    accumulation: int = 1
    steps: int = 4
    dtype: str = "fp32"
    resume: bool = False
    evaluate: bool = False
    save: bool = False
    generate: bool = False
    resize: int = 0
    readers: int = 0
    sequences: int = 1
    options: dict[str, Any] = field(default_factory=dict)


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Fixed random sequences of one length."""

    def __init__(self, count: int = 64, vocabulary: int = VOCABULARY) -> None:
        self.ids = torch.randint(2, vocabulary, (count, LENGTH), generator=torch.Generator().manual_seed(1))
        # Nothing predicts the first token, so its label is ignored. Otherwise older transformers (5.8) would count it
        # in the divisor of the loss, but not with sequence parallelism.
        self.labels = self.ids.clone()
        self.labels[:, 0] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Losses(TrainerCallback):
    """Callback that records the Trainer's logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append({**logs, "step": state.global_step})


def model_config() -> LlamaConfig:
    """Return the configuration of a Llama of two layers."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )


def arguments(case: Case, out: Path, steps: int) -> TrainingArguments:
    """Return the training arguments of a case."""
    optimizer = {} if case.config and "optimizer" in case.config else {"optim": "adamw_torch"}
    share = WORLD_BATCH // (case.readers or case.ranks)
    cut: dict[str, Any] = {}
    if case.sequences > 1:
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        cut["parallelism_config"] = ParallelismConfig(
            sp_backend="deepspeed", sp_size=case.sequences, sp_handler=handler
        )
    return TrainingArguments(
        output_dir=str(out),
        deepspeed=json.loads(json.dumps(case.config)) if case.config is not None else None,
        per_device_train_batch_size=share // case.accumulation,
        per_device_eval_batch_size=share,
        gradient_accumulation_steps=case.accumulation,
        max_steps=steps,
        learning_rate=5e-3,
        lr_scheduler_type="linear",
        warmup_steps=2,
        logging_steps=1,
        save_strategy="steps" if case.resume else "no",
        save_steps=steps // 2 if case.resume else 500,
        bf16=case.dtype == "bf16",
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **{"use_cpu": not torch.cuda.is_available() and case.config is None, **optimizer, **cut, **case.options},
    )


def train(case: Case, out: Path, start: Path) -> dict[str, Any]:
    """Run a case. Return the losses by step, and the other requested results."""
    gc.freeze()  # accelerate collects garbage often, and walking through all imports takes long
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(3)
    losses = Losses()
    results: dict[str, Any] = {}
    folder = out / f"{case.name}-{0 if case.config is None else case.ranks}"
    args = arguments(case, folder, case.steps)
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    if case.resize:
        set_seed(5)
        model.resize_token_embeddings(case.resize, mean_resizing=False)
    trainer = Trainer(model=model, args=args, train_dataset=Lines(), eval_dataset=Lines(10), callbacks=[losses])
    trainer.train()
    if case.resume:
        trainer.accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
        args = arguments(case, folder, case.steps)
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
        again = Losses()
        trainer = Trainer(model=model, args=args, train_dataset=Lines(), eval_dataset=Lines(10), callbacks=[again])
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{case.steps // 2}"))
        results["resumed"] = {str(log["step"]): log["loss"] for log in again.logs if "loss" in log}
    results["losses"] = [log["loss"] for log in losses.logs if "loss" in log]
    results["norms"] = [log.get("grad_norm") for log in losses.logs if "loss" in log]
    results["rates"] = [log["learning_rate"] for log in losses.logs if "loss" in log]
    if case.evaluate:
        results["eval_loss"] = trainer.evaluate()["eval_loss"]
    if case.generate:
        prompt = torch.arange(2, 6).view(1, 4).to(args.device)
        trainer.model_wrapped.eval()
        results["generated"] = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
    if case.save:
        trainer.save_model(str(folder / "saved"))
    if case.config is not None:
        trainer.accelerator.free_memory()
    del trainer, model
    gc.collect()
    return results


# transformers accepts bf16 without a GPU only if the CPU is selected, and then disables DeepSpeed
transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def main(out: Path, cases: list[Case]) -> None:
    """Run all cases from the same initial model. Rank 0 writes the results."""
    results = {case.name: train(case, out, out / "start") for case in cases}
    if os.environ.get("RANK", "0") == "0":
        name = f"results-{cases[0].ranks}{'-plain' if cases[0].config is None else ''}.json"
        (out / name).write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**case) for case in json.loads(Path(sys.argv[2]).read_text())])
