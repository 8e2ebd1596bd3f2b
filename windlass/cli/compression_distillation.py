"""Training of a compressed model against a teacher, a stage of `windlass compress`.

[Note: trained codes] With a weight format, the forward rounds the weights of the layers, so that the trained weights
are packed to exactly the values that the loss was computed with. Without a weight format, or with a rounding method
(which rounds after the training), the training leaves the weights unquantized.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.compute_device import local_device
from windlass.base.errors import ConfigError, LossError, ModelError
from windlass.base.processes import SignalInterrupt
from windlass.comm.bootstrap import end_distributed
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.compression_training import init_compression
from windlass.compress.distillation import Distillation, check_tokenizers
from windlass.compress.model_directory import ModelDirectory, linear_layers, shared_parameters
from windlass.compress.packed_model import is_packed_directory, load_packed_model
from windlass.compress.prune_directory import common_dtype, load_wide_model, save_wide_model
from windlass.config.distillation_section import DistillationConfig
from windlass.data.pack_corpus import PackedCorpus
from windlass.data.resumable_loaders import SequenceLoader
from windlass.data.token_file import open_tokens
from windlass.data.tokenizer import load_tokenizer

LOSS_TERMS = ("logits", "task", "hidden", "attention", "temperature")
_SAVE_SECONDS = 60.0
_WARM_UP_SHARE = 20  # number of all steps divided by the number of warm-up steps


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of a training against a teacher.

    Attributes:
        teacher: directory of the teacher.
        steps, rows: number of optimizer steps, and of sequences in each step.
        rate: learning rate after the warm-up; it falls by a cosine.
        losses: weights of loss terms, and the temperature, by key of the section `distillation`.
        format: format of the linear layers; None: weights stay unquantized.
        head: round the output head too.
    """

    teacher: Path
    steps: int
    rows: int
    rate: float
    losses: Mapping[str, float] = field(default_factory=dict)
    format: str | None = None
    head: bool = False


def parse_losses(text: str | None) -> dict[str, float]:
    """Parse weights of loss terms, e.g. `logits=1,hidden=0.5`. None gives an empty dict.

    Raises:
        ConfigError: a term is unknown, or a weight is not a number or out of range.
    """
    found: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        key, _, value = part.strip().partition("=")
        try:
            if key not in LOSS_TERMS:
                raise ValueError
            found[key] = float(value)
            DistillationConfig.model_validate({key: found[key]})
        except ValueError as error:
            raise ConfigError(
                f"distill-loss (--distill-loss) has {part.strip()!r}; write weights of {', '.join(LOSS_TERMS)}, e.g. "
                "logits=1,hidden=0.5,temperature=2"
            ) from error
    return found


def check_teacher_directory(teacher: Path, student: Path) -> None:
    """Check the teacher without loading its weights.

    Raises:
        ConfigError: the teacher and the student have different tokenizers.
        ModelError: the teacher's directory is not a model.
        DataError: the teacher or the student has no tokenizer.
    """
    ModelDirectory(teacher)
    check_tokenizers(load_tokenizer(student).backend, load_tokenizer(teacher).backend)


class DistillationStopped(SignalInterrupt):
    """Exception that ends a training after a stop request, once its state is saved."""


def distil_directory(
    source: Path,
    target: Path,
    corpus: PackedCorpus,
    settings: DistillationSettings,
    *,
    length: int,
    checkpoints: Path,
    progress: Callable[[int, int], None],
    signals: Sequence[int] = (),
    trust_remote_code: bool = False,
) -> tuple[float, float]:
    """Train the model of `source` against the teacher, and write it to `target`, an existing empty directory.

    Args:
        length: tokens of a sequence.
        checkpoints: folder of the training's checkpoints; an interrupted training continues from the latest one.
        signals: numbers of the signals received so far, read after each step but the last. After a signal, the training
            saves a checkpoint and raises `DistillationStopped`.

    Returns:
        Distillation loss at the beginning and at the end: means of the first and of the last tenth of the steps.

    Raises:
        ConfigError: the teacher and the model do not match.
        ModelError: there is a weight format, but no layer that can be rounded while it is trained.
        LossError: the loss is not finite.
        DistillationStopped: a signal was received before the last step.
    """
    directory = ModelDirectory(source)
    model: Any = load_wide_model(directory, trust_remote_code=trust_remote_code)
    teacher = _load_teacher(settings.teacher, trust_remote_code).to(local_device())
    if settings.losses.get("attention"):
        for one in (model, teacher):
            one.set_attn_implementation("eager")  # other implementations return no attention maps
    rounded = _rounded_names(model, directory, settings)
    config = _training_config(settings, rounded)
    if settings.format is not None and not rounded:
        raise ModelError(
            f"{source} has no linear layer that rounds itself while it is trained (Conv1D layers do not); choose "
            "--method rtn or gptq, which round the trained model"
        )
    if rounded:
        init_compression(model, config)
    distillation = Distillation(teacher, cache=None, **settings.losses)
    distillation.attach(model)
    is_own_group = not dist.is_initialized()
    tokens = open_tokens(corpus.tokens)
    loader = SequenceLoader(tokens.train, length, settings.rows, digest=tokens.header.digest)
    try:
        losses = _train(model, config, loader, settings, checkpoints, progress, signals)
    finally:
        if is_own_group:
            end_distributed()
    distillation.detach(model)
    dtype = common_dtype(directory)
    latent = {f"{name}.weight" for name in rounded}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and name not in latent:
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    save_wide_model(model, directory, target)
    return losses


