"""User's table of regular expressions of module names, with the sharding of these modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from torch import nn

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.parallel.tensor.linear_layers import as_linear_layer, is_pipeline_stage
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle

_STYLES_BY_WORD = {
    "column": ShardStyle.COLUMN,
    "row": ShardStyle.ROW,
    "vocabulary": ShardStyle.VOCABULARY,
    "partial": ShardStyle.PARTIAL,
    "replicated": ShardStyle.REPLICATED,
}
_VALUE_PATTERN = re.compile(r"(\w+)(?::(\d+(?:\+\d+)*))?(?: of (\d+(?:\+\d+)*) heads)?")


def read_tensor_table(model: nn.Module, tensor_table: Mapping[str, str]) -> dict[str, PlanEntry]:
    """Return the plan entries of the modules that the table matches, by name. The last matching entry takes precedence.

    A key is a regular expression that matches the full name of a module or, with `partial` or `replicated`, of a single
    parameter. A value is one of
    - `column`: shard the output features. `column:256+64+64` means that the output consists of consecutive sections of
      these sizes (queries, keys and values), each of which is sharded.
    - `row`: shard the input features and sum the outputs.
    - `vocabulary`: shard an embedding or output head along the vocabulary.
    - `partial`: replicate, and sum the gradients of all ranks (a norm of single heads, between sharded layers).
    - `replicated`: replicate.

    On a stage of a pipeline, the modules that a key matches may all be on other stages: see `find_unused_keys`.

    Heads are never split. If a module does not specify its number of heads, write `column of 8 heads` and `row of 8
    heads`, with a number for each section if they differ: `column:256+64+64 of 8+2+2 heads`.

    Raises:
        ConfigError: a key is not a regular expression or matches nothing, or a value is invalid.
    """
    modules, is_stage = dict(model.named_modules()), is_pipeline_stage(model)
    names = _list_names(model)
    found: dict[str, PlanEntry] = {}
    for key, value in tensor_table.items():
        entries, problem = _read_entry(modules, names, key, value)
        if problem and not is_stage:
            raise ConfigError(problem)
        if problem:
            logger.info("parallel.tensor_table: no module of this pipeline stage takes the entry of the key %r", key)
        found.update({entry.name: entry for entry in entries})
    return found


def find_unused_keys(model: nn.Module, tensor_table: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of the table that apply to no module of this model or pipeline stage, with the error of each.

    Raises:
        ConfigError: a key is not a regular expression, or a value is invalid.
    """
    modules, names = dict(model.named_modules()), _list_names(model)
    problems = {key: _read_entry(modules, names, key, value)[1] for key, value in tensor_table.items()}
    return {key: problem for key, problem in problems.items() if problem}


def _list_names(model: nn.Module) -> list[str]:
    """Return the names of the modules inside a model, then those of its parameters."""
    return [*(name for name, _ in model.named_modules() if name), *(name for name, _ in model.named_parameters())]


def _read_entry(
    modules: Mapping[str, nn.Module], names: Sequence[str], key: str, value: str
) -> tuple[list[PlanEntry], str]:
    """Return the plan entries of the modules and parameters that a key matches; or none, and the text of the error.

    Raises:
        ConfigError: the key is not a regular expression, or the value is invalid.
    """
    try:
        expression = re.compile(key)
    except re.error as error:
        raise ConfigError(
            f"parallel.tensor_table has the key {key!r}, which is not a regular expression ({error}); correct it"
        ) from error
    style, sections, heads = _parse_value(key, value)
    fitting = [name for name in names if expression.fullmatch(name)]
    if not fitting:
        near = difflib.get_close_matches(key.replace("\\", ""), names, n=3, cutoff=0.0)
        return [], (
            f"parallel.tensor_table has the key {key!r}, which matches no module of the model; the nearest names "
            f"are {', '.join(near)}; write a key that matches one"
        )
    if style in (ShardStyle.COLUMN, ShardStyle.ROW):
        layers = [name for name in fitting if name in modules and as_linear_layer(name, modules[name]) is not None]
        if not layers:
            kind = type(modules[fitting[0]]).__name__ if fitting[0] in modules else "parameter"
            return [], (
                f"parallel.tensor_table has {value!r} for {key!r}, which matches {fitting[0]}, a {kind}, not a "
                "linear layer; write a key that matches linear layers"
            )
        fitting = layers
    if style is ShardStyle.VOCABULARY:
        fitting_modules = [name for name in fitting if name in modules]
        if not fitting_modules:
            return [], (
                f"parallel.tensor_table has {value!r} for {key!r}, which matches the parameter {fitting[0]} and no "
                "module; write a key that matches its embedding or output head"
            )
        fitting = fitting_modules
    return [PlanEntry(name, style, sections, heads, is_from_user=True) for name in fitting], ""


def _parse_value(key: str, value: str) -> tuple[ShardStyle, tuple[int, ...], tuple[int, ...]]:
    form = _VALUE_PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if form is None or form[1] not in _STYLES_BY_WORD:
        raise ConfigError(
            f"parallel.tensor_table has {value!r} for {key!r}; allowed are {', '.join(_STYLES_BY_WORD)}, sections as "
            f"in 'column:256+64+64', and heads as in 'column of 8 heads'"
        )
    sections, heads = ([int(number) for number in (part or "").split("+") if number] for part in (form[2], form[3]))
    style = _STYLES_BY_WORD[form[1]]
    if (sections and style is not ShardStyle.COLUMN) or (heads and style not in (ShardStyle.COLUMN, ShardStyle.ROW)):
        raise ConfigError(
            f"parallel.tensor_table has {value!r} for {key!r}; only column layers have sections, and only column and "
            "row layers have heads"
        )
    if len(heads) > 1 and len(heads) != len(sections):
        raise ConfigError(
            f"parallel.tensor_table has {value!r} for {key!r}: {len(heads)} numbers of heads for "
            f"{len(sections) or 'no'} sections; write one number for each section"
        )
    return style, tuple(sections), tuple(heads)
