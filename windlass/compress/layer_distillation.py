"""Rounding that is learned block by block: each block is distilled from its unquantized weights (LKD).

[Note: learned rounding] ZeroQuant (Yao et al. 2022, arXiv:2206.01861) distills one layer at a time, so that memory
holds one layer and the states of its distillation. Here the scales of the first rounding stay, and the code of
each weight is learned: a number between the neighbouring codes, rounded in the forward, that moves by the sign of its
gradient (Cheng et al. 2023, SignRound, arXiv:2309.05516). The loss is the squared difference
of the block's output from its output with unquantized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from windlass.base.errors import ConfigError
from windlass.compress.block_calibration import CalibratedBlock, check_batches
from windlass.compress.fake_rounding import straight_through
from windlass.compress.integer_grid import IntegerGrid
from windlass.compress.linear_directory import as_linear_directory
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import PackedReport, write_packed_directory
from windlass.compress.post_training import PostTraining, RoundingOptions, fingerprint_tokens
from windlass.kernels.coded_formats import IntegerWeightFormat
from windlass.kernels.weight_format import PackedWeight, get_weight_format

_REACH = 1.0  # largest distance of a learned code from the unquantized value, in codes
_EVALUATIONS = 4  # approximate number of evaluations of the loss over all text while codes are learned


@dataclass(frozen=True)
class LayerDistillationOptions:
    """Options for the training of each block.

    Attributes:
        steps: number of steps for each block; each step uses one batch of the text.
        rate: change of each code in the first step, in codes. It falls linearly to 0. None: `1 / steps`.
        seed: seed of the order of batches.
    """

    steps: int = 200
    rate: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class BlockResult:
    """Loss of a block before and after learning: the mean squared difference of its output from the unquantized output,
    divided by the latter's mean square.
    """

    name: str
    before: float
    after: float


@dataclass
class _LearnedCodes:
    """Codes of one layer while they are learned.

    Attributes:
        place: unquantized weights in units of codes, float32.
        learned: trained values, which begin near `place`.
    """

    name: str
    grid: IntegerGrid
    place: Tensor
    learned: Tensor

    def codes(self) -> Tensor:
        return self.learned.detach().round().clamp(self.grid.low, self.grid.high)

    def weight(self) -> Tensor:
        """Return the rounded weight. The gradient passes to `learned` as if the codes were not rounded."""
        bounded = self.learned.clamp(self.grid.low, self.grid.high)
        return self.grid.values(straight_through(bounded, bounded.detach().round()))

    def move(self, gradient: Tensor, size: float) -> None:
        with torch.no_grad():
            self.learned.sub_(size * gradient.sign())
            self.learned.copy_(torch.minimum(torch.maximum(self.learned, self.place - _REACH), self.place + _REACH))


@dataclass
class LayerDistillation(PostTraining):
    """Producer of a packed directory whose codes are learned block by block; see [Note: learned rounding]."""

    distillation: LayerDistillationOptions = field(default_factory=LayerDistillationOptions)
    blocks: list[BlockResult] = field(default_factory=list)

    def _round_block(self, block: CalibratedBlock, layers: Mapping[str, str]) -> dict[str, PackedWeight]:
        chosen = [name for name, _ in block.module.named_modules() if _is_chosen(block, name, layers)]
        wide = {name: block.linear(name).weight.detach() for name in chosen}
        with torch.no_grad():
            targets = [block.run(batch) for batch in range(len(block.hidden))]
        packed = super()._round_block(block, layers)
        learned = [_start(block, name, weight, packed, layers) for name, weight in wide.items()]
        if learned and self.distillation.steps:
            self._learn(block, targets, learned)
            for one in learned:
                codes = one.codes()
                packed[block.layer(one.name)] = one.grid.pack(codes)
                block.linear(one.name).weight = torch.nn.Parameter(one.grid.values(codes), requires_grad=False)
        return packed

    def _learn(self, block: CalibratedBlock, targets: Sequence[Tensor], learned: Sequence[_LearnedCodes]) -> None:
        """Train the codes of a block, and keep those of the evaluation with the least loss over all text."""
        options, generator = self.distillation, torch.Generator().manual_seed(self.distillation.seed)
        rate = 1 / options.steps if options.rate is None else options.rate
        first = least = _mean_loss(block, targets, learned)
        best = [one.learned.detach().clone() for one in learned]
        every = max(1, options.steps // _EVALUATIONS)
        for step in range(options.steps):
            batch = int(torch.randint(len(targets), (1,), generator=generator))
            with torch.enable_grad():
                loss = _loss(block, batch, targets[batch], learned)
                gradients = torch.autograd.grad(loss, [one.learned for one in learned], allow_unused=True)
            for one, gradient in zip(learned, gradients, strict=True):
                if gradient is not None:  # None: the batch does not reach the layer, e.g. in an expert
                    one.move(gradient, rate * (1 - step / options.steps))
            if (step + 1) % every == 0 or step + 1 == options.steps:
                found = _mean_loss(block, targets, learned)
                if found < least:
                    least, best = found, [one.learned.detach().clone() for one in learned]
        for one, values in zip(learned, best, strict=True):
            one.learned = values
        self.blocks.append(BlockResult(block.prefix, first, least))


def distil_directory(
    source: str | Path,
    target: str | Path,
    formats: str | Callable[[str], str | None],
    options: RoundingOptions | None = None,
    distillation: LayerDistillationOptions | None = None,
    *,
    batches: Sequence[Tensor] = (),
    head: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    trust_remote_code: bool = False,
    wide_dtype: torch.dtype | None = None,
) -> tuple[PackedReport, list[BlockResult]]:
    """Write the model of `source` with packed linear layers, whose codes are learned, to `target`.

    One block is in memory at a time, in float32, with the text's hidden states before and after it. An interrupted call
    continues with the first block that is not complete. Layers whose format is not an `IntegerWeightFormat`, e.g.
    `int8`, keep the rounding of `options`.

    Args:
        options: rounding that gives the initial codes; None: GPTQ without input scales.
        formats, batches, head, overwrite, progress, wide_dtype: as for `compress_directory`.

    Returns:
        Sizes, and the loss of each block that this call rounded.

    Raises:
        ConfigError: there is no text, or `options` need no text or change the weights before they are rounded.
        ModelError, WeightFormatError: as for `compress_directory`.
    """
    start = options or RoundingOptions("gptq", input_scales=False)
    chosen = distillation or LayerDistillationOptions()
    if not batches:
        raise ConfigError("layer-by-layer distillation needs a calibration text; give some, or use method hqq")
    check_batches(batches)
    folds = start.smooth or start.rotate or start.method == "awq" or (start.method == "gptq" and start.input_scales)
    if folds or not start.needs_text or start.sparsity is not None:
        raise ConfigError(
            f"layer-by-layer distillation begins with gptq without input_scales, not with {asdict(start)}; pass "
            'RoundingOptions("gptq", input_scales=False)'
        )
    directory = as_linear_directory(ModelDirectory(source), trust_remote_code=trust_remote_code)
    producer = LayerDistillation(directory, start, batches, progress, trust_remote_code, distillation=chosen)
    learning = {f"lkd_{name}": value for name, value in asdict(chosen).items()}
    method = {**asdict(start), **learning, "text": [fingerprint_tokens(batch) for batch in batches]}
    report = write_packed_directory(
        directory,
        target,
        formats,
        produce=producer,
        method=method,
        head=head,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        wide_dtype=wide_dtype,
    )
    return report, producer.blocks


def _is_chosen(block: CalibratedBlock, name: str, layers: Mapping[str, str]) -> bool:
    format_name = layers.get(block.layer(name))
    return format_name is not None and isinstance(get_weight_format(format_name), IntegerWeightFormat)


def _start(
    block: CalibratedBlock, name: str, weight: Tensor, packed: Mapping[str, PackedWeight], layers: Mapping[str, str]
) -> _LearnedCodes:
    layer = block.layer(name)
    form = get_weight_format(layers[layer])
    assert isinstance(form, IntegerWeightFormat)
    coded = form.unpack_codes(packed[layer])
    scale = coded.scale.float()
    zero = torch.full_like(scale, form.zero) if coded.zero is None else coded.zero.float()
    grid = IntegerGrid(form, 0, 2**form.bits - 1, form.group or max(weight.shape[1], 1), scale, zero)
    columns = weight.shape[1]
    steps = grid.spread(torch.where(scale > 0, scale, torch.ones_like(scale)), columns)
    place, codes = weight / steps + grid.spread(zero, columns), coded.codes.float()
    inside = (place - codes).clamp(-0.45, 0.45)  # so that `learned` is rounded to the codes of the method at first
    return _LearnedCodes(name, grid, place, (codes + inside).requires_grad_())


def _loss(block: CalibratedBlock, batch: int, target: Tensor, learned: Sequence[_LearnedCodes]) -> Tensor:
    weights = {f"{one.name}.weight": one.weight() for one in learned}
    positional, arguments = block.calls[batch]
    out = torch.func.functional_call(block.module, weights, (block.hidden[batch], *positional), arguments)
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return (found - target).square().mean() / target.square().mean().clamp(min=1e-30)


def _mean_loss(block: CalibratedBlock, targets: Sequence[Tensor], learned: Sequence[_LearnedCodes]) -> float:
    with torch.no_grad():
        losses = [_loss(block, batch, target, learned) for batch, target in enumerate(targets)]
    return float(torch.stack(losses).mean())
