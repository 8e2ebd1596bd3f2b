"""Muon: momentum with orthogonalized matrices; AdamW for all parameters that are not hidden matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from windlass.base.compute_device import multiplies_fast
from windlass.base.errors import ConfigError, ModelError
from windlass.optim.hyperparameter_checks import check_hyperparameters

_HEAD_NAMES = frozenset({"lm_head", "head", "output", "embed_out", "output_projection", "classifier", "score"})
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration in Jordan's Muon."""
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for all other parameters, in one optimizer.

    Matrices follow `torch.optim.Muon`: B <- mu B + (1 - mu) g, O = `orthogonalize`(Nesterov(B)), w <- (1 - lr wd) w -
    lr s(shape) O. A parameter of three dimensions is a stack of matrices (experts); a parameter of more dimensions is
    flattened to [first, rest]. All other parameters follow `torch.optim.AdamW`.

    The key `use_muon` of a group decides whether its parameters are hidden matrices. In a group without the key, the
    attribute `use_muon` of a parameter decides; a parameter without the attribute is a hidden matrix if it has two or
    more dimensions. Embeddings and output heads are matrices, but not hidden ones: `muon_groups` separates them. Groups
    are split so that each holds one kind. `group["use_muon"]` is then a bool, and `group["lr"]` is the rate of that
    kind, which schedulers may change.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; `adjust_lr_fn="match_rms_adamw"`: Liu et al.,
    "Muon is Scalable for LLM Training", arXiv:2502.16982. State: `momentum_buffer`, or `step`, `exp_avg`, `exp_avg_sq`.

    Args:
        lr: learning rate of both kinds, unless `muon_lr` or `adam_lr` is given.
        momentum, nesterov, ns_coefficients, ns_steps, ns_eps, adjust_lr_fn: options for the hidden matrices.
        betas, eps: options for all other parameters.

    Raises:
        ConfigError: a value is out of range, or `use_muon` is set on a parameter of fewer than two dimensions.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
    ) -> None:
        rates = {"lr": lr, "muon_lr": muon_lr or 0.0, "adam_lr": adam_lr or 0.0}
        check_hyperparameters("Muon", betas, **rates, momentum=momentum, weight_decay=weight_decay, eps=eps)
        if adjust_lr_fn not in _ADJUSTMENTS:
            raise ConfigError(f"Muon: adjust_lr_fn is {adjust_lr_fn!r}; use one of {_ADJUSTMENTS}")
        if not 0 <= ns_steps < 100 or len(ns_coefficients) != 3:
            raise ConfigError(
                f"Muon: ns_steps {ns_steps} must be in [0, 100), ns_coefficients {ns_coefficients} three numbers"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "muon_lr": muon_lr,
                "adam_lr": adam_lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "betas": tuple(betas),
                "eps": eps,
                "nesterov": nesterov,
                "ns_coefficients": tuple(ns_coefficients),
                "ns_steps": ns_steps,
                "ns_eps": ns_eps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. A group without `use_muon` is split into up to two groups, matrices first.

        Raises:
            ConfigError: the group or a parameter sets `use_muon` for fewer than two dimensions, or the parameters are a
                set.
        """
        params = param_group["params"]
        if isinstance(params, set):
            raise ConfigError(
                "Muon: the parameters of a group are a set, whose order differs between ranks; give a list"
            )
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        use_muon = param_group.get("use_muon")
        bare = [
            tuple(_entry_parameter(entry).shape) for entry in params if use_muon and _entry_parameter(entry).ndim < 2
        ]
        if bare:
            raise ConfigError(
                f"Muon: use_muon is set on a parameter of shape {bare[0]}; it needs two dimensions or more"
            )
        kinds = [is_hidden_matrix(_entry_parameter(entry)) if use_muon is None else bool(use_muon) for entry in params]
        for kind in (True, False):
            of_kind = [entry for entry, its_kind in zip(params, kinds, strict=True) if its_kind == kind]
            if not of_kind and (params or kind):
                continue
            group = {**param_group, "params": of_kind, "use_muon": kind}
            rate = self.defaults["muon_lr" if kind else "adam_lr"]
            if rate is not None:
                group.setdefault("lr", rate)
            super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Return the result of `closure`.

        Raises:
            ModelError: a gradient is sparse, or the gradient of a hidden matrix has fewer than two dimensions.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if parameter.grad.is_sparse:
                    raise ModelError(
                        f"Muon: the gradient of a {tuple(parameter.shape)} parameter is sparse; make it dense"
                    )
            if group["use_muon"]:
                for parameter in parameters:
                    if not parameter.numel():
                        continue  # an empty matrix has no shape ratio, and nothing to update
                    self._update_matrix(parameter, parameter.grad, group)
            else:
                self._update_with_adamw(parameters, group)
        return loss

    def _update_matrix(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if grad.ndim < 2:
            raise ModelError(
                f"Muon: a matrix has a flattened gradient of shape {tuple(grad.shape)}; pass the gradient of the "
                "full matrix"
            )
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffer, momentum, lr = state["momentum_buffer"], group["momentum"], group["lr"]
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        matrix = update if update.ndim == 3 else update.flatten(1)
        matrix = orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"], group["ns_eps"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(matrix.view_as(parameter), alpha=-lr * _lr_adjustment(matrix, group["adjust_lr_fn"]))

    def _update_with_adamw(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter in parameters]
        if not parameters:
            return
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7
) -> torch.Tensor:
    """Approximate U V' of `matrix` = U S V' by `steps` iterations X <- a X + (b A + c A A) X with A = X X', in bf16.

    A CPU without bf16 instructions multiplies the bf16 values in fp32 and rounds each result to bf16.

    Args:
        matrix: [rows, columns] or [matrices, rows, columns], any floating-point dtype; not modified.

    Returns:
        The same shape in bf16, with singular values near 1 (between about 0.5 and 1.5 with the default coefficients).
    """
    a, b, c = coefficients
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.bfloat16()
    x = x.mT if tall else x  # the smaller side first, so that A is the smaller Gram matrix
    # The iteration needs a spectral norm of at most 1, and the Frobenius norm bounds it.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    product_dtype = _product_dtype(x.device)
    for _ in range(steps):
        x = x.to(product_dtype)
        gram = (x @ x.mT).bfloat16().to(product_dtype)
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c).bfloat16().to(product_dtype)
        x = add_product(x, polynomial, x, beta=a).bfloat16()
    return x.mT if tall else x


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which bf16 matrices are multiplied on `device`.

    Both dtypes add up the products in fp32.
    """
    return torch.bfloat16 if multiplies_fast(torch.bfloat16, device) else torch.float32


def is_hidden_matrix(parameter: torch.Tensor) -> bool:
    """Return True if Muon orthogonalizes `parameter` in a group without `use_muon`: the attribute `use_muon` of the
    parameter if set, else True for two or more dimensions.

    Raises:
        ConfigError: the attribute is set on a parameter of fewer than two dimensions.
    """
    use_muon = getattr(parameter, "use_muon", None)
    if use_muon and parameter.ndim < 2:
        raise ConfigError(
            f"Muon: use_muon is set on a parameter of shape {tuple(parameter.shape)}; it needs two dimensions"
        )
    return parameter.ndim >= 2 if use_muon is None else bool(use_muon)


def muon_groups(model: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> list[dict[str, Any]]:
    """Build parameter groups for `Muon`: hidden matrices, and all other parameters, including embeddings, output heads
    and weights tied to them.

    An output head is the result of `model.get_output_embeddings()`, or a module called `lm_head`, `head`, `classifier`,
    ... A parameter's own attribute `use_muon` takes precedence.

    Args:
        parameters: parameters to train; by default all of `model` that require a gradient.
    """
    outer = {id(parameter) for module in _embeddings_and_heads(model) for parameter in module.parameters(recurse=False)}
    chosen = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in chosen:
        marked = getattr(parameter, "use_muon", None) is not None
        groups[is_hidden_matrix(parameter) and (marked or id(parameter) not in outer)].append(parameter)
    return [{"params": params, "use_muon": kind} for kind, params in groups.items() if params]


def _embeddings_and_heads(model: nn.Module) -> list[nn.Module]:
    outer = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or name.rpartition(".")[2] in _HEAD_NAMES
    ]
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    return [*outer, head] if isinstance(head, nn.Module) else outer


def _lr_adjustment(matrix: torch.Tensor, adjust_lr_fn: str | None) -> float:
    rows, columns = matrix.shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _entry_parameter(entry: torch.Tensor | tuple[str, torch.Tensor]) -> torch.Tensor:
    """Return the parameter of a group entry. Named parameters are tuples (name, parameter)."""
    return entry[1] if isinstance(entry, tuple) else entry
