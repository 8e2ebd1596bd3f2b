"""Functions of `deepspeed.autotuning.utils` on keys of nested configurations."""

from __future__ import annotations

from typing import Any


def get_val_by_key(d: dict[str, Any], k: str) -> Any:
    """Return the value of the first key `k` at any depth; None if there is none."""
    if k in d:
        return d[k]
    below = (get_val_by_key(one, k) for one in d.values() if isinstance(one, dict))
    return next((found for found in below if found is not None), None)


def set_val_by_key(d: dict[str, Any], k: str, vv: Any) -> None:
    """Set every key `k` that exists, at any depth, to `vv`."""
    if k in d:
        d[k] = vv
    for one in d.values():
        if isinstance(one, dict):
            set_val_by_key(one, k, vv)