def _load_teacher(path: Path, trust_remote_code: bool) -> Any:
    if is_packed_directory(path):
        return load_packed_model(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    return load_wide_model(ModelDirectory(path), trust_remote_code=trust_remote_code)


def _rounded_names(model: nn.Module, directory: ModelDirectory, settings: DistillationSettings) -> list[str]:
    """Return the names of the layers to pack later: all linear layers that share no weight, and the output head only if
    `settings.head` is set."""
    if settings.format is None:
        return []
    sources = CheckpointNames(model, directory.places).source_of
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    shared = shared_parameters(model)
    return [
        name
        for name, module in linear_layers(model).items()
        if f"{name}.weight" in sources and id(module.weight) not in shared and (module is not output or settings.head)
    ]


def _training_config(settings: DistillationSettings, rounded: list[str]) -> dict[str, Any]:
    warm_up = max(2, settings.steps // _WARM_UP_SHARE)
    schedule = {"total_num_steps": max(settings.steps, 3), "warmup_num_steps": warm_up, "warmup_type": "linear"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.rows,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": settings.rate, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
    }
    if rounded:
        group = {"params": {"weight_format": settings.format}, "modules": [f"^{re.escape(name)}$" for name in rounded]}
        shared = {"enabled": True, "schedule_offset": 0}
        rounding = {"shared_parameters": shared, "different_groups": {"all": group}}
        config["compression_training"] = {"weight_quantization": rounding}
    return config


def _train(
    model: nn.Module,
    config: dict[str, Any],
    loader: SequenceLoader,
    settings: DistillationSettings,
    checkpoints: Path,
    progress: Callable[[int, int], None],
    signals: Sequence[int],
) -> tuple[float, float]:
    from windlass.initialize import initialize

    engine: Any = initialize(model=model.train(), config=config)[0]
    losses: list[float] = []
    if (checkpoints / "latest").is_file():
        _, state = engine.load_checkpoint(str(checkpoints))
        loader.load_state_dict(state["loader"])
        losses = list(state["losses"])
    saved = monotonic()
    while len(losses) < settings.steps:
        torch.manual_seed(len(losses))  # a step has the same dropout with and without a resume
        batch = {name: ids.to(engine.device) for name, ids in next(loader).items()}
        loss = engine(**batch).loss
        if not bool(torch.isfinite(loss)):
            raise LossError(
                f"the distillation loss is not finite at step {len(losses) + 1}; give a lower rate (--rate "
                f"{settings.rate:g})"
            )
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        progress(len(losses), settings.steps)
        stops = bool(signals) and len(losses) < settings.steps
        if stops or monotonic() - saved > _SAVE_SECONDS:
            _save(engine, checkpoints, {"loader": loader.state_dict(), "losses": losses})
            saved = monotonic()
        if stops:
            raise DistillationStopped(signals[0])
    engine.destroy()
    few = max(len(losses) // 10, 1)
    return sum(losses[:few]) / few, sum(losses[-few:]) / few


def _save(engine: Any, checkpoints: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, and remove all others."""
    tag = f"step{len(state['losses'])}"
    engine.save_checkpoint(str(checkpoints), tag=tag, client_state=state)
    for path in checkpoints.iterdir():
        if path.is_dir() and path.name != tag:
            shutil.rmtree(path)
