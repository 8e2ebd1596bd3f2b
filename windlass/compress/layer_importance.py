"""Importance of a model's layers, their removal, and the merging of neighbours.

[Note: layer importance] Block influence is `1 - mean cos(h, h')` of the hidden states before and after a layer (Men et
al. 2024, https://arxiv.org/abs/2403.03853). The measured loss of a layer is the loss of the model without that layer.
`choose_layers` removes layers greedily: in each step, the layer with the least measured loss. It compares the result
with the choice by influence and with the removal of evenly spaced layers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windlass.base.errors import ConfigError, ModelError
from windlass.compress.block_calibration import find_longest_list
from windlass.compress.low_rank_config import RANKS_ENTRY
from windlass.compress.pruned_config import PRUNING_ENTRY, renumber_layers
from windlass.compress.pruning_units import replace_everywhere
from windlass.compress.unit_importance import LossFunction, language_loss

_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")
# suffixes of configuration keys whose lists have no entry per layer
_NO_LAYERS = ("token_id", "token_ids", "architectures")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MERGED_SHARE = 0.25  # share of a removed layer in the neighbour that it is merged into


def find_layer_list(model: nn.Module) -> str:
    """Return the name of the list of a model's layers: the longest one whose elements have submodules.

    Raises:
        ModelError: the model has no such list.
    """
    name = find_longest_list(model, lambda module: len(module) > 0 and all(list(one.children()) for one in module))
    if name is None:
        raise ModelError(
            f"{type(model).__name__} has no list of layers (an nn.ModuleList of blocks) to measure or remove"
        )
    return name


def block_influences(model: nn.Module, batches: Sequence[Any], loss: LossFunction = language_loss) -> list[float]:
    """Return the influence of each layer; see [Note: layer importance]."""
    layers = _layers(model)
    sums, rows = [0.0] * len(layers), [0] * len(layers)

    def called(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            before = (inputs[0] if inputs else named["hidden_states"]).flatten(0, -2).float()
            after = (output[0] if isinstance(output, tuple) else output).flatten(0, -2).float()
            sums[place] += float(functional.cosine_similarity(before, after, dim=-1).sum(dtype=torch.float64))
            rows[place] += len(before)

        return hook

    handles = [layer.register_forward_hook(called(place), with_kwargs=True) for place, layer in enumerate(layers)]
    try:
        mean_loss(model, batches, loss)
    finally:
        for handle in handles:
            handle.remove()
    return [1 - total / max(count, 1) for total, count in zip(sums, rows, strict=True)]


def losses_without(
    model: nn.Module, batches: Sequence[Any], loss: LossFunction = language_loss, skipped: Sequence[int] = ()
) -> dict[int, float]:
    """Return, by layer, the loss of the model without that layer and without the layers that are already skipped."""
    found = {}
    for number in range(len(_layers(model))):
        if number not in skipped:
            with skip_layers(model, [*skipped, number]):
                found[number] = mean_loss(model, batches, loss)
    return found


def choose_layers(
    model: nn.Module, count: int, batches: Sequence[Any], loss: LossFunction = language_loss
) -> list[int]:
    """Return the numbers of the layers whose removal increases the loss least; see [Note: layer importance].

    Raises:
        ConfigError: the model does not have more than `count` layers, there is no text, or its loss is not finite.
    """
    total = len(_layers(model))
    if not 0 <= count < total:
        raise ConfigError(f"prune layers = {count}, but the model has {total} layers; remove fewer")
    if not batches:
        raise ConfigError("the importance of layers is measured on a calibration text; give some")
    before = mean_loss(model, batches, loss)
    if not math.isfinite(before):
        raise ConfigError(
            f"the loss on the calibration text is {before}, so that no layer can be compared with another; give rows "
            "of at least two tokens, and a model that computes numbers"
        )
    greedy: list[int] = []
    for _ in range(count):
        losses = losses_without(model, batches, loss, greedy)
        greedy.append(min(losses, key=lambda number: losses[number]))
    influences = block_influences(model, batches, loss)
    by_influence = sorted(range(total), key=lambda number: influences[number])[:count]
    candidates = [sorted(greedy), sorted(by_influence), every_other(total, count)]
    measured = []
    for candidate in candidates:
        with skip_layers(model, candidate):
            measured.append(mean_loss(model, batches, loss))
    return candidates[measured.index(min(measured))]


def every_other(total: int, count: int) -> list[int]:
    """Return the numbers of `count` evenly spaced layers, without the first and the last if possible."""
    inner = list(range(1, total - 1)) if count <= total - 2 else list(range(total))
    return [inner[round((place + 0.5) * len(inner) / count - 0.5)] for place in range(count)]


def mean_loss(model: nn.Module, batches: Sequence[Any], loss: LossFunction = language_loss) -> float:
    """Return the mean loss over batches, without gradients."""
    with torch.no_grad():
        return sum(float(loss(model, batch)) for batch in batches) / len(batches)


@contextmanager
def skip_layers(model: nn.Module, numbers: Sequence[int]) -> Iterator[None]:
    """Skip some layers inside the `with` block: their hidden states pass unchanged."""

    def unchanged(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        before = inputs[0] if inputs else named["hidden_states"]
        return (before, *output[1:]) if isinstance(output, tuple) else before

    layers = _layers(model)
    handles = [layers[number].register_forward_hook(unchanged, with_kwargs=True) for number in numbers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def remove_layers(model: nn.Module, numbers: Sequence[int]) -> None:
    """Remove layers in place, and update the layer numbers stored in modules and the counts and lists of the
    configuration.

    Raises:
        ModelError: the computation of the remaining layers depends on their numbers.
    """
    name = find_layer_list(model)
    if getattr(getattr(model, "config", None), "scale_attn_by_inverse_layer_idx", False):
        raise ModelError(
            f"layers of this {type(model).__name__} divide their attention scores by their number "
            "(scale_attn_by_inverse_layer_idx), so that none can be removed; prune other kinds"
        )
    layers = _layers(model)
    total = len(layers)
    gone = set(numbers)
    kept = [number for number in range(total) if number not in gone]
    for new, old in enumerate(kept):
        for module in layers[old].modules():
            for attribute in _LAYER_NUMBERS:
                if vars(module).get(attribute) == old:
                    setattr(module, attribute, new)
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._modules[leaf] = nn.ModuleList([layers[number] for number in kept])
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    _keep_in_config(text, kept, total)
    new_numbers = {old: new for new, old in enumerate(kept)}
    for key in (PRUNING_ENTRY, RANKS_ENTRY):
        entry = getattr(config, key, None)
        if entry:
            setattr(config, key, renumber_layers(entry, name, new_numbers))


def _keep_in_config(config: Any, kept: Sequence[int], total: int) -> None:
    new_number = {old: new for new, old in enumerate(kept)}
    for name, value in list(vars(config).items()):
        if name in ("mlp_only_layers", "full_attn_idxs", "moe_layers") and isinstance(value, list):
            setattr(config, name, [new_number[one] for one in value if one in new_number])
        elif name == "attention_types" and isinstance(value, list):  # GPT-Neo's form of attention_layers
            kinds = [kind for kinds, times in value for _ in range(times) for kind in kinds]
            setattr(config, name, [[[kinds[old] for old in kept], 1]])
        elif isinstance(value, (list, tuple)) and len(value) == total and not name.endswith(_NO_LAYERS):
            setattr(config, name, [value[old] for old in kept])
        elif name in ("first_k_dense_replace", "max_window_layers") and isinstance(value, int):
            setattr(config, name, sum(old < value for old in kept))
    for name in _COUNTS:
        if vars(config).get(name) == total:
            setattr(config, name, len(kept))


def _blend(one: nn.Module, two: nn.Module, weight: float) -> None:
    others = dict(two.named_parameters())
    for name, parameter in one.named_parameters():  # check all parameters before the first one changes
        if name not in others or others[name].shape != parameter.shape:
            raise ConfigError(f"{name!r} of a layer has another shape in the next one; they cannot be merged")
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.lerp_(others[name].to(parameter.dtype), weight)


def _merge(model: nn.Module, target: nn.Module, layer: nn.Module) -> None:
    """Blend a layer into another one, whose parameters become new objects: the old ones keep their values."""
    for parameter in list(target.parameters()):
        replace_everywhere(model, parameter, parameter.detach().clone())
    _blend(target, layer, _MERGED_SHARE)


def shorten_layers(
    model: nn.Module, count: int, batches: Sequence[Any], loss: LossFunction = language_loss
) -> list[str]:
    """Remove `count` layers in place. A layer is merged into a neighbour instead if that gives a lower measured loss.

    Returns:
        A description of the change for each removed layer, in the order of the steps.

    Raises:
        ConfigError: as for `choose_layers`.
        ModelError: another layer depends on a removed layer.
    """
    chosen = choose_layers(model, count, batches, loss)
    originals = list(range(len(_layers(model))))  # original numbers of the remaining layers
    steps = []
    for done, original in enumerate(chosen):
        number = original - done  # `done` layers before this one were removed
        layers = _layers(model)
        target: int | None = None
        with skip_layers(model, [number]):
            best = mean_loss(model, batches, loss)
        for neighbour in (number - 1, number + 1):
            if 0 <= neighbour < len(layers):
                saved = copy.deepcopy(layers[neighbour])
                try:
                    _blend(layers[neighbour], layers[number], _MERGED_SHARE)
                    with skip_layers(model, [number]):
                        merged = mean_loss(model, batches, loss)
                except ConfigError:
                    merged = float("inf")
                finally:
                    _restore(layers[neighbour], saved)
                if merged < best:
                    best, target = merged, neighbour
        if target is not None:
            _merge(model, layers[target], layers[number])
        step = "removed" if target is None else f"merged into {originals[target]}"
        remove_layers(model, [number])
        del originals[number]
        _check_removed(model, original, best, batches, loss)
        steps.append(f"layer {original}: {step}, loss {best:.4f}")
    return steps


def _check_removed(model: nn.Module, number: int, expected: float, batches: Sequence[Any], loss: LossFunction) -> None:
    """Check that a model without a layer has the loss that it had while the layer was skipped.

    Raises:
        ModelError: the losses differ, e.g. since another layer uses a value that the removed layer computed.
    """
    reason, cause = "", None
    try:
        found = mean_loss(model, batches, loss)
        if not math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-5):
            reason = f"its loss is {found:.4f} and not the {expected:.4f} with the layer skipped"
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        reason, cause = f"its forward ends with {type(error).__name__}: {error}", error
    if reason:
        raise ModelError(
            f"layer {number} of this {type(model).__name__} cannot be removed, since others depend on it: without it "
            f"{reason}; prune other kinds"
        ) from cause


def _restore(layer: nn.Module, saved: nn.Module) -> None:
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), saved.parameters(), strict=True):
            parameter.copy_(value)


def _layers(model: nn.Module) -> nn.ModuleList:
    found = model.get_submodule(find_layer_list(model))
    assert isinstance(found, nn.ModuleList)
    return found
