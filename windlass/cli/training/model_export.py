"""Export of full weights as a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from windlass.base.atomic_file import temporary_path_beside
from windlass.base.errors import CheckpointError
from windlass.checkpoint.safetensors_export import replace_directory

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def export_model(model: Any, state: Mapping[str, torch.Tensor], tokenizer_dir: Path, target: Path) -> None:
    """Write weights, configuration and tokenizer to `target`. The directory appears complete or not at all.

    Args:
        model: the transformers model under training. Only its class and configuration are used, because its
            parameters may be sharded.
        state: full tensors by the model's own names.

    Raises:
        CheckpointError: the weights do not fit the model, or they cannot be written.
    """
    partial = temporary_path_beside(target)
    whole = _model_with_weights(model, state)
    try:
        partial.mkdir(parents=True)
        whole.save_pretrained(partial)
        for name in _TOKENIZER_FILES:
            if (tokenizer_dir / name).is_file():
                shutil.copyfile(tokenizer_dir / name, partial / name)
        replace_directory(partial, target)
    except Exception as error:  # safetensors raises its own exception type for a full disk
        raise CheckpointError(
            f"cannot write the exported model to {target}: {error}; free some space or choose another --out"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _model_with_weights(model: Any, state: Mapping[str, torch.Tensor]) -> Any:
    with torch.device("meta"):
        whole = type(model)(model.config)
    missing, unexpected = whole.load_state_dict(dict(state), strict=False, assign=True)
    whole.tie_weights()
    tied = {name for name, tensor in whole.state_dict().items() if not tensor.is_meta}
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise CheckpointError(
            f"the weights do not fit {type(model).__name__}: missing {missing[:4]}, unexpected {list(unexpected)[:4]}"
        )
    whole.config.use_cache = True
    return whole
