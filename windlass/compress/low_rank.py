"""Linear layers as products of two smaller ones.

[Note: low rank] The best factors of rank r in the Frobenius norm are those of the singular value decomposition. With
inputs `X` and `H = X^T X = L L^T`, the output error of `W'` is `|(W' - W) L|`, so the decomposition of `W L` gives the
factors with the least output error (Wang et al. 2024, SVD-LLM, https://arxiv.org/abs/2403.07378).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.base.module_modes import evaluating
from windlass.compress.block_calibration import InputStatistics
from windlass.compress.gptq import damped_factor
from windlass.compress.low_rank_config import factor_pair, record_ranks
from windlass.compress.unit_importance import LossFunction, language_loss
from windlass.kernels.packed_linear import names_of_modules

_DAMPING = 1e-6  # added to the diagonal, relative to its mean


def low_rank_factors(weight: Tensor, rank: int, hessian: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `up [rows, rank]` and `down [rank, columns]`, whose product is the best one of this rank; see [Note: low
    rank].

    Args:
        hessian: sum of `x x^T` over the inputs; None: minimize the error of the matrix instead of the output error.

    Raises:
        ConfigError: the rank is not between 1 and the smaller side of the matrix.
        ModelError: `hessian` has values that are not finite.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ConfigError(f"rank is {rank} for a matrix {tuple(weight.shape)}; write 1 to {min(weight.shape)}")
    wide = weight.double()
    if hessian is None:
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
    else:
        factor = damped_factor(hessian.to(torch.float64, copy=True), _DAMPING)
        left, values, right = torch.linalg.svd(wide @ factor, full_matrices=False)
        right = torch.linalg.solve_triangular(factor, right, upper=False, left=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).to(weight.dtype), (root[:, None] * right[:rank]).to(weight.dtype)


def rank_of_share(rows: int, columns: int, share: float) -> int:
    """Return the largest rank whose factors have at most `share` times the elements of the matrix; at least 1."""
    return max(int(share * rows * columns / (rows + columns)), 1)


def factorize_linear_layers(
    model: nn.Module,
    share: float,
    chosen: Callable[[str], bool] = lambda name: True,
    *,
    batches: Sequence[Any] = (),
    loss: LossFunction = language_loss,
) -> dict[str, int]:
    """Replace linear layers by two, in place: `nn.Sequential(nn.Linear(in, rank), nn.Linear(rank, out))`. A layer is
    replaced under all of its names. Layers that share a weight share its factors.

    The ranks are added to the configuration of a transformers model, so that `save_pretrained` writes a directory that
    windlass loads; see [Note: ranks in the configuration].

    Args:
        share: number of elements of both factors, relative to the number of elements of the matrix.
        chosen: function that returns True for the name of each layer to replace. The output head of a transformers
            model is never replaced.
        batches: inputs of `loss`; empty: minimize the errors of the matrices instead of their output errors.

    Returns:
        The rank of each replaced layer, by the layer's first name.

    Raises:
        ConfigError: the share is not between 0 and 1.
        ModelError: a weight or the inputs of a layer have values that are not finite. The model is unchanged.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share is {share}; write a number above 0 and below 1")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and chosen(name)
    }
    hessians = _input_sums(model, layers, batches, loss) if batches else {}
    pairs, ranks = {}, {}
    made: dict[int, list[nn.Parameter]] = {}  # factors by id of the weight, which several layers may share
    for name, layer in layers.items():
        rank = rank_of_share(layer.out_features, layer.in_features, share)
        if id(layer.weight) not in made:
            users = [one for one, other in layers.items() if other.weight is layer.weight and one in hessians]
            hessian = torch.stack([hessians[one] for one in users]).sum(0) if users else None
            if not layer.weight.isfinite().all():
                raise ModelError(f"{name}.weight has values that are not finite; check the model")
            up, down = low_rank_factors(layer.weight.detach(), rank, hessian)
            trains = layer.weight.requires_grad
            made[id(layer.weight)] = [nn.Parameter(one.contiguous(), requires_grad=trains) for one in (down, up)]
        ranks[name] = rank
        pair = factor_pair(layer, rank)
        for part, factor in zip(pair, made[id(layer.weight)], strict=True):
            part.weight = factor
        pairs[name] = pair
    # Replace the layers only now, so that an error leaves the model as it was.
    all_names = names_of_modules(model)
    for name, pair in pairs.items():
        for one in all_names[id(layers[name])]:
            model.set_submodule(one, pair)
    record_ranks(model, ranks)
    return ranks


def _input_sums(
    model: nn.Module, layers: Mapping[str, nn.Linear], batches: Sequence[Any], loss: LossFunction
) -> dict[str, Tensor]:
    """Return the sum of `x x^T` over the inputs of each layer that the batches reach."""
    found = {name: InputStatistics.of(layer.in_features, layer.weight.device) for name, layer in layers.items()}

    def called(name: str) -> Callable[..., None]:
        return lambda module, inputs: found[name].add(inputs[0].detach())

    handles = [layer.register_forward_pre_hook(called(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad(), evaluating(model):
            for batch in batches:
                loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: one.hessian for name, one in found.items() if one.rows}
