"""Sparse pruning by the product of weights and gradients, in steps: `snip_momentum`.

[Note: SNIP scores] The score of a weight is `|w * dL/dw|` (Lee et al. 2019, arXiv:1810.02340), divided by
the layer's mean and averaged over steps with momentum. The gradient is that of the masked weight, so that a removed
weight may return until the schedule ends. Each layer removes its share, by blocks of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.comm.mesh import Mesh
from windlass.comm.rank_group import RankGroup
from windlass.compress.compressed_layers import CompressedLayer, Pruning, mask_name
from windlass.compress.fake_rounding import top_share
from windlass.parallel.experts import sharded_expert_modules

_MOMENTUM = 0.9
MOMENTUM_BUFFER = "sparse_pruning_momentum"


def read_block_pattern(pattern: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a block, e.g. 4 and 1 for `4x1`. The configuration has checked the
    pattern."""
    outputs, _, inputs = pattern.partition("x")
    return int(outputs), int(inputs)


def check_blocks(layer: CompressedLayer, pruning: Pruning) -> None:
    """Check that blocks divide a layer's weight.

    Raises:
        ConfigError: blocks do not divide the outputs or the inputs.
    """
    rows, columns = len(layer.weight), layer.weight.numel() // max(len(layer.weight), 1)
    if rows % pruning.block[0] or columns % pruning.block[1]:
        raise ConfigError(
            f"sparse_pruning.shared_parameters.block_pattern is {pruning.block[0]}x{pruning.block[1]}, which does not "
            f"divide the {rows} outputs and {columns} inputs of {layer.compression.name!r}; write 1x1, or a divisor"
        )


def snip_layers(model: nn.Module) -> Iterator[tuple[CompressedLayer, Pruning]]:
    """Yield the layers that `snip_momentum` prunes, each with its `Pruning`."""
    for module in model.modules():
        if isinstance(module, CompressedLayer):
            pruning = module.compression.prunings.get("sparse")
            if pruning is not None and pruning.method == "snip_momentum":
                yield module, pruning


def drop_products(model: nn.Module) -> None:
    """Drop the products of weights and gradients that the layers recorded in a step that failed."""
    for layer, _ in snip_layers(model):
        layer.take_products()


def update_masks(model: nn.Module, step: int, mesh: Mesh | None = None, *, applied: bool = True) -> None:
    """Add a step's products of weights and gradients to the scores. Compute new masks at the steps of the schedule.

    Collective.

    A layer with products that are not finite keeps its scores, with a warning.

    Args:
        step: number of optimizer steps taken, including the one whose products are added.
        mesh: mesh of the model. Products are summed over the data-parallel ranks of a layer (for an expert, its expert
            data-parallel ranks), because each rank has the products of other samples. None: no reduction.
        applied: False after a step that was skipped, e.g. for an overflow under fp16: its products are dropped.
    """
    of_experts = set(sharded_expert_modules(model))
    for layer, pruning in snip_layers(model):
        product = layer.take_products()
        taken = step - 1  # steps that were taken before the forward of these products
        # The schedule counts skipped steps too, so that the last mask is computed.
        if not pruning.offset <= taken <= max(pruning.offset, pruning.end):
            continue
        with torch.no_grad():
            if applied:
                data = None if mesh is None else mesh.experts if layer in of_experts else mesh.dense
                _add_to_score(layer, product, taken, None if data is None else data.data)
            last = taken >= pruning.end
            if last or (taken - pruning.offset) % pruning.stride == 0:
                score, share = layer.get_buffer(MOMENTUM_BUFFER), dense_share(pruning, taken)
                layer.get_buffer(mask_name(pruning)).copy_(_block_mask(score, pruning.block, share))


def _add_to_score(layer: CompressedLayer, product: Tensor | None, step: int, group: RankGroup | None) -> None:
    score, sharded = layer.get_buffer(MOMENTUM_BUFFER), layer.compression.sharded
    local = layer.weight.shape if product is None else product.shape
    values = torch.zeros(local, device=score.device) if product is None else product
    if group is not None and group.size > 1:
        group.all_reduce(values)
    if sharded is not None:
        values = sharded.gather(values, sharded.dim)
    values = values.abs()
    mean = values.mean()
    if not bool(mean.isfinite()):  # e.g. an overflow: the script's gradient scaler has skipped this step
        logger.warning(
            "sparse_pruning: step %d has products of weights and gradients that are not finite in %r; its scores stay",
            step,
            layer.compression.name,
        )
        return
    score.mul_(_MOMENTUM).add_(values / mean.clamp(min=1e-30))


def dense_share(pruning: Pruning, step: int) -> float:
    """Return the share of weights that stays at a step. It falls by a cubic rule (Zhu and Gupta 2017,
    arXiv:1710.01878)."""
    span = pruning.end - pruning.offset
    passed = 1.0 if span <= 0 else min(1.0, max(0.0, (step - pruning.offset) / span))
    return pruning.dense_ratio + (1 - pruning.dense_ratio) * (1 - passed) ** 3


def _block_mask(score: Tensor, block: tuple[int, int], share: float) -> Tensor:
    flat = score.flatten(1)
    rows, columns = flat.shape[0] // block[0], flat.shape[1] // block[1]
    sums = flat.view(rows, block[0], columns, block[1]).sum((1, 3))
    kept = top_share(sums, min(1.0, math.ceil(share * sums.numel()) / sums.numel()))
    spread = kept.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread.view(score.shape) > 0
