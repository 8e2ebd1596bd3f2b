"""Choice of weight formats under a budget, repeated with another allowed loss while the loss on held-out text is too
large, or far below its limit."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import ConfigError
from windlass.base.text import print_escaped
from windlass.cli.compression_figures import ModelFigures, StageProgress
from windlass.cli.compression_settings import CompressionSettings
from windlass.cli.model_run import RunFigures, measure_run
from windlass.compress.budget_choice import (
    BUDGET_FORMATS,
    FORCED_FORMATS,
    BudgetChoice,
    GroupChoice,
    choose_for_budget,
)
from windlass.compress.calibration_text import CalibrationText
from windlass.compress.compression_budget import CompressionBudget
from windlass.compress.compression_workspace import CompressionWorkspace
from windlass.compress.conv1d_layers import make_linear
from windlass.compress.layer_sensitivity import mean_nats, sample_tokens
from windlass.compress.linear_directory import as_linear_directory
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.prune_directory import load_wide_model
from windlass.compress.rotation import RotatedDirectory, untie_head
from windlass.compress.token_times import ANCHOR_FORMAT, TokenTimes

ATTEMPTS = 4  # maximum number of choices that are rounded and measured
_MARGIN = 0.9  # the next choice aims at this fraction of the allowed loss
_USED = 0.8  # a choice that uses less than this fraction of the allowed loss is made again
_LEAST_SHARE = 1e-3
_LOOSEST = 4.0  # largest factor by which the allowed loss rises between two successive choices


class FormatChooser:
    """Chooser of the formats of one run. Choices and measurements are stored in the workspace.

    Args:
        source: directory of the model to round, after pruning and training if they were requested.
        text: calibration text.

    Attributes:
        folder: workspace folder of the results that depend on the budget.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        work: CompressionWorkspace,
        source: Path,
        text: CalibrationText,
        progress: StageProgress,
    ) -> None:
        self._settings, self._work, self._source, self._text = settings, work, source, text
        self._progress = progress
        self.folder = settings.budget_folder
        work.kept(self.folder)

    @property
    def run_before(self) -> RunFigures | None:
        """Measured run of the unpruned model; None if the budget limits neither speed nor latency."""
        return self._runs().get("before")

    def choose(self, attempt: int = 0, share: float = 1.0) -> BudgetChoice:
        """Return the formats for `share` of the allowed loss; read from the workspace if this attempt is stored there.

        Raises:
            ConfigError: the budget cannot be met.
        """
        value = self._work.value(f"{self.folder}/choice{attempt}", lambda: self._measure(share))
        groups = [GroupChoice(**{**one, "names": tuple(one["names"])}) for one in value.pop("groups")]
        value.pop("formats")
        uniform = value.pop("uniform")
        return BudgetChoice(groups, uniform=None if uniform is None else tuple(uniform), **value)

    def _measure(self, share: float) -> dict[str, Any]:
        """Compute a choice and return it as JSON data. The loss that rounding each group of layers causes is
        measured by the first call only."""
        settings, budget = self._settings, self._settings.limits
        assert budget is not None
        times = self._times()
        whole, directory = ModelDirectory(settings.source), ModelDirectory(self._source)
        model = load_wide_model(directory, trust_remote_code=settings.trust_remote_code)
        directory = as_linear_directory(directory, trust_remote_code=settings.trust_remote_code)
        make_linear(model)
        if settings.rotate:  # a head that shares the embedding becomes a separate tensor, whose bytes count
            directory = RotatedDirectory(directory)
            untie_head(model)
        bits_per_nat = self._text.held_out.bits_per_byte(len(self._text.held_out.tokens) - 1)
        bits, bits_whole = 0.0, None
        if self._source != settings.source and budget.loss is not None:  # the budget is relative to the unpruned model
            rows = sample_tokens(model, self._text.batches)
            bits = bits_per_nat * mean_nats(model, rows)
            unpruned = load_wide_model(whole, trust_remote_code=settings.trust_remote_code)
            bits_whole = bits_per_nat * mean_nats(unpruned, rows)
            del unpruned
        relative = _relative_to(budget, bits_whole, bits, self.run_before, times)
        if relative.loss is not None:
            relative = replace(relative, loss=relative.loss * share)
        measured = "losses_of_rotated" if settings.rotate else "losses"
        self._progress.begin("measuring formats", "measurements")
        choice = choose_for_budget(
            model,
            directory,
            self._text.batches,
            relative,
            bits_per_nat=bits_per_nat,
            formats=(*BUDGET_FORMATS, *(FORCED_FORMATS if settings.force else ())),
            head=settings.head,
            before=tensor_bytes(whole),
            times=times,
            time_formats=partial(self._time_formats, directory),
            progress=self._progress,
            losses=lambda compute: self._work.value(measured, compute),
        )
        self._progress.end()
        del model
        gc.collect()
        return asdict(choice)

    def _time_formats(self, directory: ModelDirectory, formats: dict[str, str]) -> float:
        """Return the measured seconds per token, with the layers in `formats` rounded to nearest."""
        path = self._work.kept(self.folder) / "timed"
        trust = self._settings.trust_remote_code
        write_packed_directory(directory, path, formats.get, overwrite=True, trust_remote_code=trust)
        seconds = measure_run(path, trust_remote_code=trust).seconds
        shutil.rmtree(path)
        print_escaped(f"  measured {1e3 * seconds:.3g} ms a token with {', '.join(sorted(set(formats.values())))}")
        return seconds

    def _runs(self) -> dict[str, RunFigures]:
        """Return the measured runs: `before` of the unpruned model, `own` of the model to round, and `anchor` of the
        model to round in `ANCHOR_FORMAT`. Empty if the budget limits neither speed nor latency.
        """
        budget = self._settings.limits
        if budget is None or budget.speed is None and budget.latency is None:
            return {}
        found = self._work.value("runs", lambda: {name: asdict(one) for name, one in self._measure_runs().items()})
        return {name: RunFigures(**one) for name, one in found.items()}

    def _measure_runs(self) -> dict[str, RunFigures]:
        run = partial(measure_run, trust_remote_code=self._settings.trust_remote_code)
        before = run(self._settings.source)
        own = before if self._source == self._settings.source else run(self._source)
        return {"before": before, "own": own, "anchor": run(self._source, weights=ANCHOR_FORMAT)}

    def _times(self) -> TokenTimes | None:
        runs = self._runs()
        return TokenTimes(runs["own"].seconds, runs["anchor"].seconds) if runs else None


