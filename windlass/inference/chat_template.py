"""Form of a message's content that a chat template reads: a text, or a list of parts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from windlass.base.errors import RequestError

CONTENT_FORMATS = ("auto", "string", "openai")
"""Forms of content, with vLLM's names: `auto` (as the template reads it), `string` (a text), `openai` (text parts)."""


class ReadForms(NamedTuple):
    """Forms of content that a template reads."""

    text: bool
    parts: bool


_TEXT, _PARTS = ReadForms(text=True, parts=False), ReadForms(text=False, parts=True)


def with_content_form(
    messages: Iterable[Mapping[str, Any]], tokenizer: Any, template: str | None, form: str = "auto"
) -> list[Mapping[str, Any]]:
    """Return messages whose contents have a form that a template reads.

    A text becomes a list of one part if the template reads parts only: it would iterate over the characters of a text,
    and omit the text. A list of parts becomes one text if the template reads texts only. A message without a content
    that calls tools gets an empty one.

    Args:
        messages: messages; parts of their contents are texts.
        template: template in Jinja; None: that of the tokenizer.
        form: one of `CONTENT_FORMATS`.

    Raises:
        RequestError: `form` is not one of `CONTENT_FORMATS`.
    """
    if form not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format is {form!r}; write one of {', '.join(CONTENT_FORMATS)}",
            parameter="chat_template_content_format",
        )
    found = template if template is not None else getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        found = found.get("default")
    reads = _PARTS if form == "openai" else _TEXT
    if form == "auto" and isinstance(found, str):
        reads = read_forms(found)
    return [_in_form(message, reads) if isinstance(message, Mapping) else message for message in messages]


def _in_form(message: Mapping[str, Any], reads: ReadForms) -> Mapping[str, Any]:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": "" if reads.text else []}
    if isinstance(content, str) and not reads.text:
        return {**message, "content": [{"type": "text", "text": content}]}
    if isinstance(content, (list, tuple)) and not reads.parts:
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def parse_template(template: str) -> Any:
    """Return the syntax tree of a template.

    Raises:
        TemplateSyntaxError: the template is not Jinja.
    """
    import jinja2

    # only transformers has the tag `generation`, which changes no text
    plain = re.sub(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", r"{%\1 if true \2%}{%\1 endif \2%}", template)
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)


@functools.lru_cache(maxsize=16)
def read_forms(template: str) -> ReadForms:
    """Return the forms in which a template reads the content of messages.

    A template reads parts if it iterates over a content, or indexes it, and reads the type or text of what it gets. It
    then reads texts only if it tests the type of a content.
    """
    from jinja2 import TemplateError, nodes

    try:
        tree = parse_template(template)
    except TemplateError:
        return _TEXT  # the call that renders the template raises the error
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, {"content"}):
            names.add(assign.target.name)
    if not _reads_parts(tree, names):
        return _TEXT
    cases = (test.node for test in tree.find_all(nodes.Test) if test.name in ("string", "sequence", "iterable"))
    return ReadForms(text=any(_is_content(node, names) for node in cases), parts=True)


def _reads_parts(tree: Any, names: set[str]) -> bool:
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and _is_content(loop.iter, names):
            target = loop.target.name
            if any(isinstance(part, nodes.Name) and part.name == target for part in _parts_read(loop)):
                return True
    indexed = (part for part in _parts_read(tree) if isinstance(part, nodes.Getitem))  # e.g. content[0].text
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
