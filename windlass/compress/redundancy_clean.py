"""End of compression during training: a plain, smaller model with the same function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ShardedParameterError
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
from windlass.compress.fused_encoders import restore_fused_encoders
from windlass.compress.quantize_training import (
    delay_quantize_training,
    end_quantize_training,
    has_quantize_training,
)
from windlass.compress.snip_pruning import MOMENTUM_BUFFER
from windlass.config.compression_section import CompressionTraining

_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads")
_STRUCTURED = ("row", "head", "channel")  # kinds whose masks remove outputs or inputs
_CONSTANT = 1e-6  # a norm's output for a channel of zeros counts as 0 up to this magnitude


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Make a trained model plain, in place, with the same function: weights become the rounded and masked ones.

    Pruned outputs, heads and channels are removed from the matrices where `related_modules` names the layers that read
    them. Rounding of inputs is removed, since plain layers do not have it. A weight that modules share stays
    shared where all of them use the same values; otherwise each module gets a separate weight. Weights that
    `quantize_training` rounds keep the bits of the last step.

    Args:
        model: prepared model, or its engine (a wrapper with `.module`), which evaluates the plain model afterwards.
        mpu: no effect.

    Returns:
        `model`.

    Raises:
        ConfigError: the model was not prepared, its weights are sharded, or related layers do not fit. The model is
            unchanged.
    """
    inner = model if compression_clock(model) is not None else getattr(model, "module", model)
    clock = compression_clock(inner)
    if clock is None:
        raise ConfigError("redundancy_clean needs the model that init_compression prepared, or its engine")
    by_schedule = has_quantize_training(inner)
    section = read_compression_training(deepspeed_config, may_lack=by_schedule)
    with torch.no_grad():
        kept = _kept_parts(inner)
        shrinks = _plan_shrinks(inner, section, kept)
        last = max(clock.step, _last_offset(section))
        delay_quantize_training(inner, last - clock.step)
        clock.step = last
        shared = _separate_weights(inner)
        for name, layer in _compressed_layers(inner):
            bias = layer.compressed_bias()
            layer.weight.copy_(shared[name] if name in shared else layer.compressed_weight().detach())
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias.detach())
            _make_plain(layer)
        for shrink in shrinks:
            _shrink_layers(inner, shrink)
    end_quantize_training(inner)
    restore_fused_encoders(inner)
    del inner.__dict__[CLOCK]
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
    """Give each layer that shares a weight, but uses different values of it, a separate weight.

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
    """Record in the configuration of a transformers model that its head is not tied."""
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


@dataclass(frozen=True)
class _Shrink:
    """Removal of the outputs, inputs or heads that one mask prunes.

    Attributes:
        mask: bool, True for each output that stays, or for each input of the attention's output layer.
        parts: name of each layer that loses elements, and the dimension of its weight.
        heads: numbers of heads afterwards and before; None: no heads are removed.
    """

    mask: Tensor
    parts: tuple[tuple[str, int], ...]
    heads: tuple[int, int] | None = None


def _kept_parts(model: nn.Module) -> dict[str, Tensor]:
    """Return the masks of outputs, heads and channels: bool, True for each part that stays.

    The keys are the kind of mask and the layer's name, e.g. `row encoder.0.dense`.

    Raises:
        ConfigError: a weight is sharded.
    """
    kept: dict[str, Tensor] = {}
    for name, layer in _compressed_layers(model):
        try:
            for parameter in layer.parameters(recurse=False):
                parameter.detach().flatten()[:1].clone()
            for kind in _STRUCTURED:
                if kind in layer.compression.prunings:
                    kept[f"{kind} {name}"] = layer.mask(layer.compression.prunings[kind]).detach().flatten() > 0
        except ShardedParameterError as error:
            raise ConfigError(
                f"redundancy_clean needs whole weights, and those of {name!r} are sharded over ranks; call "
                "engine.destroy() before, and pass engine.module"
            ) from error
    return kept


def _plan_shrinks(model: nn.Module, section: CompressionTraining, kept: Mapping[str, Tensor]) -> list[_Shrink]:
    """Return the removals of pruned outputs, heads and channels from the pruned layers, and from the layers that are
    named as `related_modules`.

    Raises:
        ConfigError: related layers do not fit.
    """
    found: list[_Shrink] = []
    sizes: dict[tuple[str, int], int] = {}  # sizes of weights after the removals so far
    for kind in _STRUCTURED:
        for group, where in enabled_groups(getattr(section, f"{kind}_pruning"), f"{kind}_pruning"):
            if not group.related_modules:
                continue
            if len(group.related_modules) != len(group.modules):
                raise ConfigError(
                    f"{where}.related_modules has another length than modules; name a list for each of them"
                )
            for pattern, related in zip(group.modules, group.related_modules, strict=True):
                names = [name for name in find_layers(model, pattern, PRUNINGS[kind]) if f"{kind} {name}" in kept]
                others = [
                    near for other in _as_list(related) if (near := _find_near(model, names, other, where)) is not None
                ]
                for place, name in enumerate(names):
                    near = [matches[place] for matches in others]
                    found.append(_plan_shrink(model, kind, name, near, kept[f"{kind} {name}"], sizes))
    return found


def _plan_shrink(
    model: nn.Module, kind: str, name: str, related: list[str], mask: Tensor, sizes: dict[tuple[str, int], int]
) -> _Shrink:
    """Return the removal of the parts that a mask prunes, and update `sizes`.

    Raises:
        ConfigError: a layer has another number of outputs or inputs than the mask.
    """
    heads, own, other = None, 0, 1
    if kind == "head":
        heads, own, other = (int(mask.sum()), len(mask)), 1, 0
        inputs = sizes.get((name, 1), model.get_submodule(name).get_parameter("weight").shape[1])
        mask = mask.repeat_interleave(inputs // len(mask))
    parts = ((name, own), *((one, other) for one in related))
    for one, dim in parts:
        module = model.get_submodule(one)
        is_norm = isinstance(module, nn.BatchNorm2d)
        key = one, 0 if is_norm else dim
        shape = (module.num_features,) if is_norm else tuple(module.get_parameter("weight").shape)
        if sizes.get(key, shape[key[1]]) != len(mask):
            raise ConfigError(
                f"{one!r}, a {type(module).__name__} with weight {shape}, does not fit a mask of {len(mask)} from "
                f"{name!r}; name the layers that read the pruned outputs as related_modules"
            )
        sizes[key] = int(mask.sum())
    return _Shrink(mask, parts, heads)


def _shrink_layers(model: nn.Module, shrink: _Shrink) -> None:
    for name, dim in shrink.parts:
        _select(model.get_submodule(name), shrink.mask, dim)
    if shrink.heads is not None:
        _count_heads(model, [name for name, _ in shrink.parts], *shrink.heads)


def _as_list(related: Any) -> list[str]:
    return [related] if isinstance(related, str) else [str(one) for one in related]


def _find_near(model: nn.Module, names: list[str], pattern: str, where: str) -> list[str] | None:
    """Return a related module for each name: the module that matches `pattern` and shares the most name parts from the
    beginning.

    Returns None, with a warning, if the pattern matches no layer: configurations name norms that a model may lack.

    Raises:
        ConfigError: no other layer matches for some name, or two layers match equally well.
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
    """Remove the outputs (`dim` 0) or inputs (1) of a layer where `mask` is False. A norm has only outputs."""
    if isinstance(module, nn.BatchNorm2d):
        dim = 0
        _warn_of_constants(module, mask)
    places = mask.nonzero().flatten()
    for name in ("weight", "bias") if dim == 0 else ("weight",):
        values = getattr(module, name, None)
        if isinstance(values, Tensor):
            setattr(module, name, nn.Parameter(values.detach().index_select(dim, places), values.requires_grad))
    if isinstance(module, nn.BatchNorm2d):
        module.__dict__["num_features"] = len(places)
        for name in ("running_mean", "running_var"):
            if getattr(module, name) is not None:
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
    constant = -norm.running_mean / (norm.running_var + norm.eps).sqrt()
    if norm.affine:
        constant = norm.bias + constant * norm.weight
    largest = float(constant[~mask].abs().max()) if bool((~mask).any()) else 0.0
    if largest > _CONSTANT:
        logger.warning(
            "the outputs of pruned channels are up to %.3g behind a %s and are removed too, so that the model computes "
            "other values than before; train it further",
            largest,
            type(norm).__name__,
        )


def _count_heads(model: nn.Module, names: list[str], heads: int, before: int) -> None:
    """Set the number of heads in the attention module of some layers. It is the innermost module around one of the
    layers with an attribute for the number of heads that equals `before`."""
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
