"""Tiny Hugging Face models with activation checkpointing: Llama, GPT-2 with tied weights, T5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.causal_models import model_of
from tests.models import Batch, Place, Specimen

VOCABULARY = 40


def checkpointed(model: Any, *, reentrant: bool) -> None:
    """Enable activation checkpointing, by its newer name if transformers has it."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    if newer is not None:
        newer({"use_reentrant": reentrant})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def llama() -> nn.Module:
    """Return a model of two layers with grouped queries and non-reentrant checkpointing."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = model_of("LlamaForCausalLM", vocab_size=VOCABULARY, **sizes, **heads)
    checkpointed(model, reentrant=False)
    return model


def gpt2() -> nn.Module:
    """Return a model of two layers with tied embeddings and reentrant checkpointing."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = model_of("GPT2LMHeadModel", vocab_size=VOCABULARY, **sizes, **quiet)
    checkpointed(model, reentrant=True)
    model.enable_input_require_grads()
    return model


def t5() -> nn.Module:
    """Return an encoder and a decoder of two layers with a shared embedding.

    Each decoder layer reads the encoder's output.
    """
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = model_of(
        "T5ForConditionalGeneration", vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes
    )
    checkpointed(model, reentrant=False)
    return model


def language(place: Place) -> Batch:
    """Return ids `[2, 8]`, and the same ids as labels."""
    ids = torch.randint(1, VOCABULARY, (2, 8), generator=place.generator())
    return {"input_ids": ids, "labels": ids.clone()}


def output_loss(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Train a micro-batch of a transformers model, which returns a ModelOutput, and return the loss."""
    loss = call(**batch).loss
    backward(loss)
    return loss.detach()


HF_ZOO: dict[str, Specimen] = {
    name: Specimen(name, build, language, output_loss, frozenset({"hf", "chaotic"}))
    for name, build in (("llama", llama), ("gpt2", gpt2), ("t5", t5))
}
