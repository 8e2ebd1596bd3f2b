"""Laws of lossy codecs on any tensors: the bound of each element's error, exact sizes, error feedback, and refusals."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.base.errors import CodecError
from windlass.comm.bit_packing import (
    pack_bits,
    pack_nibbles,
    pack_signs,
    unpack_bits,
    unpack_nibbles,
    unpack_signs,
)
from windlass.comm.codec import Codec, get_codec
from windlass.comm.error_feedback import add_decoded, begin_message, end_message
from windlass.kernels import message_codes

NAMES = ("sign", "fine_sign", "int8", "int4", "fp8", "topk", "lowrank")
NUMELS = st.one_of(st.integers(1, 9), st.sampled_from([127, 128, 129, 255, 257, 2047, 2048, 2049, 4099]))
SEEDS = st.integers(0, 2**20)


def drawn(numel: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Return values of very different magnitudes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * (spread * torch.randn(numel, generator=generator)).exp()
    return torch.where(torch.rand(numel, generator=generator) < 0.1, torch.zeros(()), values)


def through(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    encoded = torch.empty(codec.encoded_size(tensor.numel(), tensor.dtype), dtype=torch.uint8)
    codec.encode(tensor, encoded)
    out = torch.full(tensor.shape, math.nan, dtype=torch.float32)
    codec.decode(encoded, out, tensor.dtype)
    return out


def by_block(tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
    return list(tensor.split(block))


@settings(max_examples=40, deadline=None)
@given(NUMELS, SEEDS)
def test_each_element_is_within_the_stated_bound(numel: int, seed: int) -> None:
    values = drawn(numel, seed)
    for name, block, highest in (("int8", 256, 127), ("int4", 128, 7)):
        decoded = through(get_codec(name), values)
        for part, got in zip(by_block(values, block), by_block(decoded, block), strict=True):
            scale = float(part.abs().max()) / highest
            assert float((part - got).abs().max()) <= scale * 0.50001, name
    decoded = through(get_codec("fp8"), values)
    for part, got in zip(by_block(values, 256), by_block(decoded, 256), strict=True):
        allowed = part.abs() / 16 + 2.0**-10 * part.abs().max() / 448
        assert bool(((part - got).abs() <= allowed * 1.0001).all())
    decoded = through(get_codec("sign"), values)
    for part, got in zip(by_block(values, 2048), by_block(decoded, 2048), strict=True):
        torch.testing.assert_close(got, torch.where(part >= 0, 1.0, -1.0) * part.abs().mean())
    decoded = through(get_codec("topk"), values)
    kept = decoded != 0
    assert int(kept.sum()) <= -(-numel // 100) and torch.equal(decoded[kept], values[kept])
    assert float(values.abs().max()) == float(decoded.abs().max())


@settings(max_examples=30, deadline=None)
@given(NUMELS, SEEDS, st.sampled_from(NAMES))
def test_messages_with_error_feedback_sum_to_the_truth(numel: int, seed: int, name: str) -> None:
    codec, error = get_codec(name), torch.zeros(numel)
    sent, truth = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(6):
        tensor = drawn(numel, seed + step, spread=1.0)
        truth += tensor
        corrected = tensor + error
        message = through(codec, corrected)
        error = corrected - message
        sent += message
    limit = 1e-5 * float(truth.abs().max() + error.abs().max() + 1e-30)
    assert float((sent + error - truth).abs().max()) <= limit
    # A message's error is no larger than the tensor that it encodes: the new values plus the error of the last message.
    assert float(error.norm()) <= float(corrected.norm()) * 1.00001


def test_a_product_of_low_rank_is_exact_and_all_others_are_projected() -> None:
    draw = torch.Generator().manual_seed(3)
    codec, matrix = get_codec("lowrank"), torch.randn(60, 4, generator=draw) @ torch.randn(4, 60, generator=draw)
    torch.testing.assert_close(through(codec, matrix.view(-1)), matrix.view(-1), rtol=1e-4, atol=1e-4)
    values = drawn(3000, 5, spread=0.5)
    decoded = through(codec, values)
    best = torch.linalg.svdvals(torch.nn.functional.pad(values, (0, 55 * 55 - 3000)).view(55, 55))
    least = float(best[4:].square().sum().sqrt())
    assert least * 0.999 <= float((values - decoded).norm()) <= 1.3 * least
    assert abs(float(decoded @ (values - decoded))) <= 1e-3 * float(values.square().sum())


def test_sizes_are_exact() -> None:
    sizes = {name: [get_codec(name).encoded_size(n, torch.float32) for n in (0, 1, 8, 257, 1 << 20)] for name in NAMES}
    assert sizes["sign"] == [0, 5, 5, 37, (1 << 17) + 4 * 512]
    assert sizes["fine_sign"] == [0, 5, 5, 41, (1 << 17) + 4 * 4096]
    assert sizes["int8"] == sizes["fp8"] == [0, 5, 12, 265, (1 << 20) + 4 * 4096]
    assert sizes["int4"] == [0, 5, 8, 141, (1 << 19) + 4 * 8192]
    assert sizes["topk"] == [0, 8, 8, 24, 8 * 10486]
    assert sizes["lowrank"] == [0, 4, 32, 4 * 4 * (17 + 16), 4 * 4 * 2048]


def test_topk_refuses_more_than_2_to_31_elements() -> None:
    codec = get_codec("topk")
    assert codec.encoded_size(1 << 31, torch.float32) == 8 * -(-(1 << 31) // 100)
    with pytest.raises(CodecError, match="'topk' numbers elements by 32 bits, and a tensor has 2,147,483,649"):
        codec.encoded_size((1 << 31) + 1, torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_and_not_sent(name: str, bad: float) -> None:
    values, codec = drawn(3000, 1), get_codec(name)
    values[2500] = bad
    encoded = torch.full((codec.encoded_size(3000, torch.float32),), 77, dtype=torch.uint8)
    with pytest.raises(CodecError, match=rf"element 2500 of 3000 is {bad}.*codec '{name}'"):
        codec.encode(values, encoded)
    assert bool((encoded == 77).all())


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_the_least_numbers_stay_finite(name: str) -> None:
    codec = get_codec(name)
    assert bool((through(codec, torch.zeros(300)) == 0).all())
    tiny = torch.full((300,), 1e-44)
    assert float(through(codec, tiny).abs().max()) <= 1e-37


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_packing_and_unpacking_are_inverse(flags: list[bool]) -> None:
    bits = torch.tensor(flags)
    packed = pack_bits(bits)
    assert packed.numel() == -(-len(flags) // 8) and torch.equal(unpack_bits(packed, len(flags)).bool(), bits)
    values = torch.where(bits, 0.0, -1e-3)
    signs = torch.empty(len(flags))
    unpack_signs(pack_signs(values), signs)
    assert torch.equal(pack_signs(values), packed) and torch.equal(signs, torch.where(bits, 1.0, -1.0))
    codes = bits.to(torch.uint8) * 11 + 3
    nibbles = pack_nibbles(codes)
    assert nibbles.numel() == -(-len(flags) // 2) and torch.equal(unpack_nibbles(nibbles, len(flags)), codes)


@pytest.mark.parametrize("name", NAMES[:-2])
def test_a_long_tensor_is_coded_as_its_blocks_are(name: str) -> None:
    codec, part, numel = get_codec(name), 1 << 17, 2**18 + 2053  # the tensor has three chunks on a CPU
    values = drawn(numel, 7)
    whole = through(codec, values)
    assert torch.equal(whole, torch.cat([through(codec, piece) for piece in values.split(part)]))
    narrow = torch.empty(numel, dtype=torch.bfloat16)
    encoded = torch.empty(codec.encoded_size(numel, values.dtype), dtype=torch.uint8)
    before = values.clone()
    codec.encode(values, encoded)
    codec.decode(encoded, narrow, values.dtype)
    assert torch.equal(narrow, whole.to(torch.bfloat16)) and torch.equal(values, before)


NATIVE = pytest.mark.skipif(not message_codes.can_encode("sign", torch.zeros(1)), reason="no native module was built")


@NATIVE
@settings(max_examples=60, deadline=None)
@given(
    st.one_of(NUMELS, st.sampled_from([2**16 - 1, 2**16 + 9])),
    SEEDS,
    st.sampled_from(("sign", "fine_sign", "int8", "int4")),
    st.sampled_from([1.0, 1e-40, 1e30]),
)
def test_native_messages_are_those_of_the_reference_bit_for_bit(numel: int, seed: int, name: str, size: float) -> None:
    codec, values, error = get_codec(name), drawn(numel, seed, 1.0) * size, drawn(numel, seed + 1, 1.0) * size
    found = []
    for path in ("", "reference"):
        with patch.dict("os.environ", {"WINDLASS_KERNELS": path}):
            assert message_codes.can_encode(name, values) == (not path)
            tensor, owed, sums = values.clone(), error.clone(), values.clone()
            encoded = torch.full((codec.encoded_size(numel, torch.float32),), 255, dtype=torch.uint8)
            begin_message(codec, tensor, owed, encoded)
            kept = tensor.clone()
            end_message(codec, tensor, owed, encoded, decodes=True)
            add_decoded(codec, encoded, sums)
            plain = torch.full_like(encoded, 255)
            codec.encode(values, plain)
            out = torch.full_like(values, math.nan)
            codec.decode(plain, out, torch.float32)
            found.append([kept, tensor, owed, encoded, sums, plain, out])
    for native, reference in zip(*found, strict=True):
        assert torch.equal(native.view(torch.uint8), reference.view(torch.uint8))


@NATIVE
@pytest.mark.parametrize("name", ["sign", "fine_sign", "int8", "int4"])
def test_native_errors_stay_where_a_value_is_not_finite(name: str) -> None:
    codec, values, error = get_codec(name), drawn(3000, 1), torch.ones(3000)
    values[2500] = math.inf
    encoded = torch.empty(codec.encoded_size(3000, torch.float32), dtype=torch.uint8)
    with pytest.raises(CodecError, match="element 2500 of 3000 is inf"):
        begin_message(codec, values, error, encoded)
    assert bool((error == 1).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e20, 1e24, 1e34])
def test_tiny_and_huge_values_are_decoded_as_those_of_usual_size(name: str, size: float) -> None:
    codec = get_codec(name)
    values = torch.randn(600, generator=torch.Generator().manual_seed(1))
    decoded = []
    for tensor in (values, values * size):
        encoded = torch.empty(codec.encoded_size(600, torch.float32), dtype=torch.uint8)
        codec.encode(tensor, encoded)
        out = torch.empty(600)
        codec.decode(encoded, out, torch.float32)
        decoded.append(out.double())
    error = (decoded[1] - (values * size).double()).norm() / (values * size).double().norm()
    usual = (decoded[0] - values.double()).norm() / values.double().norm()
    assert error <= 1.01 * usual or size < 1e-38 and error <= 1.0
