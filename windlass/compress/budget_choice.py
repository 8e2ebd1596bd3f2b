"""Choice of a weight format for each layer under a budget: measured losses and times, and a knapsack.

[Note: checked budget] The knapsack adds up the losses of single groups, so the loss of its choice is also measured for
all groups together. Unless the measured loss is 98 % to 100 % of its limit, the limit is divided by the ratio of the
measured loss to the sum, and the knapsack is solved again. It is solved at most `_REPAIRS` times. If a uniform format
(one format for all groups) of no more bytes has a lower loss, that format is taken. If no choice of the knapsack is
within the limit of the loss, the uniform formats within the other limits are measured before the budget is refused.

[Note: measured token] Times of single matrix products do not add up to the time of a token. So the full model is timed
in the chosen formats. Unless that time is within `TIME_TOLERANCE` of its limit, the time outside of the products is
corrected by the difference and a new choice is made, until `_TIMINGS` choices were timed: a faster choice if the limit
was exceeded, a choice with less loss if the model was faster than necessary. Of the choices within the limit, the one
with the least loss is taken. If there is none, the uniform formats are timed. If none of them is within the limit
either, the budget is refused with an error that names the least measured time.
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
from windlass.compress.model_directory import ModelDirectory, shared_parameters
from windlass.compress.token_times import ProductTimes, TokenTimes
from windlass.kernels.coded_formats import SAFE_MAGNITUDE
from windlass.kernels.weight_format import get_weight_format

BUDGET_FORMATS = ("int8", "int4_g32", "int4_g64", "int4_g128", "int3_g64", "int3_g128")
FORCED_FORMATS = ("int2_g32", "int2_g64")
_REPAIRS = 4
_LEAST_CHANGE = 1e-6  # fraction by which a new limit is below the loss of the choice that it must exclude
_TIMINGS = 5  # maximum number of choices that are timed
TIME_TOLERANCE = 0.02
"""Relative difference that a measured time may have from its limit."""


@dataclass(frozen=True)
class GroupChoice:
    """Chosen format of the layers with a common input.

    Attributes:
        names: names of the layers in the files.
        format: name of the format; None if the layers stay unquantized.
        wide_bytes, nbytes: bytes of the layers' weights before and after compression.
        loss: divergence from the unquantized model in bits per byte, with only this group in the format.
        seconds: seconds of the layers' matrix products for one token; 0: not measured.
    """

    names: tuple[str, ...]
    format: str | None
    wide_bytes: int
    nbytes: int
    loss: float
    seconds: float = 0.0


@dataclass
class BudgetChoice:
    """Chosen formats of all layers, and the size, loss and time of the model in these formats.

    Attributes:
        groups: choices in the order of the model.
        nbytes: bytes of all tensors of the compressed model.
        loss: increase of the bits per byte on calibration text, measured as the divergence of the model with weights
            rounded to nearest from the unquantized model.
        seconds: seconds of a generated token, measured in these formats, or predicted; None: time is not limited.
        uniform: name and loss of the best format for all layers that needs no more bytes; None: there is none.
        tokens: number of tokens of each measurement.
        gap: upper bound of the relative excess of the choice's loss over the optimum, or of its bytes if only the loss
            is limited; 0: the choice is the optimum.
        formats: format of each packed layer, by its name in the files.
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
    measure: Callable[[int, int, str], float] = measure_product,
    time_formats: Callable[[dict[str, str]], float] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    losses: Callable[[Callable[[], list[dict[str, float]]]], list[dict[str, float]]] = lambda compute: compute(),
) -> BudgetChoice:
    """Choose a weight format, or none, for each linear layer of a model; see [Note: checked budget].

    Args:
        model: model of the directory, in memory in float32. Its stacked experts become separate layers; see [Note:
            split experts].
        batches: token ids `[rows, length]` of the calibration text.
        bits_per_nat: factor from nats per token to bits per byte.
        formats: names of the formats to choose from.
        head: pack the output head too.
        before: bytes that `budget.size` is relative to; None: the bytes of the directory's tensors.
        seconds: approximate seconds that the measurements of the losses may take.
        times: measured times of a token, for a budget that limits speed or latency; None: time is not limited.
        measure: function of rows, columns and format that returns the seconds of a product with a matrix of this form.
        time_formats: function that measures the seconds of a token, given the format of each packed layer of the files;
            see [Note: measured token]. None: predicted times are compared with a limit of time.
        progress: function that is called with the numbers of finished and of all measurements of losses.
        losses: function that returns the loss of each group in each format, in nats per token. Its argument is a
            function that measures these losses, which need not be called if they are stored.

    Raises:
        ConfigError: the budget cannot be met. The message has the nearest budget that can be met.
    """
    rows = sample_tokens(model, batches)
    bits_before = mean_nats(model, rows) * bits_per_nat
    checkpoint = CheckpointNames(model, directory.places)
    checkpoint.split_experts()
    names = checkpoint.source_of
    meter = SensitivityMeter(model, rows, head=head)
    meter.limit_time(len(formats), seconds)
    shared = shared_parameters(model)  # they stay unquantized, even if the files store a copy for each layer

    def can_be_packed(name: str) -> bool:
        layer = model.get_submodule(name)
        return f"{name}.weight" in names and id(layer.weight) not in shared and _has_scales(layer)

    groups = [group for group in meter.groups if all(map(can_be_packed, group.names))]
    meter.groups = groups
    files = [tuple(names[f"{name}.weight"].removesuffix(".weight") for name in group.names) for group in groups]
    wide = [sum(_file_bytes(directory, name) for name in one) for one in files]
    total_bytes = sum(_bytes(place.shape, place.dtype.itemsize) for place in directory.places.values())
    fixed, before = total_bytes - sum(wide), before or total_bytes
    products = ProductTimes(model, groups, times, measure)
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
    time_places: Callable[[list[int]], float] | None = None
    if times is not None and time_formats is not None:
        time_places = lambda places: time_formats(  # noqa: E731
            {
                layer: str(one[place].name)
                for layers, one, place in zip(files, options, places, strict=True)
                if place
                for layer in layers
            }
        )
    solver = _Solver(meter, groups, options, budget, fixed, before, bits_before, bits_per_nat, products, time_places)
    solver.check_bytes_and_time()  # before the losses are measured, which takes the most time
    measured = losses(lambda: meter.sensitivities(formats, progress))
    for one, found in zip(options, measured, strict=True):
        one[1:] = [replace(option, loss=found[str(option.name)]) for option in one[1:]]
    solution = solver.solve_in_time()
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
        solution.seconds or products.token_seconds(total(options, chosen, "seconds")),
        None if uniform is None else (uniform[0], uniform[1] * bits_per_nat),
        meter.tokens,
        solution.gap / least if solution.gap else 0.0,
    )


