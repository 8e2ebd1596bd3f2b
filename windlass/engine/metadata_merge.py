"""Merging of metadata of ranks that each have a part of the model."""

from __future__ import annotations

from typing import Any

from windlass.comm.mesh import Mesh


def merge_metadata(mesh: Mesh, metadata: Any) -> Any:
    """Merge plain data of all ranks. Return it unchanged if every rank has the full model. Collective.

    Dictionaries are united, lists are concatenated without duplicates, and of other values the first one is kept. Lists
    of dictionaries, such as optimizer groups, are merged item by item.
    """
    if mesh.only_data:
        return metadata
    all_metadata = mesh.gather_from_world(metadata)
    result = all_metadata[0]
    for other in all_metadata[1:]:
        result = _merge(result, other)
    return result


def _merge(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        return {
            key: _merge(one[key], other[key]) if key in one and key in other else one.get(key, other.get(key))
            for key in keys
        }
    if isinstance(one, list) and isinstance(other, list):
        if all(isinstance(item, dict) for item in (*one, *other)):
            longer = one if len(one) > len(other) else other
            return [*(_merge(a, b) for a, b in zip(one, other, strict=False)), *longer[min(len(one), len(other)) :]]
        return [*one, *(item for item in other if item not in one)]
    return one
