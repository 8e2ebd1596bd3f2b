"""Application of DeepSpeed's section `compression_training` to a model, whose layers are compressed during training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError, WeightFormatError
from windlass.base.log import logger
from windlass.compress.compressed_layers import (
    COMPRESSED,
    CompressedLayer,
    CompressionClock,
    InputRounding,
    LayerCompression,
    Pruning,
    WeightRounding,
    add_pruning,
    replace_class,
)
from windlass.compress.conv1d_layers import use_linear_class
from windlass.compress.fake_rounding import warn_of_unused_rules
from windlass.compress.format_rounding import format_values
from windlass.compress.fused_encoders import exclude_fused_encoders
from windlass.compress.layer_reduction import copy_teacher_layers
from windlass.compress.snip_pruning import check_blocks, read_block_pattern, update_masks
from windlass.config.compression_section import CompressionGroup, CompressionTraining, GroupParams
from windlass.config.config_loading import load_config
from windlass.config.config_refusals import find_section_refusals
from windlass.kernels.weight_format import get_weight_format

SECTION = "compression_training"
CLOCK = "_windlass_compression_clock"  # attribute of a prepared model that holds its `CompressionClock`
PRUNINGS = {"sparse": (nn.Linear, nn.Conv2d), "row": (nn.Linear,), "head": (nn.Linear,), "channel": (nn.Conv2d,)}


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Prepare a model for `compression_training`, in place: the chosen layers round their weights and inputs and mask
    their weights, from the `schedule_offset` of each technique on. Call it before `initialize`, and before the
    optimizer is built. A pattern that no layer matches is logged as a warning.

    Args:
        deepspeed_config: dict or path of the full configuration.
        teacher_model: with `layer_reduction`, the model whose layers are copied into the smaller `model`.
        mpu: object with `get_model_parallel_world_size()`, which must return 1; None: no model parallelism.

    Raises:
        ConfigError: the section is missing or invalid, a technique names a layer that it does not fit, `teacher_model`
            is missing, or `mpu` has more than one model-parallel rank.
    """
    section = read_compression_training(deepspeed_config)
    if mpu is not None and int(mpu.get_model_parallel_world_size()) > 1:
        raise ConfigError(f"{SECTION} does not run with sharded matrices; leave out mpu")
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise ConfigError(f"{SECTION}.layer_reduction needs the teacher; pass teacher_model to init_compression")
        copy_teacher_layers(model, teacher_model, section.layer_reduction)
    use_linear_class(model)
    clock = compression_clock(model) or CompressionClock()
    model.__dict__[CLOCK] = clock
    _add_weight_rounding(model, section, clock)
    _add_input_rounding(model, section, clock)
    for kind in PRUNINGS:
        _add_prunings(model, section, kind, clock)
    exclude_fused_encoders(model)
    return model


def compression_clock(model: nn.Module) -> CompressionClock | None:
    """Return the step counter of a prepared model; None for any other model. In an engine the counter returns the
    engine's steps; without an engine `end_compression_step` advances the counter."""
    found = model.__dict__.get(CLOCK)
    return found if isinstance(found, CompressionClock) else None


def end_compression_step(model: nn.Module) -> None:
    """Count an optimizer step of a loop without engine, and update the masks of `snip_momentum`.

    Raises:
        ConfigError: the model is not prepared by `init_compression`.
    """
    clock = compression_clock(model)
    if clock is None:
        raise ConfigError("end_compression_step needs the model that init_compression prepared")
    clock.step += 1
    update_masks(model, clock.step)


def needs_preparation(section: CompressionTraining) -> bool:
    """Return True if the section enables any technique."""
    techniques = (section.weight_quantization, section.activation_quantization, section.sparse_pruning)
    techniques += (section.row_pruning, section.head_pruning, section.channel_pruning)  # type: ignore[assignment]
    return section.layer_reduction.enabled or any(one.shared_parameters.enabled for one in techniques)


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> nn.Module:
    """Copy layers of a teacher into a smaller model, as `compression_training.layer_reduction` of the configuration
    sets. Other keys of the section have no effect.
    """
    copy_teacher_layers(student_model, teacher_model, read_compression_training(deepspeed_config).layer_reduction)
    return student_model


def read_compression_training(config: Any, *, may_lack: bool = False) -> CompressionTraining:
    """Return the section `compression_training` of a configuration.

    Args:
        config: dict, or path of a JSON file.
        may_lack: if the configuration lacks the section, return an empty section instead of raising.

    Raises:
        ConfigError: the section is missing or invalid, or has a value that is not supported.
    """
    loaded = load_config(config)
    if SECTION not in loaded.model_fields_set and not may_lack:
        raise ConfigError(f"the configuration has no section {SECTION!r}; add it")
    section: CompressionTraining = loaded.compression_training
    refused = find_section_refusals(section)
    if refused:
        raise ConfigError("; ".join(f"{SECTION}.{one.path} is {one.value!r}: {one.reason}" for one in refused))
    return section


def enabled_groups(technique: Any, name: str) -> Iterator[tuple[CompressionGroup, str]]:
    """Yield each group of a technique and its key in the configuration; none if the technique is disabled.
    `snip_momentum` without groups has one group of all layers."""
    shared, groups = technique.shared_parameters, technique.different_groups
    if not shared.enabled:
        return
    if not groups and getattr(shared, "method", "") == "snip_momentum":
        yield CompressionGroup(), f"{SECTION}.{name}.shared_parameters"
    for key, group in groups.items():
        yield group, f"{SECTION}.{name}.different_groups.{key}"


