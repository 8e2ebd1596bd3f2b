"""Checks of models and options for sequence parallelism, made before a model is changed."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from windlass.attention.transformers_dispatch import check_attention_interface
from windlass.base.errors import ConfigError, ModelError
from windlass.comm.mesh_axis import MeshAxis

SP_MODES = ("ulysses", "ring", "ulysses+ring")
_RESULT_OF_ONE_TOKEN = re.compile("For(SequenceClassification|MultipleChoice|NextSentencePrediction)")
"""Names of transformers' classes whose result is computed from one token of each sequence."""
_HEADS_OF_ONE_TOKEN = {"seq_relationship", "sop_classifier"}
"""Names of the modules that compute one of several results from one token, as in `BertForPreTraining`."""
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def resolve_ulysses_degree(axis: MeshAxis, sp_mode: str, ulysses_degree: int | None, key_heads: int) -> int:
    """Return the number of neighbouring ranks that swap tokens for heads.

    Raises:
        ConfigError: the mode is unknown, or `ulysses_degree` contradicts it or does not divide the number of
            ranks along `axis`.
    """
    if sp_mode not in SP_MODES:
        raise ConfigError(f'sp_mode = "{sp_mode}" is unknown; write "ulysses", "ring" or "ulysses+ring"')
    fixed = {"ulysses": axis.size, "ring": 1}
    if ulysses_degree is None:
        divisors = [n for n in range(1, axis.size + 1) if axis.size % n == 0]
        requested = [n for n in divisors if key_heads % n == 0]  # each key head goes to one rank
        return fixed.get(sp_mode, max(requested))
    if ulysses_degree < 1 or axis.size % ulysses_degree:
        raise ConfigError(
            f"ulysses_degree = {ulysses_degree} does not divide the {axis.size} ranks along {axis.name}; "
            f"write one of {[n for n in range(1, axis.size + 1) if axis.size % n == 0]}"
        )
    if fixed.get(sp_mode, ulysses_degree) != ulysses_degree:
        raise ConfigError(
            f'ulysses_degree = {ulysses_degree} of {axis.size} ranks contradicts sp_mode = "{sp_mode}"; '
            'write "ulysses+ring"'
        )
    return ulysses_degree


def check_sequence_support(model: Any, axis: MeshAxis) -> None:
    """Raise a ModelError if the sequences of this model cannot be sharded."""
    name = type(model).__name__
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise ModelError(
            f"{name} is not a transformers model, and its sequences cannot be sharded over {axis.name} without "
            "changes. Call windlass.attention.attention in your module, inside windlass.parallel.sequence.use_shard"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{name} has an encoder and a decoder, and sequence parallelism needs a model with one of them; set "
            "parallel.sp to 1"
        )
    leaves = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    if leaves & _HEADS_OF_ONE_TOKEN or any(_RESULT_OF_ONE_TOKEN.search(kind.__name__) for kind in type(model).__mro__):
        raise ModelError(
            f"{name} computes its result from one token of each sequence, which only one of the ranks over "
            f"{axis.name} has; compute the result from the hidden states of a model without this head, or set "
            "parallel.sp to 1"
        )
    check_attention_interface(model, f"so its sequences cannot be sharded over {axis.name}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{name}.forward takes no position_ids, which sequence parallelism has to pass; add the argument"
        )
    _check_layer_types(model, name)


def _check_layer_types(model: Any, name: str) -> None:
    text = model.config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    other = sorted(kinds - _SUPPORTED_LAYER_TYPES)
    if other:
        raise ModelError(
            f"{name} has layers of the types {other}, which mix tokens without attention or by other patterns; "
            f"sequence parallelism supports only {sorted(_SUPPORTED_LAYER_TYPES)}; set parallel.sp to 1"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
            raise ModelError(
                f"{path} of {name} is a {type(module).__name__}, which mixes tokens that lie on several ranks; "
                "sequence parallelism does not support it; set parallel.sp to 1"
            )
