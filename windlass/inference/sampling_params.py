"""Sampling parameters of a request, with the names, defaults and meanings of vLLM's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from windlass.base.errors import RequestError

MAX_CANDIDATES = 128
"""Largest `n` and `best_of`: each answer is a sequence with KV blocks of its own."""

MAX_LOGPROBS = 64
"""Largest `logprobs` and `prompt_logprobs`; the largest beam width is half of it."""

TokenTexts = tuple[tuple[int, ...], ...]
"""Token ids of several texts, e.g. of bad words: one tuple for each text."""

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-5, 1e6  # outside of these bounds, divided logits overflow or vanish
_MAX_STOPS = 64
_MAX_BAD_WORDS = 1024
_CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_MAX_TEXT = 1000  # characters of a stop text or a bad word; each new token is compared with all texts


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint of the generated text. Exactly one of the first five fields is set.

    Attributes:
        json: a JSON Schema, as a dict or as text.
        json_object: True: the text is any JSON object.
        regex: a regular expression that the full text matches.
        choice: texts; one of them is generated.
        grammar: a context-free grammar in the syntax of Lark (with a rule `start`), or in GBNF (with a rule `root`).
        disable_any_whitespace: True: JSON has no whitespace between its tokens.
        disable_additional_properties: True: JSON objects have only the properties that the JSON Schema names, unless
            the schema has `additionalProperties`.
        whitespace_pattern: regular expression of the whitespace between the tokens of JSON.

    Raises:
        RequestError: none or several of the first five fields are set, `choice` has no texts, or the options of JSON
            contradict other fields.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs sets {', '.join(given) or 'nothing'}; set exactly one of json, json_object, "
                "regex, choice and grammar",
                parameter="structured_outputs",
            )
        of_json = [name for name in _JSON_OPTIONS if getattr(self, name) not in (None, False)]
        if of_json and given[0] not in ("json", "json_object"):
            raise RequestError(
                f"structured_outputs.{of_json[0]} applies only to JSON, and {given[0]} is set; leave it out",
                parameter="structured_outputs",
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "structured_outputs sets disable_any_whitespace and whitespace_pattern; set one of them",
                parameter="structured_outputs",
            )
        if self.choice is not None:
            choice = [self.choice] if isinstance(self.choice, str) else list(self.choice)
            if not choice or not all(isinstance(text, str) and text for text in choice):
                raise RequestError(
                    f"structured_outputs.choice is {self.choice!r}; give one or more non-empty texts",
                    parameter="structured_outputs",
                )
            object.__setattr__(self, "choice", tuple(choice))


@dataclass(slots=True)
class SamplingParams:
    """Parameters of one request. The engine checks and copies them when a request is added; it ignores later changes.

    Attributes:
        n: number of answers that are returned.
        best_of: number of answers that are generated, at least `n`; the `n` answers with the highest mean
            log-probability are returned. None: `n`.
        presence_penalty: number subtracted from the logit of each token that the answer has already; -2 to 2.
        frequency_penalty: number subtracted from a token's logit once for each time that the answer has the token; -2
            to 2.
        repetition_penalty: number above 0 by which the logits of tokens in prompt or answer are divided if positive,
            and multiplied if negative (Keskar et al. 2019, CTRL). 1: no penalty.
        temperature: divisor of the logits. 0, or any number below 1e-5: take the token with the highest logit (greedy).
        top_p: the draw is among the smallest set of likeliest tokens with a total probability of at least `top_p`,
            after `top_k` and `min_p` have excluded tokens; above 0 and at most 1.
        top_k: the draw is among the `top_k` likeliest tokens; 0 or -1: all tokens.
        min_p: tokens less likely than `min_p` times the likeliest one are not drawn; 0 to 1.
        seed: seed of the draws of this request; None: the engine draws a seed. The random numbers of a seeded request
            do not depend on other requests.
        stop: texts that end the answer; the answer's text ends before them.
        stop_token_ids: tokens that end the answer.
        include_stop_str_in_output: keep the stop text, or the text of the stop or end-of-sequence token, in the answer.
        ignore_eos: continue after the end-of-sequence token.
        max_tokens: maximum number of generated tokens; None: as many as the context window allows.
        min_tokens: before this number of tokens, no stop text ends the answer, and no end-of-sequence or stop token is
            drawn, unless `structured_outputs` allows no other token.
        logprobs: number of likeliest tokens at each position. Their log-probabilities are returned with that of the
            drawn token, before penalties, temperature and masks. 0: only that of the drawn token; None: no
            log-probabilities.
        prompt_logprobs: as `logprobs`, for the tokens of the prompt.
        logit_bias: numbers added to logits, by token id.
        allowed_token_ids: the only tokens that may be drawn; None: all.
        bad_words: texts that are not generated.
        truncate_prompt_tokens: number of tokens of the prompt that are kept, from its end. -1: as many as the context
            window holds beside `max_tokens` (without `max_tokens`: beside one token); None: all.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of `text`.
        structured_outputs: constraint of the text.

    Raises:
        RequestError: a value is of the wrong type or out of range, or values contradict each other.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._copy_containers()
        self._check_numbers()
        self._check_counts()
        self._check_lists()

    min_tokens_bans_eos: ClassVar[bool] = True  # `min_tokens` also bans end-of-sequence tokens, not only stop tokens
    min_p_is_last: ClassVar[bool] = False  # `min_p` excludes tokens after `top_p`, not before `top_k`

    @property
    def is_greedy(self) -> bool:
        """True if no token is drawn at random."""
        return self.temperature < _LOWEST_TEMPERATURE or self.top_k == 1

    @property
    def num_candidates(self) -> int:
        """Number of sequences that are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def clone(self) -> SamplingParams:
        """Return a copy.

        Raises:
            RequestError: a field was set to an invalid value.
        """
        return replace(self)

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with other values.

        Raises:
            RequestError: a value is invalid.
        """
        return replace(self, **changes)

    def truncate_prompt(self, prompt: list[int], max_model_len: int) -> list[int]:
        """Return the last tokens of a prompt: the number that `truncate_prompt_tokens` keeps."""
        kept = self.truncate_prompt_tokens
        if kept is None:
            return prompt
        if kept == -1:
            kept = max(1, max_model_len - (self.max_tokens or 1))
        return prompt[-kept:]

    def _copy_containers(self) -> None:
        """Replace lists and dicts by copies, so that a change of the caller's object changes no running request.

        Raises:
            RequestError: a field for a list has a text or a value that is not iterable, or `logit_bias` is not a dict.
        """
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is None or (name == "stop" and isinstance(value, str)):
                continue
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise RequestError(f"{name} is {value!r}; give a list", parameter=name)
            setattr(self, name, value.tolist() if hasattr(value, "tolist") else list(value))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias is {self.logit_bias!r}; give a dict from token ids to numbers", parameter="logit_bias"
                )
            self.logit_bias = dict(self.logit_bias)

    def _check_counts(self) -> None:
        _check_integer("n", self.n, 1, MAX_CANDIDATES)
        _check_integer("top_k", self.top_k, -1, None)
        _check_integer("min_tokens", self.min_tokens, 0, None)
        optional = [
            ("best_of", self.n, MAX_CANDIDATES),
            ("seed", None, None),
            ("max_tokens", 1, None),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ]
        for name, lowest, highest in optional:
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), lowest, highest)
        check_truncation(self.truncate_prompt_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}); write a smaller number",
                parameter="min_tokens",
            )
        if self.is_greedy and self.num_candidates > 1:
            raise RequestError(
                f"{self.num_candidates} answers of greedy sampling would be equal; set n and best_of to 1, or a "
                "temperature above 0 and top_k other than 1",
                parameter="n",
            )

    def _check_numbers(self) -> None:
        _check_number("temperature", self.temperature, 0, _HIGHEST_TEMPERATURE)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, math.inf, above=True)

    def _check_lists(self) -> None:
        stops = self.stops
        _check_texts("stop", stops, _MAX_STOPS)
        if stops and not self.detokenize:
            raise RequestError("stop texts need detokenize=True; use stop_token_ids", parameter="stop")
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check_tokens(name, getattr(self, name) or ())
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids is empty, so no token could be drawn; give at least one, or leave it out",
                parameter="allowed_token_ids",
            )
        biases = self.logit_bias or {}
        _check_tokens("logit_bias", biases)
        if not (set(map(type, biases.values())) <= {int, float} and all(map(math.isfinite, biases.values()))):
            for token, bias in biases.items():
                _check_number(f"logit_bias[{token}]", bias, -math.inf, math.inf)
        _check_texts("bad_words", self.bad_words or (), _MAX_BAD_WORDS)


