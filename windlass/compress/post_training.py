"""Rounding of a trained model block by block, each with the inputs that the rounded blocks before it compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.comm.rank_group import RankGroup
from windlass.compress.block_calibration import (
    BlockCalibration,
    CalibratedBlock,
    InputStatistics,
    LayerGroup,
    check_batches,
)
from windlass.compress.gptq import ColumnOrder, gptq_codes
from windlass.compress.input_scales import activation_aware_scales, fold_scales, output_error, smoothing_scales
from windlass.compress.integer_grid import IntegerGrid, clipped_grid, half_quadratic_grid, is_integer_format
from windlass.compress.linear_directory import as_linear_directory
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import PackedReport, name_tensors, pack_source, write_packed_directory
from windlass.compress.partial_directory import WrittenTensors
from windlass.compress.rotation import RotatedDirectory
from windlass.compress.sparse_pruning import SPARSITY_METHODS, check_pattern, parse_pattern, sparsify
from windlass.kernels.coded_formats import SAFE_MAGNITUDE, BinaryWeightFormat
from windlass.kernels.weight_format import PackedWeight, WeightFormat, get_weight_format

Method = Literal["rtn", "gptq", "awq", "hqq"]
METHODS = ("rtn", "gptq", "awq", "hqq")
NEEDS_TEXT = ("gptq", "awq")
_FOLD_TOKENS = 4096  # number of tokens for the search of input scales
# Change of a token's output that folded scales may cause: relative to the change that the block makes to the token, and
# relative to the token, whose rounding may be larger. A few tokens of a model may be thousands of times as large as all
# others, whose change would be lost beside them.
_PRESERVED, _ROUNDING = 1e-4, 1e-6

# linear layer -> linear layer of the same parent that produces its inputs: a factor of the second layer's output
# feature i also multiplies the first layer's input feature i
_LINEAR_PRODUCERS = {"down_proj": "up_proj", "o_proj": "v_proj", "w2": "w3"}


@dataclass(frozen=True)
class RoundingOptions:
    """Options of rounding.

    Attributes:
        method: rtn (to nearest, with a search of the clipping range), hqq (half-quadratic, without text), awq (input
            scales, then nearest), gptq (input scales, then each error compensated by later columns).
        smooth: fold scales that take outliers out of the inputs, for int8 inputs. The written configuration then sets
            int8 inputs for all layers with weights of 8-bit integers.
        rotate: rotate the hidden states, and the values of each head, by random Hadamard matrices, folded into the
            weights.
        sparsity: weights to remove before rounding, which stay 0: a share of each row, e.g. 0.5, or n:m, e.g. 2:4;
            None: no weights.
        sparsity_method: magnitude, wanda or sparsegpt.
        activation_order: gptq rounds the columns with the largest inputs first.
        input_scales: search AWQ's input scales before gptq rounds.
    """

    method: Method = "rtn"
    smooth: bool = False
    rotate: bool = False
    sparsity: str | None = None
    sparsity_method: str = "sparsegpt"
    activation_order: bool = True
    input_scales: bool = True

    @property
    def needs_text(self) -> bool:
        return (
            self.method in NEEDS_TEXT
            or self.smooth
            or self.sparsity is not None
            and self.sparsity_method != "magnitude"
        )


@dataclass
class LayerResult:
    """Squared output error of a rounded layer on its calibration inputs, relative to its squared outputs.

    `error` is None if the layer was rounded without calibration inputs.
    """

    name: str
    format: str
    error: float | None


@dataclass
class PostTraining:
    """Producer of the rounded tensors of a model's directory; see `TensorProducer`.

    Args:
        directory: directory of the unquantized model.
        options: method of rounding.
        batches: token ids `[rows, length]` of the calibration text; empty for methods that need no text.
        progress: called after each block or layer with the number of finished layers and of all layers.
        group: ranks that share the text and the layers; None: this rank alone.
        results: error of each layer that was rounded.
    """

    directory: ModelDirectory
    options: RoundingOptions
    batches: Sequence[Tensor] = ()
    progress: Callable[[int, int], None] = lambda done, total: None
    trust_remote_code: bool = False
    group: RankGroup | None = None
    results: list[LayerResult] = field(default_factory=list)
    _ordered: tuple[InputStatistics, ColumnOrder] | None = field(init=False, default=None)

    def __call__(self, layers: Mapping[str, str], partial: WrittenTensors) -> Iterator[tuple[str, PackedWeight]]:
        done = 0
        inside: set[str] = set()
        if self.options.sparsity is not None:
            features = {layer: self.directory.places[f"{layer}.weight"].shape[1] for layer in layers}
            check_pattern(parse_pattern(self.options.sparsity), features)
        if self.batches and self.options.needs_text:
            mine = self.batches if self.group is None else self.batches[self.group.index :: self.group.size]
            calibration = BlockCalibration(self.directory, mine, self.trust_remote_code, self.group)
            inside = {name for number in range(len(calibration.blocks)) for name in calibration.block_tensors(number)}
            calibration.start()
            for number in range(len(calibration.blocks)):
                names = calibration.block_tensors(number)
                if set(names) <= partial.done:
                    block = calibration.block(number, lambda name: self._read_back(partial, layers, name))
                else:
                    block = calibration.block(number, self.directory.read)
                    packed = self._round_block(block, layers)
                    for name in names:
                        yield name, self._tensors(block, name, packed)
                calibration.advance(block)
                done += sum(name.removesuffix(".weight") in layers for name in names)
                self.progress(done, len(layers))
        for name in self.directory.places:
            if name not in inside:
                if name not in partial.done:
                    yield name, pack_source(self.directory, name, layers, self._round_alone)
                done += name.removesuffix(".weight") in layers
                self.progress(done, len(layers))

    def _round_block(self, block: CalibratedBlock, layers: Mapping[str, str]) -> dict[str, PackedWeight]:
        """Return the packed tensors of a block's layers, and replace their weights by the rounded values."""
        with torch.no_grad():
            groups = block.groups()
            if self.options.smooth:
                self._fold(block, groups, layers, smooth=True)
            if self.options.method == "awq" or self.options.method == "gptq" and self.options.input_scales:
                self._fold(block, groups, layers, smooth=False)
            packed: dict[str, PackedWeight] = {}
            for group in groups:
                names = [name for name in group.names if block.layer(name) in layers]
                if not names:
                    continue
                statistics = block.statistics(names[:1])[names[0]]
                for place, name in enumerate(names):
                    layer = block.layer(name)
                    form = get_weight_format(layers[layer])
                    packed[layer] = self._round_shared(place, layer, block.linear(name), form, statistics)
            for name, module in block.module.named_modules():
                layer = block.layer(name)
                if layer in layers and layer not in packed:  # no token of the text reached the layer
                    assert isinstance(module, nn.Linear)
                    packed[layer] = self._round_alone(layer, module.weight, get_weight_format(layers[layer]))
        return packed

    def _round_shared(
        self, place: int, layer: str, linear: nn.Linear, form: WeightFormat, statistics: InputStatistics
    ) -> PackedWeight:
        """Round a layer on one rank and broadcast the result. The number of the rank is `place` modulo the group's
        size."""
        if self.group is None:
            return self._round_layer(layer, linear, form, statistics)
        source = place % self.group.size
        own = self._round_layer(layer, linear, form, statistics) if source == self.group.index else None
        result = self.results[-1] if own is not None else None
        packed, found = self.group.broadcast_object((own, result), source)
        assert packed is not None and found is not None
        if own is None:
            self.results.append(found)
            linear.weight = nn.Parameter(form.unpack(packed).float(), requires_grad=False)
        return packed

    def _round_layer(
        self, layer: str, linear: nn.Linear, form: WeightFormat, statistics: InputStatistics
    ) -> PackedWeight:
        weight = linear.weight.detach()
        self._check_finite(layer, weight)
        kept, stays = weight, None
        if self.options.sparsity is not None:
            pattern = parse_pattern(self.options.sparsity)
            kept = sparsify(weight, pattern, self.options.sparsity_method, statistics.hessian, layer)
            stays = kept != 0
        if not is_integer_format(form):
            packed = form.pack(kept)
            values = form.unpack(packed).float()
        elif self.options.method == "gptq":
            grid, codes = gptq_codes(form, kept, self._column_order(statistics), stays)
            packed, values = grid.pack(codes), grid.values(codes)
        else:
            grid = self._grid(form, kept, statistics.hessian.diagonal().float())
            codes = grid.codes(kept)  # the code of 0 is exact, so weights that are 0 stay so
            packed, values = grid.pack(codes), grid.values(codes)
        scale = output_error(weight, statistics.hessian)
        error = output_error(values - weight, statistics.hessian)
        self.results.append(LayerResult(layer, form.name, error / scale if scale else 0.0))
        linear.weight = nn.Parameter(values.float(), requires_grad=False)
        return packed

    def _check_finite(self, layer: str, weight: Tensor) -> None:
        if not bool(torch.isfinite(weight).all()):
            raise ModelError(
                f"the weight of layer {layer!r} of {self.directory.path} has values that are not finite; give a model "
                "that computes numbers"
            )

    def _column_order(self, statistics: InputStatistics) -> ColumnOrder:
        """Return the order of columns for an input. It is computed once for all layers with this input."""
        if self._ordered is None or self._ordered[0] is not statistics:
            order = ColumnOrder.of(statistics.hessian, activation_order=self.options.activation_order)
            self._ordered = statistics, order
        return self._ordered[1]

    def _round_alone(self, layer: str, weight: Tensor, form: WeightFormat) -> PackedWeight:
        """Pack a layer without calibration inputs."""
        self._check_finite(layer, weight)
        self.results.append(LayerResult(layer, form.name, None))
        if self.options.sparsity is not None:
            # without inputs only `magnitude` is possible
            weight = sparsify(weight.float(), parse_pattern(self.options.sparsity), "magnitude", name=layer)
        if not is_integer_format(form):
            return form.pack(weight)
        form.pack(weight[:0])  # the format's checks of dtype and shape
        wide = weight.float()
        grid = self._grid(form, wide, None)
        return grid.pack(grid.codes(wide))

    def _grid(self, form: WeightFormat, weight: Tensor, importance: Tensor | None) -> IntegerGrid:
        if self.options.method == "hqq":
            return half_quadratic_grid(form, weight)
        return clipped_grid(form, weight, importance)

    def _fold(
        self, block: CalibratedBlock, groups: Sequence[LayerGroup], layers: Mapping[str, str], *, smooth: bool
    ) -> None:
        """Fold scales of the inputs into the preceding modules, if that preserves the block's function. One
        measurement of the inputs serves all groups, because each accepted fold preserves the function."""
        groups = [group for group in groups if _producer(block.module, group) is not None]
        if not groups:
            return
        measured = block.statistics([group.names[0] for group in groups], tokens=_FOLD_TOKENS)
        output: Tensor | None = None  # block's output for its first batch; accepted folds do not change it
        for group in groups:
            producer = _producer(block.module, group)
            assert producer is not None
            consumers = [block.linear(name) for name in group.names]
            forms = [get_weight_format(layers[layer]) for layer in map(block.layer, group.names) if layer in layers]
            if len(forms) < len(consumers) or not all(map(is_integer_format, forms)):
                continue
            if any(map(block.is_shared, [producer, *consumers])):
                continue  # another module has the same weight, and scales would change its function
            statistics = measured[group.names[0]]
            weights = [consumer.weight.detach() for consumer in consumers]
            if smooth:
                scales = smoothing_scales(statistics.largest, weights)
            else:
                scales, before, after = activation_aware_scales(statistics.mean, weights, forms, statistics.hessian)
                if after >= before:
                    continue
            output = block.run(0) if output is None else output
            _fold_if_preserved(block, producer, consumers, scales, output, self.group)

    def _read_back(self, partial: WrittenTensors, layers: Mapping[str, str], name: str) -> Tensor:
        """Return a tensor of a complete block as float32; a packed weight is unpacked. Collective over `group`."""
        found = partial.read(name) if self.group is None or self.group.index == 0 else None
        tensors = found if self.group is None else self.group.broadcast_object(found)
        assert tensors is not None
        layer = name.removesuffix(".weight")
        if layer == name or layer not in layers:
            return tensors[name].float()
        packed = {part.removeprefix(f"{layer}."): tensor for part, tensor in tensors.items()}
        return get_weight_format(layers[layer]).unpack(packed).float()

    def _tensors(self, block: CalibratedBlock, name: str, packed: Mapping[str, PackedWeight]) -> PackedWeight:
        """Return the tensors to write for the source tensor `name` of the block."""
        layer = name.removesuffix(".weight")
        if layer in packed and layer != name:
            return name_tensors(layer, packed[layer])
        if name not in block.places:  # the source is a part of a tensor of the model; no method changes it
            return {name: self.directory.read(name)}
        inner, place = block.places[name].removeprefix(f"{block.prefix}."), self.directory.places[name]
        owner, _, leaf = inner.rpartition(".")
        module = block.module.get_submodule(owner)
        value: Tensor | None = module._buffers[leaf] if leaf in module._buffers else module._parameters[leaf]
        assert value is not None
        stored = value.detach().to(place.dtype)
        value.data.copy_(stored)  # later blocks are calibrated with the values in the file
        return {name: stored}


