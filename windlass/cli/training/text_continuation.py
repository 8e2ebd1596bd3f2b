"""Generation of text with an exported model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from windlass.base.errors import ConfigError, ModelError, RequestError
from windlass.base.log import logger

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
    **options: Any,
) -> str:
    """Return the model's continuation of `prompt`, without the prompt.

    Args:
        directory: Hugging Face directory of the model.
        max_new_tokens: maximum number of tokens to generate; the model's window may allow fewer.
        temperature: 0 always takes the most probable token.
        seed: seed of the sampling; the global random state is left unchanged.
        trust_remote_code: run Python files that come with the model.
        options: options of the engine; see `EngineOptions`.

    Raises:
        ModelError: there is no model, it is damaged, it needs `trust_remote_code`, or transformers is missing; or the
            engine has ended the answer, e.g. because its logits are not finite.
        ConfigError: a number is out of range, or the prompt is not valid UTF-8, or is empty for a tokenizer without a
            token to start from.
        RequestError: the prompt leaves no room for an answer.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature (--temperature) is {temperature}; write 0 or a positive number")
    if not 1 <= max_new_tokens <= _MAX_NEW_TOKENS:
        raise ConfigError(
            f"max_new_tokens (--max-new-tokens) is {max_new_tokens}; write a number from 1 to {_MAX_NEW_TOKENS:,}"
        )
    if not 0 < top_p <= 1:
        raise ConfigError(
            f"top_p (--top-p) is {top_p}; write a number above 0 and at most 1 (1: sample from all tokens)"
        )
    from windlass.inference.llm import LLM
    from windlass.inference.sampling_params import SamplingParams

    with LLM(directory, device=device, trust_remote_code=trust_remote_code, max_sequences=1, **options) as llm:
        try:
            ids = llm.tokenizer(prompt).input_ids
        except (TypeError, UnicodeError) as error:
            raise ConfigError(f"prompt (--prompt) is {prompt!r}, which is not valid UTF-8; write text") from error
        if not ids:
            starts = (llm.tokenizer.bos_token_id, llm.tokenizer.eos_token_id, *sorted(llm.engine.eos_ids))
            ids = [token for token in starts if token is not None][:1]
        if not ids:
            raise ConfigError("prompt (--prompt) is empty, and the tokenizer has no token to start from; write text")
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_new_tokens)
        # `generate` shortens the answer to the tokens that the prompt leaves of the model's maximum length
        (output,) = llm.generate([ids], params)
        if output.error is not None:
            raise (RequestError if output.is_request_error else ModelError)(output.error)
        answer = output.outputs[0]
        if answer.finish_reason == "length" and len(answer.token_ids) < max_new_tokens:
            logger.warning(
                "the text ends after %d of %d new tokens, since the model takes %d tokens together with the prompt",
                len(answer.token_ids),
                max_new_tokens,
                llm.max_model_len,
            )
    return answer.text
