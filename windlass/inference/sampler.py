"""Choice of the next token from logits, by the parameters of each sequence.

The steps and their order are those of vLLM: masks and biases, penalties, temperature, min-p, top-k, top-p, then the
draw. Log-probabilities are those of the unchanged logits.

[Note: one draw a token] A sequence has its own stream of uniform numbers. Without greedy sampling, each token takes one
number and is the inverse of the cumulative distribution at this number. So the tokens depend only on the parameters,
seed, index and logits of the sequence: not on the batch, and not on drafts, because a draft is accepted exactly if it
equals the drawn token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from windlass.base.errors import ModelError, RequestError
from windlass.base.log import logger
from windlass.base.text import one_line
from windlass.inference.outputs import Logprob, TokenLogprobs
from windlass.inference.sampling_params import SamplingParams, TokenTexts
from windlass.inference.token_draw import draw_together, draw_tokens, greatest, upload

_LOWEST = -torch.inf


@dataclass(eq=False)
class SequenceSampler:
    """Sampling state of one sequence.

    Attributes:
        prompt: tokens of the prompt.
        generated: tokens of the answer so far; the same list object as the sequence's `generated`.
        index: index of the answer among the request's answers; `seed` and `index` determine the random numbers.
        stop_ids: end-of-sequence and stop tokens, which are not drawn before the answer has `min_tokens` tokens.
        allowed: function that returns the mask of the tokens that a structured output allows next, bool
            `[vocabulary]`; None: no structured output.
    """

    params: SamplingParams
    prompt: Sequence[int]
    generated: list[int]
    seed: int
    index: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: TokenTexts = ()
    allowed: Callable[[], torch.Tensor] | None = None
    _random: random.Random = field(init=False)
    _counts: dict[int, int] = field(default_factory=dict, init=False)
    # tensors made once, since a request may list every token of the vocabulary
    _prompt_ids: torch.Tensor | None = field(default=None, init=False)
    _allowed_ids: torch.Tensor | None = field(default=None, init=False)
    _biases: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed}/{self.index}")

    @property
    def changes_logits(self) -> bool:
        """True if the logits are changed before the draw."""
        params = self.params
        return bool(
            self.allowed is not None
            or self.bad_words
            or params.logit_bias
            or params.allowed_token_ids
            or len(self.generated) < params.min_tokens
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
        )

    def draw(self) -> float:
        """Return the next uniform number in [0, 1)."""
        return self._random.random()

    def count(self, token: int) -> None:
        """Count a generated token for the penalties."""
        self._counts[token] = self._counts.get(token, 0) + 1

    def change_logits(self, logits: torch.Tensor) -> None:
        """Apply masks, biases and penalties to `logits` `[vocabulary]` in place."""
        params, size = self.params, logits.shape[0]
        if params.allowed_token_ids is not None:
            if self._allowed_ids is None:
                allowed = sorted({token for token in params.allowed_token_ids if token < size})
                self._allowed_ids = torch.tensor(allowed, dtype=torch.long, device=logits.device)
            _keep(logits, self._allowed_ids)
        if self.allowed is not None:
            mask = self.allowed().to(logits.device)
            logits[: len(mask)].masked_fill_(~mask[:size], _LOWEST)
            logits[len(mask) :] = _LOWEST
        for word in self.bad_words:
            if word[-1] < size and (len(word) == 1 or tuple(self.generated[1 - len(word) :]) == word[:-1]):
                logits[word[-1]] = _LOWEST
        if len(self.generated) < params.min_tokens and self.stop_ids:
            stop_ids = [token for token in self.stop_ids if token < size]
            ends = logits[stop_ids]
            logits[stop_ids] = _LOWEST
            if self.allowed is not None and logits.max() == _LOWEST:
                logits[stop_ids] = ends  # the structure is complete, and nothing else may follow
        if params.logit_bias:
            if self._biases is None:
                given = [(token, bias) for token, bias in params.logit_bias.items() if token < size]
                tokens = torch.tensor([token for token, _ in given], dtype=torch.long, device=logits.device)
                biases = torch.tensor([bias for _, bias in given], dtype=torch.float64)
                self._biases = tokens, biases.to(logits)
            tokens, biases = self._biases
            logits[tokens] += biases
        self._penalize(logits)

    def _penalize(self, logits: torch.Tensor) -> None:
        params, size = self.params, logits.shape[0]
        if params.repetition_penalty != 1:
            if self._prompt_ids is None:
                # a model may embed tokens that it has no logits for
                seen = sorted({token for token in self.prompt if token < size})
                self._prompt_ids = torch.tensor(seen, dtype=torch.long, device=logits.device)
            ids = torch.cat([self._prompt_ids, self._generated_ids(logits)]).unique()
            score = logits[ids]
            penalty = params.repetition_penalty
            logits[ids] = torch.where(score > 0, score / penalty, score * penalty)
        if (params.presence_penalty or params.frequency_penalty) and self._counts:
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
            logits[self._generated_ids(logits)] -= counts * params.frequency_penalty + params.presence_penalty

    def _generated_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(self._counts), dtype=torch.long, device=logits.device)


class SampledToken(NamedTuple):
    """Token of a sequence, with the requested log-probabilities.

    Attributes:
        error: reason for which no token could be drawn: RequestError if the request's parameters are the cause, else
            ModelError. With an error of either type the token is undefined.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    error: RequestError | ModelError | None = None


