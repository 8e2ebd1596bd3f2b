"""Settings of a model's configuration that must be equal for the elements of two models' tensors to correspond."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LABELS = ("id2label", "label2id")
_SYNONYMS = {"swish": "silu"}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the values that transformers derives or takes by default; unchanged if transformers
    is missing or lacks the model type, or the model type is defined by remote code."""
    kind = config.get("model_type")
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:  # then configurations are compared without defaults
        return dict(config)
    if kind not in CONFIG_MAPPING or "auto_map" in config:
        return dict(config)
    found: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(dict(config)).to_dict()
    return found


def ties_head(config: Mapping[str, Any]) -> bool:
    """Return True if the head of a model shares the weight of the embedding."""
    return bool(with_defaults(config).get("tie_word_embeddings"))


def settings_of_places(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(key, value)` for the model type, the numbers and sizes of heads, and the activation functions, also in
    nested configurations such as `text_config`."""
    for key, value in _with_heads(config).items():
        name = f"{path}{key}"
        if isinstance(value, Mapping) and key not in _LABELS:
            yield from settings_of_places(value, f"{name}.")
        elif key == "model_type" or "head" in name and isinstance(value, int | list) and not isinstance(value, bool):
            yield name, value
        elif ("hidden_act" in key or "activation" in key) and isinstance(value, str):
            yield name, _SYNONYMS.get(value, value)


def same_labels_in_other_order(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Return True if two classifiers have the same set of labels, but assign some of them to different outputs."""
    own, other = (
        {str(key): str(value).casefold() for key, value in (config.get("id2label") or {}).items()}
        for config in (one, two)
    )
    return own != other and sorted(own.values()) == sorted(other.values())


def _with_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which a missing `num_key_value_heads` or `head_dim` follows from other keys."""
    found = dict(config)
    heads, width = found.get("num_attention_heads"), found.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        for key, value in (("num_key_value_heads", heads), ("head_dim", width // heads)):
            if found.get(key) is None:
                found[key] = value
    return found
