"""Structured pruning: a smaller model with fewer heads, features, experts, channels or layers, which can be trained
further."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.base.module_modes import evaluating
from windlass.compress.channel_units import find_channel_units
from windlass.compress.layer_importance import find_layer_list, shorten_layers
from windlass.compress.low_rank_config import RANKS_ENTRY
from windlass.compress.model_directory import linear_layers
from windlass.compress.pruned_config import check_layers, describe_widths
from windlass.compress.pruning_units import Kept, UnitGroup, choose_units, count_kept, remove_units
from windlass.compress.transformer_units import find_transformer_units, fit_module
from windlass.compress.unit_importance import IMPORTANCES, LossFunction, language_loss, unit_scores

PRUNED_KINDS = ("layers", "experts", "groups", "heads", "ffn", "channels")
"""Kinds of units in the order in which they are removed."""


@dataclass
class PruningReport:
    """Result of a pruning.

    Attributes:
        units: for each kind, the number of units before and after, over the full model.
        layers: description of the change at each removed layer.
        parameters_before, parameters_after: elements of all parameters.
        of_each_key_head: for kinds whose units are divided among key heads, the number of units of one key head before
            and after.
    """

    parameters_before: int
    parameters_after: int = 0
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    of_each_key_head: dict[str, tuple[int, int]] = field(default_factory=dict)


def prune_model(
    model: nn.Module,
    shares: Mapping[str, float],
    *,
    importance: str = "activation",
    batches: Sequence[Any] = (),
    loss: LossFunction = language_loss,
    example: Any = None,
) -> PruningReport:
    """Remove the least important units of a model in place.

    Every attention, feed-forward or expert module loses the same share, so that the result has one configuration. The
    parameters are new objects: build optimizers afterwards. If this raises an error, the model is as before.

    Args:
        model: a transformers model with its configuration, whose heads, groups (key heads with their query heads), ffn
            features, experts and layers can be removed; or any module, of which channels and ffn features are found by
            tracing ([Note: marked channels]).
        shares: for each kind, the share of its units to remove (below 1), or their number in each module (heads in
            grouped-query attention: for each key head; layers: in the model).
        importance: magnitude, activation or taylor; see [Note: unit importance]. Layers are always measured.
        batches: inputs of `loss`: token ids, for the loss of language models.
        example: inputs for tracing, as in `find_channel_units`; None: `model` is a transformers model.

    Raises:
        ConfigError: a kind or an importance is unknown, no units or more than there are would be removed, or text or
            `example` is missing.
        ModelError: a dependency is unknown, an importance is not finite, or no configuration describes the result.
    """
    _check(shares, importance)
    report = PruningReport(_count(model))
    traced = not hasattr(model, "config") or example is not None
    kinds = [kind for kind in PRUNED_KINDS[1:] if shares.get(kind)]
    with evaluating(model), _undone_on_error(model):
        for kind in kinds:  # raise for an impossible kind before anything is removed
            _find_units(model, kind, shares[kind], example if traced else None)
        if shares.get("layers"):
            _prune_layers(model, shares["layers"], batches, loss, report)
        for kind in kinds:
            _prune_kind(model, kind, shares[kind], importance, batches, loss, example if traced else None, report)
    report.parameters_after = _count(model)
    return report


@contextmanager
def _undone_on_error(model: nn.Module) -> Iterator[None]:
    """Undo all changes of a model's modules and configuration if the `with` block raises. The block may replace
    parameters and buffers, but not change their values."""
    saved = [_copy_of(vars(module)) for module in model.modules()]
    configs = [(config, dict(vars(config))) for config in _list_configurations(getattr(model, "config", None), [])]
    modules = list(model.modules())
    try:
        yield
    except BaseException:
        for module, attributes in zip(modules, saved, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        for config, values in configs:
            vars(config).clear()
            vars(config).update(values)
        raise


def _copy_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the attributes of a module, and of its tables of parameters, buffers and submodules."""
    names = ("_parameters", "_buffers", "_modules")  # missing in the `__dict__` of a traced module
    tables = {name: dict(attributes[name]) for name in names if name in attributes}
    return {**attributes, **tables}


def _list_configurations(config: Any, found: list[Any]) -> list[Any]:
    """Add a configuration of transformers and the configurations inside it to `found`, each once."""
    if hasattr(config, "to_dict") and not any(config is one for one in found):
        found.append(config)
        for value in vars(config).values():
            _list_configurations(value, found)
    return found


