"""Embeddings of texts by a causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from windlass.base.errors import RequestError
from windlass.inference.model_forward import find_device

if TYPE_CHECKING:
    from windlass.inference.llm_engine import LLMEngine


def embed_prompts(engine: LLMEngine, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the last hidden state of the last token of each prompt, divided by its norm.

    Raises:
        RequestError: the model has no decoder that returns hidden states, or a prompt is empty or too long.
    """
    model = engine.runner.model
    decoder = getattr(model, "get_decoder", lambda: None)() or getattr(
        model, getattr(model, "base_model_prefix", "") or "_", None
    )
    if decoder is None or decoder is model:
        raise RequestError(f"{type(model).__name__} has no decoder inside, whose hidden states are embeddings")
    results = []
    for ids in prompts:
        if not 0 < len(ids) <= engine.max_model_len:
            raise RequestError(f"an input has {len(ids)} tokens; give 1 to {engine.max_model_len}", parameter="input")
        tokens = torch.tensor([list(ids)], device=find_device(model))
        with torch.inference_mode():
            hidden = decoder(input_ids=tokens).last_hidden_state[0, -1].float()
        results.append((hidden / hidden.norm().clamp_min(1e-12)).tolist())
    return results
