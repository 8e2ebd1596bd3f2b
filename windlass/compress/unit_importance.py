"""Importance of units: an estimate of the effect of removing a unit.

[Note: unit importance] magnitude is the norm of all elements of a unit. The other two use the elements `W[:, j]` of
the tensors that read the unit: activation is `sqrt(sum_j |W[:, j]|^2 mean(x_j^2))`, the size of the unit's contribution
on the calibration inputs (Wanda's score for one weight, Sun et al. 2023, https://arxiv.org/abs/2306.11695, summed over
the unit); taylor is `mean over batches of (sum W grad W)^2`, the first-order change of the loss, squared (Molchanov et
al. 2019, https://arxiv.org/abs/1906.10771). For experts, activation is the mean router weight of each expert. Units
whose inputs cannot be recorded, e.g. features inside a module with all experts, get their magnitude instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError
from windlass.compress.pruning_units import CoupledTensor, UnitGroup

IMPORTANCES = ("magnitude", "activation", "taylor")
LossFunction = Callable[[nn.Module, Any], Tensor]
Scores = dict[int | None, Tensor]


def language_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a transformers model: of a batch of token ids, with the ids as labels, or of named inputs."""
    inputs = batch if isinstance(batch, dict) else {"input_ids": batch, "labels": batch}
    options = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    loss: Tensor = model(**inputs, **options).loss
    return loss


def unit_scores(
    model: nn.Module,
    groups: Sequence[UnitGroup],
    importance: str,
    batches: Sequence[Any] = (),
    loss: LossFunction = language_loss,
) -> list[Scores]:
    """Return the importance of the units of each group; see [Note: unit importance].

    Each result maps an expert whose units are chosen separately (None: all other units) to the scores `[units]`.

    Args:
        batches: inputs of `loss`, for activation and taylor.
        loss: function of the model and a batch that returns the loss.

    Raises:
        ConfigError: the importance is unknown, or needs batches and there are none.
    """
    if importance not in IMPORTANCES:
        raise ConfigError(f"importance is {importance!r}; it is one of {', '.join(IMPORTANCES)}")
    if importance != "magnitude" and not batches:
        raise ConfigError(f"importance {importance} needs a calibration text; give some, or use magnitude")
    if importance == "magnitude":
        return [_magnitudes(model, group) for group in groups]
    if importance == "taylor":
        return _taylor(model, groups, batches, loss)
    return _activations(model, groups, batches, loss)


def _per_unit(values: Tensor, tensor: CoupledTensor) -> Tensor:
    """Return, for each unit, the sum of `values` over the elements that it has in a tensor, `[units]`."""
    values = values if tensor.part is None else values[tensor.part]
    dim = tensor.dim if tensor.part is None else tensor.dim - 1
    rows = values.movedim(dim, 0).flatten(1).sum(1) if values.dim() > 1 else values
    return rows[tensor.index].sum(1)


def _magnitudes(model: nn.Module, group: UnitGroup) -> Scores:
    found: Scores = {part: torch.zeros(group.units) for part in group.parts}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for tensor in group.tensors:
        if tensor.name in parameters:  # skip buffers, e.g. the statistics of a norm
            squares = parameters[tensor.name].detach().float().square()
            found[tensor.part] += _per_unit(squares, tensor).cpu()
    return {part: value.sqrt() for part, value in found.items()}