def _producer(module: nn.Module, group: LayerGroup) -> nn.Module | None:
    """Return the module whose outputs can be scaled in place of a group's inputs; None: there is no such module."""
    if group.producer is not None:
        return module.get_submodule(group.producer)
    if len(group.names) != 1:
        return None
    owner, _, leaf = group.names[0].rpartition(".")
    parent = module.get_submodule(owner)
    source = getattr(parent, _LINEAR_PRODUCERS.get(leaf, ""), None) if leaf in _LINEAR_PRODUCERS else None
    consumer = getattr(parent, leaf)
    fits = type(source) is nn.Linear and source.out_features == consumer.in_features
    return source if fits else None


def _fold_if_preserved(
    block: CalibratedBlock,
    producer: nn.Module,
    consumers: Sequence[nn.Linear],
    scales: Tensor,
    before: Tensor,
    group: RankGroup | None = None,
) -> bool:
    """Fold scales into weights. Return True if the scales stay folded.

    The fold is undone if it changes the block's output for its first batch (e.g. since a norm adds 1 to its weight), if
    no rank's first batch reaches the layers, or if a weight becomes too large for some format.
    """
    modules = [producer, *consumers]
    saved = [{name: p.detach().clone() for name, p in module.named_parameters(recurse=False)} for module in modules]
    fold_scales(producer, consumers, scales)
    # sizes of the inputs; if all are 0 (an expert without tokens), an equal output proves nothing
    elements: list[int] = []
    handle = consumers[0].register_forward_pre_hook(lambda module, inputs: elements.append(inputs[0].numel()))
    try:
        change = (block.run(0) - before).abs().amax(-1)
    finally:
        handle.remove()
    own = before - block.hidden[0] if before.shape == block.hidden[0].shape else before
    allowed = _PRESERVED * own.abs().amax(-1) + _ROUNDING * before.abs().amax(-1)
    worst = (change / allowed.clamp(min=1e-12)).max()
    found = torch.stack([worst, worst.new_tensor(float(any(elements)))])
    if group is not None:
        group.all_reduce(found, dist.ReduceOp.MAX)
    largest = max(float(module.get_parameter("weight").abs().max()) for module in modules)
    if bool(found[0] <= 1) and bool(found[1]) and largest <= SAFE_MAGNITUDE:
        return True
    for module, values in zip(modules, saved, strict=True):
        for name, value in values.items():
            module.get_parameter(name).data.copy_(value)
    return False


