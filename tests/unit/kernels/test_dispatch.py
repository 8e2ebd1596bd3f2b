"""Which path runs is said and can be chosen; what does not fit together is refused before addresses are used."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.unit.kernels.rules import RULES, piece
from windlass.base.errors import ConfigError, ModelError
from windlass.kernels import dispatch
from windlass.kernels.dispatch import REFERENCE, path_in_use, paths, update
from windlass.kernels.piece import Piece

native = pytest.mark.skipif(len(paths()) == 1, reason="no native module was built")


def test_the_reference_is_always_there() -> None:
    assert paths()[-1] == REFERENCE


@native
def test_the_best_path_is_in_use_and_the_environment_may_name_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_KERNELS", raising=False)
    assert path_in_use().name == paths()[0] and path_in_use().native
    for name in paths():
        monkeypatch.setenv("WINDLASS_KERNELS", name.lower())
        assert path_in_use().name == name
        assert "WINDLASS_KERNELS" in str(path_in_use())


def test_an_unknown_path_is_refused_with_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_KERNELS", "sse9")
    with pytest.raises(ConfigError, match="'sse9'.*reference"):
        path_in_use()


def test_without_the_native_module_the_reference_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(dispatch.logger, "info", lambda text, *values: said.append(text % values))
    monkeypatch.setitem(sys.modules, "windlass.kernels._optimizers", None)
    monkeypatch.delattr("windlass.kernels._optimizers", raising=False)
    monkeypatch.delenv("WINDLASS_KERNELS", raising=False)
    caches = (dispatch._module, dispatch._path, dispatch._say_once)
    for cache in caches:
        cache.cache_clear()
    try:
        rule = RULES["sgd"](1)
        for _ in range(2):
            update(rule, [piece(rule, torch.ones(3), torch.ones(3))])
        assert said == [f"optimizer kernels: {path_in_use()}"]
        assert said[0].startswith("optimizer kernels: reference (") and "compiler" in said[0]
        with pytest.raises(ConfigError, match="AVX2"):
            update(rule, [piece(rule, torch.ones(3), torch.ones(3))], path="AVX2")
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()


def wrong(**changed: Any) -> Piece:
    tensors: dict[str, Any] = {"parameter": torch.zeros(4), "gradient": torch.zeros(4), "states": (torch.zeros(4),) * 2}
    return Piece(**{**tensors, **changed})


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (wrong(gradient=torch.zeros(5)), "gradient has 5 elements where 4"),
        (wrong(parameter=torch.zeros(4, dtype=torch.float64)), "parameter.*float64.*float32, bfloat16, float16"),
        (wrong(gradient=torch.zeros(8)[::2]), "gradient.*not contiguous"),
        (wrong(parameter=torch.zeros(4, device="meta")), "parameter is on meta"),
        (wrong(states=(torch.zeros(4),)), "needs 2 states and got 1"),
        (wrong(states=(torch.zeros(4), torch.zeros(4).bfloat16())), "state 1 is torch.bfloat16"),
        (wrong(states=(torch.zeros(4, dtype=torch.uint8),) * 2), "came with 0 tensors of scales"),
        (wrong(lowered=torch.zeros(4)), "lowered copy.*float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(piece: Piece, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        update(RULES["adamw"](1), [piece])
