"""Forms in which a chat template reads messages: content as a text or parts, arguments of calls as objects or JSON."""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.errors import RequestError

CONTENT_FORMATS = ("auto", "string", "openai")
"""Forms of content, with vLLM's names: `auto` (as the template reads it), `string` (a text), `openai` (text parts)."""


class ContentForm(enum.Enum):
    """Form in which a template reads the content of a message.

    A template with `ONE_PART` reads only the first part of a list.
    """

    TEXT = enum.auto()
    PARTS = enum.auto()
    ONE_PART = enum.auto()


def with_content_form(
    messages: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    template: str | None,
    form: str = "auto",
    tools: Sequence[Any] | None = None,
) -> list[Mapping[str, Any]]:
    """Return messages whose contents, and arguments of tool calls, have the form that a template reads.

    A text becomes a list of one part if the template reads only parts: the template would iterate over the characters
    of a text, and omit them. A list of parts becomes one text if the template reads texts, since a template that reads
    both may read only the first part of some messages. A message with tool calls and no content gets empty content.

    Args:
        messages: messages; parts of their contents are texts.
        template: template in Jinja, or the name of one of the tokenizer's templates; None: that of the tokenizer.
        form: one of `CONTENT_FORMATS`.
        tools: functions that the template shows. A tokenizer may have a separate template for them.

    Raises:
        RequestError: `form` is not one of `CONTENT_FORMATS`, or arguments of a call are a text that is not JSON.
    """
    if form not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format is {form!r}; write one of {', '.join(CONTENT_FORMATS)}",
            parameter="chat_template_content_format",
        )
    found = _rendered_template(tokenizer, template, tools)
    reads = read_forms(found) if found is not None else _TEXT_ONLY
    if form != "auto":
        reads = replace(reads, content=ContentForm.PARTS if form == "openai" else ContentForm.TEXT)
    return [_in_form(message, reads) if isinstance(message, Mapping) else message for message in messages]


def _rendered_template(tokenizer: Any, template: str | None, tools: Sequence[Any] | None) -> str | None:
    """Return the template that `apply_chat_template` renders, or None if it will report that there is none."""
    named = getattr(tokenizer, "chat_template", None)
    if isinstance(named, Mapping):
        kind = "tool_use" if tools is not None and "tool_use" in named else "default"
        found = named.get(kind if template is None else template, template)
    else:
        found = named if template is None else template
    return found if isinstance(found, str) else None


def _in_form(message: Mapping[str, Any], reads: TemplateForms) -> Mapping[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    shown = dict(message)
    if isinstance(calls, (list, tuple)):
        shown["tool_calls"] = [_with_arguments(call, as_text=reads.arguments_are_text) for call in calls]
        if not calls:  # some servers send an empty list with each answer, and a template may test for the key alone
            del shown["tool_calls"]
    if content is None and calls:
        content = []
    if isinstance(content, (list, tuple)) and reads.content is not ContentForm.PARTS:
        content = "\n".join(part["text"] for part in content)
    # A template may test for an empty list, but one that reads the first part fails on it: pass an empty text.
    if content == [] and reads.indexes_parts:
        content = ""
    if isinstance(content, str) and reads.content is not ContentForm.TEXT:
        content = [{"type": "text", "text": content}]
    return {**shown, "content": content} if content is not None else shown


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    """Return a tool call with its arguments as JSON text (`as_text`), or as the object that they describe."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        text = arguments or "{}"
        try:
            found = parse_json(text, finite_numbers=True)
        except JsonError as error:
            raise RequestError(f"arguments of a tool call are not JSON: {error}", parameter="messages") from error
        arguments = text if as_text else found
    elif as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def parse_template(template: str) -> Any:
    """Return the syntax tree of a template.

    Raises:
        TemplateSyntaxError: the template is not Jinja.
    """
    import jinja2

    # only transformers has the tag `generation`, which changes no text
    plain = re.sub(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", r"{%\1 if true \2%}{%\1 endif \2%}", template)
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)


@dataclass(frozen=True)
class TemplateForms:
    """Forms in which a template reads messages.

    Attributes:
        content: form in which contents are passed. TEXT if the template tests the type of contents (e.g. `content is
            string`), because it then accepts plain strings.
        indexes_parts: the template reads parts by their number.
        arguments_are_text: the template writes arguments of tool calls as they are, so that they must be texts.
    """

    content: ContentForm
    indexes_parts: bool
    arguments_are_text: bool


_TEXT_ONLY = TemplateForms(ContentForm.TEXT, indexes_parts=False, arguments_are_text=False)


@functools.lru_cache(maxsize=16)
def read_forms(template: str) -> TemplateForms:
    """Return the forms in which a template reads messages."""
    from jinja2 import TemplateError, nodes

    try:
        tree = parse_template(template)
    except TemplateError:
        return _TEXT_ONLY  # the call that renders the template raises the error
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, {"content"}):
            names.add(assign.target.name)
    tests = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node, names)}
    content = ContentForm.TEXT
    if not tests & {"string", "sequence", "iterable"}:
        content = _content_form(tree, names)
    return TemplateForms(content, _indexes_parts(tree, names), _writes_arguments(tree))


def _writes_arguments(tree: Any) -> bool:
    """Return True if a template writes arguments of calls, or adds them to a text, and has no case for an object."""
    from jinja2 import nodes

    written = [node for output in tree.find_all(nodes.Output) for node in output.nodes]
    written += [node for joined in tree.find_all(nodes.Concat) for node in joined.nodes]
    written += [node for added in tree.find_all(nodes.Add) for node in (added.left, added.right)]
    read = [one.node for one in tree.find_all(nodes.Filter) if one.name in ("tojson", "items", "dictsort")]
    read += [one.node for one in tree.find_all(nodes.Test) if one.name in ("string", "mapping")]
    return any(map(_is_arguments, written)) and not any(map(_is_arguments, read))


def _is_arguments(node: Any) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "arguments")
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"


def _content_form(tree: Any, names: set[str]) -> ContentForm:
    """Return the form in which a template reads contents, if it does not test their type."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and _is_content(loop.iter, names):
            target = loop.target.name
            if any(isinstance(part, nodes.Name) and part.name == target for part in _parts_read(loop)):
                return ContentForm.PARTS
    return ContentForm.ONE_PART if _indexes_parts(tree, names) else ContentForm.TEXT


def _indexes_parts(tree: Any, names: set[str]) -> bool:
    """Return True if a template reads the type or text of a part by its number, e.g. `content[0].text`."""
    from jinja2 import nodes

    indexed = (part for part in _parts_read(tree) if isinstance(part, nodes.Getitem))
    return any(_is_content(part.node, names) and _is_number(part.arg) for part in indexed)


def _parts_read(tree: Any) -> list[Any]:
    """Return each expression `x` for which the tree contains `x.type`, `x.text`, `x["type"]` or `x["text"]`."""
    from jinja2 import nodes

    by_name = [node.node for node in tree.find_all(nodes.Getattr) if node.attr in _PART_KEYS]
    return by_name + [
        node.node
        for node in tree.find_all(nodes.Getitem)
        if isinstance(node.arg, nodes.Const) and node.arg.value in _PART_KEYS
    ]


_PART_KEYS = ("type", "text")


def _is_number(node: Any) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Const) and isinstance(node.value, int)


def _is_content(node: Any, names: set[str]) -> bool:
    """Return True for `x.content`, `x["content"]` and a variable of `names`, also after selectattr or rejectattr."""
    from jinja2 import nodes

    if isinstance(node, nodes.Filter) and node.name in ("selectattr", "rejectattr"):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "content")
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
