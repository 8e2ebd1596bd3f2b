"""Merging of models with the same architecture into one: linear, SLERP, TIES, DARE.

[Note: merging] A task vector is the difference of a model's parameter from the base's. Linear is the weighted mean of
the parameters; SLERP moves along the arc between the parameters of two models; TIES (Yadav et al. 2023,
https://arxiv.org/abs/2306.01708) keeps the elements of each task vector with the largest magnitudes, takes the sign of
each element from the sum, and averages the values with that sign; DARE (Yu et al. 2023,
https://arxiv.org/abs/2311.03099) drops a random part of each task vector and scales the rest by `1 / density`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.kernels.packed_linear import PackedMatrix

MERGE_METHODS = ("linear", "slerp", "ties", "dare")
_PARALLEL = 0.9995  # cosine above which the arc is replaced by a straight line


def linear_merge(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return `sum(weight * tensor) / sum(weights)`, computed in float32."""
    total = sum(weights)
    found = torch.zeros(tensors[0].shape, dtype=torch.float32, device=tensors[0].device)
    for tensor, weight in zip(tensors, weights, strict=True):
        found += tensor.float() * (weight / total)
    return found


def spherical_merge(one: Tensor, two: Tensor, position: float) -> Tensor:
    """Return the point between two tensors on the arc between their directions (Shoemake 1985):
    `(sin((1 - t) a) one + sin(t a) two) / sin a` with the angle `a` between them; on a straight line if they are
    nearly parallel or opposite, or if a tensor is 0. Float32.

    Args:
        position: `t`, 0 for the first and 1 for the second.
    """
    x, y = one.double().flatten(), two.double().flatten()
    norms = x.norm() * y.norm()
    cosine = float(x @ y / norms) if norms > 0 else 1.0
    if abs(cosine) > _PARALLEL:
        return torch.lerp(one.float(), two.float(), position)
    angle = torch.tensor(cosine, dtype=torch.float64).acos()
    left, right = torch.sin((1 - position) * angle), torch.sin(position * angle)
    return ((left * x + right * y) / torch.sin(angle)).view_as(one).float()


def ties_merge(base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], density: float) -> Tensor:
    """Return the base plus the merged task vectors by TIES; see [Note: merging].

    Args:
        density: share of the elements of each task vector that stay.
    """
    vectors = [_largest(tensor.float() - base.float(), density) for tensor in tensors]
    weighted = torch.stack([vector * weight for vector, weight in zip(vectors, weights, strict=True)])
    sign = weighted.sum(0).sign()
    agrees = (weighted.sign() == sign) & (weighted != 0)
    scale = torch.tensor(list(weights), device=base.device).view(-1, *[1] * base.dim())
    total = (agrees * scale).sum(0)
    merged = (weighted * agrees).sum(0) / torch.where(total != 0, total, torch.ones_like(total))
    return base.float() + merged


def dare_merge(
    base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], density: float, seed: int = 0
) -> Tensor:
    """Return the base plus the weighted sum of randomly thinned task vectors by DARE; see [Note: merging]."""
    generator = torch.Generator().manual_seed(seed)
    found = base.float().clone()
    for tensor, weight in zip(tensors, weights, strict=True):
        stays = torch.rand(base.shape, generator=generator) < density  # on the CPU: equal draws on all devices
        found += weight * (tensor.float() - base.float()) * stays.to(base.device) / density
    return found


def _largest(vector: Tensor, density: float) -> Tensor:
    """Return a tensor with all but its largest magnitudes set to 0: the share `density` stays, at least one element."""
    keep = max(round(density * vector.numel()), 1)
    flat = vector.flatten()
    order = flat.abs().argsort(descending=True, stable=True)[:keep]
    return torch.zeros_like(flat).index_copy_(0, order, flat[order]).view_as(vector)


