"""Conversion between blocks of GGUF's types Q8_0, Q4_0, TQ2_0 and Q1_0 and weight formats with the same values.

Layouts of a block in ggml: Q8_0 has 32 weights (a float16 scale, 32 int8), Q4_0 32 (a scale, 16 bytes: weight i in the
low half of byte i, weight i + 16 in the high half), TQ2_0 256 (64 bytes, a scale: byte 32 * h + i has the weights
128 * h + 32 * p + i at bit 2 * p, each plus 1), Q1_0 128 (a scale, 16 bytes: weight i at bit i).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.base.errors import ModelError
from windlass.kernels.coded_formats import (
    BinaryWeightFormat,
    CodedWeightFormat,
    GroupCodes,
    IntegerWeightFormat,
    TritWeightFormat,
)
from windlass.kernels.weight_format import PackedWeight, WeightFormat, get_weight_format


@dataclass(frozen=True)
class BlockType:
    """Type of quantized tensors in GGUF files.

    Attributes:
        weights: number of weights of a block.
        nbytes: number of bytes of a block.
        format: weight format that has the same values.
    """

    name: str
    weights: int
    nbytes: int
    format: str


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q8_0", 32, 34, "int8_g32"),
        BlockType("Q4_0", 32, 18, "int4_g32"),
        BlockType("TQ2_0", 256, 66, "ternary_g128"),
        BlockType("Q1_0", 128, 18, "binary_g128"),
    )
}


def find_block_type(weight_format: WeightFormat, in_features: int) -> BlockType:
    """Return the GGUF type with the same values as a format.

    Raises:
        ModelError: no type has these values, or rows of `in_features` do not divide into its blocks.
    """
    name = None
    if isinstance(weight_format, IntegerWeightFormat) and not weight_format.has_zeros:
        name = {8: "Q8_0", 4: "Q4_0"}.get(weight_format.bits)
    elif isinstance(weight_format, TritWeightFormat):
        name = "TQ2_0"
    elif isinstance(weight_format, BinaryWeightFormat) and weight_format.group in (None, 128):
        name = "Q1_0"
    if name is None:
        raise ModelError(
            f"no GGUF type has the numbers of format {weight_format.name!r}; pack the weights as int8_g32, int4_g128 "
            "(or 64, 32), ternary, or binary_g128"
        )
    kind = BLOCK_TYPES[name]
    if in_features % kind.weights:
        raise ModelError(
            f"{in_features} input features do not divide into blocks of {kind.weights} of GGUF's {name}; pack the "
            "weights in another format"
        )
    return kind


def encode_blocks(weight_format: WeightFormat, packed: PackedWeight, kind: BlockType) -> torch.Tensor:
    """Return the blocks of a matrix, uint8 `[out_features, bytes of a row]`."""
    assert isinstance(weight_format, CodedWeightFormat)
    coded = weight_format.unpack_codes(packed)
    rows, columns = coded.codes.shape
    blocks = columns // kind.weights
    codes = coded.codes.view(rows, blocks, kind.weights)
    per_block = (weight_format.group or columns) // kind.weights
    scale = coded.scale.repeat_interleave(per_block, 1)[:, :blocks] if per_block > 1 else coded.scale
    if kind.name == "Q1_0":
        scale = scale / 2
    head = scale.reshape(-1).contiguous().view(torch.uint8).view(rows, blocks, 2)
    if kind.name == "Q8_0":
        body = (codes.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
    elif kind.name == "Q4_0":
        body = codes[..., :16] | codes[..., 16:] << 4
    elif kind.name == "TQ2_0":
        parts = codes.view(rows, blocks, 2, 4, 32)
        body = (parts[..., 0, :] | parts[..., 1, :] << 2 | parts[..., 2, :] << 4 | parts[..., 3, :] << 6).flatten(2)
    else:
        shifts = torch.arange(8, dtype=torch.uint8)
        body = (codes.view(rows, blocks, 16, 8) << shifts).sum(3, dtype=torch.uint8)
    order = [body, head] if kind.name == "TQ2_0" else [head, body]
    return torch.cat(order, 2).flatten(1)


def decode_blocks(data: torch.Tensor, kind: BlockType) -> PackedWeight:
    """Return the tensors of `kind.format` for the blocks of a matrix, uint8 `[out_features, bytes of a row]`.

    Raises:
        ModelError: rows are not multiples of a block, or a code is not a value of the type.
    """
    if data.dim() != 2 or data.shape[1] % kind.nbytes:
        raise ModelError(f"{tuple(data.shape)} bytes are not rows of blocks of {kind.nbytes} of GGUF's {kind.name}")
    rows, form = len(data), get_weight_format(kind.format)
    assert isinstance(form, CodedWeightFormat) and form.group is not None
    blocks = data.view(rows, -1, kind.nbytes)
    if kind.name == "TQ2_0":
        body, head = blocks[..., :-2], blocks[..., -2:]
    else:
        head, body = blocks[..., :2], blocks[..., 2:]
    scale = head.reshape(-1).contiguous().view(torch.float16).view(rows, -1)
    if kind.name == "Q8_0":
        codes = (body.contiguous().view(torch.int8).to(torch.int16) + 128).to(torch.uint8)
    elif kind.name == "Q4_0":
        codes = torch.cat([body & 15, body >> 4], 2)
    elif kind.name == "TQ2_0":
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
        codes = (body.reshape(rows, -1, 2, 1, 32) >> shifts) & 3
        if bool((codes > 2).any()):
            raise ModelError("a code of GGUF's TQ2_0 is 3, which is not a ternary value; the file is damaged")
        codes = codes + 1
    else:
        codes = (body.unsqueeze(3) >> torch.arange(8, dtype=torch.uint8)) & 1
        scale = scale * 2
    codes = codes.reshape(rows, -1)
    return form.pack_codes(GroupCodes(codes, scale.repeat_interleave(kind.weights // form.group, 1)))
