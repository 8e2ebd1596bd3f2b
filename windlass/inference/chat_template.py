"""Form of a message's content that a chat template reads: a text, or a list of parts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from windlass.base.errors import RequestError

CONTENT_FORMATS = ("auto", "string", "openai")
"""Forms of content, with vLLM's names: `auto` (as the template reads it), `string` (a text), `openai` (text parts)."""


def with_content_form(
    messages: Iterable[Mapping[str, Any]], tokenizer: Any, template: str | None, form: str = "auto"
) -> list[Mapping[str, Any]]:
    """Return messages in which each content that is a text has the form that a template reads.

    With the form of parts, a text becomes a list of one part. Contents that are lists already stay as they are.
    A template that iterates over the parts of a content would iterate over the characters of a text, and omit the text.

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
    parts = form == "openai" or (form == "auto" and isinstance(found, str) and reads_parts(found))
    return [_with_parts(message) if parts else _with_text(message) for message in messages]


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


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
def reads_parts(template: str) -> bool:
    """Return True if a template reads the content of messages as a list of parts, and has no case for a text."""
    from jinja2 import TemplateError, nodes

    try:
        tree = parse_template(template)
    except TemplateError:
        return False  # the call that renders the template raises the error
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, {"content"}):
            names.add(assign.target.name)
    cases = (test.node for test in tree.find_all(nodes.Test) if test.name in ("string", "sequence", "iterable"))
    if any(_is_content(node, names) for node in cases):
        return False
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