def compress_directory(
    source: str | Path,
    target: str | Path,
    formats: str | Callable[[str], str | None],
    options: RoundingOptions | None = None,
    *,
    batches: Sequence[Tensor] = (),
    head: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    trust_remote_code: bool = False,
    group: RankGroup | None = None,
    wide_dtype: torch.dtype | None = None,
) -> tuple[PackedReport, list[LayerResult]]:
    """Write the model of `source` with packed linear layers, rounded by a method of `RoundingOptions`, to `target`.

    With a text, one block is in memory at a time, in float32, with the hidden states of the text; without, one layer.
    An interrupted call continues with the first block or layer that is not complete.

    Args:
        formats, head, overwrite, wide_dtype: as for `write_packed_directory`.
        batches: token ids `[rows, length]` of text, all of one shape.
        progress: called with the number of finished layers and of all layers.
        group: ranks that make the same call, e.g. `world_group()`: each runs its share of the text and rounds its share
            of the layers; the first one writes the directory.

    Returns:
        Sizes, and the error of each layer that this call rounded.

    Raises:
        ConfigError: an option is wrong, the method needs text and `batches` is empty, or there are fewer batches than
            ranks.
        ModelError, WeightFormatError: as for `write_packed_directory`, the model cannot be rotated, or `batches` are
            not token ids of one shape.
    """
    chosen = options or RoundingOptions()
    if chosen.method not in METHODS:
        raise ConfigError(f"method is {chosen.method!r}; write one of {', '.join(METHODS)}")
    if chosen.sparsity is not None:
        parse_pattern(chosen.sparsity)
        if chosen.sparsity_method not in SPARSITY_METHODS:
            raise ConfigError(
                f"sparsity_method is {chosen.sparsity_method!r}; it is one of {', '.join(SPARSITY_METHODS)}"
            )
        if isinstance(formats, str) and not has_zero(formats):
            raise ConfigError(
                f"sparsity is {chosen.sparsity!r}, and format {formats!r} has no code for 0; choose another format"
            )
    if chosen.needs_text and not batches:
        if chosen.method in NEEDS_TEXT:
            what, instead = f"method {chosen.method}", "use method hqq or rtn"
        elif chosen.smooth:
            what, instead = "smoothing of int8 activations", "leave the activations float"
        else:
            what, instead = f"sparsity_method {chosen.sparsity_method}", "use magnitude"
        raise ConfigError(f"{what} needs a calibration text; give some, or {instead}")
    if batches:
        check_batches(batches)
    directory = as_linear_directory(ModelDirectory(source), trust_remote_code=trust_remote_code)
    if chosen.rotate:
        directory = RotatedDirectory(directory)
    if group is not None and chosen.needs_text and len(batches) < group.size:
        raise ConfigError(
            f"{len(batches)} batches of text are fewer than {group.size} ranks; give more text, or smaller batches"
        )
    producer = PostTraining(directory, chosen, batches, progress, trust_remote_code, group)
    method: dict[str, Any] = {**asdict(chosen), "text": [fingerprint_tokens(batch) for batch in batches]}
    report = write_packed_directory(
        directory,
        target,
        formats,
        produce=producer,
        method=method,
        head=head,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        group=group,
        rounds_inputs=chosen.smooth,
        wide_dtype=wide_dtype,
    )
    logger.debug("%d layers rounded by %s", len(producer.results), chosen.method)
    return report, producer.results


def has_zero(name: str) -> bool:
    """Return True if a format, given its name, stores weights that are 0 exactly."""
    return not isinstance(get_weight_format(name), BinaryWeightFormat)


def fingerprint_tokens(batch: Tensor) -> str:
    """Return a hash of token ids, by which an interrupted run recognizes its text."""
    return hashlib.sha256(batch.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()[:16]