def _has_scales(layer: nn.Module) -> bool:
    """Return True if all weights of a layer have magnitudes for which the scales of every format stay finite."""
    return float(layer.get_parameter("weight").detach().abs().max()) <= SAFE_MAGNITUDE


def _bytes(shape: Sequence[int], itemsize: int) -> int:
    return math.prod(shape) * itemsize


def _file_bytes(directory: ModelDirectory, layer: str) -> int:
    place = directory.places[f"{layer}.weight"]
    return _bytes(place.shape, place.dtype.itemsize)


def _packed_bytes(directory: ModelDirectory, layer: str, name: str) -> int:
    rows, columns = directory.places[f"{layer}.weight"].shape
    return sum(form.nbytes for form in get_weight_format(name).file_form(rows, columns).values())


@dataclass(frozen=True)
class _Solution:
    """Choice for a budget.

    Attributes:
        places: index of the chosen option of each group.
        nats: measured loss in nats per token.
        gap: upper bound of the excess of the knapsack's objective over the optimum; see `FormatChoice`.
        uniform: name and loss, in nats per token, of the best format for all groups that needs no more bytes; None:
            there is none.
        seconds: measured seconds of a token; None: not measured.
    """

    places: list[int]
    nats: float
    gap: float = 0.0
    uniform: tuple[str, float] | None = None
    seconds: float | None = None


