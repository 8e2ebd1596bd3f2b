"""Tests of kernel dispatch: the path is reported and can be chosen, and mismatched tensors are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.unit.kernels.rule_cases import RULES, piece
from windlass.base.errors import ConfigError, ModelError
from windlass.kernels import kernel_dispatch
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.kernel_dispatch import REFERENCE_PATH, apply_updates, get_active_kernel_path, list_kernel_paths
from windlass.kernels.update_tensors import UpdateTensors

native = pytest.mark.skipif(len(list_kernel_paths()) == 1, reason="no native module was built")


def test_reference_path_is_always_available() -> None:
    assert list_kernel_paths()[-1] == REFERENCE_PATH


@native
def test_best_path_is_used_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_KERNELS", raising=False)
    assert get_active_kernel_path().name == list_kernel_paths()[0] and get_active_kernel_path().is_native
    for name in list_kernel_paths():
        monkeypatch.setenv("WINDLASS_KERNELS", name.lower())
        assert get_active_kernel_path().name == name
        assert "WINDLASS_KERNELS" in str(get_active_kernel_path())


def test_unknown_path_error_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_KERNELS", "sse9")
    with pytest.raises(ConfigError, match="'sse9'.*reference"):
        get_active_kernel_path()


@pytest.mark.parametrize("name", ["sse9", "avx2", "Reference"])
def test_a_path_is_refused_by_one_rule_for_updates_and_inference(name: str) -> None:
    said = f"no kernel path '{name}' on this machine.*; use one of .*reference"
    with pytest.raises(ConfigError, match=said):
        apply_updates(RULES["sgd"](1), [], path=name)
    with pytest.raises(ConfigError, match=said):
        get_inference_path(name)


def test_missing_native_module_falls_back_to_the_reference_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(kernel_dispatch.logger, "info", lambda text, *values: reported.append(text % values))
    monkeypatch.setitem(sys.modules, "windlass.kernels._optimizers", None)
    monkeypatch.delattr("windlass.kernels._optimizers", raising=False)
    monkeypatch.delenv("WINDLASS_KERNELS", raising=False)
    caches = (kernel_dispatch._native_module, kernel_dispatch._resolve_path, kernel_dispatch._log_path_once)
    for cache in caches:
        cache.cache_clear()
    try:
        rule = RULES["sgd"](1)
        for _ in range(2):
            apply_updates(rule, [piece(rule, torch.ones(3), torch.ones(3))])
        assert reported == [f"optimizer kernels: {get_active_kernel_path()}"]
        assert reported[0].startswith("optimizer kernels: reference (") and "compiler" in reported[0]
        with pytest.raises(
            ConfigError, match="no kernel path 'AVX2' on this machine .*compiler.*; use one of reference"
        ):
            apply_updates(rule, [piece(rule, torch.ones(3), torch.ones(3))], path="AVX2")
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()


def wrong(**changed: Any) -> UpdateTensors:
    tensors: dict[str, Any] = {"parameter": torch.zeros(4), "gradient": torch.zeros(4), "states": (torch.zeros(4),) * 2}
    return UpdateTensors(**{**tensors, **changed})


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (wrong(gradient=torch.zeros(5)), "gradient has 5 elements where 4 are needed; pass a tensor of 4 elements"),
        (wrong(parameter=torch.zeros(4, dtype=torch.float64)), "parameter.*float64.*float32, bfloat16, float16"),
        (wrong(gradient=torch.zeros(8)[::2]), "gradient.*not contiguous"),
        (wrong(parameter=torch.zeros(4, device="meta")), "parameter is on meta"),
        (wrong(states=(torch.zeros(4),)), "needs 2 states and got 1; pass 2 tensors"),
        (wrong(states=(torch.zeros(4), torch.zeros(4).bfloat16())), "state 1 is torch.bfloat16"),
        (wrong(states=(torch.zeros(4, dtype=torch.uint8),) * 2), "came with 0 tensors of scales; pass 2$"),
        (wrong(scales=(torch.zeros(1),)), "2 states of torch.float32 came with 1 tensor of scales; pass 0$"),
        (wrong(low_precision_copy=torch.zeros(4)), "lowered copy.*float32"),
    ],
)
def test_unsuitable_tensors_are_refused_by_name(piece: UpdateTensors, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        apply_updates(RULES["adamw"](1), [piece])
