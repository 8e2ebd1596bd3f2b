"""Mixture of quantization (MoQ) by DeepSpeed's section `quantize_training`: the number of bits of weights falls while
the model is trained.

[Note: bits by curvature] With `eigenvalue`, each block has a separate schedule. When its bits fall, its next period
is twice as long, times `1 + floor(4 e)`, where `e` is the largest eigenvalue of its Hessian, divided by the largest of
all blocks: a block with a larger curvature keeps its bits longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.base.module_modes import evaluating
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.rank_group import world_group
from windlass.compress.block_curvature import CurvatureRanks, ShiftGradients, largest_eigenvalue
from windlass.compress.compressed_layers import (
    COMPRESSED,
    CompressedLayer,
    CompressionClock,
    LayerCompression,
    WeightRounding,
    replace_class,
)
from windlass.compress.compression_training import CLOCK, compression_clock
from windlass.compress.conv1d_layers import use_linear_class
from windlass.compress.fake_rounding import warn_of_unused_rules
from windlass.compress.fused_encoders import exclude_fused_encoders
from windlass.config.compression_section import Eigenvalue
from windlass.config.quantize_training_section import QuantizeTraining

SCHEDULE = "quantize_training_schedule"  # name of the model's buffer of bits and periods
_PREPARATION = "_windlass_quantize_training"  # name of the model's attribute with its `_Preparation`
_STEPS_OF_FACTOR = 4


def prepare_quantize_training(
    model: nn.Module, section: QuantizeTraining, eigenvalue: Eigenvalue, *, in_stages: bool = False
) -> None:
    """Make the linear layers, convolutions and embeddings of a model round their weights, in place, by the section
    `quantize_training`. Matrices of other modules stay unchanged, with a warning.

    A model that was prepared with other settings gets the new ones. If the section is not enabled, rounding ends.

    Args:
        eigenvalue: section for bits by curvature, if `quantize_training` has no enabled `eigenvalue`.
        in_stages: True if the model runs in the stages of a pipeline; it may have only this rank's stages. Then the
            call is collective if `eigenvalue` is enabled.

    Raises:
        ConfigError: the bits, types or `quantize_change_ratio` are wrong, the groups do not divide a weight, or the
            model does not have the blocks of `eigenvalue`.
    """
    if not section.enabled:
        end_quantize_training(model)
        return
    chosen = section.eigenvalue if section.eigenvalue is not None and section.eigenvalue.enabled else eigenvalue
    bits, schedule, algorithm = section.quantize_bits, section.quantize_schedule, section.quantize_algo
    if not 1 <= bits.target_bits <= bits.start_bits <= 16:
        raise ConfigError(
            f"quantize_training.quantize_bits has start_bits {bits.start_bits} and target_bits {bits.target_bits}; "
            "write 16 at most, and no fewer bits at the start"
        )
    symmetric = (section.quantize_type or algorithm.q_type) == "symmetric"
    if (
        section.quantize_type is not None
        and "q_type" in algorithm.model_fields_set
        and symmetric != (algorithm.q_type == "symmetric")
    ):
        raise ConfigError(
            f"quantize_training.quantize_type is {section.quantize_type!r} and quantize_algo.q_type "
            f"{algorithm.q_type!r}; delete one"
        )
    mixed = section.fp16_mixed_quantize
    if mixed.enabled and not 0 <= mixed.quantize_change_ratio <= 1:
        raise ConfigError(
            f"quantize_training.fp16_mixed_quantize.quantize_change_ratio is {mixed.quantize_change_ratio}; write the "
            "part that a step takes away, from 0 to 1"
        )
    settings = {**section.model_dump(), "eigenvalue": chosen.model_dump()}
    before = model.__dict__.get(_PREPARATION)
    if before is not None and before.settings == settings:
        return
    end_quantize_training(model)
    warn_of_unused_rules(
        bits.target_bits,
        {
            "quantize_training.quantize_type": section.quantize_type or "symmetric",
            "quantize_training.quantize_algo.q_type": algorithm.q_type,
            "quantize_training.quantize_algo.rounding": algorithm.rounding,
        },
    )
    clock = compression_clock(model) or CompressionClock()
    model.__dict__[CLOCK] = clock
    rounding = WeightRounding(
        bits.start_bits,
        bits.target_bits,
        schedule.quantize_period,
        section.quantize_groups,
        symmetric,
        algorithm.rounding == "stochastic",
        schedule.schedule_offset,
        mixed.quantize_change_ratio if mixed.enabled else 0.0,
    )
    layers: dict[str, CompressedLayer] = {}
    use_linear_class(model)
    for name, module in list(model.named_modules()):
        if type(module) in COMPRESSED or isinstance(module, CompressedLayer):
            layer = replace_class(module, LayerCompression(name, clock))
            if layer.compression.weight is not None:
                continue  # the section compression_training rounds this layer
            if layer.weight.numel() % section.quantize_groups:
                raise ConfigError(
                    f"quantize_training.quantize_groups is {section.quantize_groups}, which does not divide the "
                    f"{layer.weight.numel()} weights of {name!r}; write a divisor"
                )
            layer.compression.weight, layers[name] = rounding, layer
    exclude_fused_encoders(model)
    _warn_of_others(model)
    planner = BitPlanner(model, rounding, chosen, layers, in_stages=in_stages) if chosen.enabled else None
    model.__dict__[_PREPARATION] = _Preparation(settings, frozenset(layers), planner)


def _warn_of_others(model: nn.Module) -> None:
    layers = [module for module in model.modules() if isinstance(module, CompressedLayer)]
    rounded = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    others = [name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in rounded]
    if others:
        shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        logger.warning(
            "quantize_training rounds linear layers, convolutions and embeddings; %d matrices of other modules stay as "
            "they are: %s",
            len(others),
            shown,
        )


def bit_planner(model: nn.Module) -> BitPlanner | None:
    """Return the planner of a model whose bits follow curvature; None for any other model."""
    found = model.__dict__.get(_PREPARATION)
    return found.planner if found is not None else None


def has_quantize_training(model: nn.Module) -> bool:
    """Return True if `quantize_training` rounds the weights of a model."""
    return _PREPARATION in model.__dict__


def delay_quantize_training(model: nn.Module, steps: int) -> None:
    """Move the schedule of `quantize_training` to later steps, in place. No effect on other models.

    Args:
        steps: number of steps by which the model's counter of steps is about to jump.
    """
    found = model.__dict__.get(_PREPARATION)
    if found is None:
        return
    for name, module in model.named_modules():
        if name in found.layers and isinstance(module, CompressedLayer) and module.compression.weight is not None:
            rounding = module.compression.weight
            module.compression.weight = replace(rounding, offset=rounding.offset + steps)


def end_quantize_training(model: nn.Module) -> None:
    """End the rounding by `quantize_training`. No effect on other models."""
    found = model.__dict__.pop(_PREPARATION, None)
    if found is None:
        return
    for name, module in model.named_modules():
        if name in found.layers and isinstance(module, CompressedLayer):
            module.compression.weight = module.compression.planned_bits = None
    if found.planner is not None:
        if found.planner.hook is not None:
            found.planner.hook.remove()
        delattr(model, SCHEDULE)


@dataclass(frozen=True)
class _Preparation:
    """Settings by which `quantize_training` rounds some layers of a model, and the planner of their bits."""

    settings: dict[str, Any]
    layers: frozenset[str]
    planner: BitPlanner | None


class BitPlanner:
    """Planner of the number of bits of each block's weights; see [Note: bits by curvature]. The numbers are in a buffer
    of the model, and so in checkpoints.

    Args:
        rounding: rounding of all layers, with the plain schedule.
        options: options of the power iteration, and the name and number of the blocks.
        layers: rounded layers by name. Layers outside of the blocks follow the plain schedule.
        in_stages: True if the ranks of a pipeline have different layers. Then the construction is collective, because
            the ranks agree on the blocks.

    Attributes:
        hook: handle of the hook that records the last batch; None for a pipeline, whose engine stores the batch.

    Raises:
        ConfigError: the model does not have the blocks of `options`.
    """

    def __init__(
        self,
        model: nn.Module,
        rounding: WeightRounding,
        options: Eigenvalue,
        layers: dict[str, CompressedLayer],
        *,
        in_stages: bool = False,
    ) -> None:
        self.options, self._rounding = options, rounding
        prefix = f"{options.layer_name}." if options.layer_name else ""
        blocks: dict[str, list[CompressedLayer]] = {}
        for name, layer in layers.items():
            number = name.removeprefix(prefix).split(".")[0]
            if name.startswith(prefix) and (prefix or number.isdigit()):
                blocks.setdefault(number, []).append(layer)
        numbers = _block_names_of_all_ranks(list(blocks)) if in_stages else list(blocks)
        if not numbers or options.layer_num not in (0, len(numbers)):
            raise ConfigError(
                f"eigenvalue.layer_name is {options.layer_name!r} and layer_num {options.layer_num}, but the model has "
                f"{len(numbers)} blocks with matrices there; write the name of its list of layers, and their number"
            )
        self._blocks = [blocks.get(number, []) for number in numbers]
        start = torch.tensor([rounding.start_bits, rounding.offset + rounding.period, rounding.period])
        model.register_buffer(SCHEDULE, start.repeat(len(numbers), 1))  # integers, which no dtype cast changes
        for place, block in enumerate(self._blocks):
            for layer in block:
                layer.compression.planned_bits = _planned(model, place)
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.hook = None if in_stages else model.register_forward_pre_hook(self._remember, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ModelError("a model whose bits follow eigenvalues cannot be copied; copy it before initialize")

    def keep_stages(self, model: nn.Module, stages: MeshAxis) -> None:
        """Drop the layers that are on other ranks of a pipeline, so that their memory can be freed. Collective.

        Raises:
            ConfigError: several ranks have matrices of one block, so that each would have a part of its gradient.
        """
        present = set(model.modules())
        self._blocks = [[layer for layer in block if layer in present] for block in self._blocks]
        holders = zip(*stages.all_gather_object([bool(block) for block in self._blocks]), strict=True)
        split = next((place for place, held in enumerate(holders) if sum(held) > 1), None)
        if split is not None:
            raise ConfigError(
                f"eigenvalue.enabled is true, but block {split} of {self.options.layer_name!r} shares a module with a "
                "block on another rank of the pipeline; set parallel.pp to 1, or eigenvalue.enabled to false"
            )

    def end_step(
        self,
        model: nn.Module,
        step: int,
        ranks: CurvatureRanks | None = None,
        gradients: ShiftGradients | None = None,
    ) -> None:
        """Lower the bits of the blocks whose period has ended. Collective over the ranks of the model.

        Does nothing if `gas_boundary_resolution` does not divide `step`, or before a batch was recorded.

        Args:
            step: number of steps taken.
            ranks: ranks over which curvature is measured; None: this rank alone.
            gradients: function that returns the gradients of the loss of the last micro-batch over all stages of a
                pipeline; None: the model runs in one forward.
        """
        schedule = model.get_buffer(SCHEDULE)
        due = (schedule[:, 1] <= step) & (schedule[:, 0] > self._rounding.target_bits)
        has_batch = gradients is not None or self._call is not None
        if not bool(due.any()) or step % self.options.gas_boundary_resolution or not has_batch:
            return
        values = self.eigenvalues(model, ranks, gradients)
        largest = max(map(abs, values)) or 1.0
        for place in due.nonzero().flatten().tolist():
            factor = 1 + math.floor(_STEPS_OF_FACTOR * abs(values[place]) / largest)
            period = 2 * int(schedule[place, 2]) * factor
            schedule[place] = torch.tensor([int(schedule[place, 0]) - 1, step + period, period])

    def eigenvalues(
        self,
        model: nn.Module,
        ranks: CurvatureRanks | None = None,
        gradients: ShiftGradients | None = None,
    ) -> list[float]:
        """Return the largest eigenvalue of each block's Hessian, on the samples of the last forward. Collective."""
        options, device = self.options, model.get_buffer(SCHEDULE).device
        with evaluating(model):
            return [
                largest_eigenvalue(
                    block,
                    gradients or partial(self._gradients_of_one_forward, model),
                    device,
                    steps=options.max_iter,
                    tolerance=options.tol,
                    stability=options.stability,
                    ranks=ranks,
                )
                for block in self._blocks
            ]

    def _gradients_of_one_forward(self, model: nn.Module, shifts: Sequence[Tensor]) -> Sequence[Tensor | None]:
        assert self._call is not None
        args, kwargs = self._call
        return torch.autograd.grad(_loss_of(model(*args, **kwargs)).float(), list(shifts), allow_unused=True)

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            self._call = (args, kwargs)


def _block_names_of_all_ranks(local: list[str]) -> list[str]:
    """Return the names of the blocks of all ranks, in the order of the model. Collective."""
    of_ranks = world_group().all_gather_object(local)
    names = list(dict.fromkeys(chain.from_iterable(of_ranks)))
    return sorted(names, key=int) if all(name.isdigit() for name in names) else names


def plan_bits_of_stages(model: nn.Module, stages: MeshAxis) -> None:
    """Update the planner of bits after a model was split into the stages of a pipeline. Collective.

    Raises:
        ConfigError: several ranks have matrices of one block.
    """
    planner = bit_planner(model)
    if planner is not None and stages.size > 1:
        planner.keep_stages(model, stages)


def _planned(model: nn.Module, place: int) -> Callable[[], int]:
    return lambda: int(model.get_buffer(SCHEDULE)[place, 0])


def _loss_of(output: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    found = found[0] if isinstance(found, tuple | list) else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ModelError(
            "eigenvalue needs a model whose forward returns the loss: a scalar, or an object with .loss; return it, or "
            "write eigenvalue.enabled false"
        )
    return found