@dataclass
class _Solver:
    """Search for the choice of formats that meets one budget with the least loss or size.

    Attributes:
        time: function that measures the seconds of a token of a choice; None: times are only predicted.
    """

    meter: SensitivityMeter
    groups: Sequence[InputGroup]
    options: Sequence[Sequence[FormatOption]]
    budget: CompressionBudget
    fixed: int
    before: int
    bits_before: float
    bits_per_nat: float
    products: ProductTimes
    time: Callable[[list[int]], float] | None = None
    _seconds: dict[tuple[int, ...], float] = field(default_factory=dict)

    def solve_in_time(self) -> _Solution:
        """Return the choice for the budget; see [Note: measured token].

        Raises:
            ConfigError: the budget cannot be met.
        """
        token = self._token_limit()
        best: _Solution | None = None
        tried: list[list[int]] = []
        while len(tried) < _TIMINGS:
            try:
                found = self._solve()
            except UnmetLimitError as error:
                if best is not None:
                    break
                if error.resource != "seconds" or self.time is None:
                    raise self._refusal(error) from error
                found = self._measure(error.places)  # the choice of the least predicted time
            if self.time is None or token is None:
                return found
            if found.places in tried:
                break
            tried.append(found.places)
            seconds = self._timed(found.places)
            if seconds <= (1 + TIME_TOLERANCE) * token and (best is None or found.nats < best.nats):
                best = replace(found, seconds=seconds)
            if abs(seconds / token - 1) <= TIME_TOLERANCE:
                break
        if best is None:
            in_time = [self._measure(places) for places in self._uniform_in_time()]
            if not in_time:
                raise self._refusal(UnmetLimitError("seconds", 0.0))
            best = min(in_time, key=lambda one: one.nats)
            best = replace(best, seconds=self._timed(best.places))
        loss = self._limits().loss
        if loss is not None and best.nats > loss:
            raise self._refusal(UnmetLimitError("loss", best.nats))
        return best

    def _uniform_in_time(self) -> list[list[int]]:
        """Return the choices of one format for all groups that are within the limits of bytes and of measured
        time. The choice that is the fastest by the times of single products need not be the fastest model."""
        token = self._token_limit() or 0.0
        uniform = self._uniform_choices(self._limits().nbytes, None)
        return [places for places in uniform if self._timed(places) <= (1 + TIME_TOLERANCE) * token]

    def _timed(self, places: list[int]) -> float:
        """Return the measured seconds per token of a choice of formats, and correct the predicted times with it."""
        assert self.time is not None and self.products.wide is not None
        if tuple(places) not in self._seconds:
            self._seconds[tuple(places)] = self.time(places) if any(places) else self.products.wide
        seconds = self._seconds[tuple(places)]
        self.products.correct(total(self.options, places, "seconds"), seconds)
        return seconds

    def _solve(self) -> _Solution:
        """Return the choice for the budget by predicted times, with its measured loss.

        Raises:
            UnmetLimitError: the budget cannot be met.
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
                    raise
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
            if not within:
                allowed = min(allowed, expected * (1 - _LEAST_CHANGE))
        if best is None:
            assert asked is not None
            best = self._least_measured(measured, limits)
            if best.nats > asked:
                raise UnmetLimitError("loss", best.nats)
        return self._better_of_uniform(best, limits)

    def _least_measured(self, measured: Sequence[_Solution], limits: FormatLimits) -> _Solution:
        """Return the choice with the least measured loss, among `measured` and the choices of one format for all layers
        that are within the limits of bytes and time. The sum of the losses of groups is only an estimate of the
        model's loss, so a budget is refused only after a measurement."""
        tried = list(measured)
        if not tried:  # no choice within the other limits has a small enough sum of losses
            tried.append(self._measure(choose_formats(self.options, replace(limits, loss=None)).places))
        tried += [self._measure(one) for one in self._uniform_choices(limits.nbytes, limits.seconds)]
        return min(tried, key=lambda one: one.nats)

    def check_bytes_and_time(self) -> None:
        """Check that the limits of bytes and time can be met, before any loss is measured.

        Raises:
            ConfigError: no choice is within the limits. If only the predicted time of a choice
                exceeds the limit, and not its measured time, the limit can be met.
        """
        limits = replace(self._limits(), loss=None)
        if limits.nbytes is None and limits.seconds is None:
            return
        try:
            choose_formats(self.options, limits)
        except UnmetLimitError as error:
            token = self._token_limit()
            if error.resource == "seconds" and self.time is not None and token is not None:
                is_fast = self._timed(error.places) <= (1 + TIME_TOLERANCE) * token
                if is_fast or self._uniform_in_time():
                    return  # only the predicted time exceeds the limit, not the measured time
            raise self._refusal(error) from error

    def _limits(self) -> FormatLimits:
        budget = self.budget
        nbytes = None if budget.size is None else int(budget.size * self.before) - self.fixed
        loss = None
        if budget.loss is not None:
            bits = budget.loss * self.bits_before if budget.is_relative else budget.loss
            loss = bits / self.bits_per_nat
        token = self._token_limit()
        return FormatLimits(nbytes, loss, None if token is None else self.products.limit(token))

    def _token_limit(self) -> float | None:
        """Return the largest allowed time of a token in seconds; None if time is not limited."""
        token, wide = self.budget.latency, self.products.wide
        if self.budget.speed is None or wide is None:
            return token
        return wide / self.budget.speed if token is None else min(token, wide / self.budget.speed)

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
        """Return the choice, or the best uniform format of at most as many bytes if that format has a lower loss. The
        result has `uniform` set."""
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
            token = min(self._seconds.values(), default=self.products.token_seconds(error.nearest)) or 0.0
            wide = self.products.wide or token
            speed, latency = self.budget.speed, self.budget.latency
            is_speed = speed is not None and (latency is None or wide / speed <= latency)
            asked = f"speed={speed:g}" if is_speed else f"latency={1e3 * (latency or 0):g}ms"
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
