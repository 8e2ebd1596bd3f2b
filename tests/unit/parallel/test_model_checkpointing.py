"""Tests of the switch of activation checkpointing: refused models, and another checkpoint function."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from tests.causal_models import build
from windlass.base.errors import ModelError
from windlass.parallel.activation_checkpoint_api import checkpoint
from windlass.parallel.model_checkpointing import can_checkpoint, enable_checkpointing


def test_models_that_cannot_recompute_are_refused_with_the_key() -> None:
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1))
    assert not can_checkpoint(model)
    with pytest.raises(ModelError, match="OpenAIGPTLMHeadModel has no switch .* leave a.key out"):
        enable_checkpointing(model, "a.key")


def test_a_model_with_its_own_checkpoint_function_takes_no_other() -> None:
    class Own(nn.Module):
        supports_gradient_checkpointing = True

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None) -> None:
            self.enabled = True

    enable_checkpointing(Own())
    with pytest.raises(ModelError, match="Own checkpoints its layers by a function of its own, so a.key stores"):
        enable_checkpointing(Own(), "a.key", checkpoint)
    model: Any = build("llama")
    enable_checkpointing(model, "a.key", checkpoint)
    assert all(layer._gradient_checkpointing_func is checkpoint for layer in model.model.layers)
