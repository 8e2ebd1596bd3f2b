"""Beam search with an engine: each step of the search extends all beams by one token.

Beams share the KV blocks of common prefixes through the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from windlass.base.errors import ModelError, RequestError
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.outputs import TokenLogprobs
from windlass.inference.sampling_params import BeamSearchParams, SamplingParams


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: prompt and answer.
        logprobs: log-probabilities of the candidate tokens at each position of the answer.
        cum_logprob: sum of the log-probabilities of the answer's tokens, each divided by the temperature.
        text: decoded prompt and answer; None without a tokenizer.
        finish_reason: `stop` or `length`; None while the beam grows.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """Beams of one prompt, the best one first."""

    sequences: list[BeamSearchSequence]


def search_beams(engine: LLMEngine, prompt: str | Sequence[int], params: BeamSearchParams) -> BeamSearchOutput:
    """Return the `beam_width` likeliest answers that the search finds.

    Each step of the search extends every beam by its `2 * beam_width` likeliest tokens, sets aside the beams that end,
    and keeps the `beam_width` best others. At the end all beams are ranked by `cum_logprob / length ** length_penalty`;
    `length` counts the tokens of the answer without the end-of-sequence token.

    Raises:
        RequestError: the prompt cannot be served.
        ModelError: a step failed for one of the beams, e.g. because the logits are not finite.
    """
    _, ids = engine.encode(prompt)
    width, length = params.beam_width, len(ids)
    beams, ended = [BeamSearchSequence(list(ids))], []
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True, detokenize=False)
    temperature = params.temperature or 1.0
    room = min(params.max_tokens, engine.max_model_len - length)
    if room < 1:
        raise RequestError(
            f"the prompt has {length} tokens; the model takes {engine.max_model_len} together with the answer: "
            "shorten the prompt",
            parameter="prompt",
        )
    for _ in range(room):
        candidates = []
        for beam, entry in zip(beams, _next_logprobs(engine, [beam.tokens for beam in beams], sampling), strict=True):
            for token, found in entry.items():
                total = beam.cum_logprob + found.logprob / temperature
                grown = BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, entry], total)
                if token in engine.eos_ids and not params.ignore_eos:
                    grown.finish_reason = "stop"
                    ended.append(grown)
                else:
                    candidates.append(grown)
        beams = sorted(candidates, key=lambda beam: -beam.cum_logprob)[:width]
        if not beams:
            break
    for beam in beams:
        beam.finish_reason = "length"

    def score(beam: BeamSearchSequence) -> float:
        # the end-of-sequence token does not count
        tokens = len(beam.tokens) - length - (beam.finish_reason == "stop")
        return beam.cum_logprob / math.pow(max(tokens, 1), params.length_penalty)

    best = sorted([*ended, *beams], key=lambda beam: -score(beam))[:width]
    if engine.tokenizer is not None:
        for beam in best:
            beam.text = str(engine.tokenizer.decode(beam.tokens, skip_special_tokens=True))
    return BeamSearchOutput(best)


def _next_logprobs(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[TokenLogprobs]:
    ids = [f"beam-{number}" for number in range(len(prompts))]
    found: dict[str, TokenLogprobs] = {}
    try:
        queued = 0
        while len(found) < len(prompts):
            while queued < len(prompts) and not engine.is_full:
                engine.add_request(ids[queued], prompts[queued], sampling)
                queued += 1
            for output in engine.step():
                if output.error is not None:
                    raise ModelError(f"the beam search cannot continue: {output.error}")
                if output.outputs[0].logprobs:
                    found[output.request_id] = output.outputs[0].logprobs[0]
    except BaseException:
        for request_id in ids:
            engine.cancel(request_id)
        raise
    return [found[request_id] for request_id in ids]
