"""Contradictions inside the sections of model compression, as far as they do not depend on the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from windlass.config.compression_section import (
    CompressionGroup,
    CompressionTraining,
    GroupParams,
    ModuleQuantization,
    SparsePruningShared,
)
from windlass.config.config_problems import format_value
from windlass.config.root_config import Config

PRUNING_METHODS = {
    "sparse_pruning": ("l1", "topk", "snip_momentum"),
    "row_pruning": ("l1", "topk"),
    "head_pruning": ("topk",),
    "channel_pruning": ("l1", "topk"),
}
"""Methods of each pruning technique."""
BLOCK_PATTERN = re.compile(r"([1-9]\d*)x([1-9]\d*)")
"""Pattern of a block size, `OUTPUTSxINPUTS`, such as `4x1`."""
_PACKED_BITS, _PACKED_GROUPS = (2, 3, 4, 6, 8), (32, 64, 128)  # bits and group sizes of the symmetric weight formats


def compression_contradictions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each contradiction of `compression_training`."""
    section = config.compression_training
    for name in (*PRUNING_METHODS, "weight_quantization", "activation_quantization"):
        technique = getattr(section, name)
        if not technique.shared_parameters.enabled:
            continue
        where = f"compression_training.{name}"
        yield from _shared_contradictions(section, name, where)
        if not technique.different_groups and getattr(technique.shared_parameters, "method", "") != "snip_momentum":
            yield f"{where}.different_groups", "empty; name the modules of at least one group"
        for key, group in technique.different_groups.items():
            yield from _group_contradictions(section, name, group, f"{where}.different_groups.{key}")


def _shared_contradictions(section: CompressionTraining, name: str, where: str) -> Iterator[tuple[str, str]]:
    shared: Any = getattr(section, name).shared_parameters
    where = f"{where}.shared_parameters"
    methods = PRUNING_METHODS.get(name)
    if methods is not None and shared.method not in methods:
        yield f"{where}.method", f"{format_value(shared.method)}; write {' or '.join(methods)}"
    if name == "head_pruning" and shared.num_heads is None:
        yield f"{where}.num_heads", "missing; write the model's number of heads"
    if isinstance(shared, SparsePruningShared) and shared.method == "snip_momentum":
        if BLOCK_PATTERN.fullmatch(shared.block_pattern) is None:
            yield (
                f"{where}.block_pattern",
                f"{format_value(shared.block_pattern)}; write outputs x inputs of a block, e.g. 4x1 or 1x1",
            )
        for pattern in shared.excluded_modules:
            yield from _pattern_contradictions(pattern, f"{where}.excluded_modules")
        if shared.schedule_offset_end < shared.schedule_offset:
            yield (
                f"{where}.schedule_offset_end",
                f"{shared.schedule_offset_end}, before schedule_offset {shared.schedule_offset}; write a later step",
            )
    mixed = getattr(shared, "fp16_mixed_quantize", None)
    if mixed is not None and mixed.enabled and not 0 <= mixed.quantize_change_ratio <= 1:
        yield (
            f"{where}.fp16_mixed_quantize.quantize_change_ratio",
            f"{mixed.quantize_change_ratio}; write the fraction that a step removes, from 0 to 1",
        )


def _group_contradictions(
    section: CompressionTraining, name: str, group: CompressionGroup, where: str
) -> Iterator[tuple[str, str]]:
    for pattern in group.modules:
        if pattern != "*":
            yield from _pattern_contradictions(pattern, f"{where}.modules")
    if name == "weight_quantization":
        yield from _bits_contradictions(group.params, f"{where}.params")
    if name in PRUNING_METHODS:
        shared: Any = getattr(section, name).shared_parameters
        ratio = group.params.dense_ratio
        if shared.method == "snip_momentum" and ratio is None:
            ratio = getattr(shared, "dense_ratio", None)
        if ratio is None or not 0 < ratio <= 1:
            yield (
                f"{where}.params.dense_ratio",
                f"{ratio}; write the share that stays, above 0 and at most 1",
            )


def _bits_contradictions(params: GroupParams, where: str) -> Iterator[tuple[str, str]]:
    if params.weight_format is not None:
        if params.target_bits is not None or params.start_bits is not None:
            yield where, "weight_format beside bits; delete target_bits and start_bits"
    elif params.target_bits is None:
        yield f"{where}.target_bits", "missing; write the bits of the weights"
    elif not params.target_bits <= (start := params.start_bits or params.target_bits) <= 16:
        yield (
            where,
            f"start_bits {start} and target_bits {params.target_bits}; write at most 16 bits, and "
            "start_bits no smaller than target_bits",
        )


def _pattern_contradictions(pattern: str, where: str) -> Iterator[tuple[str, str]]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield where, f"{format_value(pattern)} is not a regular expression: {error}; correct it"


def packing_contradictions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each contradiction of `weight_quantization`."""
    section = config.weight_quantization
    first = section.quantized_initialization
    if not section.enabled or (first.num_bits is None and not section.post_init_quant):
        return
    if first.num_bits is not None:
        yield from _format_contradictions(first, "weight_quantization.quantized_initialization")
    for key, options in section.post_init_quant.items():
        yield from _format_contradictions(options, f"weight_quantization.post_init_quant.{key}")


def _format_contradictions(options: ModuleQuantization, where: str) -> Iterator[tuple[str, str]]:
    bits, group = options.num_bits, options.group_size
    if bits is None:
        yield f"{where}.num_bits", "missing; write 4 or 8"
    elif options.symmetric and not (bits in _PACKED_BITS and group in _PACKED_GROUPS and options.group_dim == 1):
        yield (
            where,
            f"symmetric with num_bits {bits}, group_size {group} and group_dim {options.group_dim}: there is no such "
            "weight format; write symmetric false, or 2, 3, 4, 6 or 8 bits in groups of 32, 64 or 128 along 1",
        )