def sample(logits: torch.Tensor, samplers: Sequence[SequenceSampler]) -> list[SampledToken]:
    """Choose one token for each row.

    Args:
        logits: float32 `[rows, vocabulary]`; not changed.
        samplers: one for each row. Each draws at most one number. The caller must pass the chosen token to `count`.
    """
    scores, errors = _change_rows(logits, samplers)
    best, ids = greatest(scores)
    for row, value in enumerate(best):
        if not math.isfinite(value):
            errors.setdefault(row, _explain(value, logits[row]))
    drawing = [row for row, sampler in enumerate(samplers) if not sampler.params.is_greedy and row not in errors]
    if drawing:
        chosen = scores if len(drawing) == len(samplers) else scores[drawing]
        params = [samplers[row].params for row in drawing]
        drawn = draw_tokens(chosen, params, [samplers[row].draw() for row in drawing])
        for row, token in zip(drawing, drawn, strict=True):
            ids[row] = token
    logprobs: list[TokenLogprobs | None] = [None] * len(samplers)
    reporting = [
        row for row, sampler in enumerate(samplers) if sampler.params.logprobs is not None and row not in errors
    ]
    if reporting:
        counts = [samplers[row].params.logprobs or 0 for row in reporting]
        found = take_logprobs(logits[reporting], [ids[row] for row in reporting], counts)
        for row, entry in zip(reporting, found, strict=True):
            logprobs[row] = entry
    return [SampledToken(ids[row], logprobs[row], errors.get(row)) for row in range(len(samplers))]


class PendingTokens:
    """Tokens that were drawn on a device, with their asynchronous copy to the host.

    Attributes:
        ids: int64 `[rows]` on the device.
    """

    def __init__(self, ids: torch.Tensor, best: torch.Tensor) -> None:
        self.ids, self._best = ids, best
        found = torch.stack([ids, torch.isfinite(best).long()])
        self._event: torch.cuda.Event | None = None
        if ids.device.type == "cuda":
            self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = found.cpu()

    def wait(self) -> list[SampledToken]:
        """Wait for the copy, and return the tokens."""
        if self._event is not None:
            self._event.synchronize()
        errors = {
            row: _explain_infinite(float(self._best[row])) for row, ok in enumerate(self._host[1].tolist()) if not ok
        }
        return [SampledToken(token, None, errors.get(row)) for row, token in enumerate(self._host[0].tolist())]


def can_draw_later(sampler: SequenceSampler) -> bool:
    """Return True if the token of a sequence depends only on its unchanged logits and one uniform number, and no
    log-probabilities are requested.
    """
    return not sampler.changes_logits and sampler.params.logprobs is None