@dataclass(frozen=True)
class RoundedChoice:
    """Choice of formats, with the model that was rounded to it.

    Attributes:
        path: directory of the model.
        nbytes: bytes of the model's tensors.
        loss: increase of the bits per byte on held-out text.
        share: share of the allowed loss for which the formats were chosen.
    """

    path: Path
    choice: BudgetChoice
    nbytes: int
    loss: float
    share: float


def round_within_loss(
    chooser: FormatChooser,
    work: CompressionWorkspace,
    limit: float,
    asked: str,
    write: Callable[[Path, BudgetChoice], Any],
    measure: Callable[[Path], float],
    *,
    uses_all: bool = False,
) -> RoundedChoice:
    """Round with up to `ATTEMPTS` choices of formats until the loss on held-out text is within the limit.

    Args:
        limit: largest increase of the bits per byte.
        asked: the limit as the user wrote it, for the error message.
        write: function that rounds the model to the formats of a choice, and returns the number of bytes.
        measure: function that returns the increase of the bits per byte on held-out text of the model in a directory.
        uses_all: True: choose again, for more loss and so fewer bytes, if less than `_USED` of the limit is used.

    Returns:
        The choice within the limit with the fewest bytes; without `uses_all` the first one within the limit.

    Raises:
        ConfigError: the budget cannot be met, or no choice is within the limit. In the second case, the message has the
            least loss that was reached.
    """
    share = 1.0
    tried: list[RoundedChoice] = []
    best: RoundedChoice | None = None
    reason = f"{ATTEMPTS} choices were tried"
    for attempt in range(ATTEMPTS):
        try:
            choice = chooser.choose(attempt, share)
        except ConfigError as error:
            if not tried:
                raise
            reason = str(error)
            break
        same = next((one for one in tried if one.choice.formats == choice.formats), None)
        if same is not None:
            found = replace(same, share=share)
        else:
            found = _round_choice(chooser, work, attempt, choice, share, write, measure)
        tried.append(found)
        if found.loss <= limit and (best is None or found.nbytes < best.nbytes):
            best = found
        if best is not None and (not uses_all or best.loss >= _USED * limit or same is not None):
            break
        share = _next_share(tried, limit)
    if best is None:
        raise _missed(asked, [one.loss for one in tried], reason)
    return best


