"""Product of an input and a packed matrix as a Triton kernel, for few rows and for many.

A program multiplies a tile of rows by the codes of a tile of outputs, block by block of the input features. In
device memory the codes are packed as in the checkpoint; a tile of codes is converted to numbers in registers.

[Note: exact tiles] A tile holds `code - zero`, which 16-bit floats represent exactly for codes of at most 8 bits. A
block of features is part of one group, whose scale multiplies the tile's sum in float32. So the weight is never rounded
to the dtype of the input; only the result is rounded.

[Note: parts of the features] A product of few rows and outputs would use few processors. Its input features are divided
into parts that programs sum side by side in float32; the parts are added afterwards, in a fixed order. The number of
parts follows from shapes alone, so a CUDA graph can capture the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from windlass.kernels.device_matmul import CodedMatrix

_PROGRAMS = 512  # enough programs to occupy a device
_MOST_PARTS = 16
_LEAST_BLOCKS = 4  # minimum number of blocks of features in a part
_CODINGS = {"words": 0, "int8": 1, "fp8": 2, "trits": 3}


@triton.jit
def _bits_at(words, place, stride, mask, BITS: tl.constexpr):
    """Return the codes at positions `place` of rows of words; a code may begin in one word and end in the next."""
    bit = place * BITS
    shift = bit % 32
    first = words + (bit // 32) * stride
    code = tl.load(first, mask=mask, other=0).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    if 32 % BITS != 0:
        after = tl.load(first + stride, mask=mask & (shift + BITS > 32), other=0).to(tl.uint32, bitcast=True)
        code = code | ((after << 1) << (31 - shift).to(tl.uint32))  # a shift by up to 32, in two steps
    return (code & (2**BITS - 1)).to(tl.int32)


@triton.jit
def _float8(code):
    """Return the float32 values of float8 e4m3fn numbers with the bits `code`."""
    # a float16 has more bits of fraction, and an exponent bias that is larger by 8: hence the factor 256
    bits = ((code & 128) << 8) | ((code & 127) << 7)
    value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit(do_not_specialize=["rows", "blocks_of_part"])
def _multiply_tile(
    input,
    codes,
    scales,
    zeros,
    bias,
    out,
    rows,
    outputs,
    features,
    input_stride,
    code_stride,
    groups,
    blocks_of_part,
    CODING: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # programs that use the same codes are neighbours, so that memory is read once
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    has_row = row < rows
    has_output = output < outputs
    line = output.to(tl.int64)
    sums = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    block = tl.arange(0, BLOCK_K)
    begin = part * blocks_of_part
    end = tl.minimum(begin + blocks_of_part, (features + BLOCK_K - 1) // BLOCK_K)
    for number in range(begin, end):
        start = number * BLOCK_K
        feature = start + block
        has_feature = feature < features
        x = tl.load(
            input + row.to(tl.int64)[:, None] * input_stride + feature[None, :],
            mask=has_row[:, None] & has_feature[None, :],
            other=0.0,
        )
        valid = has_output[:, None] & has_feature[None, :]
        if CODING == 0 and 32 % BITS == 0:
            # each word is loaded once, and becomes the codes of 32 / BITS features
            word = start * BITS // 32 + tl.arange(0, BLOCK_K * BITS // 32)
            words = tl.load(
                codes + line[:, None] * code_stride + word[None, :],
                mask=has_output[:, None] & (word < code_stride)[None, :],
                other=0,
            )
            shifts = tl.arange(0, 32 // BITS) * BITS
            tile = tl.reshape((words[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1), (BLOCK_N, BLOCK_K))
        elif CODING == 0:
            tile = _bits_at(codes + line[:, None] * code_stride, feature[None, :], 1, valid, BITS)
        elif CODING == 3:
            byte = tl.load(codes + line[:, None] * code_stride + (feature // 5)[None, :], mask=valid, other=0)
            byte = byte.to(tl.int32)
            digit = (feature % 5)[None, :]
            tile = tl.where(digit == 1, byte // 3, byte)
            tile = tl.where(digit == 2, byte // 9, tile)
            tile = tl.where(digit == 3, byte // 27, tile)
            tile = tl.where(digit == 4, byte // 81, tile) % 3
        else:
            tile = tl.load(codes + line[:, None] * code_stride + feature[None, :], mask=valid, other=0).to(tl.int32)
        values = _float8(tile) if CODING == 2 else tile.to(tl.float32)
        group = 0
        if GROUP > 0:
            group = start // GROUP
        if HAS_ZEROS:
            zero = _bits_at(zeros + group, output, groups, has_output, BITS)
            values = values - zero.to(tl.float32)[:, None]
        else:
            values = values - ZERO
        product = tl.dot(x, tl.trans(values.to(x.dtype)), input_precision="ieee")
        if GROUP > 0:
            scale = tl.load(scales + line * groups + group, mask=has_output, other=0.0).to(tl.float32)
            sums += product * scale[None, :]
        else:
            sums += product
    if GROUP == 0:
        sums = sums * tl.load(scales + line, mask=has_output, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS and PARTS == 1:
        sums += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    place = (part * rows + row).to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


@dataclass(frozen=True)
class _Tiles:
    """Sizes of a launch.

    Attributes:
        rows, outputs, features: sizes of a tile.
        parts: number of parts of the features; see [Note: parts of the features].
        blocks: number of blocks of features in a part.
    """

    rows: int
    outputs: int
    features: int
    parts: int
    blocks: int


def multiply(input: torch.Tensor, matrix: CodedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `input @ weight.T + bias` in the dtype of `input`, without gradients, and without waiting for the device.

    Args:
        input: `[rows, in_features]` in float32, bfloat16 or float16; neither size is 0.
        matrix: packed matrix on the device of `input`.
    """
    input = input if input.stride(-1) == 1 else input.contiguous()
    rows, features = input.shape
    outputs = len(matrix.codes)
    tiles = _choose_tiles(rows, outputs, features, matrix.group, input.dtype)
    dtype = input.dtype if tiles.parts == 1 else torch.float32
    out = torch.empty((tiles.parts, rows, outputs), dtype=dtype, device=input.device)
    codes = matrix.codes if matrix.coding != "fp8" else matrix.codes.view(torch.uint8)
    grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(outputs, tiles.outputs), tiles.parts)
    _multiply_tile[grid](
        input,
        codes,
        matrix.scale,
        matrix.scale if matrix.zeros is None else matrix.zeros,  # a placeholder: absent tensors are not read
        matrix.scale if bias is None else bias.contiguous(),
        out,
        rows,
        outputs,
        features,
        input.stride(0),
        codes.shape[1],
        matrix.scale.shape[1],
        tiles.blocks,
        CODING=_CODINGS[matrix.coding],
        BITS=matrix.bits,
        GROUP=matrix.group or 0,
        ZERO=matrix.zero,
        HAS_ZEROS=matrix.zeros is not None,
        HAS_BIAS=bias is not None,
        PARTS=tiles.parts,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.features,
        num_warps=8 if tiles.rows * tiles.outputs > 64 * 64 else 4,
        # codes of 3 bits are loaded once for each feature, and three stages of them exceed 99 KB of shared memory
        num_stages=2 if tiles.rows > 64 and matrix.coding == "words" and 32 % matrix.bits else 3,
    )
    if tiles.parts == 1:
        return out[0]
    total = out.sum(0)
    return (total if bias is None else total + bias).to(input.dtype)


def _choose_tiles(rows: int, outputs: int, features: int, group: int | None, dtype: torch.dtype) -> _Tiles:
    """Choose tiles for few rows (limited by memory bandwidth) or for many rows."""
    many = rows > 64 and dtype != torch.float32
    high = 128 if many else max(16, min(64, triton.next_power_of_2(rows)))
    wide = 128 if many else 64
    deep = min(group or 128, 64 if high > 32 else 128)
    if dtype == torch.float32:
        deep = 32  # smaller, since products of float32 hold their operands in registers
    blocks = triton.cdiv(features, deep)
    programs = triton.cdiv(rows, high) * triton.cdiv(outputs, wide)
    parts = 1 if rows > 64 else max(1, min(_PROGRAMS // programs, blocks // _LEAST_BLOCKS, _MOST_PARTS))
    of_part = triton.cdiv(blocks, parts)
    return _Tiles(high, wide, deep, triton.cdiv(blocks, of_part), of_part)
