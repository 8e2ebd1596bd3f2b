"""Modules of a model with a vocabulary dimension: the token embedding and the output head."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.kernels.packed_linear import PackedMatrix
from windlass.parallel.tensor.find_language_model import find_language_model
from windlass.parallel.tensor.linear_layers import as_linear_layer, is_plain_linear, is_stub
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle, make_cannot_shard_error


def find_vocabulary_modules(model: nn.Module, entries: Mapping[str, PlanEntry]) -> dict[str, PlanEntry]:
    """Return the entries of the sharding plan, by module name, for modules that are sharded along the vocabulary.

    These are the input and output embeddings of a transformers model, and modules with a `VOCABULARY` entry. Modules
    that share a weight are sharded together or not at all.

    Raises:
        ModelError: a module that the user named cannot be sharded along the vocabulary.
    """
    modules = dict(model.named_modules())
    requested = {name for name, entry in entries.items() if entry.style is ShardStyle.VOCABULARY and name in modules}
    other = {name for name, entry in entries.items() if entry.is_from_user and name not in requested}
    _, inner = find_language_model(model)
    ends = [
        module
        for module in (_call_getter(inner, "get_input_embeddings"), _call_getter(inner, "get_output_embeddings"))
        if module
    ]
    found: set[str] = set()
    for name, module in modules.items():
        if name in found or not (name in requested or module in ends):
            continue
        tied = {name, *find_tied_modules(modules, name)}  # includes stubs, so that all pipeline stages decide alike
        local = {one for one in tied if not is_stub(modules[one])}
        why = next((why for why in (_why_not_shardable(modules[one]) for one in sorted(tied)) if why), "")
        if why and any(entries[one].is_from_user for one in requested & tied):
            raise make_cannot_shard_error(name, why)
        if not why and not tied & other:
            found |= local
    return {name: PlanEntry(name, ShardStyle.VOCABULARY) for name in modules if name in found}


def get_hidden_size(model: nn.Module) -> int | None:
    """Return the number of features between blocks, from the config or else the token embedding; None if both are
    missing.
    """
    _, inner = find_language_model(model)
    size = getattr(getattr(inner, "config", None), "hidden_size", None)
    embedding = _call_getter(inner, "get_input_embeddings")
    if isinstance(size, int):
        return size
    return embedding.embedding_dim if isinstance(embedding, nn.Embedding) else None


def find_tied_modules(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """Return the names of the other modules that hold this module's weight, with stubs of other stages."""
    weight = modules[name]._parameters.get("weight")
    return [
        other
        for other, module in modules.items()
        if other != name and weight is not None and any(held is weight for held in module._parameters.values())
    ]


def _call_getter(model: nn.Module, getter: str) -> nn.Module | None:
    """Return the module that a getter of the model returns; None if the model lacks the getter, or the module is a stub
    or missing.
    """
    ask: Any = getattr(model, getter, None)
    if ask is None:
        return None
    with contextlib.suppress(NotImplementedError, AttributeError):
        found = ask()
        return found if isinstance(found, nn.Module) and not is_stub(found) else None
    return None


def _why_not_shardable(module: nn.Module) -> str:
    """Return the reason why this module cannot be sharded along the vocabulary, or "" if it can."""
    if isinstance(module, PackedMatrix):
        return "its table is packed"
    if isinstance(module, nn.Embedding) or is_stub(module):
        options = (getattr(module, name, None) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
        if any(option is not None and option is not False for option in options):
            return "an embedding with max_norm, scale_grad_by_freq or sparse needs all its rows"
    elif as_linear_layer("", module) is None or not is_plain_linear(module):
        return f"its weight is used by a {type(module).__name__}"
    return ""
