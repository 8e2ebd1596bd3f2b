"""Output items of a response of `/v1/responses`, and the events of their stream."""

from __future__ import annotations

import uuid
from typing import Any

from windlass.serving.tool_calls import ToolCallDelta


class ResponseItems:
    """Output of one response, as its text grows. Methods that change the output return the events of the change.

    Attributes:
        output: messages and tool calls so far, in OpenAI's format.
        status: `in_progress`, `completed` or `incomplete`.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self.status = "in_progress"
        self._is_open = False
        self._logprobs: list[dict[str, Any]] = []
        self._blank = ""  # white space, which is part of a message only if other text follows

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        """Store the log-probabilities of tokens for the text that is added next; those of a tool call are dropped."""
        self._logprobs += logprobs

    def add_text(self, text: str) -> list[dict[str, Any]]:
        """Append text to the open message, or begin a message."""
        text = self._blank + text
        opened = self._is_open and self.output[-1]["type"] == "message"
        if not opened and not text.strip():
            self._blank = text
            return []
        self._blank = ""
        events = [] if opened else [*self.close("completed"), *self._open_message()]
        return [*events, self._append(text)]

    def add_call(self, call: ToolCallDelta) -> list[dict[str, Any]]:
        """Append to the arguments of the open tool call, or begin a tool call."""
        events: list[dict[str, Any]] = []
        self._logprobs = []
        if call.name is not None:
            self._blank = ""
            events = self.close("completed")
            item = {"type": "function_call", "id": _new_id("fc"), "call_id": call.id, "name": call.name}
            events += self._open({**item, "arguments": "", "status": "in_progress"})
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def finish(self, status: str) -> list[dict[str, Any]]:
        """End the last item. An answer without items gets an empty message.

        Args:
            status: `completed` or `incomplete`.
        """
        events = [] if self.output else self._open_message()
        if events and self._blank:
            events.append(self._append(self._blank))
        self.status = status
        return [*events, *self.close(status)]

    def close(self, status: str) -> list[dict[str, Any]]:
        """End the item that is open."""
        if not self._is_open:
            return []
        self._is_open, item = False, self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            return [done, self._item_event("done")]
        part = item["content"][0]
        # The last tokens may have no text, e.g. the end-of-sequence token. Whether they arrive with the text before
        # them depends on the time at which the client reads.
        part["logprobs"] += self._logprobs
        self._logprobs = []
        return [
            self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"], content_index=0),
            self._event("response.content_part.done", part=dict(part), content_index=0),
            self._item_event("done"),
        ]

    def _append(self, text: str) -> dict[str, Any]:
        part, logprobs = self.output[-1]["content"][0], self._logprobs
        self._logprobs = []
        part["text"] += text
        part["logprobs"] += logprobs
        return self._event("response.output_text.delta", delta=text, logprobs=logprobs, content_index=0)

    def _open_message(self) -> list[dict[str, Any]]:
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item: dict[str, Any] = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []}
        events = self._open({**item, "status": "in_progress"})
        events.append(self._event("response.content_part.added", part=dict(part, logprobs=[]), content_index=0))
        self.output[-1]["content"] = [part]
        return events

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self.output.append(item)
        self._is_open = True
        return [self._item_event("added")]

    def _item_event(self, change: str) -> dict[str, Any]:
        index = len(self.output) - 1
        return {"type": f"response.output_item.{change}", "output_index": index, "item": dict(self.output[-1])}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **fields}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
