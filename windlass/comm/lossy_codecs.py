"""Lossy codecs: 1-bit, 4-bit, 8-bit and fp8 codes in blocks with a scale, and the largest elements only.

A block is a run of elements of the flat tensor; the last block may be shorter. Each block has one float32 scale, and
the scales precede the codes. Rounding is deterministic, so a single message is biased: error feedback of the caller
makes the sum of all messages equal the sum of all tensors, up to the last error. `encode` raises if a value is not
finite, before anything is written. The code of this file is the reference; for float32 tensors on the CPU, native code
does the same (`windlass.kernels.message_codes`), except for `fp8` and `topk`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from windlass.base.errors import CodecError
from windlass.comm.bit_packing import pack_nibbles, pack_signs, unpack_nibbles, unpack_signs
from windlass.kernels import message_codes

SOURCES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1 << 17  # elements that a CPU encodes or decodes at once, few enough for its cache; a multiple of every block
_LEAST = torch.finfo(torch.float32).tiny  # lower bound of a scale, so that its reciprocal is finite
_MOST_PLACES = 1 << 31  # number of element indices that int32 can represent


def require_finite(name: str, values: torch.Tensor, sums: torch.Tensor) -> None:
    """Raise CodecError if one of `sums`, a number for each block of `values`, is NaN or infinite.

    Either a value is not finite, or a block sums to more than float32 holds.
    """
    if bool(torch.isfinite(sums).all()):
        return
    bad = (~torch.isfinite(values)).nonzero()
    if bad.numel():
        place = int(bad[0])
        raise CodecError(
            f"element {place} of {values.numel()} is {float(values[place])}, and codec {name!r} would spread it over "
            "its block and its error feedback; skip the step, or find the operation that made it"
        )
    raise CodecError(
        f"a block of the tensor sums to more than float32 holds, so codec {name!r} has no scale for it; scale the "
        "tensor down"
    )


def _blocks(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of `[n]` values: the full blocks `[blocks, block]`, and the last, shorter block
    `[1, remainder]`, or `[0, 1]` if there is none.
    """
    whole = values.numel() // block * block
    rest = values[whole:]
    return values[:whole].view(-1, block), rest.view(1, -1) if rest.numel() else rest.view(0, 1)


