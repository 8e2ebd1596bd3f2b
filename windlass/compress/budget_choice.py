"""Choice of a weight format for each layer under a budget: measured losses and times, and a knapsack.

[Note: checked budget] The knapsack adds up the losses of single groups, so the loss of its choice is measured once more
for all groups together. Unless the measured loss is just within its limit, the limit is divided by the ratio of the
measured loss to the sum, and the knapsack is solved again. If a uniform format of no more bytes has a lower loss, that
format is taken. If no choice of the knapsack is within the limit of the loss, the uniform formats within the other
limits are measured before the budget is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from windlass.base.errors import ConfigError
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.compression_budget import CompressionBudget
from windlass.compress.format_choice import FormatLimits, FormatOption, UnmetLimitError, choose_formats, total
from windlass.compress.format_speed import measure_product
from windlass.compress.layer_sensitivity import InputGroup, SensitivityMeter, mean_nats, sample_tokens
from windlass.compress.model_directory import ModelDirectory
from windlass.kernels.coded_formats import SAFE_MAGNITUDE
from windlass.kernels.weight_format import get_weight_format

BUDGET_FORMATS = ("int8", "int4_g32", "int4_g64", "int4_g128", "int3_g64", "int3_g128")
FORCED_FORMATS = ("int2_g32", "int2_g64")
ANCHOR_FORMAT = "int4_g128"
_REPAIRS = 4


@dataclass(frozen=True)
class TokenTimes:
    """Measured seconds per generated token, of the whole model.

    Attributes:
        wide: seconds of the unquantized model.
        anchor: seconds of the model with all layers and the head in `ANCHOR_FORMAT`.
    """

    wide: float
    anchor: float


@dataclass(frozen=True)
class GroupChoice:
    """Chosen format of the layers with a common input.

    Attributes:
        names: names of the layers in the files.
        format: name of the format; None if the layers stay unquantized.
        wide_bytes, nbytes: bytes of their weights before and after.
        loss: loss in bits per byte, of this group alone.
        seconds: seconds of the products for one token; 0: not measured.
    """

    names: tuple[str, ...]
    format: str | None
    wide_bytes: int
    nbytes: int
    loss: float
    seconds: float = 0.0


@dataclass
class BudgetChoice:
    """Chosen formats of all layers, with their predicted figures.

    Attributes:
        groups: choices in the order of the model.
        nbytes: bytes of all tensors of the file.
        loss: increase of the bits per byte, measured with weights rounded to nearest on calibration text.
        seconds: seconds of a generated token; None: not measured.
        uniform: the best uniform format of no more bytes, and its loss; None: there is none.
        tokens: number of tokens of each measurement.
        gap: bound of the excess of the knapsack's loss, or bytes, above the least, as a share; 0: it is the least.
    """

    groups: list[GroupChoice]
    nbytes: int
    loss: float
    seconds: float | None = None
    uniform: tuple[str, float] | None = None
    tokens: int = 0
    gap: float = 0.0
    formats: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.formats = {name: one.format for one in self.groups if one.format for name in one.names}


def choose_for_budget(
    model: Any,
    directory: ModelDirectory,
    batches: Sequence[Tensor],
    budget: CompressionBudget,
    *,
    bits_per_nat: float,
    formats: Sequence[str] = BUDGET_FORMATS,
    head: bool = False,
    before: int | None = None,
    seconds: float = 40.0,
    times: TokenTimes | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    losses: Callable[[Callable[[], list[dict[str, float]]]], list[dict[str, float]]] = lambda compute: compute(),
) -> BudgetChoice:
    """Choose a format for every layer of a model; see [Note: checked budget].

    Args:
        model: model of the directory, in memory in float32.
        batches: token ids `[rows, length]` of the calibration text.
        bits_per_nat: factor from nats per token to bits per byte.
        before: bytes that `budget.size` is relative to; None: those of the directory.
        seconds: approximate time for the measurements of the losses.
        times: times of a token; needed if speed or latency is limited.
        losses: returns the losses of each group in each format, in nats per token. It calls the given function, which
            measures them, or returns stored ones.

    Raises:
        ConfigError: the budget cannot be met. The message has the nearest one that can.
    """
    rows = sample_tokens(model, batches)
    bits_before = mean_nats(model, rows) * bits_per_nat
    meter = SensitivityMeter(model, rows, head=head)
    meter.limit_time(len(formats), seconds)
    names = CheckpointNames(model, directory.places).source_of
    groups = [
        group
        for group in meter.groups
        if all(f"{name}.weight" in names and _has_scales(model.get_submodule(name)) for name in group.names)
    ]
    meter.groups = groups
    files = [tuple(names[f"{name}.weight"].removesuffix(".weight") for name in group.names) for group in groups]
    wide = [sum(_file_bytes(directory, name) for name in one) for one in files]
    total_bytes = sum(_bytes(place.shape, place.dtype.itemsize) for place in directory.places.values())
    fixed, before = total_bytes - sum(wide), before or total_bytes
    products = _Products(model, groups, times)
    options = [
        [
            FormatOption(None, size, 0.0, products.seconds(group, None)),
            *(
                FormatOption(
                    name,
                    sum(_packed_bytes(directory, layer, name) for layer in layers),
                    0.0,
                    products.seconds(group, name),
                )
                for name in formats
            ),
        ]
        for group, layers, size in zip(groups, files, wide, strict=True)
    ]
    solver = _Solver(meter, groups, options, budget, fixed, before, bits_before, bits_per_nat, products)
    solver.check_bytes_and_time()  # before the losses are measured, which takes the most time
    measured = losses(lambda: meter.sensitivities(formats, progress))
    for one, found in zip(options, measured, strict=True):
        one[1:] = [replace(option, loss=found[str(option.name)]) for option in one[1:]]
    solution = solver.solve()
    chosen, uniform = solution.places, solution.uniform
    least = total(options, chosen, "nbytes" if budget.size is None and times is None else "loss")
    choices = [
        GroupChoice(
            layers, one[place].name, size, one[place].nbytes, one[place].loss * bits_per_nat, one[place].seconds
        )
        for layers, one, place, size in zip(files, options, chosen, wide, strict=True)
    ]
    return BudgetChoice(
        choices,
        fixed + int(total(options, chosen, "nbytes")),
        solution.nats * bits_per_nat,
        products.token_seconds(total(options, chosen, "seconds")),
        None if uniform is None else (uniform[0], uniform[1] * bits_per_nat),
        meter.tokens,
        solution.gap / least if solution.gap else 0.0,
    )


def _has_scales(layer: nn.Module) -> bool:
    """Return True if every format has scales for the weights of a layer."""
    return float(layer.get_parameter("weight").detach().abs().max()) <= SAFE_MAGNITUDE


def _bytes(shape: Sequence[int], itemsize: int) -> int:
    return math.prod(shape) * itemsize


def _file_bytes(directory: ModelDirectory, layer: str) -> int:
    place = directory.places[f"{layer}.weight"]
    return _bytes(place.shape, place.dtype.itemsize)


def _packed_bytes(directory: ModelDirectory, layer: str, name: str) -> int:
    rows, columns = directory.places[f"{layer}.weight"].shape
    return sum(form.nbytes for form in get_weight_format(name).file_form(rows, columns).values())


class _Products:
    """Measured times of the matrix products of groups. Nothing is measured if the budget does not limit time."""

    def __init__(self, model: Any, groups: Sequence[InputGroup], times: TokenTimes | None) -> None:
        self._times = times
        self._shapes = {}
        for group in groups:
            layers = [model.get_submodule(name) for name in group.names]
            self._shapes[group] = (sum(layer.out_features for layer in layers), layers[0].in_features)
        self._known: dict[tuple[int, int, str], float] = {}
        self._wide = self._saved = 0.0
        if times is not None:
            self._wide = sum(self.seconds(group, None) for group in groups)
            self._saved = self._wide - sum(self.seconds(group, ANCHOR_FORMAT) for group in groups)
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            if head is not None and not any(model.get_submodule(n) is head for g in groups for n in g.names):
                rows, columns = head.weight.shape  # the measured anchor has a packed head
                self._saved += measure_product(rows, columns, "fp32") - measure_product(rows, columns, ANCHOR_FORMAT)

    def seconds(self, group: InputGroup, name: str | None) -> float:
        """Return the seconds of a group's product for one token; 0 if the budget does not limit time."""
        if self._times is None:
            return 0.0
        key = (*self._shapes[group], name or "fp32")
        if key not in self._known:
            self._known[key] = measure_product(*key)
        return self._known[key]

    @property
    def _scale(self) -> float:
        """Factor from seconds of products timed alone to seconds of the whole model, bounded so that all products
        together take at most the measured time of a token."""
        assert self._times is not None
        if self._saved <= 0 or self._times.wide <= self._times.anchor:
            return 1.0
        measured = (self._times.wide - self._times.anchor) / self._saved
        return min(measured, self._times.wide / self._wide)

    def token_seconds(self, products: float) -> float | None:
        """Return the predicted seconds per token if its products take `products` seconds."""
        return None if self._times is None else self._times.wide + (products - self._wide) * self._scale

    def limit(self, token: float) -> float:
        """Return the largest time of the products with which a token takes at most `token` seconds."""
        assert self._times is not None
        return self._wide + (token - self._times.wide) / self._scale


