"""Deep copy of an object that holds a mesh axis, whose process group cannot be copied."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from windlass.comm.mesh_axis import MeshAxis

T = TypeVar("T")


def deepcopy_on_axis(original: T, axis: MeshAxis, memo: dict[int, Any]) -> T:
    """Return a deep copy of `original`, as its `__deepcopy__` should. The copy shares the mesh axis."""
    memo[id(axis)] = axis
    copied: T = object.__new__(type(original))
    memo[id(original)] = copied
    copied.__dict__.update({name: deepcopy(value, memo) for name, value in vars(original).items()})
    return copied