def _by_block(values: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Multiply `[n]` values in place, each by the scale of its block."""
    whole, rest = _blocks(values, block)
    whole.mul_(scales[: whole.shape[0], None])
    rest.mul_(scales[whole.shape[0] :, None])


def _divided(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Return `[n]` values divided by the scale of their block, as a new tensor."""
    result = values.clone()
    _by_block(result, scales.reciprocal(), block)
    return result


def _quotients(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return `values / divisor`, correctly rounded on every processor."""
    # On CUDA torch divides by a number by multiplying by its reciprocal, which rounds twice, but divides by a tensor.
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


class ScaledCodec:
    """Base class of codecs whose message has one float32 scale for each block, followed by the codes."""

    name = ""
    exact = False
    block = 1

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in SOURCES

    def code_bytes(self, numel: int) -> int:
        """Return the size of `numel` codes in bytes."""
        raise NotImplementedError

    def scales_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the scales `[blocks]` of the rows of `whole`, `[blocks, elements]` float32."""
        raise NotImplementedError

    def write_codes(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the codes of `values`, `[n]` float32, to `codes`, and leave `values` unchanged."""
        raise NotImplementedError

    def read_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Write the float32 values of the codes to `out`, not yet multiplied by their scales."""
        raise NotImplementedError

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * -(-numel // self.block) + self.code_bytes(numel)

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        self._encode(tensor, encoded, checked=True)

    def encode_unchecked(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        """Encode as `encode` does, but do not raise for a value that is not finite: its block is then decoded as values
        that are not finite.
        """
        self._encode(tensor, encoded, checked=False)

    def is_native(self, tensor: torch.Tensor) -> bool:
        """Return True if native code encodes `tensor`."""
        return message_codes.can_encode(self.name, tensor)

    def begin(self, tensor: torch.Tensor, error: torch.Tensor, encoded: torch.Tensor) -> None:
        """See `error_feedback.begin_message`. Requires `is_native(tensor)`."""
        scales, _ = self._divided_message(encoded, tensor.numel())
        if not message_codes.write_scales(self.name, tensor, scales, error):
            require_finite(self.name, tensor, scales)

    def end(self, tensor: torch.Tensor, error: torch.Tensor, encoded: torch.Tensor, *, decodes: bool) -> None:
        """See `error_feedback.end_message`. Requires `is_native(tensor)`."""
        scales, codes = self._divided_message(encoded, tensor.numel())
        message_codes.write_codes(self.name, tensor, scales, codes, error, tensor if decodes else None)

    def add_decoded(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """See `error_feedback.add_decoded`. Requires `is_native(out)`."""
        message_codes.decode(self.name, *self._divided_message(encoded, out.numel()), out, adds=True)

    def _divided_message(self, encoded: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and the codes of a message, as views."""
        head = 4 * -(-numel // self.block)
        return encoded[:head].view(torch.float32), encoded[head:]

    def _encode(self, tensor: torch.Tensor, encoded: torch.Tensor, *, checked: bool) -> None:
        head = 4 * -(-tensor.numel() // self.block)
        scales = torch.empty(head // 4, dtype=torch.float32, device=tensor.device)
        if self.is_native(tensor):
            if not message_codes.write_scales(self.name, tensor, scales) and checked:
                require_finite(self.name, tensor, scales)
            encoded[:head].view(torch.float32).copy_(scales)
            message_codes.write_codes(self.name, tensor, scales, encoded[head:])
            return
        parts = list(self._chunks(tensor, scales, encoded[head:]))
        for values, scale, _ in parts:
            whole, rest = _blocks(values.float(), self.block)
            scale[: whole.shape[0]] = self.scales_of(whole)
            if rest.numel():
                scale[whole.shape[0] :] = self.scales_of(rest)
        if checked:
            require_finite(self.name, tensor, scales)
        encoded[:head].view(torch.float32).copy_(scales)
        for values, scale, codes in parts:
            self.write_codes(values.float(), scale, codes)

    def _chunks(
        self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the values, scales and codes of each chunk, as views. On a GPU there is one chunk."""
        size = _CHUNK if values.device.type == "cpu" else max(1, values.numel())
        for start in range(0, values.numel(), size):
            stop = min(values.numel(), start + size)
            place = slice(self.code_bytes(start), self.code_bytes(stop))
            yield values[start:stop], scales[start // self.block : -(-stop // self.block)], codes[place]

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        if self.is_native(out):
            message_codes.decode(self.name, *self._divided_message(encoded, out.numel()), out)
            return
        for part, scales, codes in self._chunks(out, *self._divided_message(encoded, out.numel())):
            direct = part.dtype == torch.float32 and part.is_contiguous()
            values = part if direct else torch.empty(part.numel(), dtype=torch.float32, device=part.device)
            self.read_codes(codes, values)
            _by_block(values, scales, self.block)
            if values is not part:
                part.copy_(values)


_COLUMNS = 256  # number of partial sums of a block of `SignCodec`, each over every 256th element


class SignCodec(ScaledCodec):
    """Codec of one sign bit for each element, and the mean absolute value of each block of 2048 as its scale.

    This scale minimizes the squared error. The error of a message is then smaller than the tensor in norm, as error
    feedback requires (Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv:1901.09847, lemma 8). 0 counts as
    positive. Size of n elements: n / 8 bytes, and 4 bytes for each block.

    The order of summation is part of the codec, so that every processor computes the same bits: 256 columns are summed
    row by row, then the second half of the columns is added to the first half, until one column is left.
    """

    name = "sign"
    needs_error_feedback = True
    block = 2048

    def code_bytes(self, numel: int) -> int:
        return -(-numel // 8)

    def scales_of(self, whole: torch.Tensor) -> torch.Tensor:
        sizes = torch.nn.functional.pad(whole.abs(), (0, -whole.shape[1] % _COLUMNS))
        rows = sizes.view(whole.shape[0], sizes.shape[1] // _COLUMNS, _COLUMNS).unbind(1)
        sums = rows[0].clone()
        for row in rows[1:]:
            sums += row
        width = _COLUMNS // 2
        while width:
            sums = sums[:, :width] + sums[:, width : 2 * width]
            width //= 2
        return _quotients(sums[:, 0], whole.shape[1])

    def write_codes(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(pack_signs(values))

    def read_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        unpack_signs(codes, out)


class FineSignCodec(SignCodec):
    """`SignCodec` with blocks of 256. Size of n elements: n / 8 bytes for the signs and n / 64 for the scales."""

    name = "fine_sign"
    block = 256


class _IntegerCodec(ScaledCodec):
    """Codec of integers in [-highest, highest], where a scale is the largest absolute value of its block / `highest`.

    Rounds to nearest, ties to even: the error of an element is at most half the scale of its block.
    """

    highest = 1

    def scales_of(self, whole: torch.Tensor) -> torch.Tensor:
        return _quotients(whole.abs().amax(1), self.highest).clamp_(min=_LEAST)

    def rounded(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _divided(values, scales, self.block).round_().clamp_(-self.highest, self.highest)


class Int8Codec(_IntegerCodec):
    """Codec of 8-bit integers in blocks of 256. Size of n elements: n bytes, and 4 bytes for each block."""

    name = "int8"
    block = 256
    highest = 127

    def code_bytes(self, numel: int) -> int:
        return numel

    def write_codes(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        codes.view(torch.int8).copy_(self.rounded(values, scales))

    def read_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes.view(torch.int8))


class Int4Codec(_IntegerCodec):
    """Codec of 4-bit integers in blocks of 128. Size of n elements: n / 2 bytes, and 4 bytes for each block."""

    name = "int4"
    block = 128
    highest = 7

    def code_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    def write_codes(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(pack_nibbles(self.rounded(values, scales).add_(8).to(torch.uint8)))

    def read_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(unpack_nibbles(codes, out.numel())).sub_(8)


class Fp8Codec(_IntegerCodec):
    """Codec of float8_e4m3fn values in blocks of 256, scaled to a largest magnitude of 448.

    Size of n elements: n bytes, and 4 bytes for each block. The error is at most 1/16 of an element, or 2**-10 of the
    scale for elements below the smallest normal number.
    """

    name = "fp8"
    block = 256
    highest = 448

    def code_bytes(self, numel: int) -> int:
        return numel

    def write_codes(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        scaled = _divided(values, scales, self.block)
        codes.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-self.highest, self.highest))

    def read_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes.view(torch.float8_e4m3fn))


class TopKCodec:
    """Codec of the elements of largest absolute value, exact in float32, with their indices; all others become 0.

    Size of n elements: 8 bytes for each of the `ceil(n / divisor)` elements that are sent. `encoded_size` raises
    CodecError for more than
    2**31 elements.
    """

    exact = False
    needs_error_feedback = True

    def __init__(self, name: str = "topk", divisor: int = 100) -> None:
        self.name, self._divisor = name, divisor

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in SOURCES

    def kept(self, numel: int) -> int:
        """Return the number of elements that are sent for a tensor of `numel` elements."""
        return -(-numel // self._divisor)

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        if numel > _MOST_PLACES:
            raise CodecError(
                f"codec {self.name!r} numbers elements by 32 bits, and a tensor has {numel:,}; use another codec"
            )
        return 8 * self.kept(numel)

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        values, count = tensor.float(), self.kept(tensor.numel())
        chosen = values.abs().topk(count, sorted=False)
        require_finite(self.name, values, chosen.values)  # topk ranks NaN and infinity above all numbers
        places = chosen.indices.sort().values
        encoded[: 4 * count].view(torch.int32).copy_(places)
        encoded[4 * count :].view(torch.float32).copy_(values[places])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        count = self.kept(out.numel())
        places = encoded[: 4 * count].view(torch.int32).long()
        out.zero_()
        out[places] = encoded[4 * count :].view(torch.float32).to(out.dtype)
