"""The oracle: training in plain PyTorch, in one process, with the result that an engine on W ranks should have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Place, Specimen, cast

SEED = 1000  # rank r builds its model from seed SEED + r; the engine must start from rank 0's model


@dataclass(frozen=True)
class Recipe:
    """Training recipe that both the oracle and an engine can run.

    Attributes:
        precision: "fp32", or "bf16" or "fp16" for a 16-bit model with fp32 accumulation and fp32 master weights.
        delayed_from: first step whose update reaches the model only at the end of the next step; None: never.
        finished_after: steps from `delayed_from` on that nevertheless update the model at once.
        summed: True if a step's gradient is the sum over ranks of each rank's mean over its micro-batches.
    """

    ranks: int = 2
    accumulation: int = 1
    steps: int = 5
    precision: str = "fp32"
    optimizer: str = "SGD"
    optimizer_params: tuple[tuple[str, Any], ...] = (("lr", 0.05), ("momentum", 0.9))
    clipping: float = 1.0
    delayed_from: int | None = None
    finished_after: tuple[int, ...] = ()
    summed: bool = False

    def delays(self, step: int) -> bool:
        """Return True if the update of this step applies one step later."""
        return self.delayed_from is not None and step >= self.delayed_from and step not in self.finished_after

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters while training."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]


@dataclass
class Trace:
    """Results of training.

    Gradients are full, unclipped and averaged over the global batch; None for a parameter without gradient.

    Attributes:
        losses, grads, norms: `losses[step][rank][micro]`, `grads[step][name]`, `norms[step]`.
        params: master weights after the last step.
        model: values with which the model computes.
        buffers: buffers of rank 0.
    """

    losses: list[list[list[float]]] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def build(specimen: Specimen, rank: int = 0) -> nn.Module:
    """Build the specimen from the seed of rank `rank`."""
    torch.manual_seed(SEED + rank)
    return specimen.build()


def make_optimizer(recipe: Recipe, parameters: list[Any]) -> torch.optim.Optimizer:
    """Return the torch optimizer of the recipe."""
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, recipe.optimizer)
    return kind(parameters, **dict(recipe.optimizer_params))


def train(
    specimen: Specimen,
    recipe: Recipe,
    optimizer_factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    model: nn.Module | None = None,
    *,
    by_rank: bool = False,
) -> Trace:
    """Train the specimen on the global batch of `ranks x accumulation` micro-batches a step.

    The gradient of a step is the mean over all its micro-batches: added in their order, as one process does, or with
    `by_rank` the mean of each rank's mean, as DistributedDataParallel does. Both are plain PyTorch, and they differ by
    rounding. Gradients of a 16-bit model are computed for each micro-batch in 16 bits, widened, and averaged in fp32.
    Clipping and the step use the fp32 mean and fp32 master weights. Master weights start from the values before the
    cast to 16 bits; the model holds a rounded copy. Buffers follow DDP: each rank's forward starts from rank 0's
    buffers.
    """
    model = build(specimen) if model is None else model
    if recipe.precision == "fp32" and recipe.delayed_from is None:
        named = _trainable(model)
        masters = [nn.Parameter(p.detach().float()) if p.dtype != torch.float32 else p for _, p in named]
    else:
        masters = [nn.Parameter(p.detach().float().clone()) for _, p in _trainable(model)]
        model = model.to(recipe.dtype)
        named = _trainable(model)
    optimizer = optimizer_factory(masters) if optimizer_factory else make_optimizer(recipe, masters)
    trace = Trace()
    for step in range(recipe.steps):
        by_place: list[list[Tensor | None]] = [[None] * len(named) for _ in range(recipe.ranks if by_rank else 1)]
        losses: list[list[float]] = [[] for _ in range(recipe.ranks)]
        for micro in range(recipe.accumulation):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            kept: dict[str, Tensor] = {}
            for rank in range(recipe.ranks):
                _restore(model, before)
                losses[rank].append(_micro_batch(model, specimen, recipe, Place(step, micro, rank)))
                parts = recipe.accumulation * (1 if recipe.summed or by_rank else recipe.ranks)
                _move_gradients(named, by_place[rank if by_rank else 0], parts)
                if rank == 0:
                    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            _restore(model, kept)
        means = 1 if recipe.summed else len(by_place)
        sums = [_sum(of_ranks, means) for of_ranks in zip(*by_place, strict=True)]
        trace.losses.append(losses)
        trace.grads.append({name: s for (name, _), s in zip(named, sums, strict=True)})
        _give(named, masters)  # the delayed update of the previous step
        trace.norms.append(_step(masters, sums, optimizer, recipe.clipping))
        if not recipe.delays(step):
            _give(named, masters)
    _give(named, masters)
    trace.params = {name: m.detach().clone() for (name, _), m in zip(named, masters, strict=True)}
    trace.model = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return trace


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _micro_batch(model: nn.Module, specimen: Specimen, recipe: Recipe, place: Place) -> float:
    def backward(loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    batch = cast(specimen.batch(place), recipe.dtype)
    return float(specimen.train(model, batch, backward))


def _move_gradients(named: list[tuple[str, nn.Parameter]], sums: list[Tensor | None], parts: int) -> None:
    """Add each parameter's gradient, weighted by one micro-batch's share, to its fp32 sum, and clear the gradient."""
    for index, (_, parameter) in enumerate(named):
        if parameter.grad is None:
            continue
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        share = gradient.float() / parts
        total = sums[index]
        sums[index] = share if total is None else total + share
        parameter.grad = None


def _sum(parts: tuple[Tensor | None, ...], divisor: int) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return sum(present[1:], present[0]) / divisor if present else None


def _step(
    masters: list[nn.Parameter],
    sums: list[Tensor | None],
    optimizer: torch.optim.Optimizer,
    clipping: float,
) -> float:
    """Clip and update, except parameters without a gradient. Return the norm before clipping."""
    for master, total in zip(masters, sums, strict=True):
        master.grad = None if total is None else total.clone()
    limit = clipping if clipping > 0 else float("inf")
    norm = float(nn.utils.clip_grad_norm_(masters, limit))
    optimizer.step()
    for master in masters:
        master.grad = None
    return norm


def _give(named: list[tuple[str, nn.Parameter]], masters: list[nn.Parameter]) -> None:
    """Copy the master weights into the model."""
    with torch.no_grad():
        for (_, parameter), master in zip(named, masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)


def _restore(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def relative_error(
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    reordered: Mapping[str, Tensor | None] | None = None,
) -> tuple[float, str]:
    """Return the largest relative error of any tensor, and its name.

    The error of a tensor is |found - wanted| / max(|wanted|, rms * sqrt(numel)), with | | the 2-norm and rms that of
    all wanted elements together: relative to the tensor itself, or to a tensor of typical elements if that is larger.
    A tensor present on one side only is an infinite error. `reordered` has the wanted values from sums in another order
    in plain PyTorch. |reordered - wanted|, which is large where terms cancel, is subtracted from the error.
    """
    if found.keys() != wanted.keys():
        return float("inf"), f"names {sorted(found.keys() ^ wanted.keys())} on one side only"
    present = [w for w in wanted.values() if w is not None]
    count = max(1, sum(w.numel() for w in present))
    rms = (sum(float(w.double().square().sum()) for w in present) / count) ** 0.5
    worst, where = 0.0, ""
    for name, want in wanted.items():
        have = found[name]
        if have is None or want is None:
            if (have is None) != (want is None):
                return float("inf"), f"{name}: {'no value' if have is None else 'a value where none is expected'}"
            continue
        if have.shape != want.shape:
            return float("inf"), f"{name}: shape {tuple(have.shape)} where {tuple(want.shape)} is expected"
        if want.numel() == 0:
            continue
        difference = float((have.double() - want.double()).norm())
        if reordered is not None:
            other = reordered[name]
            difference -= 0.0 if other is None else min(difference, float((other.double() - want.double()).norm()))
        error = difference / max(float(want.double().norm()), rms * want.numel() ** 0.5, 1e-30)
        if error != error:
            return float("inf"), f"{name}: NaN"
        if error > worst:
            worst, where = error, name
    return worst, where
