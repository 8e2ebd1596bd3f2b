"""Structured output: the tokens that a JSON Schema, a regular expression, a choice or a grammar allows next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from windlass.base.errors import RequestError
from windlass.inference.sampling_params import StructuredOutputsParams


class StructuredOutputCompiler:
    """Compiler of constraints for one tokenizer, with the library llguidance.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: size of the logits; tokens beyond the tokenizer's are never allowed.
        eos_ids: tokens that end an answer; empty: the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int] = ()) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._llguidance: Any = None
        self._vocabulary: Any = None

    def compile(self, params: StructuredOutputsParams) -> OutputConstraint:
        """Return the constraint of one answer. After `load`, several threads may call `compile` at the same time.

        Raises:
            RequestError: llguidance or a usable tokenizer is missing, or the constraint cannot be compiled.
        """
        self.load()
        try:
            grammar = _make_grammar(self._llguidance, params)
            matcher = self._llguidance.LLMatcher(self._vocabulary, grammar)
            matcher.compute_bitmask()  # slow for a large constraint, so it runs before the first step
            problem = matcher.get_error() if matcher.is_error() else None
        except (ValueError, TypeError, RecursionError) as error:
            problem = str(error)
        if problem:
            raise RequestError(
                f"structured_outputs cannot be compiled: {str(problem).strip()[:500]}", parameter="structured_outputs"
            )
        return OutputConstraint(matcher, self._vocab_size)

    def load(self) -> None:
        """Load the library and read the tokenizer, once. The tokenizer must not be in use by another thread.

        Raises:
            RequestError: llguidance or a usable tokenizer is missing.
        """
        if self._vocabulary is not None:
            return
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs llguidance: pip install 'windlass[serve]'", parameter="structured_outputs"
            ) from error
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and the engine has none; leave it out",
                parameter="structured_outputs",
            )
        try:
            # the library refuses end tokens beyond the tokenizer's, e.g. GPT-2's default 50256 with another tokenizer
            ends = [token for token in self._eos_ids if token < min(len(self._tokenizer), self._vocab_size)]
            vocabulary = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=ends or None)
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError(
                f"structured_outputs cannot use the tokenizer {type(self._tokenizer).__name__}: {error}",
                parameter="structured_outputs",
            ) from error
        self._llguidance, self._vocabulary = llguidance, vocabulary


class OutputConstraint:
    """State of a constraint in one answer."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> torch.Tensor:
        """Return the tokens that are allowed next, bool `[vocab_size]`.

        Raises:
            RequestError: this call or an earlier one failed, e.g. because the constraint became too large.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        # If `compute_bitmask` fails, it does not raise: the matcher is in error, and the mask allows only the end.
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs cannot continue: {self._matcher.get_error()}")
        bits = np.unpackbits(words, count=min(self._vocab_size, 8 * len(words)), bitorder="little")
        flat = torch.from_numpy(bits).view(torch.bool)
        missing = self._vocab_size - len(flat)
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat

    def accept(self, token: int) -> None:
        """Advance by a generated token. Do nothing if the answer is complete, or after an error.

        Raises:
            RequestError: the token is not allowed.
        """
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise RequestError(f"token {token} violates structured_outputs: {self._matcher.get_error()}")

    def is_complete(self) -> bool:
        """Return True if the answer satisfies the constraint and nothing but its end may follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def copy(self) -> OutputConstraint:
        """Return an independent copy, for another answer to the same prompt."""
        return OutputConstraint(self._matcher.deep_copy(), self._vocab_size)


def _make_grammar(llguidance: Any, params: StructuredOutputsParams) -> str:
    library = llguidance.LLMatcher
    if params.json_object or params.json is not None:
        schema: Any = {"type": "object"} if params.json is None else params.json
        if isinstance(schema, str):
            schema = json.loads(schema)
        if params.disable_additional_properties:
            schema = _closed(schema)
        options: dict[str, Any] = {}
        if params.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
        return str(library.grammar_from_json_schema(text, overrides=options))
    if params.regex is not None:
        return str(library.grammar_from_regex(params.regex))
    if params.choice is not None:
        return str(library.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in params.choice)))
    return str(llguidance.grammar_from("grammar", str(params.grammar)))


_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_JOINS = ("allOf", "anyOf", "oneOf", "if", "then", "else")
_VALUES = ("enum", "const", "default", "examples")


def _closed(schema: Any, open_ones: frozenset[str] | None = None, *, is_branch: bool = False) -> Any:
    """Return a copy of a JSON Schema in which an object with `properties` or `patternProperties` allows no other keys,
    unless the schema sets `additionalProperties`.

    Schemas that an `allOf` joins still allow other keys if several of them name properties: otherwise each would refuse
    the properties of the others.

    Args:
        open_ones: the references to definitions that an `allOf` joins; None: `schema` is the full schema.
        is_branch: an `allOf` joins this schema with others that name properties.
    """
    if isinstance(schema, list):
        return [_closed(one, open_ones, is_branch=is_branch) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if open_ones is None:
        open_ones = frozenset(_joined_references(schema))
    joins = _joins_properties(schema)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {
                name: _closed(one, open_ones, is_branch=f"#/{key}/{name}" in open_ones) for name, one in value.items()
            }
        elif key in _JOINS:
            found[key] = _closed(value, open_ones, is_branch=is_branch or joins)
        else:
            found[key] = value if key in _VALUES else _closed(value, open_ones)
    if not (is_branch or joins) and ("properties" in schema or "patternProperties" in schema):
        found.setdefault("additionalProperties", False)
    return found


def _joins_properties(schema: Mapping[str, Any]) -> bool:
    """Return True if the `allOf` of a schema joins several schemas that may name properties."""
    branches = schema.get("allOf")
    return isinstance(branches, list) and sum(map(_may_name_properties, [{**schema, "allOf": []}, *branches])) > 1


def _may_name_properties(schema: Any) -> bool:
    keys = ("properties", "patternProperties", "$ref", "anyOf", "oneOf", "if", "then", "else")
    return isinstance(schema, Mapping) and (
        any(key in schema for key in keys) or any(map(_may_name_properties, schema.get("allOf", ())))
    )


def _joined_references(schema: Any, *, is_branch: bool = False) -> Iterator[str]:
    """Yield the `$ref` of every schema that an `allOf` joins with others."""
    if isinstance(schema, list):
        for one in schema:
            yield from _joined_references(one, is_branch=is_branch)
    elif isinstance(schema, Mapping):
        joins = _joins_properties(schema)
        for key, value in schema.items():
            if key == "$ref" and (is_branch or joins):
                yield str(value)
            elif key not in _VALUES:
                named = key in _NAMED_SCHEMAS and isinstance(value, Mapping)
                inner = list(value.values()) if named else value
                yield from _joined_references(inner, is_branch=key in _JOINS and (is_branch or joins))