def _prune_layers(
    model: nn.Module, wanted: float, batches: Sequence[Any], loss: LossFunction, report: PruningReport
) -> None:
    total = len(model.get_submodule(find_layer_list(model)))  # type: ignore[arg-type]
    count = round(wanted * total) if wanted < 1 else int(wanted)
    if not count:
        raise ConfigError(f"prune layers = {wanted:g} removes none of the {total} layers; remove more")
    report.layers = shorten_layers(model, count, batches, loss)
    if hasattr(model, "config"):
        check_layers(model)
    report.units["layers"] = (total, total - count)


def _prune_kind(
    model: nn.Module,
    kind: str,
    share: float,
    importance: str,
    batches: Sequence[Any],
    loss: LossFunction,
    example: Any,
    report: PruningReport,
) -> None:
    groups, keep = _find_units(model, kind, share, example)
    scores = unit_scores(model, groups, importance, batches, loss)
    for group, score in zip(groups, scores, strict=True):
        if not all(bool(torch.isfinite(values).all()) for values in score.values()):
            raise ModelError(
                f"the importance of the {kind} of {group.name} is not finite; give a model and text that compute "
                "numbers"
            )
    chosen: list[tuple[UnitGroup, Kept]] = [
        (group, choose_units(group, score, count)) for group, score, count in zip(groups, scores, keep, strict=True)
    ]
    remove_units(model, chosen)
    if example is None:
        for group, count in zip(groups, keep, strict=True):
            fit_module(model, group, count)
        describe_widths(model, list(zip(groups, keep, strict=True)))
    report.units[kind] = (sum(group.units for group in groups), sum(keep))
    first = groups[0]
    if first.sections > 1:
        report.of_each_key_head[kind] = (first.units // first.sections, keep[0] // first.sections)


def features_after(model: nn.Module, shares: Mapping[str, float]) -> dict[str, int]:
    """Return the number of input features that each linear layer has after `prune_model` with the same shares.

    Args:
        model: a transformers model on any device; its values are not read.

    Raises:
        ConfigError, ModelError: as for `prune_model`.
    """
    found = {name: module.in_features for name, module in linear_layers(model).items()}
    for kind in PRUNED_KINDS[1:]:
        if not shares.get(kind):
            continue
        groups, keep = _find_units(model, kind, shares[kind], None)
        for group, count in zip(groups, keep, strict=True):
            for tensor in group.tensors:
                layer = tensor.name.removesuffix(".weight")
                if layer in found and tensor.dim == 1 and tensor.part is None:
                    # heads and groups both shrink the same features
                    found[layer] = found[layer] * count // group.units
    return found


def _find_units(model: nn.Module, kind: str, share: float, example: Any) -> tuple[list[UnitGroup], list[int]]:
    """Return the groups of units of a kind, and the number of units of each group that stay.

    Raises:
        ConfigError: there are no units of the kind, no units or more than there are would be removed, `example` is
            missing, or the model is factorized.
    """
    if example is not None:
        groups = [group for group in find_channel_units(model, example) if group.kind == kind]
    elif hasattr(model, "config"):
        if getattr(model.config, RANKS_ENTRY, None):
            raise ConfigError(
                f"prune {kind} = {share:g}, but layers of this {type(model).__name__} are in two factors "
                f"({RANKS_ENTRY}), from which only whole layers of the model can be removed; prune before "
                "factorize_linear_layers"
            )
        groups = find_transformer_units(model, [kind])
    else:
        raise ConfigError(f"prune {kind} of a {type(model).__name__} needs example inputs, to trace its dependencies")
    if not groups:
        raise ConfigError(f"prune {kind} = {share:g}, but {type(model).__name__} has no {kind} that can be removed")
    keep = [count_kept(group, share) for group in groups]
    if all(count == group.units for group, count in zip(groups, keep, strict=True)):
        each = groups[0].units // groups[0].sections
        raise ConfigError(
            f"prune {kind} = {share:g} removes none of the {each} {kind} of {groups[0].name}"
            f"{' with one key head' if groups[0].sections > 1 else ''}; remove more"
        )
    return groups, keep


def _check(shares: Mapping[str, float], importance: str) -> None:
    unknown = sorted(set(shares) - set(PRUNED_KINDS))
    if unknown:
        raise ConfigError(f"prune has {', '.join(unknown)}; it supports {', '.join(PRUNED_KINDS)}")
    if importance not in IMPORTANCES:
        raise ConfigError(f"importance is {importance!r}; it is one of {', '.join(IMPORTANCES)}")
    for kind, share in shares.items():
        if not math.isfinite(share) or share < 0 or share >= 1 and share != int(share):
            raise ConfigError(f"prune {kind} = {share:g}; write a share below 1, or a whole number of {kind}")


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
