"""Tests of codecs and their registry: encoded sizes, the flag `exact`, decoded values, and refused codecs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toy_codecs import BlockInt8Codec, SignCodec
from windlass.base.errors import CodecError, ConfigError, WindlassError
from windlass.comm import codec as codecs
from windlass.comm.codec import Codec, accumulation_dtype, get_codec, list_codecs, register_codec
from windlass.comm.codec_check import check_codec
from windlass.comm.lossy_codecs import TopKCodec
from windlass.config import load_config, registered_codecs

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ALL: list[Codec] = [
    *map(get_codec, ("identity", "bf16", "sign", "fine_sign", "int8", "int4", "fp8", "topk")),
    BlockInt8Codec(),
]


@pytest.fixture
def registry() -> Iterator[None]:
    stores: list[dict[str, Any]] = [codecs._codecs, registered_codecs._needs_error_feedback]
    before = [dict(store) for store in stores]
    yield
    for store, entries in zip(stores, before, strict=True):
        store.clear()
        store.update(entries)


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
def test_decoding_to_the_message_dtype_rounds_the_wide_result(codec: Codec, dtype: torch.dtype, numel: int) -> None:
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
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for _ in range(2):  # twice, as a cell of a notebook that is run again
        exec(compile(code, "compressed-communication.md", "exec"), {"__name__": "codec_page"})
    tensor = values(100, torch.float32)
    assert torch.equal(through(get_codec("half"), tensor, torch.float32), tensor.half().float())


@pytest.mark.usefixtures("registry")
def test_codec_registry() -> None:
    assert list_codecs() == ["bf16", "fine_sign", "fp8", "identity", "int4", "int8", "lowrank", "sign", "topk"]
    local = SignCodec()
    register_codec(local)
    register_codec(local)  # registering the same codec again is not an error
    assert isinstance(get_codec("toy-sign"), SignCodec) and "toy-sign" in list_codecs()
    register_codec(SignCodec())  # an equal codec of the same class is not an error
    with pytest.raises(CodecError, match="'toy-sign' is registered already"):
        register_codec(type("Other", (SignCodec,), {})())
    with pytest.raises(CodecError, match="'topk' is registered already"):
        register_codec(TopKCodec(divisor=7))
    names = "bf16, fine_sign, fp8, identity, int4, int8, lowrank, sign, topk, toy-sign"
    with pytest.raises(WindlassError, match=f"no codec named 'zip'; use one of {names}"):
        get_codec("zip")


@pytest.mark.usefixtures("registry")
def test_a_codec_with_a_table_is_registered_again() -> None:
    class Table(SignCodec):
        def __init__(self, last: float) -> None:
            self.name, self.levels = "toy-table", torch.tensor([0.0, last])
            self.edges = self.levels.numpy()

    register_codec(Table(1.0))
    register_codec(Table(1.0))
    with pytest.raises(CodecError, match="'toy-table' is registered already"):
        register_codec(Table(2.0))


def load(weights: str = "int8", changes: str = "int8") -> None:
    load_config({"train_batch_size": 1, "zero_optimization": {"zero_quantized_weights_codec": weights}})
    load_config({"train_batch_size": 1, "optimizer": {"type": "DiLoCo", "params": {"codec": changes}}})


@pytest.mark.usefixtures("registry")
def test_keys_of_the_configuration_take_registered_codecs() -> None:
    assert sorted(registered_codecs.codec_names()) == list_codecs()
    for name in list_codecs():
        needs = getattr(get_codec(name), "needs_error_feedback", False)
        assert (name not in registered_codecs.quantizing_codec_names()) is needs, name
    with pytest.raises(
        ConfigError, match=r'weights_codec: "toy-int8" does not fit: .*: bf16, fp8, identity, int4, int8,'
    ):
        load(weights="toy-int8")
    with pytest.raises(ConfigError, match=r'optimizer\.params\.codec: "toy-int8" does not fit; write .*"lowrank"'):
        load(changes="toy-int8")
    register_codec(BlockInt8Codec())
    load(weights="toy-int8", changes="toy-int8")
    load(changes="lowrank")
    with pytest.raises(ConfigError, match=r'weights_codec: "lowrank" does not fit: .*needs no error feedback'):
        load(weights="lowrank")


class _Wrong(BlockInt8Codec):
    """User-defined codec that clamps its input to [-9, 9]; `fault` "dtype" or "size" adds a second fault."""

    def __init__(self, fault: str) -> None:
        self.name, self.fault = f"toy-{fault}", fault

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.fault != "dtype" and super().accepts(dtype)

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        super().encode(tensor.clamp(-9, 9), encoded[: -1 if self.fault == "size" else None])


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("dtype", "does not accept torch.float32"),
        ("size", r"fails on a message of 1000 elements of torch.float32 \(RuntimeError"),
        ("overflow", "decodes infinity as finite values"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_a_codec_that_cannot_carry_gradients_is_refused_before_the_first_step(fault: str, text: str) -> None:
    register_codec(_Wrong(fault))
    for name in ("identity", "bf16", "fp8", "int8", "int4"):
        check_codec("key", name, torch.float32, torch.device("cpu"), keeps_overflow=True)
    with pytest.raises(ConfigError, match=f'^key: the codec "toy-{fault}" {text}'):
        check_codec("key", f"toy-{fault}", torch.float32, torch.device("cpu"), keeps_overflow=True)
