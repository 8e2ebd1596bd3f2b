"""Check of prompts and sampling parameters, and creation of a request's sequences."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from typing import Any

from windlass.base.errors import RequestError
from windlass.base.text import one_line
from windlass.inference.detokenizer import Detokenizer, TextDecoder
from windlass.inference.engine_options import EngineOptions
from windlass.inference.generation_request import GenerationRequest, GenerationSequence
from windlass.inference.outputs import CompletionOutput
from windlass.inference.sampler import SequenceSampler
from windlass.inference.sampling_params import SamplingParams, TokenTexts
from windlass.inference.structured_output import OutputConstraint, StructuredOutputCompiler


class RequestFactory:
    """Factory of the sequences of one engine's requests.

    Args:
        tokenizer: tokenizer of transformers; None: prompts are token ids and outputs have no text.
        eos_ids: tokens that end an answer.
        vocab_size: number of logits of a token.
        max_model_len: largest number of tokens of a sequence.
        num_embeddings: number of tokens that a prompt may contain; at least `vocab_size`.

    Attributes:
        constraints: compiler of structured outputs.
    """

    def __init__(
        self,
        options: EngineOptions,
        tokenizer: Any,
        eos_ids: frozenset[int],
        vocab_size: int,
        max_model_len: int,
        num_embeddings: int = 0,
    ) -> None:
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._num_embeddings = max(vocab_size, num_embeddings)
        self._max_sequences = options.max_sequences
        self.constraints = StructuredOutputCompiler(tokenizer, vocab_size, eos_ids)
        self._numbers = itertools.count()
        self._seeds = random.Random(options.seed)
        self._decoders: dict[bool, TextDecoder] = {}  # for each value of skip_special_tokens

    def read_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> tuple[SamplingParams, str | None, list[int], int]:
        """Return (copy of `params`, text of the prompt or None, its token ids, maximum number of tokens of an answer).

        Raises:
            RequestError: `params` is not a valid `SamplingParams`, the prompt cannot be encoded, or the prompt or a
                parameter does not fit the model or `max_sequences`.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"the sampling parameters are {one_line(repr(params), 80)}; give SamplingParams(...)",
                parameter="sampling_params",
            )
        params = params.clone()  # the caller may change its object while the request runs
        text, ids = self.encode(prompt)
        ids = params.truncate_prompt(ids, self._max_model_len)
        self._check_prompt(ids, params)
        room = self._max_model_len - len(ids)
        return params, text, ids, room if params.max_tokens is None else min(params.max_tokens, room)

    def encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        """Return the text of a prompt (None if it is given as token ids) and its token ids.

        Raises:
            RequestError: the prompt is neither valid Unicode text nor token ids of the vocabulary, or is text and there
                is no tokenizer, or the tokenizer gives a token beyond the vocabulary, or none for a part of the text.
        """
        if not isinstance(prompt, str):
            ids = _token_ids(prompt)
            wrong = next((token for token in ids if not 0 <= token < self._num_embeddings), None)
            if wrong is not None:
                raise RequestError(
                    f"token {wrong} of the prompt is not in the vocabulary of {self._num_embeddings} tokens; give "
                    "smaller ids, from 0",
                    parameter="prompt",
                )
            return None, ids
        if self._tokenizer is None:
            raise RequestError("the engine has no tokenizer; give the prompt as token ids", parameter="prompt")
        try:
            ids = list(self._tokenizer(prompt).input_ids)
        except (TypeError, UnicodeError) as error:  # a lone surrogate, e.g. of bytes that are not UTF-8
            raise RequestError(f"the prompt is not valid Unicode text: {error}", parameter="prompt") from error
        if None in ids:  # as from a slow tokenizer without an unknown token
            raise RequestError(
                "the tokenizer has no token for a part of the prompt, and no unk_token; leave that part out, or give a "
                "tokenizer with an unk_token",
                parameter="prompt",
            )
        wrong = next((token for token in ids if not 0 <= token < self._num_embeddings), None)
        if wrong is not None:  # e.g. a token that was added to the tokenizer alone
            raise RequestError(
                f"the tokenizer gives the token {wrong} ({self._show(wrong)}), and the model has a vocabulary of "
                f"{self._num_embeddings} tokens; give the tokenizer of this model, or resize the model's embeddings "
                "before it is served",
                parameter="prompt",
            )
        return prompt, ids

    def make_sequence(
        self,
        request: GenerationRequest,
        index: int = 0,
        constraint: OutputConstraint | None = None,
        bad_words: TokenTexts | None = None,
    ) -> GenerationSequence:
        """Return a new sequence for answer `index` of a request.

        Args:
            constraint: compiled `structured_outputs`; None: copy the first answer's, or compile them here.
            bad_words: tokens of the bad words; None: take the first answer's, or encode the words here.

        Raises:
            RequestError: the structured outputs cannot be compiled, or the bad words cannot be encoded.
        """
        params = request.params
        wants_logprobs = params.logprobs is not None or params.best_of is not None
        output = CompletionOutput(
            index,
            "",
            [],
            0.0 if wants_logprobs else None,
            [] if wants_logprobs else None,
        )
        first = request.sequences[0] if request.sequences else None
        if params.structured_outputs is not None and constraint is None:
            if first is not None and first.constraint is not None:
                constraint = first.constraint.copy()
            else:
                constraint = self.constraints.compile(params.structured_outputs)
        if bad_words is None:
            bad_words = self.encode_bad_words(params) if first is None else first.sampler.bad_words
        if index == 0:
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        else:
            seed = request.sequences[0].sampler.seed
        stop_ids = frozenset(params.stop_token_ids or ())
        sampler = SequenceSampler(
            params if params.logprobs is not None or not wants_logprobs else params.replace(logprobs=0),
            request.prompt_ids,
            output.token_ids,
            seed,
            index,
            self._eos_ids | stop_ids if params.min_tokens_bans_eos else stop_ids,
            bad_words,
            None if constraint is None else constraint.allowed,
        )
        detokenizer = None
        if self._tokenizer is not None and params.detokenize:
            skips = params.skip_special_tokens
            if skips not in self._decoders:
                self._decoders[skips] = TextDecoder(self._tokenizer, skip_special_tokens=skips)
            detokenizer = Detokenizer(self._decoders[skips], request.prompt_ids)
            output.text_offsets = [] if wants_logprobs else None
        return GenerationSequence(
            next(self._numbers), request, index, list(request.prompt_ids), output, sampler, detokenizer, constraint
        )

    def encode_bad_words(self, params: SamplingParams) -> TokenTexts:
        """Return the tokens of each bad word, at the start of a text and after a space.

        Raises:
            RequestError: there are bad words and no tokenizer, or a bad word is not valid Unicode text.
        """
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and there is none; leave it out", parameter="bad_words")
        texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        try:
            found = {tuple(ids) for ids in self._tokenizer(texts, add_special_tokens=False).input_ids}
        except (TypeError, UnicodeError) as error:  # a lone surrogate, as in `encode`
            raise RequestError(f"bad_words is not valid Unicode text: {error}", parameter="bad_words") from error
        # a word with a part for which a slow tokenizer has no token, and gives None, is never generated
        return tuple(sorted(word for word in found if word and None not in word))

    def _show(self, token: int) -> str:
        try:
            return one_line(repr(self._tokenizer.decode([token])), 80)
        except Exception:  # tokenizers raise errors of any kind; the one about the token matters more
            return "which it cannot decode"

    def _check_prompt(self, ids: Sequence[int], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", parameter="prompt")
        if len(ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the model takes {self._max_model_len} together with the answer: "
                "shorten the prompt",
                parameter="prompt",
            )
        if params.num_candidates > self._max_sequences:
            raise RequestError(
                f"n or best_of is {params.num_candidates}, and the engine runs {self._max_sequences} sequences at a "
                "time (max_sequences); write a smaller number",
                parameter="n",
            )
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            wrong = max(getattr(params, name) or (), default=0)
            if wrong >= self._vocab_size:
                raise RequestError(
                    f"{name} has the token {wrong}, beyond a vocabulary of {self._vocab_size}; write smaller ids",
                    parameter=name,
                )


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt (a sequence or an array) as Python integers.

    Raises:
        RequestError: the prompt is bytes or is not iterable, or an element is not an integer.
    """
    try:
        if isinstance(prompt, (bytes, bytearray)) or any(isinstance(token, (bool, str)) for token in prompt):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        shown = one_line(repr(prompt), 80)
        raise RequestError(f"the prompt is {shown}; give a text or a list of token ids", parameter="prompt") from None
