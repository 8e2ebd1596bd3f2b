"""Tests of 16-bit products on CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import windlass
from windlass.base.compute_device import multiplies_fast

CPU = torch.device("cpu")


def patch_support(monkeypatch: pytest.MonkeyPatch, *, bf16: bool, fp16: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: fp16)


@pytest.mark.parametrize(("bf16", "fp16"), [(True, False), (False, True)])
def test_products_of_16_bits_are_fast_where_onednn_supports_them(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, fp16: bool
) -> None:
    patch_support(monkeypatch, bf16=bf16, fp16=fp16)
    assert multiplies_fast(torch.bfloat16, CPU) is bf16
    assert multiplies_fast(torch.float16, CPU) is fp16
    assert multiplies_fast(torch.float32, CPU)
    assert multiplies_fast(torch.bfloat16, torch.device("cuda", 0))


def test_products_of_16_bits_are_slow_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoOperators:
        pass

    monkeypatch.setattr(torch.ops, "mkldnn", NoOperators())
    assert not multiplies_fast(torch.bfloat16, CPU) and multiplies_fast(torch.float32, CPU)


@pytest.mark.parametrize("section", ["bf16", "fp16", None])
def test_initialize_warns_of_slow_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, section: str | None
) -> None:
    patch_support(monkeypatch, bf16=False, fp16=False)
    alone = not dist.is_initialized()
    precision = {} if section is None else {section: {"enabled": True}}
    engine = windlass.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, **precision})[0]
    engine.destroy()
    if alone and dist.is_initialized():
        dist.destroy_process_group()
    warned = [record.getMessage() for record in caplog.records if "4 to 40 times" in record.getMessage()]
    assert len(warned) == (section is not None) and all(f"{section}.enabled" in line for line in warned)
