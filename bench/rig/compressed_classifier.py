"""Classifier of texts with twelve layers, trained here, and its compressed forms: binary or ternary, some with fewer
layers.

The texts are pieces of the standard library's sources, and the classes are its packages. In a compressed form, the
matrices and all embeddings have one scale a row; the other tensors (biases, norms and the head) are rounded to bfloat16
before the accuracy is measured.
"""

from __future__ import annotations

import copy
import math
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import windlass
from windlass.compress.compression_training import init_compression
from windlass.compress.distillation import Distillation
from windlass.compress.format_rounding import pack_values
from windlass.compress.redundancy_clean import redundancy_clean
from windlass.data.corpus_sources import find_sources
from windlass.data.tokenizer import load_tokenizer
from windlass.kernels.weight_format import get_weight_format

LENGTH, ROWS, CLASSES, STEPS = 48, 16, 8, 400
WIDTH, LAYERS = 256, 12
_EMBEDDINGS = ["word_embeddings", "position_embeddings", "token_type_embeddings"]
_BERT = {"hidden": 768, "inner": 3072, "layers": 12, "vocabulary": 30522, "positions": 512}


@dataclass(frozen=True)
class ClassifierForm:
    """Row of the table: layers, and the format of matrices and embeddings."""

    goal: str
    layers: int = LAYERS
    format: str | None = None
    is_trained = True


CLASSIFIERS: dict[str, ClassifierForm] = {
    "12 layers, float32": ClassifierForm(""),
    "12 layers, 1 bit, int8 inputs": ClassifierForm("32x smaller, almost no loss", format="binary"),
    "12 layers, ternary, int8 inputs": ClassifierForm("", format="ternary"),
    "6 layers, 1 bit, int8 inputs": ClassifierForm("50x smaller, 97 % of the accuracy", 6, "binary"),
    "5 layers, 1 bit, int8 inputs": ClassifierForm("50x smaller, 97 % of the accuracy", 5, "binary"),
}


def measure_classifier(row: str, seed: int, base: Path, known: Path) -> dict[str, Any]:
    """Return the held-out accuracy and the file size of one compressed form. The teacher of a seed is trained once."""
    form = CLASSIFIERS[row]
    vocabulary, train, held_out = _texts(base / "tokenizer")
    torch.manual_seed(seed)
    teacher = _bert(LAYERS, vocabulary)
    if known.is_file():
        teacher.load_state_dict(torch.load(known, weights_only=True))
    else:
        _fit(teacher, None, {}, train, seed, rate=3e-4)
        torch.save(teacher.state_dict(), known)
    if form.format is None:
        return {"accuracy": _accuracy(teacher, held_out), "bytes": _file_bytes(teacher, None), "times": 1.0}
    student = _bert(form.layers, vocabulary)
    config = _techniques(form)
    init_compression(student, config, teacher_model=teacher)
    _fit(student, teacher, config, train, seed, rate=3e-4)
    _round_wide_tensors(student)
    nbytes = _file_bytes(student, form.format)
    redundancy_clean(student, config)
    result = {"accuracy": _accuracy(student, held_out), "bytes": nbytes}
    result["times"] = _file_bytes(teacher, None) / nbytes
    return result | {"times_of_bert": bert_ratio(form.layers, form.format)}


def bert_ratio(layers: int, name: str) -> float:
    """Return how much smaller BERT base would be in this form, counting all its tensors as `_file_bytes` does."""

    def count(depth: int, format_name: str | None) -> float:
        hidden, inner = _BERT["hidden"], _BERT["inner"]
        matrices = depth * [*[(hidden, hidden)] * 4, (inner, hidden), (hidden, inner)] + [(hidden, hidden)]
        matrices += [(rows, hidden) for rows in (_BERT["vocabulary"], _BERT["positions"], 2)]
        rest = depth * (9 * hidden + inner) + 3 * hidden
        if format_name is None:
            return 4 * (rest + sum(math.prod(shape) for shape in matrices))
        form = get_weight_format(format_name)
        return 2 * rest + sum(part.nbytes for shape in matrices for part in form.file_form(*shape).values())

    return count(12, None) / count(layers, name)