@dataclass(frozen=True)
class _Solution:
    """Choice for a budget.

    Attributes:
        places: index of the option of each group.
        nats: measured loss in nats per token.
        gap: bound of the excess of the knapsack's sum above the least one; see `FormatChoice`.
        uniform: the best uniform format of no more bytes, and its loss; None: there is none.
    """

    places: list[int]
    nats: float
    gap: float = 0.0
    uniform: tuple[str, float] | None = None


@dataclass
class _Solver:
    """Solver for one budget."""

    meter: SensitivityMeter
    groups: Sequence[InputGroup]
    options: Sequence[Sequence[FormatOption]]
    budget: CompressionBudget
    fixed: int
    before: int
    bits_before: float
    bits_per_nat: float
    products: _Products

    def solve(self) -> _Solution:
        """Return the choice for the budget, with its measured loss, and the best uniform choice.

        Raises:
            ConfigError: the budget cannot be met.
        """
        limits = self._limits()
        asked = limits.loss
        allowed = asked
        best: _Solution | None = None
        measured: list[_Solution] = []
        for _ in range(_REPAIRS):
            try:
                found = choose_formats(self.options, FormatLimits(limits.nbytes, allowed, limits.seconds))
            except UnmetLimitError as error:
                if error.resource != "loss":
                    raise self._refusal(error) from error
                break
            if any(found.places == one.places for one in measured):
                break
            one = self._measure(found.places, found.gap)
            measured.append(one)
            within = asked is None or one.nats <= asked
            if within and (best is None or self._nbytes(one.places) < self._nbytes(best.places)):
                best = one
            expected = total(self.options, one.places, "loss")
            if asked is None or 0.98 * asked <= one.nats <= asked or not one.nats or not expected:
                break
            allowed = asked * expected / one.nats
        if best is None:
            assert asked is not None
            best = self._least_measured(measured, limits)
            if best.nats > asked:
                raise self._refusal(UnmetLimitError("loss", best.nats))
        return self._better_of_uniform(best, limits)

    def _least_measured(self, measured: Sequence[_Solution], limits: FormatLimits) -> _Solution:
        """Return the choice of the least measured loss among the measured ones and the uniform formats within the
        limits of bytes and time. Losses of groups only nearly add up, so that the sum of a choice refuses nothing."""
        tried = list(measured)
        if not tried:  # the least sum within the other limits was above the limit of the loss
            tried.append(self._measure(choose_formats(self.options, replace(limits, loss=None)).places))
        tried += [self._measure(one) for one in self._uniform_choices(limits.nbytes, limits.seconds)]
        return min(tried, key=lambda one: one.nats)

    def check_bytes_and_time(self) -> None:
        """Raise a ConfigError if the fewest bytes, or the least time, are above their limits."""
        limits = replace(self._limits(), loss=None)
        if limits.nbytes is None and limits.seconds is None:
            return
        try:
            choose_formats(self.options, limits)
        except UnmetLimitError as error:
            raise self._refusal(error) from error

    def _limits(self) -> FormatLimits:
        budget = self.budget
        nbytes = None if budget.size is None else int(budget.size * self.before) - self.fixed
        loss = None
        if budget.loss is not None:
            bits = budget.loss * self.bits_before if budget.is_relative else budget.loss
            loss = bits / self.bits_per_nat
        token = budget.latency
        wide = self.products.token_seconds(0.0)
        if budget.speed is not None and wide is not None:
            own = self.products._times.wide / budget.speed  # type: ignore[union-attr]
            token = own if token is None else min(token, own)
        return FormatLimits(nbytes, loss, None if token is None else self.products.limit(token))

    def _measure(self, places: list[int], gap: float = 0.0) -> _Solution:
        formats = {
            name: options[place].name
            for group, options, place in zip(self.groups, self.options, places, strict=True)
            for name in group.names
        }
        return _Solution(places, self.meter.divergence(formats), gap=gap)

    def _nbytes(self, places: Sequence[int]) -> float:
        return total(self.options, places, "nbytes")

    def _better_of_uniform(self, chosen: _Solution, limits: FormatLimits) -> _Solution:
        """Return the choice, or the best uniform format of at most as many bytes if its loss is lower."""
        best: tuple[str, float] | None = None
        result = chosen
        for uniform in self._uniform_choices(self._nbytes(chosen.places), limits.seconds):
            found = self._measure(uniform)
            if best is None or found.nats < best[1]:
                best = str(self.options[0][uniform[0]].name), found.nats
            if found.nats < result.nats:
                result = found
        return replace(result, uniform=best)

    def _uniform_choices(self, nbytes: float | None, seconds: float | None) -> Iterator[list[int]]:
        """Yield each choice of one format for all groups that is within limits of bytes and time; None: no limit."""
        for place in range(1, len(self.options[0])):
            uniform = [place] * len(self.options)
            is_large = nbytes is not None and total(self.options, uniform, "nbytes") > nbytes
            is_slow = seconds is not None and total(self.options, uniform, "seconds") > seconds
            if not is_large and not is_slow:
                yield uniform

    def _refusal(self, error: UnmetLimitError) -> ConfigError:
        """Return the error with the nearest budget that can be met."""
        if error.resource == "nbytes":
            least = (error.nearest + self.fixed) / self.before
            return ConfigError(
                f"budget (--budget) size={self.budget.size:.4g} cannot be met: the nearest is size={least + 5e-5:.4f} "
                f"({1 / least:.2f}x), since {self.fixed / self.before:.4f} of the bytes stay unquantized; allow it, "
                "pack the head too (--head), or allow 2 bits (--force)"
            )
        if error.resource == "seconds":
            token = self.products.token_seconds(error.nearest) or 0.0
            wide = self.products._times.wide if self.products._times is not None else token
            asked = (
                f"speed={self.budget.speed:g}"
                if self.budget.speed is not None
                else (f"latency={1e3 * (self.budget.latency or 0):g}ms")
            )
            return ConfigError(
                f"budget (--budget) {asked} cannot be met: the nearest is latency={1e3 * token:.3g}ms, "
                f"speed={wide / token:.3g}; allow it, or prune the model too (--prune)"
            )
        bits = error.nearest * self.bits_per_nat
        asked = f"{100 * (self.budget.loss or 0):g}%" if self.budget.is_relative else f"+{self.budget.loss:g}"
        return ConfigError(
            f"budget (--budget) loss={asked} cannot be met: the nearest is loss=+{bits:.4f} bits per byte "
            f"({100 * bits / self.bits_before:.3g} %); allow it, or a larger size or latency"
        )
