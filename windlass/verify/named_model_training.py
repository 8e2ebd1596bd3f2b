"""Training of `windlass verify --model`: a named model on generated batches, or on batches that a function returns."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError, DataError, ModelError
from windlass.base.remote_code import needs_remote_code, remote_code_refusal
from windlass.verify.verification_job import VerificationJob

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SHAPE = re.compile(r"(\d+)x(\d+)")
_LENGTH = 32  # tokens of a generated sample

BatchFunction = Callable[[int, int, int], Any]  # called with step, micro-batch and rank


def train_named_model(job: VerificationJob) -> None:
    """Train the model of `job` under the job's configuration, until all steps are done or the verification ends.

    Raises:
        ConfigError: the configuration has no optimizer.
        ModelError, DataError: the model or its batches can't be built.
    """
    import windlass

    torch.manual_seed(job.seed)
    model = build_model(job.model or "", trust_remote_code=job.trust_remote_code)
    engine, optimizer, _, _ = windlass.initialize(model=model, config=job.config)
    if optimizer is None:
        raise ConfigError(f"{job.config} names no optimizer, and --model provides none; add a section optimizer")
    batches = build_batch_function(job, model, engine.train_micro_batch_size_per_gpu())
    for step in range(job.steps):
        for micro in range(engine.gradient_accumulation_steps()):
            batch = move_batch(batches(step, micro, dist.get_rank()), engine.device)
            engine.backward(loss_of(call_model(engine, batch)))
            engine.step()


def build_model(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model with this name.

    Args:
        trust_remote_code: run Python files that come with a Hugging Face model.

    Raises:
        ModelError: there is no such model, transformers is not installed, or the model needs its own code.
    """
    if _FUNCTION.fullmatch(name):
        model = _import_function(name, "--model")()
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"--model {name} returned a {type(model).__name__}, not a torch.nn.Module; return the model"
            )
        return model
    return _from_transformers(name, trust_remote_code)


def build_batch_function(job: VerificationJob, model: nn.Module, rows: int) -> BatchFunction:
    """Return a function that makes the job's batches for a step, micro-batch and rank.

    Args:
        rows: samples of a generated batch, unless the job gives its shape.

    Raises:
        DataError: the job's batch is neither a shape nor a function, or the model has no `config.vocab_size`.
        ModelError: the job's batch function can't be imported.
    """
    given = job.batch
    if given is not None and _FUNCTION.fullmatch(given):
        made: BatchFunction = _import_function(given, "--batch")
        return made
    length, config = _LENGTH, getattr(model, "config", None)
    if given is not None:
        shape = _SHAPE.fullmatch(given)
        if shape is None:
            raise DataError(f"--batch is {given!r}; give ROWSxLENGTH of tokens (2x32), or package.module:function")
        rows, length = int(shape[1]), int(shape[2])
    vocabulary = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if vocabulary is None:
        raise DataError(
            f"{type(model).__name__} has no config.vocab_size to generate tokens from; give --batch "
            "package.module:function, which returns the arguments of a forward for (step, micro_batch, rank)"
        )

    def tokens(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
        seed = job.seed + 1 + step * 10_007 + micro * 101 + rank * 1_000_003
        ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids.clone()}

    return tokens


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output: the tensor itself, its `loss` (attribute or item), or the first item of
    a tuple or list.

    Raises:
        ModelError: the output has no scalar loss.
    """
    found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ModelError(
            f"the model returned a {type(output).__name__} without a scalar loss; verify it with the script that "
            "trains it, or wrap it in a module that returns its loss"
        )
    return found


def _import_function(name: str, option: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{option} {name}: {error}; name a function that can be imported, e.g. from the current directory"
        ) from error
    if not callable(found):
        raise ModelError(f"{option} {name} is a {type(found).__name__}, not a function; name a function")
    call: Callable[..., Any] = found
    return call


def _from_transformers(name: str, trust_remote_code: bool) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"--model {name!r} is not package.module:function, and Hugging Face models need transformers: "
            "pip install 'windlass[hf]'"
        ) from error
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not name.startswith("hub:") and not file.is_file():
        raise ModelError(
            f"no model at {name!r}; give package.module:function, a Hugging Face config.json, a directory that holds "
            "one, or hub:NAME"
        )
    weights = name.startswith("hub:") or (path.is_dir() and next(path.glob("*.safetensors"), None) is not None)
    # Pass the folder, not the file: transformers looks for the Python files of the model there.
    local = file.parent if file.name == "config.json" else file
    source = name.removeprefix("hub:") if name.startswith("hub:") else str(local)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        if weights:
            model = kind.from_pretrained(source, use_safetensors=True, trust_remote_code=trust_remote_code)
        else:
            model = kind.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if needs_remote_code(error):
            raise ModelError(remote_code_refusal(name)) from error
        raise
    model.config.use_cache = False  # training does not use the keys and values of past tokens
    model.train()
    assert isinstance(model, nn.Module)
    return model


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch: a mapping has keyword arguments, a tuple or list has positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def move_batch(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`. A mapping, such as the result of a tokenizer, becomes a dict."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move_batch(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [move_batch(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