def _techniques(form: ClassifierForm) -> dict[str, Any]:
    every = {"modules": ["encoder.layer", "pooler", *_EMBEDDINGS]}
    inputs = {"modules": ["encoder.layer", "pooler"]}
    section: dict[str, Any] = {
        "layer_reduction": {
            "enabled": True,
            "module_name_prefix": "bert.encoder.layer",
            "teacher_layer": [round((place + 1) * LAYERS / form.layers) - 1 for place in range(form.layers)],
            "other_module_name": ["bert.embeddings", "bert.pooler", "classifier"],
        },
        "weight_quantization": {
            "shared_parameters": {"enabled": True},
            "different_groups": {"all": {"params": {"weight_format": form.format}, **every}},
        },
        "activation_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 0},
            "different_groups": {"all": {"params": {"bits": 8}, **inputs}},
        },
    }
    return {"compression_training": section}


def _fit(
    model: Any, teacher: Any, techniques: dict[str, Any], texts: tuple[Tensor, Tensor], seed: int, *, rate: float
) -> None:
    schedule = {"total_num_steps": STEPS, "warmup_num_steps": STEPS // 10, "warmup_type": "linear"}
    config = {
        **techniques,
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
    }
    distillation = None
    if teacher is not None:
        distillation = Distillation(teacher, hidden=1.0, task=0.0)
        distillation.attach(model)
    engine = windlass.initialize(model=model.train(), config=config)[0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randint(len(texts[0]), (ROWS,), generator=generator)
        engine.backward(engine(input_ids=texts[0][rows], labels=texts[1][rows]).loss)
        engine.step()
    engine.destroy()
    if distillation is not None:
        distillation.detach(model)


def _bert(layers: int, vocabulary: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def _round_wide_tensors(model: nn.Module) -> None:
    """Round all parameters except the weights with a format to the values of bfloat16."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name != "weight" or not hasattr(module, "compression"):
                parameter.data = parameter.data.bfloat16().to(parameter.dtype)


def _accuracy(model: Any, texts: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        found = [
            model.eval()(input_ids=ids).logits.argmax(-1) == labels
            for ids, labels in zip(texts[0].split(64), texts[1].split(64), strict=True)
        ]
    return float(torch.cat(found).float().mean())


def _file_bytes(model: nn.Module, name: str | None) -> int:
    """Return the bytes of a file with all tensors: matrices and embeddings in the format `name`, the rest in bfloat16;
    None: all in their own dtypes."""
    tensors: dict[str, Tensor] = {}
    packed = {} if name is None else {
        f"{layer}.weight": module
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and hasattr(module, "compression")
    }  # fmt: skip
    for key, value in model.state_dict().items():
        if key in packed and name is not None:
            parts = pack_values(get_weight_format(name), packed[key].weight)
            tensors |= {
                f"{key}.{part}": tensor.contiguous() for part, tensor in parts.items() if part != "weight_shape"
            }
        else:
            tensors[key] = value.contiguous() if name is None or not value.is_floating_point() else value.bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        save_file(copy.copy(tensors), f"{folder}/model.safetensors")
        return Path(folder, "model.safetensors").stat().st_size


def _texts(tokenizer: Path) -> tuple[int, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the vocabulary's size, and ids and classes of pieces to train on and of (at most 1024) held-out pieces."""
    encoder, root = load_tokenizer(tokenizer), Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, list[str]] = {}
    for source in find_sources(["stdlib"]):
        parts = Path(source.location).relative_to(root).parts
        if len(parts) > 1:
            files.setdefault(parts[0], []).append("\n".join(source.documents()))
    sizes = Counter({name: sum(map(len, texts)) for name, texts in files.items() if len(texts) >= 6})
    train: tuple[list[Tensor], list[int]] = ([], [])
    held_out: tuple[list[Tensor], list[int]] = ([], [])
    for label, (name, _) in enumerate(sizes.most_common(CLASSES)):
        for place, text in enumerate(sorted(files[name])):
            ids = torch.from_numpy(encoder.encode([text])[0])
            pieces = list(ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH))
            chosen = held_out if place % 5 == 4 else train
            chosen[0].extend(pieces)
            chosen[1].extend([label] * len(pieces))
    order = torch.randperm(len(held_out[0]), generator=torch.Generator().manual_seed(0))[:1024]
    whole = (torch.stack(held_out[0])[order], torch.tensor(held_out[1])[order])
    return encoder.vocab_size, (torch.stack(train[0]), torch.tensor(train[1])), whole
