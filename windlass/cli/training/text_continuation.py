"""Generation of text with an exported model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.base.remote_code import needs_remote_code, remote_code_refusal

_MAX_NEW_TOKENS = 10**6


def generate_continuation(
    directory: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.6,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> str:
    """Return the model's continuation of `prompt`, without the prompt.

    Args:
        directory: Hugging Face directory of the model.
        temperature: 0 always takes the most probable token. seed: seed of the sampling; the global random state is left
        unchanged.
        trust_remote_code: run Python files that come with the model.

    Raises:
        ModelError: there is no model, it is damaged, it needs its own code, or transformers is missing.
        ConfigError: a number is out of range.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature (--temperature) is {temperature}; write 0 or a positive number")
    if not 1 <= max_new_tokens <= _MAX_NEW_TOKENS:
        raise ConfigError(
            f"max_new_tokens (--max-new-tokens) is {max_new_tokens}; write a number from 1 to {_MAX_NEW_TOKENS:,}"
        )
    if not 0 < top_p <= 1:
        raise ConfigError(
            f"top_p (--top-p) is {top_p}, which is not a probability; write a number above 0 and at most 1 (1: "
            "sample from all tokens)"
        )
    model, tokenizer = _load_model_and_tokenizer(directory, trust_remote_code)
    model.to(device).eval()
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids if prompt else None
    if encoded is None or encoded.shape[1] == 0:
        encoded = torch.tensor([[tokenizer.eos_token_id]])
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and encoded.shape[1] + max_new_tokens > limit:
        encoded = encoded[:, -max(limit - max_new_tokens, 1) :]
        max_new_tokens = min(max_new_tokens, limit - encoded.shape[1])
    encoded = encoded.to(device)
    draws = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed % 2**63)
        ids = model.generate(
            encoded,
            attention_mask=torch.ones_like(encoded),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            **draws,
        )
    return str(tokenizer.decode(ids[0, encoded.shape[1] :], skip_special_tokens=True))


def _load_model_and_tokenizer(directory: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"no model at {directory}: it contains no config.json; give a directory that `windlass train` or "
            "save_pretrained wrote"
        )
    try:
        import transformers
    except ImportError as error:
        raise ModelError("generating text needs transformers: pip install 'windlass[hf]'") from error
    talk: Any = transformers.logging
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, use_safetensors=True, trust_remote_code=trust_remote_code
        )
        return model, transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # safetensors and tokenizers raise their own exception types
        if needs_remote_code(error):
            raise ModelError(remote_code_refusal(directory)) from error
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"cannot load the model in {directory}: {reason}; is the directory complete?") from error
