"""Update of answers: tokens, texts, log-probabilities and finish reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.base.errors import ModelError, RequestError
from windlass.base.log import logger
from windlass.base.text import one_line
from windlass.inference.detokenizer import find_stop, held_back
from windlass.inference.generation_request import GenerationRequest, GenerationSequence
from windlass.inference.outputs import EngineStats, FinishReason, Logprob, TokenLogprobs
from windlass.inference.sampler import SampledToken, take_logprobs
from windlass.inference.sequence_table import SequenceTable


class AnswerWriter:
    """Writer of answers: adds sampled tokens, and ends answers.

    Args:
        table: sequences of the engine, from which ended ones are removed.
        tokenizer: tokenizer of transformers; None: outputs have no text.
        eos_ids: tokens that end an answer.
        stats: counters of the engine, which are updated here.
        clock: function that returns the time in seconds.
        on_finish: function that is called with each sequence that has ended.

    Attributes:
        changed: requests by id, with new tokens or finished answers that the engine has not reported.
    """

    def __init__(
        self,
        table: SequenceTable,
        tokenizer: Any,
        eos_ids: frozenset[int],
        stats: EngineStats,
        clock: Callable[[], float],
        on_finish: Callable[[GenerationSequence], None],
    ) -> None:
        self._table, self._tokenizer, self._eos_ids = table, tokenizer, eos_ids
        self._stats, self._clock, self._on_finish = stats, clock, on_finish
        self.changed: dict[str, GenerationRequest] = {}
        self._token_texts: dict[int, str] = {}  # at most one text for each token of the vocabulary

    def append(self, sequence: GenerationSequence, sampled: SampledToken) -> bool:
        """Add a sampled token; return True if it ended the sequence."""
        request, output, token = sequence.request, sequence.output, sampled.token
        now = self._clock()
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        request.metrics.last_token_time = now
        self.changed[request.request_id] = request
        self._stats.generation_tokens += 1
        sequence.has_sampled = True
        sequence.token_ids.append(token)
        output.token_ids.append(token)
        sequence.sampler.count(token)
        try:
            if sampled.logprobs is not None:
                assert output.logprobs is not None and output.cumulative_logprob is not None
                output.cumulative_logprob += sampled.logprobs[token].logprob
                output.logprobs.append(self._with_text(sampled.logprobs))
                if output.text_offsets is not None and sequence.detokenizer is not None:
                    output.text_offsets.append(len(sequence.detokenizer.text))
            if sequence.constraint is not None:
                sequence.constraint.accept(token)
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                self._finish(sequence, "stop" if self._finish_text(sequence) else reason)
        except RequestError as error:
            self.end(request, "error", error)
            return True
        except Exception as error:  # from the tokenizer or a structured output: other requests continue
            self._end_by_text(request, f"token {token} could not be added to the answer", error)
            return True
        return reason is not None

    def end(
        self, request: GenerationRequest, reason: FinishReason, error: RequestError | ModelError | None = None
    ) -> None:
        """End all unfinished answers of a request. An error of the tokenizer is logged, and the text stays as it is."""
        request.error = error
        for sequence in request.sequences:
            if sequence.output.finished():
                continue
            try:
                stopped = self._finish_text(sequence)
            except Exception:  # from the tokenizer: the end must not fail, since it frees the blocks
                logger.exception("request %s ends without the rest of its text: decoding failed", request.request_id)
                stopped = False
            self._finish(sequence, "stop" if stopped else reason)

    def _end_by_text(self, request: GenerationRequest, problem: str, error: Exception) -> None:
        logger.exception("request %s failed: %s", request.request_id, problem)
        for sequence in request.sequences:
            sequence.detokenizer = None  # the detokenizer may be the cause of the error
        self.end(request, "error", ModelError(f"{problem}: {type(error).__name__}: {one_line(str(error))}"))

    def add_prompt_logprobs(self, sequence: GenerationSequence, first: int, logits: torch.Tensor) -> bool:
        """Add log-probabilities of prompt tokens, given the logits `[rows, vocab_size]` from position `first` on.

        Returns:
            False if the tokenizer cannot decode a token, which ends the request.
        """
        request = sequence.request
        assert request.prompt_logprobs is not None
        skipped = len(request.prompt_logprobs) - 1 - first  # positions that were reported before a preemption
        logits = logits[max(skipped, 0) :]
        start = len(request.prompt_logprobs)
        tokens = request.prompt_ids[start : start + logits.shape[0]]
        if tokens:
            counts = [request.params.prompt_logprobs or 0] * len(tokens)
            found = take_logprobs(logits[: len(tokens)], tokens, counts)
            try:
                request.prompt_logprobs += [self._with_text(entry) for entry in found]
            except Exception as error:  # from the tokenizer: other requests continue
                self._end_by_text(request, "a token of prompt_logprobs has no text", error)
                return False
        return True

    def _finish_reason(self, sequence: GenerationSequence, token: int) -> FinishReason | None:
        """Add the token's text, and return the finish reason if the sequence ends with this token, else None.

        The text of a stop token or end-of-sequence token is added only with `include_stop_str_in_output`.
        """
        request, output = sequence.request, sequence.output
        params, length = request.params, len(output.token_ids)
        is_eos = token in self._eos_ids and not params.ignore_eos
        is_stop = token in (params.stop_token_ids or ())
        if length >= params.min_tokens and (is_eos or is_stop):
            if is_stop:
                output.stop_reason = token
            if params.include_stop_str_in_output and sequence.detokenizer is not None:
                sequence.detokenizer.append(token)
            return "stop"
        if sequence.detokenizer is not None and self._add_text(sequence, sequence.detokenizer.append(token)):
            return "stop"
        if length >= request.max_tokens:
            return "length"
        if sequence.constraint is not None and sequence.constraint.is_complete():
            return "stop"
        return None

    def _add_text(self, sequence: GenerationSequence, new: str) -> bool:
        """Update the answer's text; return True if it has reached a stop text."""
        assert sequence.detokenizer is not None
        params, output, text = sequence.request.params, sequence.output, sequence.detokenizer.text
        if not params.stop:
            output.text = text
            return False
        stops = params.stops if len(output.token_ids) >= params.min_tokens else ()
        found = find_stop(text, len(new), stops) if new else None
        if found is None:
            # hold back an end that may be the beginning of a stop text
            output.text = text[: len(text) - held_back(text, params.stops, len(text) - len(output.text))]
            return False
        place, stop = found
        output.text = text[: place + len(stop)] if params.include_stop_str_in_output else text[:place]
        output.stop_reason = stop
        return True

    def _finish_text(self, sequence: GenerationSequence) -> bool:
        """Add the text that was held back; return True if this text completes a stop text."""
        if sequence.detokenizer is None or isinstance(sequence.output.stop_reason, str):
            return False
        new = sequence.detokenizer.finish()  # a replacement character if the last character is incomplete
        if self._add_text(sequence, new):
            return True
        sequence.output.text = sequence.detokenizer.text
        return False

    def _finish(self, sequence: GenerationSequence, reason: FinishReason) -> None:
        sequence.output.finish_reason = reason
        self._table.remove(sequence)
        self._on_finish(sequence)
        self.changed[sequence.request.request_id] = sequence.request

    def _with_text(self, entry: TokenLogprobs) -> TokenLogprobs:
        if self._tokenizer is None:
            return entry
        return {token: Logprob(found.logprob, found.rank, self._text_of(token)) for token, found in entry.items()}

    def _text_of(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = str(self._tokenizer.decode([token]))
        return text
