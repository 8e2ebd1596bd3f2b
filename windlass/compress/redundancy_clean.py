"""End of compression during training: a plain, smaller model with the same function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.compress.compressed_layers import COMPRESSED, CompressedLayer, mask_name
from windlass.compress.compression_training import (
    CLOCK,
    PRUNINGS,
    compression_clock,
    enabled_groups,
    find_layers,
    read_compression_training,
)
from windlass.compress.quantize_training import end_quantize_training
from windlass.compress.snip_pruning import MOMENTUM_BUFFER
from windlass.config.compression_section import CompressionTraining

_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads")
_CONSTANT = 1e-6  # output of a norm for a channel of zeros, above which its removal is seen


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Make a trained model plain, in place, with the same function: weights become the rounded and masked ones.

    Outputs, heads and channels that a mask removes leave the matrices where `related_modules` names the layers that
    read them. Rounding of inputs is removed, since plain layers do not have it. A weight that modules share stays
    shared where all of them use the same values; else each module gets a weight of its own.

    Raises:
        ConfigError: the model was not prepared, or related layers do not fit.
    """
    section = read_compression_training(deepspeed_config)
    clock = compression_clock(model)
    if clock is None:
        raise ConfigError("redundancy_clean needs the model that init_compression prepared")
    clock.step = max(clock.step, _last_offset(section))
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        shared = _separate_weights(model)
        for name, layer in _compressed_layers(model):
            for kind in ("row", "head", "channel"):
                if kind in layer.compression.prunings:
                    kept[f"{kind} {name}"] = layer.mask(layer.compression.prunings[kind]).detach().flatten() > 0
            bias = layer.compressed_bias()
            layer.weight.copy_(shared[name] if name in shared else layer.compressed_weight().detach())
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias.detach())
            _make_plain(layer)
        for kind in ("row", "head", "channel"):
            _shrink_related(model, section, kind, kept)
    end_quantize_training(model)
    del model.__dict__[CLOCK]
    return model


def _last_offset(section: CompressionTraining) -> int:
    """Return the step from which every technique is active with its final settings."""
    last = 0
    for name in ("weight_quantization", "activation_quantization", *(f"{kind}_pruning" for kind in PRUNINGS)):
        technique = getattr(section, name)
        if technique.shared_parameters.enabled:
            shared = technique.shared_parameters
            last = max(last, shared.schedule_offset)
            if getattr(shared, "method", "") == "snip_momentum":
                last = max(last, shared.schedule_offset_end)
    for group in section.weight_quantization.different_groups.values():
        falls = (group.params.start_bits or 0) - (group.params.target_bits or 0)
        shared = section.weight_quantization.shared_parameters
        last = max(last, shared.schedule_offset + group.params.quantization_period * 2 ** max(falls, 0))
        if shared.fp16_mixed_quantize.enabled and shared.fp16_mixed_quantize.quantize_change_ratio > 0:
            last = max(last, shared.schedule_offset + int(1 / shared.fp16_mixed_quantize.quantize_change_ratio) + 1)
    return last


def _compressed_layers(model: nn.Module) -> list[tuple[str, CompressedLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, CompressedLayer)]


def _separate_weights(model: nn.Module) -> dict[str, Tensor]:
    """Give each layer that shares a weight, but uses different values of it, a weight of its own.

    Returns:
        Values of each compressed layer whose weight was shared. All are computed before the first is written, since
        rounding a rounded weight again changes it.
    """
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(name)
    values: dict[str, Tensor] = {}
    layers = {name: layer for name, layer in _compressed_layers(model) if len(users[id(layer.weight)]) > 1}
    for name, layer in layers.items():
        values[name] = layer.compressed_weight().detach()
    for name, layer in layers.items():
        others = [values.get(other) for other in users[id(layer.weight)] if other != name]
        if not all(other is not None and torch.equal(other, values[name]) for other in others):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
            _record_untied(model)
    return values


