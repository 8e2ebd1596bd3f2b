"""Tests of packed weights in models that read a layer's weight directly, with or without a call of the layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import windlass
from tests.causal_models import VOCABULARY
from windlass.base.errors import ModelError
from windlass.inference.engine_factory import make_rank_engine
from windlass.inference.engine_options import EngineOptions
from windlass.inference.sampling_params import SamplingParams

SMALL = {"kv_cache_tokens": 256, "max_tokens_per_step": 32, "max_sequences": 4}
WIDTH = 16


class WeightReader(nn.Module):
    """Model that reads the weights of `own` layers and of the head. `calls_too`: it also calls the `own` layers."""

    def __init__(self, *, calls_too: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in ("up", "own")}) for _ in "ab")
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.calls_too = calls_too

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).cumsum(1)
        for layer in self.layers:
            x = x + torch.tanh(layer["up"](input=x)) @ layer["own"].weight
            if self.calls_too:
                x = x + layer["own"](x)
        return F.linear(x, self.head.weight)


def greedy(model: nn.Module, ids: list[int], count: int = 5) -> list[int]:
    tokens = list(ids)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(ids) :]


def made(**options: Any) -> WeightReader:
    torch.manual_seed(0)
    return WeightReader(**options).eval()


@pytest.mark.parametrize("weights", [None, "fp32"])
def test_layers_that_are_not_called_keep_their_weights(weights: str | None) -> None:
    model, prompt = made(), list(range(3, 24))
    prune.identity(model.layers[0]["up"], "weight")  # now the weight is not a parameter
    expected = greedy(model, prompt)
    engine = make_rank_engine(
        copy.deepcopy(model),
        EngineOptions.from_arguments(max_model_len=64, weights=weights, **SMALL),
        skip_tokenizer=True,
        owned=True,
    )
    with windlass.LLM.from_engine(engine) as llm:
        answer = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0].outputs[0]
    assert answer.token_ids == expected


def test_a_model_that_calls_a_layer_and_reads_its_weight_is_refused() -> None:
    """The weight that such a model reads is a tensor without values, once the layer is packed."""
    options = EngineOptions.from_arguments(max_model_len=64, **SMALL)
    with pytest.raises(
        ModelError, match="WeightReader computes other logits with packed weights .* serve the module itself"
    ):
        make_rank_engine(made(calls_too=True), options, skip_tokenizer=True, owned=True)
