"""Checkpoints of GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ), read as windlass's formats with the same values.

GPTQ stores a matrix transposed: `qweight` `[in * bits / 32, out]`, `qzeros` `[groups, out * bits / 32]`, `scales`
`[groups, out]` and `g_idx`, the group of each input feature. Version 1 stores zero points minus 1. AWQ stores `qweight`
`[in, out / 8]` and `qzeros` `[groups, out / 8]`, whose words have the outputs 0, 2, 4, 6, 1, 3, 5, 7 in that order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.compress.model_directory import ModelDirectory
from windlass.kernels.bit_packing import unpack_words
from windlass.kernels.coded_formats import SCALE_DTYPE, CodedWeightFormat, GroupCodes, fits_scale_dtype
from windlass.kernels.ordered_formats import OrderedWeightFormat, sorts
from windlass.kernels.weight_format import PackedWeight, get_weight_format, list_weight_formats

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output feature in each nibble of a packed word, lowest nibble first
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def find_packed_layers(directory: ModelDirectory) -> list[str]:
    """Return the names of the packed layers."""
    return sorted(name.removesuffix(".qweight") for name in directory.places if name.endswith(".qweight"))


def read_packed_layer(
    directory: ModelDirectory, layer: str, entry: Mapping[str, Any]
) -> tuple[str, PackedWeight, set[str]]:
    """Return the format of a layer, its packed tensors, and the names of its tensors in the files.

    A layer whose features are ordered by activation (`desc_act`), so that its groups are scattered, has a format of
    [Note: ordered features]. A layer whose groups have other sizes than `group_size`, or whose scales are outside of
    the range of float16, has no packed form: it is returned as float32, with the same values.

    Args:
        entry: `quantization_config`.

    Raises:
        ModelError: no format has the checkpoint's bits, group size or layout, or a tensor is missing or of another
            size.
    """
    names = {part: f"{layer}.{part}" for part in _PARTS if f"{layer}.{part}" in directory.places}
    missing = {"qweight", "qzeros", "scales"} - set(names)
    if missing:
        raise ModelError(
            f"layer {layer!r} of {directory.path} lacks {', '.join(sorted(missing))}; copy its files again"
        )
    entry = {**entry, **_layer_settings(entry, layer)}
    tensors = {part: directory.read(name) for part, name in names.items()}
    bits, size = entry.get("bits", entry.get("w_bit")), entry.get("group_size", entry.get("q_group_size"))
    if bits not in (2, 3, 4, 8):
        raise ModelError(f"quantization_config.bits is {bits!r}; windlass reads 2, 3, 4 and 8")
    scales = tensors["scales"].t().contiguous()
    if entry["quant_method"] == "awq":
        if bits != 4 or str(entry.get("version", "gemm")).lower() != "gemm":
            raise ModelError(f"AWQ of {bits} bits, version {entry.get('version')!r}, is not read; 4 bits, 'gemm' is")
        codes, zeros = _unpack_awq(tensors["qweight"]).t().contiguous(), _unpack_awq(tensors["qzeros"]).t().contiguous()
        order = None
    else:
        features = tensors["qweight"].shape[0] * 32 // bits
        codes = unpack_words(tensors["qweight"].t().contiguous(), bits, features)
        zeros = unpack_words(tensors["qzeros"], bits, len(scales)).t().contiguous()
        if entry.get("checkpoint_format", "gptq") != "gptq_v2":
            zeros = (zeros + 1) & (2**bits - 1)
        order = tensors.get("g_idx")
        if order is not None and len(order) != features:
            raise ModelError(
                f"layer {layer!r} of {directory.path} has {features} input features of {bits} bits, and g_idx has "
                f"{len(order)}; correct bits in quantization_config, or copy the files again"
            )
    groups, columns = scales.shape[1], codes.shape[1]
    group = None if size in (-1, None) or groups == 1 else int(size)
    straight = torch.arange(columns) // (group or columns)
    is_scattered = order is not None and not torch.equal(order.to(torch.int64), straight)
    is_sorted = order is not None and group is not None and sorts(order.to(torch.int64), group)
    if is_scattered and not is_sorted or not (fits_scale_dtype(scales) or (bits, group) == (8, None)):
        has_sizes = is_scattered and not is_sorted
        reason = "groups of several sizes (desc_act)" if has_sizes else f"scales outside of {SCALE_DTYPE}"
        logger.warning("layer %s has %s, and is held in float32", layer, reason)
        places = straight if order is None else order.to(torch.int64)
        wide = (codes.float() - zeros.float()[:, places]) * scales.float()[:, places]
        return "fp32", {"weight": wide}, set(names.values())
    symmetric = bool((zeros == 2 ** (bits - 1)).all())
    name = f"int{bits}" + (f"_g{group}" if group else "") + ("" if symmetric else "_zp")
    if name == "int8":
        packed = {"weight": (codes.to(torch.int16) - 128).to(torch.int8), "weight_scale": scales.float()}
        return name, packed, set(names.values())
    form = get_weight_format(name) if name in list_weight_formats() else None
    if not isinstance(form, CodedWeightFormat):
        raise ModelError(
            f"layer {layer!r} has {bits} bits in groups of {size}, {'symmetric' if symmetric else 'with zero points'}; "
            "windlass has groups of 32, 64 and 128 features, or rows"
        )
    coded = GroupCodes(codes, scales, None if symmetric else zeros)
    if is_scattered:
        assert order is not None
        ordered = OrderedWeightFormat(form)
        return ordered.name, ordered.pack_codes(coded, order.to(torch.int64)), set(names.values())
    return name, form.pack_codes(coded), set(names.values())


def _layer_settings(entry: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """Return the settings of a layer that differ from those of the model, from GPTQModel's entry `dynamic`,
    which maps regular expressions to settings. Expressions, with or without the prefix `+:`, match the beginning of a
    layer's name; those with the prefix `-:` are for layers that are not packed."""
    for pattern, settings in (entry.get("dynamic") or {}).items():
        try:
            matches = re.match(pattern.removeprefix("+:"), layer)
        except re.error as error:
            raise ModelError(
                f"quantization_config.dynamic has {pattern!r}, which is not a regular expression: {error}"
            ) from error
        if matches and not pattern.startswith("-:"):
            found: Mapping[str, Any] = settings
            return found
    return {}


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of `[rows, out / 8]` words as uint8 `[rows, out]`."""
    nibbles = unpack_words(words, 4, 8 * words.shape[1]).view(len(words), -1, 8)
    codes = torch.empty_like(nibbles)
    codes[..., list(_AWQ_ORDER)] = nibbles
    return codes.flatten(1)
