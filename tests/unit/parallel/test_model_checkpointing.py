"""Test that activation checkpointing of a model without support for it is refused."""

from __future__ import annotations

import pytest
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from windlass.base.errors import ModelError
from windlass.parallel.model_checkpointing import can_checkpoint, enable_checkpointing


def test_models_that_cannot_recompute_are_refused_with_the_key() -> None:
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1))
    assert not can_checkpoint(model)
    with pytest.raises(ModelError, match="OpenAIGPTLMHeadModel has no switch .* leave a.key out"):
        enable_checkpointing(model, "a.key")