def check_truncation(kept: Any) -> None:
    """Raise a RequestError unless `kept` is a value of `truncate_prompt_tokens`."""
    if kept is not None:
        _check_integer("truncate_prompt_tokens", kept, -1, None)
    if kept == 0:
        raise RequestError(
            "truncate_prompt_tokens is 0; write the number of tokens to keep, or -1 for as many as fit",
            parameter="truncate_prompt_tokens",
        )


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Attributes:
        beam_width: number of beams, and of answers.
        max_tokens: maximum number of generated tokens.
        ignore_eos: continue after the end-of-sequence token.
        temperature: divisor of the log-probabilities of tokens. It scales `cum_logprob` and changes no order of beams;
            0 and 1 change nothing.
        length_penalty: exponent: beams are ranked by their log-probability divided by `length ** length_penalty`.

    Raises:
        RequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_integer("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        _check_integer("max_tokens", self.max_tokens, 1, None)
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_number("length_penalty", self.length_penalty, -math.inf, math.inf)


def _check_texts(name: str, texts: Sequence[Any], most: int) -> None:
    if len(texts) > most or not all(isinstance(text, str) and 0 < len(text) <= _MAX_TEXT for text in texts):
        raise RequestError(
            f"{name} has {len(texts)} entries; give at most {most} non-empty texts of at most {_MAX_TEXT} characters",
            parameter=name,
        )


def _check_tokens(name: str, tokens: Collection[Any]) -> None:
    # builtins check a list as long as the vocabulary many times faster than the loop
    if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0):
        for token in tokens:
            _check_integer(name, token, 0, None)


def _check_integer(name: str, value: Any, lowest: int | None, highest: int | None) -> None:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or (lowest is not None and value < lowest) or (highest is not None and value > highest):
        bounds = "" if lowest is None else f" of at least {lowest}"
        bounds += "" if highest is None else f" and at most {highest}"
        raise RequestError(f"{name} is {value!r}; write an integer{bounds}", parameter=name)


def _check_number(name: str, value: Any, lowest: float, highest: float, *, above: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # infinite bounds limit nothing; infinite values are refused
    if not number or not math.isfinite(value) or not lowest <= value <= highest or (above and value == lowest):
        bounds = f"above {lowest}" if above else f"of at least {lowest}"
        bounds += "" if highest == math.inf else f" and at most {highest}"
        raise RequestError(f"{name} is {value!r}; write a finite number {bounds}", parameter=name.split("[")[0])
