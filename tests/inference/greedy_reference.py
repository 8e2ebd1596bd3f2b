"""Requests that arrive while others run, and comparison of generated tokens with a plain forward of the same model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from windlass.compress.conv1d_layers import make_linear
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.outputs import RequestOutput
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.weight_format import get_weight_format


def _every_third(number: int) -> int:
    return int(number % 3 == 0)


def answer_arrivals(
    engine: LLMEngine,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    steps: Callable[[int], int] = _every_third,
    more: Sequence[Mapping[str, Any]] | None = None,
) -> list[RequestOutput]:
    """Answer requests that arrive while others run, and check that no block leaks.

    Args:
        params: sampling parameters of each request; or one for all requests, which then get answers of 4 to 23 tokens.
        steps: function from the number of a request to the number of steps before the next request arrives.
        more: other arguments of `add_request` for each request.
    """
    if isinstance(params, SamplingParams):
        params = [params.replace(max_tokens=4 + number % 20) for number in range(len(prompts))]
    outputs = {}
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, one, **({} if more is None else more[number]))
        for _ in range(steps(number)):
            outputs.update((output.request_id, output) for output in engine.step())
    while engine.has_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    assert engine.stats().kv_cache_usage == 0, "blocks leaked"
    return [outputs[str(number)] for number in range(len(prompts))]


def make_prompts(count: int, vocab: int, longest: int = 20, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Return random prompts of 1 to `longest` tokens. Before these, every second prompt has `shared` common tokens."""
    r = random.Random(seed)
    prefix = [r.randrange(3, vocab) for _ in range(shared)]
    prompts = []
    for number in range(count):
        prompt = [r.randrange(3, vocab) for _ in range(r.randrange(1, longest + 1))]
        prompts.append(prefix + prompt if number % 2 else prompt)
    return prompts


@torch.no_grad()
def assert_greedy(model: Any, outputs: list[RequestOutput], tolerance: float = 1e-4) -> None:
    """Check each generated token, and its log-probability if there is one, against one plain forward per request."""
    for output in outputs:
        (answer,) = output.outputs
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        kwargs = {"use_cache": False} if hasattr(model, "config") else {}
        result = model(torch.tensor([tokens[:-1]]), **kwargs)
        logits = getattr(result, "logits", result)[0, len(output.prompt_token_ids) - 1 :].float()
        logprobs = logits.log_softmax(-1)
        best = logprobs.max(-1).values
        taken = logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        # the best tokens, except for ties within rounding
        worst = (best - taken).max().item()
        assert worst <= tolerance, f"{output.request_id}: token {(best - taken).argmax()} is off by {worst}"
        if answer.logprobs is not None:
            found = torch.tensor([e[t].logprob for e, t in zip(answer.logprobs, answer.token_ids, strict=True)])
            torch.testing.assert_close(found, taken, atol=tolerance, rtol=0)


def round_layers(model: nn.Module, weights: str) -> None:
    """Round the weights of all linear layers to a format, in place."""
    form = get_weight_format(weights)
    make_linear(model)
    for layer in [one for one in model.modules() if type(one) is nn.Linear]:
        layer.weight = nn.Parameter(form.unpack(form.pack(layer.weight.detach())))
