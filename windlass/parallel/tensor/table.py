"""The user's table: regular expressions of module names, and how such modules are cut."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from torch import nn

from windlass.base.errors import ConfigError
from windlass.parallel.tensor.linear_layers import linear
from windlass.parallel.tensor.plan import Style
from windlass.parallel.tensor.wishes import Wish

_WORDS = {
    "column": Style.COLUMN,
    "row": Style.ROW,
    "vocabulary": Style.VOCABULARY,
    "partial": Style.PARTIAL,
    "replicated": Style.REPLICATED,
}
_FORM = re.compile(r"(\w+)(?::(\d+(?:\+\d+)*))?(?: of (\d+(?:\+\d+)*) heads)?")


def read_table(model: nn.Module, table: Mapping[str, str]) -> dict[str, Wish]:
    """What the table says of the modules of a model, by their names; the last line that fits a module counts.

    A line's key is a regular expression that fits the whole name of a module, or of a parameter that lies directly in
    a module which is no linear layer. Its value is one of

    - `column`: the output features are cut; with `column:256+64+64` they are fused from sections of these sizes, one
      after another (queries, keys and values), and each is cut.
    - `row`: the input features are cut, and the outputs added up.
    - `vocabulary`: an embedding, or the layer that makes logits.
    - `partial`: whole, between layers that are cut (a norm of single heads).
    - `replicated`: whole.

    Heads stay whole. Where a module does not tell how many it has, `column of 8 heads` and `row of 8 heads` do, with a
    number for each section where those differ: `column:256+64+64 of 8+2+2 heads`.

    Raises:
        ConfigError: a line that is no regular expression, says something else or fits nothing.
    """
    modules = dict(model.named_modules())
    names = [name for name in modules if name]
    bare = [name for name, _ in model.named_parameters()]
    found: dict[str, Wish] = {}
    for key, value in table.items():
        try:
            expression = re.compile(key)
        except re.error as error:
            raise ConfigError(f"parallel.tensor_table has {key!r}, no regular expression: {error}") from error
        style, sections, heads = _read(key, value)
        fitting = [name for name in (*names, *bare) if expression.fullmatch(name)]
        if not fitting:
            near = difflib.get_close_matches(key.replace("\\", ""), [*names, *bare], n=3, cutoff=0.0)
            raise ConfigError(
                f"parallel.tensor_table has {key!r}, which fits no module of the model; the nearest names "
                f"are {', '.join(near)}"
            )
        if style in (Style.COLUMN, Style.ROW):
            layers = [name for name in fitting if name in modules and linear(name, modules[name]) is not None]
            if not layers:
                kind = type(modules[fitting[0]]).__name__ if fitting[0] in modules else "parameter"
                raise ConfigError(
                    f"parallel.tensor_table says {value!r} of {key!r}, which fits {fitting[0]}, a {kind}, "
                    f"and no linear layer"
                )
            fitting = layers
        for name in fitting:
            found[name] = Wish(name, style, sections, heads, said=True)
    return found


def _read(key: str, value: str) -> tuple[Style, tuple[int, ...], tuple[int, ...]]:
    form = _FORM.fullmatch(value.strip()) if isinstance(value, str) else None
    if form is None or form[1] not in _WORDS:
        raise ConfigError(
            f"parallel.tensor_table says {value!r} of {key!r}; it may say {', '.join(_WORDS)}, sections as "
            f"in 'column:256+64+64', and heads as in 'column of 8 heads'"
        )
    sections, heads = ([int(number) for number in (part or "").split("+") if number] for part in (form[2], form[3]))
    style = _WORDS[form[1]]
    if (sections and style is not Style.COLUMN) or (heads and style not in (Style.COLUMN, Style.ROW)):
        raise ConfigError(
            f"parallel.tensor_table says {value!r} of {key!r}; only columns have sections, and only "
            f"columns and rows heads"
        )
    if len(heads) > 1 and len(heads) != len(sections):
        raise ConfigError(
            f"parallel.tensor_table says {value!r} of {key!r}: {len(heads)} numbers of heads for "
            f"{len(sections) or 'no'} sections"
        )
    return style, tuple(sections), tuple(heads)
