"""Tests that the backend of docs/attention.md runs as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from windlass.attention import AttentionMask, attention, use_backend
from windlass.attention import backend_registry as registry
from windlass.base.errors import ModelError

PAGE = Path(__file__).parents[3] / "docs/attention.md"


def test_the_documented_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class " in block)

    def kernel(query: Any, key: Any, value: Any, scaling: Any, softcap: Any) -> Any:
        assert softcap == 3.0
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)

    exec(compile(code, str(PAGE), "exec"), {"flashy_kernel": kernel})
    q = torch.randn(2, 4, 5, 8)
    with use_backend("flashy"):
        found = attention(q, q, q, is_causal=True, softcap=3.0)
        with pytest.raises(ModelError, match="flashy computes causal attention alone"):
            attention(q, q, q, AttentionMask(2, 5, 5, padding=torch.ones(2, 5)))
    assert torch.equal(found, scaled_dot_product_attention(q, q, q, is_causal=True))
