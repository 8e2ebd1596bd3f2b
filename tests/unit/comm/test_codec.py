"""Tests of codecs and their registry: sizes and the flag `exact` are true, and values equal explicit torch code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.toy_codecs import BlockInt8Codec, SignCodec
from windlass.base.errors import CodecError, WindlassError
from windlass.comm import codec as codecs
from windlass.comm.codec import Codec, accumulation_dtype, get_codec, list_codecs, register_codec

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ALL: list[Codec] = [
    *map(get_codec, ("identity", "bf16", "sign", "fine_sign", "int8", "int4", "fp8", "topk")),
    BlockInt8Codec(),
]


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(codecs._codecs)
    yield
    codecs._codecs.clear()
    codecs._codecs.update(before)


def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


def through(codec: Codec, tensor: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Encode and decode in a buffer followed by guard bytes, which must not change."""
    size = codec.encoded_size(tensor.numel(), tensor.dtype)
    memory = torch.full((size + 8,), 77, dtype=torch.uint8)
    codec.encode(tensor, memory[:size])
    assert bool((memory[size:] == 77).all()), codec.name
    out = torch.full((tensor.numel(),), float("nan"), dtype=out_dtype)
    codec.decode(memory[:size].clone(), out, tensor.dtype)
    return out


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 64, 65, 1000])
def test_decoded_values_have_the_requested_and_the_sum_dtype(codec: Codec, dtype: torch.dtype, numel: int) -> None:
    tensor = values(numel, dtype)
    same, wide = through(codec, tensor, dtype), through(codec, tensor, accumulation_dtype(dtype))
    assert bool(torch.isfinite(wide).all())
    assert torch.equal(same, wide.to(dtype))
    if codec.exact:
        assert torch.equal(same.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bf16_rounds_as_torch_does(dtype: torch.dtype) -> None:
    tensor = torch.cat(
        [values(1001, dtype), torch.tensor([0.0, -0.0, float("inf"), 1 + 2**-8, 1 + 3 * 2**-8], dtype=dtype)]
    )
    result = through(get_codec("bf16"), tensor, dtype)
    assert torch.equal(result, tensor.bfloat16().to(dtype))
    assert get_codec("bf16").encoded_size(1001, dtype) == 2002


def test_identity_accepts_every_dtype_and_bf16_only_floats() -> None:
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e5m2):
        assert get_codec("identity").accepts(dtype) and not get_codec("bf16").accepts(dtype)
        tensor = torch.ones(5).to(dtype)
        encoded = torch.empty(5 * dtype.itemsize, dtype=torch.uint8)
        get_codec("identity").encode(tensor, encoded)
        out = torch.zeros(5).to(dtype)
        get_codec("identity").decode(encoded, out, dtype)
        assert torch.equal(out.view(torch.uint8), tensor.view(torch.uint8))


def test_sums_are_in_float32_or_wider() -> None:
    assert {accumulation_dtype(d) for d in (torch.float16, torch.bfloat16, torch.float32)} == {torch.float32}
    assert accumulation_dtype(torch.float64) == torch.float64
    assert accumulation_dtype(torch.int64) == torch.int64


@pytest.mark.usefixtures("registry")
def test_the_documented_codec() -> None:
    page = (Path(__file__).parents[3] / "docs/compressed-communication.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "compressed-communication.md", "exec"), {"__name__": "codec_page"})
    tensor = values(100, torch.float32)
    assert torch.equal(through(get_codec("half"), tensor, torch.float32), tensor.half().float())


@pytest.mark.usefixtures("registry")
def test_codec_registry() -> None:
    assert list_codecs() == ["bf16", "fine_sign", "fp8", "identity", "int4", "int8", "lowrank", "sign", "topk"]
    local = SignCodec()
    register_codec(local)
    register_codec(local)  # registering the same codec again is not an error
    assert get_codec("toy-sign") is local and "toy-sign" in list_codecs()
    with pytest.raises(CodecError, match="'toy-sign' is registered already"):
        register_codec(SignCodec())
    names = "bf16, fine_sign, fp8, identity, int4, int8, lowrank, sign, topk, toy-sign"
    with pytest.raises(WindlassError, match=f"no codec named 'zip'; use one of {names}"):
        get_codec("zip")