def _taylor(model: nn.Module, groups: Sequence[UnitGroup], batches: Sequence[Any], loss: LossFunction) -> list[Scores]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    readers = [[tensor for tensor in group.tensors if tensor.reads] for group in groups]
    needed = {tensor.name: parameters[tensor.name] for tensors in readers for tensor in tensors}
    found: list[Scores] = [{part: torch.zeros(group.units) for part in group.parts} for group in groups]
    with torch.enable_grad(), _requiring_gradients(model, list(needed.values())):
        for batch in batches:
            gradients = dict(
                zip(
                    needed,
                    torch.autograd.grad(loss(model, batch), list(needed.values()), allow_unused=True),
                    strict=True,
                )
            )
            for scores, tensors in zip(found, readers, strict=True):
                sums = {part: torch.zeros_like(value) for part, value in scores.items()}
                for tensor in tensors:
                    gradient = gradients[tensor.name]
                    if gradient is not None:  # None: no token reached the parameter
                        product = needed[tensor.name].detach().float() * gradient.float()
                        sums[tensor.part] += _per_unit(product, tensor).cpu()
                for part, value in sums.items():
                    scores[part] += value.square() / len(batches)
    return found


@contextmanager
def _requiring_gradients(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Require gradients of only some parameters inside the `with` block."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def _activations(
    model: nn.Module, groups: Sequence[UnitGroup], batches: Sequence[Any], loss: LossFunction
) -> list[Scores]:
    readers = {
        tensor.name.rpartition(".")[0]
        for group in groups
        for tensor in group.tensors
        if tensor.reads and tensor.part is None and group.kind != "experts"
    }
    experts = {group.name for group in groups if group.kind == "experts"}
    squares = mean_squares(model, readers, batches, loss, routed=experts)
    found: list[Scores] = []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for group in groups:
        if group.kind == "experts":
            weights = squares.get(group.name)
            found.append({None: weights} if weights is not None else _magnitudes(model, group))
            continue
        scores: Scores = {part: torch.zeros(group.units) for part in group.parts}
        is_measured = True
        for tensor in group.tensors:
            if tensor.reads:
                inputs = squares.get(tensor.name.rpartition(".")[0]) if tensor.part is None else None
                is_measured = is_measured and inputs is not None
                if inputs is not None:
                    weight = parameters[tensor.name].detach().float().square()
                    shape = [1] * weight.dim()
                    shape[tensor.dim] = -1
                    scores[tensor.part] += _per_unit(weight * inputs.to(weight.device).view(shape), tensor).cpu()
        # hooks cannot record the features inside a module that holds all experts
        found.append(
            {part: value.sqrt() for part, value in scores.items()} if is_measured else _magnitudes(model, group)
        )
    return found


def mean_squares(
    model: nn.Module,
    names: set[str],
    batches: Sequence[Any],
    loss: LossFunction,
    routed: set[str] = frozenset(),  # type: ignore[assignment]
) -> Mapping[str, Tensor]:
    """Return the mean square of each input feature of layers on some batches, by layer: `[features]`, float32 on the
    CPU. Layers that no batch reaches are missing.

    Args:
        names: names of linear layers and convolutions.
        routed: names of modules with all experts, for which the mean router weight of each expert is returned,
            `[experts]`.
    """
    sums: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    def called(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            value = inputs[0].detach().float()
            channels = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
            value = (value.movedim(1, -1) if channels else value).flatten(0, -2)
            sums[name] = sums.get(name, 0) + value.square().sum(0).cpu()
            rows[name] = rows.get(name, 0) + len(value)

        return hook

    def chosen(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            tensors = [one for one in (*inputs, *named.values()) if isinstance(one, Tensor)]
            index = next((one for one in tensors if not one.is_floating_point()), None)
            weights = next(
                (one for one in tensors if index is not None and one.shape == index.shape and one is not index), None
            )
            if index is None or weights is None:
                return
            count = module.get_parameter("down_proj").shape[0]
            total = torch.zeros(count + 1).index_add_(
                0, index.flatten().cpu(), weights.detach().flatten().float().cpu()
            )
            sums[name] = sums.get(name, 0) + total[:count]
            rows[name] = rows.get(name, 0) + len(index)

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(called(name)) for name in names]
    handles += [model.get_submodule(name).register_forward_pre_hook(chosen(name), with_kwargs=True) for name in routed]
    try:
        with torch.no_grad():
            for batch in batches:
                loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: value / max(rows[name], 1) for name, value in sums.items()}
