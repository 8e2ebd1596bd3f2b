"""Tiny Hugging Face models with activation checkpointing on: Llama, GPT-2 with tied weights, T5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.causal_models import model_of
from tests.models import Batch, Place, Specimen

VOCABULARY = 40


def checkpointed(model: Any, *, reentrant: bool) -> None:
    """Turn activation checkpointing on, under its newer name where transformers has it."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    if newer is not None:
        newer({"use_reentrant": reentrant})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def llama() -> nn.Module:
    """Two layers with grouped queries, non-reentrant checkpointing."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = model_of("LlamaForCausalLM", vocab_size=VOCABULARY, **sizes, **heads)
    checkpointed(model, reentrant=False)
    return model


def gpt2() -> nn.Module:
    """Two layers, input and output embeddings tied, reentrant checkpointing."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = model_of("GPT2LMHeadModel", vocab_size=VOCABULARY, **sizes, **quiet)
    checkpointed(model, reentrant=True)
    model.enable_input_require_grads()
    return model


def t5() -> nn.Module:
    """Encoder and decoder of two layers; shared embedding; encoder states reach every decoder layer."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = model_of(
        "T5ForConditionalGeneration", vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes
    )
    checkpointed(model, reentrant=False)
    return model


def language(place: Place) -> Batch:
    """ids [2, 8], and the same as labels."""
    ids = torch.randint(1, VOCABULARY, (2, 8), generator=place.generator())
    return {"input_ids": ids, "labels": ids.clone()}


def output_loss(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Hugging Face models return a ModelOutput with a loss."""
    loss = call(**batch).loss
    backward(loss)
    return loss.detach()


HF_ZOO: dict[str, Specimen] = {
    name: Specimen(name, build, language, output_loss, frozenset({"hf", "chaotic"}))
    for name, build in (("llama", llama), ("gpt2", gpt2), ("t5", t5))
}