def _round_choice(
    chooser: FormatChooser,
    work: CompressionWorkspace,
    attempt: int,
    choice: BudgetChoice,
    share: float,
    write: Callable[[Path, BudgetChoice], int],
    measure: Callable[[Path], float],
) -> RoundedChoice:
    path = work.path / chooser.folder / f"rounded{attempt}"

    def compute() -> dict[str, float]:
        # An interrupted run may have written the model already.
        nbytes = tensor_bytes(ModelDirectory(path)) if path.is_dir() else write(path, choice)
        return {"nbytes": nbytes, "loss": measure(path)}

    found = work.value(f"{chooser.folder}/reached{attempt}", compute)
    return RoundedChoice(path, choice, int(found["nbytes"]), float(found["loss"]), share)


def _next_share(tried: Sequence[RoundedChoice], limit: float) -> float:
    """Return the share of the allowed loss for the next choice.

    The last share is scaled by the limit over the measured loss. The result is between the largest share whose loss was
    within the limit and the smallest share whose loss was not.

    A choice may be predicted to use less loss than it was allowed. After a loss above the limit, that predicted loss is
    scaled instead if it is smaller than the allowed one: any share between the two would give the same choice.
    """
    last = tried[-1]
    if last.loss <= limit:
        share = last.share * (min(_MARGIN * limit / last.loss, _LOOSEST) if last.loss > 0 else _LOOSEST)
    else:
        expected = max(last.choice.loss / limit, _LEAST_SHARE)
        share = min(last.share, expected) * min(_MARGIN * limit / last.loss, _MARGIN)
    low = max((one.share for one in tried if one.loss <= limit), default=0.0)
    high = min((one.share for one in tried if one.loss > limit), default=math.inf)
    return share if low < share < high or low >= high else (low * high) ** 0.5


def _missed(asked: str, reached: list[float], reason: str) -> ConfigError:
    return ConfigError(
        f"budget (--budget) loss={asked} is missed on held-out text: reached {min(reached):+.4f} bits per byte "
        f"({reason}); raise loss, give more text (--data, --sequences), or raise size or latency"
    )


def tensor_bytes(directory: ModelDirectory) -> int:
    """Return the total size of a directory's tensors in bytes."""
    return sum(torch.Size(place.shape).numel() * place.dtype.itemsize for place in directory.places.values())


def loss_text(budget: CompressionBudget) -> str:
    """Return the limit of the loss in the form of the command line."""
    return f"{100 * (budget.loss or 0):g}%" if budget.is_relative else f"+{budget.loss:g}"


def budget_lines(budget: CompressionBudget, before: ModelFigures, after: ModelFigures) -> list[str]:
    """Return one line for each limit of the budget, with the requested and the reached value."""
    lines = []
    if budget.size is not None:
        lines.append(f"size: asked {budget.size:.4f} of the bytes, got {after.nbytes / before.nbytes:.4f}")
    if budget.loss is not None and before.bits is not None and after.bits is not None:
        loss = after.bits - before.bits
        lines.append(
            f"loss: asked {loss_text(budget)}, got {loss:+.4f} bits per byte ({100 * loss / before.bits:+.2f} %) on "
            "held-out text"
        )
    if budget.speed is not None and before.speed is not None and after.speed is not None:
        got = after.speed / before.speed
        lines.append(
            f"speed: asked {budget.speed:g}, got {got:.3g} times the tokens/s ({100 * (got / budget.speed - 1):+.1f} %)"
        )
    if budget.latency is not None and after.ms_per_token is not None:
        asked = 1e3 * budget.latency
        change = 100 * (after.ms_per_token / asked - 1)
        lines.append(f"latency: asked {asked:g} ms a token, got {after.ms_per_token:.3g} ms ({change:+.1f} %)")
    return lines


def _relative_to(
    budget: CompressionBudget,
    bits_whole: float | None,
    bits: float,
    before: RunFigures | None,
    times: TokenTimes | None,
) -> CompressionBudget:
    """Convert a budget relative to the unpruned model to one relative to the pruned model. The size limit does not
    change."""
    loss, is_relative = budget.loss, budget.is_relative
    if loss is not None and bits_whole is not None:
        loss = (loss * bits_whole if is_relative else loss) - (bits - bits_whole)
        is_relative = False
        if loss <= 0:
            raise ConfigError(
                f"budget (--budget) loss cannot be met: the pruned model loses {bits - bits_whole:+.4f} bits per byte "
                f"({100 * (bits / bits_whole - 1):.3g} %) already; prune less"
            )
    wanted = budget.speed
    if wanted is not None and before is not None and times is not None:
        wanted *= times.wide / before.seconds
    return CompressionBudget(budget.size, loss, is_relative, wanted, budget.latency)
