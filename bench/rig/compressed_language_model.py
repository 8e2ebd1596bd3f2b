"""Language model, the demo's or a larger one, trained once, and its compressed forms."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import windlass
from windlass.compress.calibration_text import bits_per_byte, read_calibration_text
from windlass.compress.compression_training import init_compression
from windlass.compress.distillation import Distillation
from windlass.compress.format_rounding import pack_trained_layers
from windlass.compress.layer_importance import block_influences, choose_layers, every_other, remove_layers
from windlass.compress.packed_model import load_packed_model
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.compress.prune_model import prune_model
from windlass.compress.redundancy_clean import redundancy_clean
from windlass.data.held_out import HeldOutSet
from windlass.data.resumable_loaders import SequenceLoader
from windlass.data.token_file import open_tokens

LENGTH, ROWS = 128, 4
_DEMO = Path(__file__).parents[2] / "examples" / "demo.json"
MODELS: dict[str, dict[str, Any]] = {
    "2.6M": {},
    "12.6M": {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
"""Configurations of transformers by number of parameters; empty: the demo's model."""


@dataclass(frozen=True)
class CompressedForm:
    """Row of the table.

    Attributes:
        format: weight format of the blocks' matrices.
        method: method of rounding without training.
        share: length of the training with distillation, as a share of the original training; 0: none.
        rate: learning rate of the training with distillation.
        section: techniques of `compression_training` in addition to the format.
        layers: number of blocks that stay; 0: all.
        choice: rule by which the other blocks are chosen: loss without them, block influence, or even spacing.
        sparsity: method that sets half of the weights to 0 without training.
        prune: share of the units of each kind to remove, chosen by activations.
    """

    goal: str
    format: str | None = None
    method: Literal["rtn", "gptq"] = "rtn"
    share: float = 0.0
    rate: float = 1e-3
    section: dict[str, Any] = field(default_factory=dict)
    layers: int = 0
    choice: Literal["measured", "influence", "every other"] = "measured"
    sparsity: str | None = None
    prune: dict[str, float] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """True if the form is trained, so that its loss depends on the seed."""
        return self.share > 0


def _masks(kind: str, modules: str, share: float, **more: Any) -> dict[str, Any]:
    shared = {"enabled": True, "schedule_offset": 0, "method": "l1", **more}
    groups = {"all": {"params": {"dense_ratio": share}, "modules": [modules]}}
    return {f"{kind}_pruning": {"shared_parameters": shared, "different_groups": groups}}


LANGUAGE_MODELS: dict[str, CompressedForm] = {
    "int8, to nearest": CompressedForm("<= 0.1 %", "int8"),
    "int4 g128, to nearest": CompressedForm("<= 1 %", "int4_g128"),
    "int4 g128, gptq": CompressedForm("half of the row above", "int4_g128", "gptq"),
    "int2 g128, gptq": CompressedForm("refused without --force", "int2_g128", "gptq"),
    "int2 g128, trained on 10 %": CompressedForm("<= 5 %", "int2_g128", share=0.1),
    "ternary, trained on 30 %": CompressedForm("<= 3 %", "ternary", share=0.3),
    "1 bit, trained on 30 %": CompressedForm("<= 8 %", "binary", share=0.3),
    "MLP -25 %, by magnitude": CompressedForm("", section=_masks("row", "up_proj", 0.75)),
    "MLP -25 %, trained on 10 %": CompressedForm("<= 2 %", share=0.1, section=_masks("row", "up_proj", 0.75)),
    "50 % of the weights, by magnitude": CompressedForm("", section=_masks("sparse", "layers.*proj", 0.5)),
    "50 % of the weights, trained on 10 %": CompressedForm(
        "", share=0.1, section=_masks("sparse", "layers.*proj", 0.5)
    ),
    "50 % of each row, by magnitude": CompressedForm("", sparsity="magnitude"),
    "50 % of the weights, wanda": CompressedForm("less than magnitude", sparsity="wanda"),
    "50 % of the weights, sparsegpt": CompressedForm("less than wanda", sparsity="sparsegpt"),
    "heads -25 %, by activation": CompressedForm("", prune={"heads": 0.25}),
    "heads -25 %, trained on 10 %": CompressedForm("<= 2 %", share=0.1, prune={"heads": 0.25}),
    "layers 4 -> 3": CompressedForm("no worse than the next two rows", layers=3),
    "layers 4 -> 3, by block influence": CompressedForm("", layers=3, choice="influence"),
    "layers 4 -> 3, every other": CompressedForm("", layers=3, choice="every other"),
    "layers 4 -> 3, trained on 10 %": CompressedForm("<= 3 %", share=0.1, layers=3),
}


def train_base(folder: Path, steps: int, model: str) -> Path:
    """Return the folder of a trained model of `MODELS`; the first call trains it, as `windlass train` does."""
    from windlass.cli.training.stop_signals import StopSignals
    from windlass.cli.training.train_options import TrainOptions, make_training_plan
    from windlass.cli.training.train_rank import train_on_rank

    if not (folder / "result.json").is_file():
        known = folder / "run.json"
        described = folder.with_name(f"{folder.name}-model") / "config.json"
        if MODELS[model]:
            described.parent.mkdir(parents=True, exist_ok=True)
            described.write_text(json.dumps(MODELS[model]))
        resumes = known.is_file() and (folder / "checkpoint" / "latest").is_file()
        options = TrainOptions(
            out=folder,
            config=None if resumes else str(_DEMO),
            model=str(described.parent) if MODELS[model] and not resumes else None,
            data=None if resumes else ["stdlib"],
            eval_bytes=None if resumes else 2**16,
            steps=steps,
            sample_tokens=0,
            save_every=None if resumes else 100,
            resume=resumes,
            overwrite=known.is_file() and not resumes,
        )
        if not train_on_rank(make_training_plan(options), StopSignals(folder / "failure")):
            raise SystemExit("the training of the base was stopped; the same command continues it")
    return folder