def _record_untied(model: nn.Module) -> None:
    """State in the configuration of a transformers model that its head has a weight of its own."""
    config = getattr(model, "config", None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if head is None or embedding is None or head.weight is embedding.weight:
        return
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False  # type: ignore[union-attr]


def _make_plain(layer: CompressedLayer) -> None:
    for pruning in layer.compression.prunings.values():
        delattr(layer, mask_name(pruning))
        layer._buffers.pop(MOMENTUM_BUFFER, None)
    if "input_range" in layer._buffers:
        del layer._buffers["input_range"]
    plain = next(kind for kind, compressed in COMPRESSED.items() if isinstance(layer, compressed))
    del layer.__dict__["compression"]
    layer.__class__ = plain  # type: ignore[assignment]


def _shrink_related(model: nn.Module, section: CompressionTraining, kind: str, kept: Mapping[str, Tensor]) -> None:
    """Remove pruned outputs, heads or channels from layers, and from the layers that their group names as related."""
    technique = getattr(section, f"{kind}_pruning")
    for group, where in enabled_groups(technique, f"{kind}_pruning"):
        if not group.related_modules:
            continue
        if len(group.related_modules) != len(group.modules):
            raise ConfigError(f"{where}.related_modules has another length than modules; name a list for each of them")
        for pattern, related in zip(group.modules, group.related_modules, strict=True):
            names = [name for name in find_layers(model, pattern, PRUNINGS[kind]) if f"{kind} {name}" in kept]
            others = [
                found for other in _as_list(related) if (found := _find_near(model, names, other, where)) is not None
            ]
            for place, name in enumerate(names):
                mask = kept[f"{kind} {name}"]
                module = model.get_submodule(name)
                if kind == "head":
                    features = mask.repeat_interleave(module.get_parameter("weight").shape[1] // len(mask))
                    _select(module, features, dim=1)
                    for matches in others:
                        _select(model.get_submodule(matches[place]), features, dim=0)
                    near = [name, *(matches[place] for matches in others)]
                    _count_heads(model, near, int(mask.sum()), len(mask))
                else:
                    _select(module, mask, dim=0)
                    for matches in others:
                        _select(model.get_submodule(matches[place]), mask, dim=1)


def _as_list(related: Any) -> list[str]:
    return [related] if isinstance(related, str) else [str(one) for one in related]


def _find_near(model: nn.Module, names: list[str], pattern: str, where: str) -> list[str] | None:
    """Return a related module for each name: the matching one with the longest common beginning.

    Returns None, with a warning, if the pattern matches no layer: configurations name norms that a model may lack.

    Raises:
        ConfigError: no other layer matches for some name, or two are equally near.
    """
    candidates = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.BatchNorm2d)) and re.search(pattern, name)
    ]
    if not candidates:
        logger.warning("%s.related_modules has %r, which matches no layer", where, pattern)
        return None
    found = []
    for name in names:
        parts = name.split(".")
        lengths = {one: _common(parts, one.split(".")) for one in candidates if one != name}
        best = max(lengths.values(), default=-1)
        nearest = [one for one, length in lengths.items() if length == best]
        if len(nearest) != 1:
            raise ConfigError(
                f"{where}.related_modules has {pattern!r}, which matches {len(nearest)} layers beside {name!r}: "
                f"{', '.join(nearest[:4]) or 'none'}; write a pattern of one of them"
            )
        found.append(nearest[0])
    return found


def _common(one: list[str], two: list[str]) -> int:
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count


def _select(module: nn.Module, mask: Tensor, dim: int) -> None:
    """Keep some outputs (0) or inputs (1) of a layer.

    Raises:
        ConfigError: the layer has another number of them.
    """
    weight = module.get_parameter("weight")
    if isinstance(module, nn.BatchNorm2d):
        dim = 0
        _warn_of_constants(module, mask)
    if weight.shape[dim] != len(mask):
        raise ConfigError(
            f"a {type(module).__name__} with weight {tuple(weight.shape)} does not fit a mask of {len(mask)}; name "
            "the layers that read the pruned outputs as related_modules"
        )
    places = mask.nonzero().flatten()
    module.weight = nn.Parameter(weight.detach().index_select(dim, places), requires_grad=weight.requires_grad)
    bias = getattr(module, "bias", None)
    if dim == 0 and isinstance(bias, Tensor):
        module.bias = nn.Parameter(bias.detach()[places], requires_grad=bias.requires_grad)
    if isinstance(module, nn.BatchNorm2d):
        module.__dict__["num_features"] = len(places)
        for name in ("running_mean", "running_var"):
            setattr(module, name, module.get_buffer(name)[places])
    for name, size in (("out_features", 0), ("in_features", 1), ("out_channels", 0), ("in_channels", 1)):
        if hasattr(module, name) and size == dim:
            module.__dict__[name] = len(places)


def _warn_of_constants(norm: nn.BatchNorm2d, mask: Tensor) -> None:
    """Log a warning if a norm turns pruned channels into constants other than 0, which are lost when the channels are
    removed.
    """
    if norm.running_mean is None or norm.running_var is None or len(mask) != norm.num_features:
        return
    constant = norm.bias - norm.running_mean * norm.weight / (norm.running_var + norm.eps).sqrt()
    largest = float(constant[~mask].abs().max()) if bool((~mask).any()) else 0.0
    if largest > _CONSTANT:
        logger.warning(
            "the outputs of pruned channels are up to %.3g behind a %s and are removed too, so that the model computes "
            "other values than before; train it further",
            largest,
            type(norm).__name__,
        )


def _count_heads(model: nn.Module, names: list[str], heads: int, before: int) -> None:
    """Correct the number of heads in the attention module of some layers: the nearest module around one of them that
    states it."""
    owners = {owner for name in names for owner in _owners(name)}
    for owner in sorted(owners, key=lambda one: (one.count(".") if one else -1, one), reverse=True):
        module = model.get_submodule(owner) if owner else model
        counts = [one for one in _HEAD_COUNTS if getattr(module, one, None) == before]
        for attribute in counts:
            setattr(module, attribute, heads)
        size = getattr(module, "attention_head_size", getattr(module, "head_dim", None))
        if counts and isinstance(size, int) and hasattr(module, "all_head_size"):
            module.__dict__["all_head_size"] = heads * size
        if counts:
            return
    logger.warning("no module around %s has the number of heads %d; set it to %d", names[0], before, heads)


def _owners(name: str) -> list[str]:
    """Return the names of the modules around a module, the model's own name last."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
