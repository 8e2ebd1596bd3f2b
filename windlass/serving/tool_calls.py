"""Recognition of tool calls in generated text, as it grows."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from windlass.base.bounded_json import JsonError, parse_json
from windlass.serving.chat_prompt import arguments_text

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_NUMBERS_AS_TEXT = json.JSONDecoder(parse_float=str, parse_int=str)
_CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"parameters"\s*:')


@dataclass(frozen=True)
class ToolCallDelta:
    """Part of a tool call. The first part of a call has its id and name, each part some text of its arguments."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None

    def as_json(self, streamed: bool) -> dict[str, Any]:
        """Return the part in OpenAI's form, with the index of the call if `streamed`."""
        function = (
            {"arguments": self.arguments} if self.name is None else {"name": self.name, "arguments": self.arguments}
        )
        entry: dict[str, Any] = {"index": self.index} if streamed else {}
        if self.id is not None:
            entry |= {"id": self.id, "type": "function"}
        return {**entry, "function": function}


@dataclass
class ParsedText:
    """Tool calls that a piece of generated text completed, and text for the user."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolCallParser(Protocol):
    """Parser that takes generated text piece by piece."""

    def feed(self, text: str, finished: bool) -> ParsedText:
        """Return the content and the calls that the next piece of text completes.

        Args:
            finished: True if the piece is the last one.
        """


def new_call_id() -> str:
    """Return an id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class PlainText:
    """Parser of answers without tools: all text is content."""

    def feed(self, text: str, finished: bool) -> ParsedText:
        """Return the text."""
        return ParsedText(text)


class ForcedFunction:
    """Parser of an answer that consists of the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, finished: bool) -> ParsedText:
        """Return new text as a part of the function's arguments; the first part also has the function's name."""
        if not text and self._name is None:
            return ParsedText()
        name, self._name = self._name, None
        return ParsedText(calls=[ToolCallDelta(0, text, name, new_call_id() if name else None)])


class RequiredCalls:
    """Parser of an answer that is a JSON list of calls."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._count = 0

    def feed(self, text: str, finished: bool) -> ParsedText:
        """Return the calls that are complete by now."""
        self._text += text
        found = ParsedText()
        if "}" not in text:
            return found
        while True:
            start = self._text.find("{", self._position)
            if start < 0:
                return found
            try:
                call, self._position = _NUMBERS_AS_TEXT.raw_decode(self._text, start)
            except (ValueError, RecursionError):  # the call is not complete
                return found
            # the arguments stay text, because a number such as 1e999 could not be written as JSON again
            head = _CALL_HEAD.match(self._text, start)
            arguments = self._text[head.end() : self._position - 1].strip() if head else "{}"
            found.calls.append(ToolCallDelta(self._count, arguments, str(call.get("name")), new_call_id()))
            self._count += 1


class OptionalCalls:
    """Parser of an answer that may have calls: hermes' `<tool_call>` blocks, or Llama's JSON objects.

    Text that could be the beginning of a call is held back until that is decided. Text that looks like a call and is
    not one is content.
    """

    def __init__(self, names: set[str], form: str) -> None:
        self._names = names
        self._blocks = form in ("auto", "hermes")
        self._objects = form in ("auto", "llama3_json")
        self._pending = ""
        self._started = False  # True once content was returned
        self._after_call = False  # True if no content was returned since the last call
        self._space = ""  # white space at the beginning of the answer, which is content only if text follows
        self._count = 0

    def feed(self, text: str, finished: bool) -> ParsedText:
        """Return content and calls that are certain by now."""
        self._pending += text
        found = ParsedText()
        if self._objects and not self._started and self._count == 0 and self._may_be_objects():
            if not finished:
                return found
            calls = self._parse_objects()
            if calls is not None:
                self._pending = ""
                found.calls = calls
                return found
        if not self._blocks or (finished and _OPEN not in self._pending):
            self._return_content(found, self._pending)
            self._pending = ""
            return found
        self._take_blocks(found, finished)
        return found

    def _take_blocks(self, found: ParsedText, finished: bool) -> None:
        while True:
            start = self._pending.find(_OPEN)
            if start < 0:
                kept = 0 if finished else _overlap(self._pending, _OPEN)
                self._return_content(found, self._pending[: len(self._pending) - kept])
                self._pending = self._pending[len(self._pending) - kept :]
                return
            end = self._pending.find(_CLOSE, start)
            if end < 0 and not finished:
                self._return_content(found, self._pending[:start])
                self._pending = self._pending[start:]
                return
            # models often end the answer without the closing tag
            stop = len(self._pending) if end < 0 else end + len(_CLOSE)
            block = self._pending[start + len(_OPEN) : stop if end < 0 else end]
            call = self._call_of(_parse_or_none(block), known_only=False)
            self._return_content(found, self._pending[: start if call else stop])
            self._pending = self._pending[stop:]
            if call:
                found.calls.append(call)
                self._after_call, self._space = True, ""

    def _return_content(self, found: ParsedText, text: str) -> None:
        # line breaks around calls are part of the template, not of the answer
        text = text.lstrip() if self._after_call else self._space + text
        if not self._started and not text.strip():
            self._space = text
        elif text:
            self._started, self._after_call, self._space = True, False, ""
            found.content += text

    def _may_be_objects(self) -> bool:
        text = self._pending.lstrip()
        return text.startswith("{") or text.startswith(_PYTHON_TAG[: max(1, len(text))]) or not text

    def _parse_objects(self) -> list[ToolCallDelta] | None:
        text = self._pending.strip().removeprefix(_PYTHON_TAG).strip()
        calls = []
        while text:
            try:
                _, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                self._count = 0
                return None
            # Parse the text again, because the decoder also takes NaN, 1e999 and any depth, which clients may not read.
            call = self._call_of(_parse_or_none(text[:end]), known_only=True)
            if call is None:
                self._count = 0
                return None
            calls.append(call)
            text = text[end:].lstrip(" \n;,")
        return calls or None

    def _call_of(self, data: Any, known_only: bool) -> ToolCallDelta | None:
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            return None
        if known_only and data["name"] not in self._names:
            return None
        arguments = data.get("arguments", data.get("parameters", {}))
        if not isinstance(arguments, dict | str):
            return None
        self._count += 1
        return ToolCallDelta(self._count - 1, arguments_text(arguments), data["name"], new_call_id())


def _parse_or_none(text: str) -> Any:
    try:
        return parse_json(text.strip(), finite_numbers=True)
    except JsonError:
        return None


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest beginning of `tag` that `text` ends with."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