def measure_language_model(row: str, seed: int, base: Path, steps: int) -> dict[str, Any]:
    """Return the loss of a compressed form: bits per byte, and its relative excess over the trained model's."""
    form, tokens = LANGUAGE_MODELS[row], open_tokens(base / "tokens.bin")
    held_out = HeldOutSet(tokens.held_out, tokens.header.eval_bytes, LENGTH)
    whole = _load(base)
    before = _bits_of(whole, held_out, base)
    if form.format is not None and not form.is_trained:
        model, size = _round(base, form, held_out)
    else:
        model = _shrink(form, base)
        model = _train(model, whole, form, round(form.share * steps), seed, base)
        size = None
        if form.format is not None:
            size = sum(p.numel() for name, p in model.named_parameters() if p.dtype == torch.uint8)
    after = bits_per_byte(model, held_out)
    result = {"bits": after, "before": before, "loss": after / before - 1}
    if size is not None:
        linear = sum(m.in_features * m.out_features for m in _block_layers(whole))
        result |= {"bytes": size, "times": 4 * linear / size}
    return result


def _shrink(form: CompressedForm, base: Path) -> Any:
    """Return the model with fewer blocks, sparse or pruned; the whole model if the form has none of these."""
    if form.layers:
        return _drop_layers(_load(base), form, base)
    if form.sparsity is not None:
        options = RoundingOptions(sparsity="0.5", sparsity_method=form.sparsity)
        with tempfile.TemporaryDirectory() as folder:
            compress_directory(base / "hf", f"{folder}/hf", _wide_format, options, batches=_calibration(base))
            return _load(Path(folder))
    model = _load(base)
    if form.prune:
        prune_model(model, form.prune, batches=_calibration(base))
    return model


def _wide_format(layer: str) -> str | None:
    return None if layer == "lm_head" else "fp32"


def _calibration(base: Path) -> list[torch.Tensor]:
    return read_calibration_text(["stdlib"], base / "hf", sequences=128, length=LENGTH).batches


def _load(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base / "hf", trust_remote_code=False).eval()


def _block_layers(model: Any) -> list[nn.Linear]:
    head = model.get_output_embeddings()
    return [module for module in model.modules() if type(module) is nn.Linear and module is not head]


def _bits_of(model: nn.Module, held_out: HeldOutSet, base: Path) -> float:
    """Return the held-out loss of the trained model: measured at the first call, then read from a file."""
    known = base / "bits.json"
    if not known.is_file():
        known.write_text(json.dumps(bits_per_byte(model, held_out)))
    return float(json.loads(known.read_text()))


def _round(base: Path, form: CompressedForm, held_out: HeldOutSet) -> tuple[nn.Module, int]:
    assert form.format is not None
    batches = _calibration(base) if form.method == "gptq" else []
    with tempfile.TemporaryDirectory() as folder:
        report, _ = compress_directory(
            base / "hf", f"{folder}/packed", form.format, RoundingOptions(form.method), batches=batches
        )
        return load_packed_model(f"{folder}/packed", dtype=torch.float32), report.packed_after


def _train(student: Any, teacher: Any, form: CompressedForm, steps: int, seed: int, base: Path) -> nn.Module:
    """Return the compressed model, after training with the original model as teacher."""
    section: dict[str, Any] = {name: dict(value) for name, value in form.section.items()}
    if form.format is not None:
        groups = {"all": {"params": {"weight_format": form.format}, "modules": ["layers.*proj"]}}
        section["weight_quantization"] = {"shared_parameters": {"enabled": True}, "different_groups": groups}
    schedule = {"total_num_steps": max(steps, 2), "warmup_num_steps": max(2, steps // 20), "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": form.rate, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        **({"compression_training": section} if section else {}),
    }
    if section:
        init_compression(student, config)
    if steps:
        Distillation(teacher).attach(student)
        tokens = open_tokens(base / "tokens.bin")
        loader = SequenceLoader(tokens.train, LENGTH, ROWS, seed=seed, digest=tokens.header.digest)
        engine = windlass.initialize(model=student.train(), config=config)[0]
        for _ in range(steps):
            engine.backward(engine(**next(loader)).loss)
            engine.step()
        engine.destroy()
    if section:
        pack_trained_layers(student)
        redundancy_clean(student, config)
    return student.eval()


def _drop_layers(model: Any, form: CompressedForm, base: Path) -> Any:
    """Remove blocks in place until `form.layers` stay. The choice is measured on calibration text, not on the
    held-out set."""
    total, batches = len(model.model.layers), _calibration(base)
    count = total - form.layers
    if form.choice == "measured":
        chosen = choose_layers(model, count, batches)
    elif form.choice == "influence":
        influences = block_influences(model, batches)
        chosen = sorted(sorted(range(total), key=lambda number: influences[number])[:count])
    else:
        chosen = every_other(total, count)
    remove_layers(model, chosen)
    return model
