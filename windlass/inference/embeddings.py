"""Embeddings of texts by a causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.base.errors import RequestError
from windlass.base.module_modes import evaluating
from windlass.inference.model_forward import find_decoder, find_device, own_modes
from windlass.inference.sharded_runner import ShardedRunner
from windlass.inference.stage_link import get_stage_link

if TYPE_CHECKING:
    from windlass.inference.llm_engine import LLMEngine


def embed_prompts(engine: LLMEngine, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the last hidden state of the last token of each prompt, divided by its L2 norm.

    A prompt is a list of token ids.

    Raises:
        RequestError: the model has no decoder that returns hidden states, or a prompt is empty, too long, or has a
            token beyond the vocabulary.
    """
    engine.finish_started()  # ranks run commands in order, so steps in flight come first
    runner = engine.runner
    if find_decoder(runner.model) is None:
        raise RequestError(
            f"{type(runner.model).__name__} has no inner decoder, whose hidden states would be the embeddings; load a "
            "causal language model of transformers"
        )
    results = []
    for ids in prompts:
        if not 0 < len(ids) <= engine.max_model_len:
            raise RequestError(f"an input has {len(ids)} tokens; give 1 to {engine.max_model_len}", parameter="input")
        wrong = next((token for token in ids if not 0 <= token < runner.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token {wrong} of an input is not in the vocabulary of {runner.vocab_size} tokens; give smaller "
                "ids, from 0",
                parameter="input",
            )
        with own_modes():
            if isinstance(runner, ShardedRunner):
                hidden = runner.call(compute_hidden, list(ids))
            else:
                hidden = compute_hidden(runner.model, list(ids))
        results.append((hidden / hidden.norm().clamp_min(1e-12)).tolist())
    return results


def compute_hidden(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Return the last hidden state of the last token, float32 `[hidden]`; empty on stages of pp before the last."""
    decoder: Any = find_decoder(model)
    tokens = torch.tensor([ids], device=find_device(model))
    link = get_stage_link(model)
    with torch.inference_mode(), evaluating(model):
        if link is None:
            output = decoder(input_ids=tokens)
        else:
            output = link.run(decoder, {"input_ids": tokens, "use_cache": False}, None, torch.float32)
            if output is None:
                return torch.empty(0)
        hidden: torch.Tensor = output.last_hidden_state[0, -1].float()
    return hidden
