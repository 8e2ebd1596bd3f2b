"""What the ranks say of a model of which each has only a part, as what one rank would say that has all of it."""

from __future__ import annotations

from typing import Any

from windlass.comm.mesh import Mesh


def merge_metadata(mesh: Mesh, metadata: Any) -> Any:
    """Plain data of all ranks as one; what is said here where every rank has the whole model. Collective.

    Dictionaries are united, lists are joined without what is there already, and of anything else the first that is said
    counts. What optimizer groups say, a list of dictionaries, is united group by group.
    """
    if mesh.only_data:
        return metadata
    heard = mesh.gather_from_world(metadata)
    result = heard[0]
    for other in heard[1:]:
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
