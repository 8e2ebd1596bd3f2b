"""Configuration of a pruned transformers model.

[Note: widths of pruned models] transformers builds a pruned model from its configuration if that has keys for the
number of heads, their size and the features of the feed-forward layers. Some families derive the size of a head from
the hidden size, so that no configuration describes fewer heads of the same size, and some refuse a number of heads that
does not divide the hidden size. For these families, `config.json` keeps the numbers of the unpruned model and has an
entry `windlass_pruning`, which `windlass.LLM` and `windlass.from_pretrained` apply to the empty model; transformers
refuses the shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.compress.conv1d_layers import use_linear_class
from windlass.compress.low_rank_config import RANKS_ENTRY, apply_ranks
from windlass.compress.pruning_units import UnitGroup, remove_units
from windlass.compress.transformer_units import find_transformer_units, fit_module

PRUNING_ENTRY = "windlass_pruning"

_QUERY_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_FEATURES = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "inner_dim",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ffn_hidden_size",
    "hidden_dim_ffn",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def describe_widths(model: Any, pruned: Sequence[tuple[UnitGroup, int]]) -> None:
    """Change the configuration of a pruned model in place, so that the model can be built from it; see [Note: widths of
    pruned models].

    Args:
        pruned: each group of units from before the pruning, and the number of its units that stay.

    Raises:
        ModelError: no configuration describes the model.
    """
    config = model.config
    earlier = dict(getattr(config, PRUNING_ENTRY, None) or {})
    wanted = _shapes(model)
    kinds = {group.kind for group, _ in pruned}
    for recorded in (set[str](), {"heads", "groups"}, kinds):
        trial = copy.deepcopy(config)
        text = trial.get_text_config() if hasattr(trial, "get_text_config") else trial
        stated = dict(vars(text))
        for group, kept in pruned:
            if group.kind not in recorded:
                _state_width(text, stated, group, kept)
        for entry in _entries(earlier, [(group, kept) for group, kept in pruned if group.kind in recorded]):
            with suppress(ValueError, TypeError, KeyError, RuntimeError, ModelError, ZeroDivisionError):
                _check_valid(trial)
                _check_valid(text)
                if _shapes(_build_empty(model, trial, entry)) == wanted:
                    if entry:
                        setattr(trial, PRUNING_ENTRY, entry)
                    _copy_values(trial, config)
                    return
    raise ModelError(
        f"no configuration of {type(model).__name__} describes the pruned model: "
        f"{', '.join(sorted(kinds))} of some layers have other sizes than those of others; prune fewer kinds"
    )


def _entries(earlier: Mapping[str, int], pruned: Sequence[tuple[UnitGroup, int]]) -> Iterator[dict[str, int]]:
    """Yield entries `windlass_pruning` that may describe a model: with the kinds as they were pruned; and, if heads
    have keys of their own, so that heads and groups are the same units, with one kind for both, and with both kinds,
    since several heads of the unpruned model may share a key."""
    found = {**earlier, **{_key(group): kept for group, kept in pruned}}
    for group, kept in pruned:
        heads = f"heads:{group.name}"
        if group.kind == "groups" and heads in earlier:  # the number of query heads after both removals
            found[heads] = group.heads[0] // group.heads[1] * kept
    yield found
    same = {group.name for group, _ in pruned if group.has_own_keys}
    if same:
        others = {key: kept for key, kept in earlier.items() if key.removeprefix("groups:") not in same}
        new = {f"heads:{group.name}" if group.has_own_keys else _key(group): kept for group, kept in pruned}
        yield {**others, **new}
        both = [(group.name, kept) for group, kept in pruned if group.has_own_keys]
        yield {**found, **{f"{kind}:{name}": kept for name, kept in both for kind in ("groups", "heads")}}


def check_layers(model: Any) -> None:
    """Check that the configuration of a model with fewer layers describes it.

    Raises:
        ModelError: no configuration describes the model, e.g. since every second layer has experts.
    """
    wanted = _shapes(model)
    with suppress(ValueError, TypeError, KeyError, IndexError, RuntimeError, ModelError, ZeroDivisionError):
        _check_valid(model.config)
        if _shapes(_build_empty(model, model.config, getattr(model.config, PRUNING_ENTRY, None) or {})) == wanted:
            return
    raise ModelError(
        f"no configuration of {type(model).__name__} describes the model without these layers, whose kind follows from "
        "their number; prune other kinds"
    )


def _build_empty(model: Any, config: Any, widths: Mapping[str, int]) -> nn.Module:
    """Return a model of the class of `model` on the meta device, with pruned widths, and low ranks as configured."""
    with torch.device("meta"):
        empty: nn.Module = type(model)(copy.deepcopy(config))
    apply_entries(empty, config, widths)
    return empty


def apply_entries(model: nn.Module, config: Any, widths: Mapping[str, int] | None = None) -> None:
    """Give a model that transformers built from a configuration the pruned widths and low ranks of that configuration.
    Parameters of factorized layers are then on the meta device.

    Args:
        config: the configuration; None: it has no such entries.
        widths: pruned widths in place of those of the configuration.

    Raises:
        ModelError: an entry does not fit the model.
    """
    apply_widths(model, (getattr(config, PRUNING_ENTRY, None) or {}) if widths is None else widths)
    use_linear_class(model)  # before `apply_ranks`, which finds only linear layers
    apply_ranks(model, getattr(config, RANKS_ENTRY, None) or {})


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _check_valid(config: Any) -> None:
    """Run the validation of a configuration, as transformers does when it saves or loads the configuration.

    Raises:
        ModelError: the configuration breaks a rule, e.g. since the number of heads does not divide the hidden size.
    """
    validate = getattr(config, "validate", None)
    try:
        if validate is not None:
            validate()
    except Exception as error:  # transformers and huggingface_hub raise exceptions of various classes
        raise ModelError(f"{type(config).__name__}: {error}") from error


def renumber_layers(entry: Mapping[str, int], prefix: str, new_numbers: Mapping[int, int]) -> dict[str, int]:
    """Return an entry `windlass_pruning` or `windlass_low_rank` for a model with fewer layers.

    Args:
        prefix: name of the list of layers.
        new_numbers: new number of each layer that stays, by its old number.
    """
    found: dict[str, int] = {}
    for key, kept in entry.items():
        kind, colon, name = key.rpartition(":")
        number, dot, rest = name.removeprefix(f"{prefix}.").partition(".")
        if not name.startswith(f"{prefix}.") or not number.isdigit():
            found[key] = kept
        elif int(number) in new_numbers:
            found[f"{kind}{colon}{prefix}.{new_numbers[int(number)]}{dot}{rest}"] = kept
    return found


def _copy_values(source: Any, target: Any) -> None:
    """Copy the values of a configuration into `target`. Its nested configurations stay the same objects, which modules
    refer to."""
    for name, value in vars(source).items():
        own = vars(target).get(name)
        if hasattr(own, "to_dict") and hasattr(value, "to_dict"):
            _copy_values(value, own)
        elif own != value or type(own) is not type(value):
            vars(target)[name] = value


def apply_widths(model: nn.Module, entry: Mapping[str, int]) -> None:
    """Shrink a model to the widths of an entry `windlass_pruning`. The first units of each group stay. Key heads are
    removed before single query heads: the entry has the final numbers of both.

    Raises:
        ModelError: the entry does not fit the model.
    """
    for kind in sorted({name.partition(":")[0] for name in entry}):  # groups before heads
        groups = {_key(group): group for group in find_transformer_units(model, [kind])}
        wanted = {name: kept for name, kept in entry.items() if name.partition(":")[0] == kind}
        missing = set(wanted) - set(groups)
        if missing:
            raise ModelError(f"{PRUNING_ENTRY} names {sorted(missing)[:4]}, which {type(model).__name__} lacks")
        chosen = []
        for name, kept in wanted.items():
            group = groups[name]
            each, size = kept // group.sections, group.units // group.sections
            if not 0 < each <= size or kept % group.sections:
                raise ModelError(f"{PRUNING_ENTRY} keeps {kept} of the {group.units} units of {name}")
            first = (torch.arange(group.sections)[:, None] * size + torch.arange(each)).flatten()
            chosen.append((group, dict.fromkeys(group.parts, first)))
        remove_units(model, chosen)
        for name, kept in wanted.items():
            fit_module(model, groups[name], kept)


def _key(group: UnitGroup) -> str:
    return f"{group.kind}:{group.name}"


def _state_width(config: Any, stated: Mapping[str, Any], group: UnitGroup, kept: int) -> None:
    """Set the keys of the configuration for the size of a group of units. `stated` has the values before any change."""
    if group.kind in ("heads", "groups"):
        query, key = group.heads
        new_query = kept if group.kind == "heads" else query // key * kept
        new_key = key if group.kind == "heads" and not group.has_own_keys else kept
        reader = next(tensor for tensor in group.tensors if tensor.reads)
        size = reader.index.shape[1] // (query // key if group.kind == "groups" else 1)
        _set(config, stated, _QUERY_COUNTS, query, new_query)
        _set(config, stated, _KEY_COUNTS, key, new_key)
        # `stated` first, because a configuration whose layers differ may raise when an attribute is read
        known = stated["head_dim"] if "head_dim" in stated else getattr(config, "head_dim", None)
        if known is None:
            config.head_dim = size
    elif group.kind == "ffn":
        _set(config, stated, _FEATURES, group.units, kept)
        hidden = getattr(config, "hidden_size", None)
        for name in _FEATURES:  # None means four times the hidden size
            if name in stated and stated[name] is None and group.units == 4 * (hidden or 0):
                setattr(config, name, kept)
    elif group.kind == "experts":
        _set(config, stated, _EXPERTS, group.units, kept)


def _set(config: Any, stated: Mapping[str, Any], names: Sequence[str], before: int, after: int) -> None:
    for name in names:
        if stated.get(name) == before:
            setattr(config, name, after)
