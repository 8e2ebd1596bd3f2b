"""Counter of the updates of a model's weights, so that values computed from old weights are not used again."""

from __future__ import annotations

from weakref import WeakKeyDictionary

_counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def count_updates(model: object) -> int:
    """Return how often `note_update` was called for a model."""
    return _counts.get(model, 0)


def note_update(model: object) -> None:
    """Record that a model's weights have changed. Training engines call it after steps and loads."""
    _counts[model] = _counts.get(model, 0) + 1