def merge_models(
    models: Sequence[nn.Module],
    method: str = "linear",
    *,
    weights: Sequence[float] | None = None,
    base: nn.Module | None = None,
    density: float = 0.5,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return the merged state of models with the same parameters, in the dtypes of the first.

    Args:
        weights: weights of the models. Linear divides them by their sum; for slerp the second weight, divided by the
            sum, is the position on the arc. None: 1 for each model.
        base: model from which all models were trained, for ties and dare.
        density: share of the elements of each task vector that stay, for ties and dare.
        seed: seed for dare.

    Raises:
        ConfigError: an option is wrong; see `check_merge`.
        ModelError: a parameter is missing or has another shape in one of the models, packed weights of two models
            differ, or merged values are not finite.
    """
    states = [model.state_dict() for model in models]
    check_merge(len(models), method, weights, base is not None, density)
    values = list(weights) if weights is not None else [1.0] * len(states)
    base_state: Mapping[str, Tensor] = {} if base is None else base.state_dict()
    _check_packed(models[0], states)
    merged: dict[str, Tensor] = {}
    # First name of each tensor, by its memory in all models: tied parameters are several names for one memory.
    shared: dict[tuple[Any, ...], str] = {}
    for name, first in states[0].items():
        tensors = [_get(state, name, first) for state in states]
        start = _get(base_state, name, first) if base is not None else None
        same = [*tensors, *([] if start is None else [start])]
        owner = shared.setdefault(tuple((one.data_ptr(), one.shape, one.stride(), one.dtype) for one in same), name)
        if owner != name:
            merged[name] = merged[owner]
            continue
        merged[name] = merge_tensors(name, tensors, method, values, start, density, seed)
    return merged


def merge_tensors(
    name: str,
    tensors: Sequence[Tensor],
    method: str,
    weights: Sequence[float],
    base: Tensor | None,
    density: float,
    seed: int,
) -> Tensor:
    """Return one merged tensor, in the dtype of the first; see `merge_models`. Tensors of other than floating-point
    dtypes are taken from the first model.

    Raises:
        ModelError: the merged tensor has NaN values, or is infinite where the first model's tensor is finite.
    """
    first = tensors[0]
    if not first.is_floating_point():
        return first.clone()
    if method == "linear":
        found = linear_merge(tensors, weights)
    elif method == "slerp":
        found = spherical_merge(tensors[0], tensors[1], weights[1] / sum(weights))
    else:
        assert base is not None
        if method == "ties":
            found = ties_merge(base, tensors, weights, density)
        else:
            found = dare_merge(base, tensors, weights, density, seed ^ zlib.crc32(name.encode()))
    merged = found.to(first.dtype)
    labelled = {f"model {number}": one for number, one in enumerate(tensors, 1)}
    _check_finite(name, labelled if base is None else {**labelled, "the base": base}, merged)
    return merged


def _check_packed(model: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise ModelError if layers of the first model are packed, and their bytes differ from those of another model."""
    for layer, module in model.named_modules():
        for leaf in module._parameters if isinstance(module, PackedMatrix) else ():
            name = f"{layer}.{leaf}"
            first = states[0].get(name)
            if first is None or first.is_floating_point():  # e.g. a bias, which is averaged
                continue
            if not all(torch.equal(first, _get(state, name, first)) for state in states[1:]):
                raise ModelError(
                    f"layer {layer!r} has packed weights, which differ between the models and cannot be averaged; "
                    "merge the unquantized models, and compress the result"
                )


def _check_finite(name: str, tensors: Mapping[str, Tensor], merged: Tensor) -> None:
    """Raise ModelError if a merged tensor has NaN values, or is infinite where the first tensor is finite."""
    wide = merged.float()
    first = next(iter(tensors.values()))
    if bool((torch.isfinite(wide) | ~torch.isfinite(first.float()) & ~wide.isnan()).all()):
        return
    broken = next((label for label, one in tensors.items() if bool(one.float().isnan().any())), None)
    if broken is not None:
        raise ModelError(f"tensor {name!r} of {broken} has NaN values; merge models without them")
    raise ModelError(
        f"tensor {name!r} has values outside of the range of {merged.dtype} once merged; give weights that sum to "
        "about 1, or models of a wider dtype"
    )


def check_merge(count: int, method: str, weights: Sequence[float] | None, has_base: bool, density: float) -> None:
    """Check the options of a merge of `count` models.

    Raises:
        ConfigError: the method is unknown or lacks its base model, it cannot merge `count` models, there is not one
            weight for each model, the weights are not finite or sum to 0, or the density is not above 0 and at most 1.
    """
    if method not in MERGE_METHODS:
        raise ConfigError(f"merging method is {method!r}; it is one of {', '.join(MERGE_METHODS)}")
    if count < (1 if method in ("ties", "dare") else 2) or method == "slerp" and count != 2:
        raise ConfigError(f"merging by {method} takes {'two models' if method == 'slerp' else 'several models'}, not "
                          f"{count}")  # fmt: skip
    if weights is not None and (len(weights) != count or not math.isfinite(sum(weights)) or sum(weights) == 0):
        raise ConfigError(
            f"weights are {list(weights)} for {count} models; give one each, finite and with a sum other than 0"
        )
    if method in ("ties", "dare") and not has_base:
        raise ConfigError(f"merging by {method} needs base, the model from which all were trained")
    if not 0 < density <= 1:
        raise ConfigError(f"density is {density}; write a share above 0 and at most 1")


def _get(state: Mapping[str, Tensor], name: str, first: Tensor) -> Tensor:
    found = state.get(name)
    if found is None or found.shape != first.shape:
        shape = "missing" if found is None else f"of shape {tuple(found.shape)}"
        raise ModelError(
            f"tensor {name!r} is {shape} in a model, and {tuple(first.shape)} in the first; merge models of one "
            "architecture"
        )
    return found