def draw_later(logits: torch.Tensor, samplers: Sequence[SequenceSampler]) -> PendingTokens:
    """Draw one token for each row, like `sample`, but without waiting for the device.

    Args:
        logits: float32 `[rows, vocabulary]`.
        samplers: one for each row, which `can_draw_later` accepts.
    """
    best, tokens = logits.max(dim=-1)
    drawing = [row for row, sampler in enumerate(samplers) if not sampler.params.is_greedy]
    if drawing:
        every = len(drawing) == len(samplers)
        index = upload(torch.tensor(drawing), logits.device)
        chosen = logits if every else logits[index]
        params = [samplers[row].params for row in drawing]
        drawn = draw_together(chosen, params, [samplers[row].draw() for row in drawing])
        tokens = drawn if every else tokens.index_copy(0, index, drawn)
    return PendingTokens(tokens, best)


def _change_rows(
    logits: torch.Tensor, samplers: Sequence[SequenceSampler]
) -> tuple[torch.Tensor, dict[int, RequestError | ModelError]]:
    """Return logits with masks and penalties applied, and the error of each row that failed."""
    changed = [row for row, sampler in enumerate(samplers) if sampler.changes_logits]
    if not changed:
        return logits, {}
    scores = logits.clone()
    errors: dict[int, RequestError | ModelError] = {}
    for row in changed:
        try:
            samplers[row].change_logits(scores[row])
        except RequestError as error:
            errors[row] = error
        except Exception as error:  # from the structured-output library: the other rows continue
            logger.exception("a request failed, because its masks or penalties could not be applied")
            errors[row] = ModelError(f"no token could be chosen: {type(error).__name__}: {one_line(str(error))}")
    return scores, errors


def _explain(best: float, logits: torch.Tensor) -> RequestError | ModelError:
    if best == _LOWEST and logits.max() > _LOWEST:
        return RequestError(
            "no token can be generated: allowed_token_ids, bad_words, min_tokens, logit_bias and structured_outputs "
            "together exclude all tokens; relax one of them"
        )
    if logits.max().isfinite():
        return RequestError(
            f"the highest logit is {best} after logit_bias and penalties; write smaller biases, and a "
            "repetition_penalty nearer to 1"
        )
    return _explain_infinite(best)


def _explain_infinite(best: float) -> ModelError:
    return ModelError(
        f"the highest logit of the model is {best}; load the model in a wider dtype, or check its weights"
    )


def take_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probability of one token for each row, and those of the likeliest tokens.

    Args:
        logits: float32 `[rows, vocabulary]`.
        tokens: one token for each row. Its log-probability is the first entry of the row's result; minus infinity for
            a token of a prompt that the model embeds, but has no logit for.
        counts: number of likeliest tokens for each row.
    """
    logprobs = logits.log_softmax(dim=-1)
    index, size = torch.tensor(tokens, device=logits.device)[:, None], logits.shape[-1]
    own = logprobs.gather(1, index.clamp(max=size - 1)).masked_fill(index >= size, _LOWEST)
    ranks = (logprobs > own).sum(dim=-1) + 1
    most = min(max(counts), size)
    values, ids = logprobs.topk(most, dim=-1) if most else (own[:, :0], own[:, :0].long())
    results = []
    rows = zip(tokens, own[:, 0].tolist(), ranks.tolist(), values.tolist(), ids.tolist(), counts, strict=True)
    for token, value, rank, top_values, top_ids, count in rows:
        entry = {token: Logprob(value, rank)}
        for place, (other, other_value) in enumerate(zip(top_ids[:count], top_values[:count], strict=True)):
            entry.setdefault(other, Logprob(other_value, place + 1))
        results.append(entry)
    return results


def _keep(logits: torch.Tensor, ids: torch.Tensor) -> None:
    kept = logits[ids]
    logits.fill_(_LOWEST)
    logits[ids] = kept