def find_layers(model: nn.Module, pattern: str, kinds: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Return, by name, the compressible layers of the classes `kinds` whose names contain a match of the regular
    expression `pattern`; `*` matches all names."""
    expression = ".*" if pattern == "*" else pattern
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        and (type(module) in COMPRESSED or isinstance(module, CompressedLayer))
        and re.search(expression, name)
    }


def _prepared(
    model: nn.Module, group: CompressionGroup, kinds: tuple[type[nn.Module], ...], where: str, clock: CompressionClock
) -> Iterator[CompressedLayer]:
    """Replace the class of each layer of a group by its `CompressedLayer` class, and yield each layer once."""
    seen: set[str] = set()
    for pattern in group.modules:
        found = find_layers(model, pattern, kinds)
        if not found:  # no error, as in DeepSpeed: one configuration may serve several models
            logger.warning(
                "%s.modules has %r, which no %s of the model matches, so it has no effect",
                where,
                pattern,
                ", ".join(kind.__name__ for kind in kinds),
            )
        for name, module in found.items():
            if name not in seen:
                seen.add(name)
                yield replace_class(module, LayerCompression(name, clock))


def _add_weight_rounding(model: nn.Module, section: CompressionTraining, clock: CompressionClock) -> None:
    shared = section.weight_quantization.shared_parameters
    groups = list(enabled_groups(section.weight_quantization, "weight_quantization"))
    key = f"{SECTION}.weight_quantization.shared_parameters"
    for bits in sorted({group.params.target_bits or 0 for group, _ in groups}):
        warn_of_unused_rules(
            bits, {f"{key}.quantization_type": shared.quantization_type, f"{key}.rounding": shared.rounding}
        )
    for group, where in groups:
        params = group.params
        start, target = _read_bits(params, where)
        mixed = shared.fp16_mixed_quantize
        rounding = WeightRounding(
            start,
            target,
            params.quantization_period,
            shared.quantize_groups,
            shared.quantization_type == "symmetric",
            shared.rounding == "stochastic",
            shared.schedule_offset,
            mixed.quantize_change_ratio if mixed.enabled else 0.0,
            params.weight_format,
        )
        for layer in _prepared(model, group, tuple(COMPRESSED), where, clock):
            if layer.compression.weight is not None:
                raise ConfigError(f"{where} names {layer.compression.name!r}, as another group does; leave one out")
            count = shared.quantize_groups
            if isinstance(layer, nn.Embedding):  # each row has a scale of its own, as in DeepSpeed
                count = max(len(layer.weight) or layer.num_embeddings, 1)  # zero.Init leaves no rows here
            if layer.weight.numel() % count and rounding.form is None:
                raise ConfigError(
                    f"{SECTION}.weight_quantization.shared_parameters.quantize_groups is {shared.quantize_groups}, "
                    f"which does not divide the {layer.weight.numel()} weights of {layer.compression.name!r}; write a "
                    "divisor"
                )
            layer.compression.weight = replace(rounding, groups=count)
            layer.compression.values = _values_in_format


def _read_bits(params: GroupParams, where: str) -> tuple[int, int]:
    """Return the number of bits of a weight at the start and at the end of the schedule; 16 and 16 if the group has a
    `weight_format`."""
    if params.weight_format is not None:
        try:
            get_weight_format(params.weight_format)
        except WeightFormatError as error:
            raise ConfigError(f"{where}.params.weight_format: {error}") from error
        return 16, 16
    assert params.target_bits is not None  # checked when the configuration was read
    return params.start_bits or params.target_bits, params.target_bits


def _values_in_format(name: str, weight: Tensor) -> Tensor:
    return format_values(get_weight_format(name), weight)


def _add_input_rounding(model: nn.Module, section: CompressionTraining, clock: CompressionClock) -> None:
    shared = section.activation_quantization.shared_parameters
    groups = list(enabled_groups(section.activation_quantization, "activation_quantization"))
    key = f"{SECTION}.activation_quantization.shared_parameters.quantization_type"
    if shared.range_calibration == "dynamic":
        for bits in sorted({group.params.bits or 0 for group, _ in groups}):
            warn_of_unused_rules(bits, {key: shared.quantization_type})
    for group, where in groups:
        rounding = InputRounding(
            group.params.bits or 8,
            shared.quantization_type == "symmetric",
            shared.range_calibration == "static",
            shared.schedule_offset,
        )
        for layer in _prepared(model, group, (nn.Linear, nn.Conv2d), where, clock):
            if layer.compression.inputs is not None:
                raise ConfigError(f"{where} names {layer.compression.name!r}, as another group does; leave one out")
            layer.compression.inputs = rounding
            if rounding.static:
                layer.register_buffer("input_range", torch.zeros(2))


def _add_prunings(model: nn.Module, section: CompressionTraining, kind: str, clock: CompressionClock) -> None:
    name = f"{kind}_pruning"
    technique = getattr(section, name)
    shared = technique.shared_parameters
    for group, where in enabled_groups(technique, name):
        ratio = group.params.dense_ratio
        by_snip = shared.method == "snip_momentum"
        if by_snip and ratio is None:
            ratio = shared.dense_ratio
        assert ratio is not None  # checked when the configuration was read
        heads = getattr(shared, "num_heads", None) or 0
        pruning = Pruning(kind, shared.method, ratio, shared.schedule_offset, heads)
        if by_snip:
            block = read_block_pattern(shared.block_pattern)
            end, stride = shared.schedule_offset_end, shared.schedule_offset_stride
            pruning = replace(pruning, end=end, stride=stride, block=block)
        excluded = shared.excluded_modules if by_snip else ()
        for layer in _prepared(model, group, PRUNINGS[kind], where, clock):
            if any(re.search(pattern, layer.compression.name) for pattern in excluded):
                continue
            if by_snip:
                check_blocks(layer, pruning)
            add_pruning(layer, pruning)
