"""Stages of `windlass compress`: pruning, choice of formats, rounding, and the figures of before and after."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.base.text import plural, print_escaped
from windlass.cli.compression_figures import (
    ModelFigures,
    StageProgress,
    choose_method,
    figure_lines,
    format_name,
    measure_figures,
    measure_speed,
    warn_of_uneven_groups,
)
from windlass.cli.compression_report import CompressionReport, choice_lines, prune_lines
from windlass.compress.budget_choice import (
    ANCHOR_FORMAT,
    BUDGET_FORMATS,
    FORCED_FORMATS,
    BudgetChoice,
    GroupChoice,
    TokenTimes,
    choose_for_budget,
)
from windlass.compress.calibration_text import CalibrationText, longest_sequence, read_calibration_text
from windlass.compress.compression_budget import CompressionBudget, parse_budget, parse_shares
from windlass.compress.compression_workspace import CompressionWorkspace
from windlass.compress.layer_sensitivity import mean_nats, sample_tokens
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import source_state
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.compress.prune_directory import load_wide_model, prune_directory
from windlass.compress.sparse_pruning import parse_pattern

_FEW_BITS = ("int2", "ternary", "binary")
_WIDE = "wide"


@dataclass(frozen=True)
class CompressionSettings:
    """Options of the command, see there."""

    source: Path
    out: Path
    weights: str | None
    group: int | None
    method: str
    activations: str
    budget: str | None
    prune: str | None
    importance: str
    sparsity: str | None
    sparsity_method: str
    data: tuple[str, ...]
    text_field: str
    sequences: int
    length: int
    rotate: bool
    head: bool
    measure: bool
    force: bool
    overwrite: bool
    trust_remote_code: bool


class CompressionRun:
    """One run of the command.

    Raises:
        ConfigError: options do not fit together.
    """

    def __init__(self, settings: CompressionSettings) -> None:
        self._settings = settings
        self.progress = StageProgress()
        self._budget = parse_budget(settings.budget) if settings.budget is not None else None
        self._shares = parse_shares(settings.prune) if settings.prune is not None else {}
        self._name = self._format_name()
        self._speed: float | None = None  # of the model before
        self._pruned: list[str] = []
        self._notes: list[str] = []

    def run(self) -> None:
        """Write the directory, and print and write the report."""
        settings = self._settings
        self._directory = ModelDirectory(settings.source)
        if self._directory.quantization is not None:
            method = self._directory.quantization.get("quant_method")
            raise ModelError(f"{settings.source} is quantized already ({method}); give the wide model")
        out = settings.out
        if out.exists() and not settings.overwrite and not (out.is_dir() and not any(out.iterdir())):
            raise ModelError(f"{out} exists; choose another directory, or overwrite it")
        text = self._read_text()
        work = CompressionWorkspace(settings.out, self._fingerprint())
        source = self._prune(work, text) if self._shares else settings.source
        choice = self._choose(work, source, text) if self._budget is not None else None
        after = self._round(source, text, choice)
        self._report(after, text, choice)
        work.remove()

    def _format_name(self) -> str | None:
        """Return the format of all layers; None where a budget chooses, or weights stay wide."""
        settings = self._settings
        if settings.sparsity is not None:
            parse_pattern(settings.sparsity)
            if settings.weights not in (None, _WIDE) or self._budget is not None:
                raise ConfigError("sparsity (--sparsity) writes wide weights; round the result in a second run")
        if self._budget is not None:
            if settings.weights is not None or settings.group is not None:
                raise ConfigError("budget (--budget) chooses the formats; leave weights (--weights) and --group out")
            if not settings.data:
                raise ConfigError("budget (--budget) needs a calibration text; give some with --data")
            return None
        if settings.weights == _WIDE or settings.sparsity is not None:
            if not self._shares and settings.sparsity is None:
                raise ConfigError("weights (--weights) stay wide and nothing is pruned; give --prune or --sparsity")
            return None
        name = format_name(settings.weights or "int4", settings.group)
        if name.startswith(_FEW_BITS) and not settings.force:
            raise ConfigError(
                f"weights (--weights) is {name!r}: rounding a trained model to so few bits without training it again "
                "makes it answer badly; use int3 or int4, or --force"
            )
        return name

    def _read_text(self) -> CalibrationText | None:
        settings = self._settings
        if not settings.data:
            return None
        limit = longest_sequence(self._directory.config) or settings.length
        return read_calibration_text(
            settings.data,
            settings.source,
            sequences=settings.sequences,
            length=min(settings.length, limit),
            text_field=settings.text_field,
        )

    def _fingerprint(self) -> dict[str, Any]:
        """Return everything that the stages before the rounding depend on."""
        wanted = ("budget", "prune", "importance", "data", "text_field", "sequences", "length", "head", "force")
        found = {name: value for name, value in asdict(self._settings).items() if name in wanted}
        return {**found, "source": source_state(self._directory)}

    def _prune(self, work: CompressionWorkspace, text: CalibrationText | None) -> Path:
        settings = self._settings
        importance = settings.importance
        if importance == "auto":
            importance = "activation" if text is not None else "magnitude"

        def write(path: Path) -> None:
            report = prune_directory(
                settings.source,
                path,
                self._shares,
                importance=importance,
                batches=text.batches if text is not None else (),
                trust_remote_code=settings.trust_remote_code,
            )
            parameters = (report.parameters_before, report.parameters_after)
            self._pruned = prune_lines(report.units, report.layers, parameters)

        found = work.directory("pruned", write)
        self._pruned = work.value("pruned", lambda: self._pruned)
        print_escaped(f"pruned by {importance}:")
        for line in self._pruned:
            print_escaped(f"  {line}")
        return found

    def _choose(self, work: CompressionWorkspace, source: Path, text: CalibrationText | None) -> BudgetChoice:
        assert text is not None and self._budget is not None
        found = work.value("choice", partial(self._measure_choice, source, text, self._budget))
        self._speed = found["speed"]
        value = found["choice"]
        groups = [GroupChoice(**{**one, "names": tuple(one["names"])}) for one in value.pop("groups")]
        value.pop("formats")
        uniform = value.pop("uniform")
        choice = BudgetChoice(groups, uniform=None if uniform is None else tuple(uniform), **value)
        print_escaped("\n".join(choice_lines(choice)))
        expected = f"expected: {choice.nbytes:,} bytes, loss +{choice.loss:.4f} bits per byte by nearest rounding"
        if choice.seconds is not None:
            expected += f", {1e3 * choice.seconds:.3g} ms a token"
        if choice.uniform is not None:
            expected += f"; the best uniform format of no more bytes, {choice.uniform[0]}: +{choice.uniform[1]:.4f}"
        self._notes.append(f"{expected} ({choice.tokens} tokens)")
        print_escaped(f"  {self._notes[-1]}")
        return choice

    def _measure_choice(self, source: Path, text: CalibrationText, budget: CompressionBudget) -> dict[str, Any]:
        """Return the choice, and the tokens/s of the model before, as JSON."""
        settings = self._settings
        whole = self._directory
        speed = None
        if budget.speed is not None or budget.latency is not None:
            speed = measure_speed(settings.source, trust_remote_code=settings.trust_remote_code)
        directory = ModelDirectory(source)
        model = load_wide_model(directory, trust_remote_code=settings.trust_remote_code)
        bits_per_nat = text.held_out.bits_per_byte(len(text.held_out.tokens) - 1)
        bits, bits_whole = 0.0, None
        if source != settings.source and budget.loss is not None:  # it is that of the model before it was pruned
            rows = sample_tokens(model, text.batches)
            bits = bits_per_nat * mean_nats(model, rows)
            unpruned = load_wide_model(whole, trust_remote_code=settings.trust_remote_code)
            bits_whole = bits_per_nat * mean_nats(unpruned, rows)
            del unpruned
        times = None
        if speed is not None:
            own = speed if source == settings.source else measure_speed(source)
            times = TokenTimes(1 / own, 1 / measure_speed(source, weights=ANCHOR_FORMAT))
        self.progress.begin("measuring formats", "measurements")
        choice = choose_for_budget(
            model,
            directory,
            text.batches,
            _relative_to(budget, whole, directory, bits_whole, bits, speed, times),
            bits_per_nat=bits_per_nat,
            formats=(*BUDGET_FORMATS, *(FORCED_FORMATS if settings.force else ())),
            head=settings.head,
            times=times,
            progress=self.progress,
        )
        self.progress.end()
        del model
        gc.collect()
        return {"choice": asdict(choice), "speed": speed}

    def _round(self, source: Path, text: CalibrationText | None, choice: BudgetChoice | None) -> int:
        """Write the directory, and return the bytes of its tensors."""
        settings = self._settings
        if choice is not None:
            names = sorted(set(choice.formats.values()))
            formats: str | Callable[[str], str | None] = choice.formats.get
        elif self._name is not None:
            names, formats = [self._name], self._name
        elif settings.sparsity is not None:
            directory = ModelDirectory(source)
            names, formats = [_WIDE], partial(_wide_format, directory, settings.head)
        else:
            return self._keep_wide(source)
        if not names:
            raise ConfigError("the budget is met by the model as it is; nothing is compressed")
        has_text = text is not None
        method = choose_method(settings.method, names[0], has_text=has_text) if settings.sparsity is None else "rtn"
        if choice is not None and settings.method == "auto" and any(not name.startswith("int8") for name in names):
            method = "gptq"
        sparsity_method = settings.sparsity_method
        if sparsity_method == "auto":
            sparsity_method = "sparsegpt" if has_text else "magnitude"
        options = RoundingOptions(
            method,  # type: ignore[arg-type]
            smooth=settings.activations == "int8",
            rotate=settings.rotate,
            sparsity=settings.sparsity,
            sparsity_method=sparsity_method,
        )
        self.progress.begin("rounding", "layers")
        report, results = compress_directory(
            source,
            settings.out,
            formats,
            options,
            batches=text.batches if text is not None and options.needs_text else (),
            head=settings.head,
            overwrite=settings.overwrite,
            progress=self.progress,
            trust_remote_code=settings.trust_remote_code,
        )
        self.progress.end()
        what = names[0] if len(names) == 1 else f"{len(names)} formats"
        by = f"{sparsity_method}, {settings.sparsity}" if settings.sparsity is not None else method
        print_escaped(
            f"{settings.out}: {plural(len(report.layers), 'layer')} as {what} by {by}, in {self.progress.seconds:.0f} s"
        )
        for reason in sorted(set(report.kept.values())):
            layers = ", ".join(layer for layer, one in report.kept.items() if one == reason)
            print_escaped(f"  not packed: {layers}: {reason}")
        directory = ModelDirectory(source)
        for name in names:
            if name != _WIDE:
                warn_of_uneven_groups(directory, [n for n, one in report.layers.items() if one == name], name)
        worst = max((one for one in results if one.error is not None), key=lambda one: one.error or 0.0, default=None)
        if worst is not None:
            print_escaped(f"  largest error of a layer's outputs: {100 * (worst.error or 0):.2f} % in {worst.name}")
        if settings.sparsity is None:
            ratio = report.packed_before / max(report.packed_after, 1)
            print_escaped(f"  packed weights: {ratio:.2f}x smaller than float32")
        return report.bytes_after

    def _keep_wide(self, source: Path) -> int:
        """Move the pruned model to its place."""
        out = self._settings.out
        if out.exists():
            shutil.rmtree(out)
        source.rename(out)
        print_escaped(f"{out}: wide weights, in {self.progress.seconds:.0f} s")
        return tensor_bytes(ModelDirectory(out))

    def _report(self, bytes_after: int, text: CalibrationText | None, choice: BudgetChoice | None) -> None:
        settings = self._settings
        held_out = None if text is None else text.held_out
        measured = {"trust_remote_code": settings.trust_remote_code, "measure": settings.measure}
        before = measure_figures(
            settings.source,
            tensor_bytes(self._directory),
            held_out,
            "auto",
            speed=self._speed,
            **measured,
        )
        activations = "int8" if settings.activations == "int8" else "auto"
        after = measure_figures(settings.out, bytes_after, held_out, activations, **measured)
        if self._budget is not None:
            self._notes += budget_lines(self._budget, before, after)
        lines = figure_lines(before, after)
        print_escaped("\n".join([*lines, *(f"  {line}" for line in self._notes[1:])]))
        options = {name: str(value) for name, value in asdict(settings).items() if value not in (None, ())}
        report = CompressionReport(
            lines, asdict(before), asdict(after), options, self._pruned, choice, self._notes
        )  # fmt: skip
        report.write(settings.out)


def tensor_bytes(directory: ModelDirectory) -> int:
    """Return the bytes of all tensors of a directory."""
    return sum(torch.Size(place.shape).numel() * place.dtype.itemsize for place in directory.places.values())


def budget_lines(budget: CompressionBudget, before: ModelFigures, after: ModelFigures) -> list[str]:
    """Return what was asked and what was got, for each limit."""
    lines = []
    if budget.size is not None:
        lines.append(f"size: asked {budget.size:.4f} of the bytes, got {after.nbytes / before.nbytes:.4f}")
    if budget.loss is not None and before.bits is not None and after.bits is not None:
        loss = after.bits - before.bits
        asked = f"{100 * budget.loss:g} %" if budget.is_relative else f"+{budget.loss:g}"
        lines.append(
            f"loss: asked {asked}, got {loss:+.4f} bits per byte ({100 * loss / before.bits:+.2f} %) on held-out text"
        )
    if budget.speed is not None and before.speed is not None and after.speed is not None:
        lines.append(f"speed: asked {budget.speed:g}, got {after.speed / before.speed:.2f} times the tokens/s")
    if budget.latency is not None and after.speed is not None:
        lines.append(f"latency: asked {1e3 * budget.latency:g} ms a token, got {1e3 / after.speed:.3g} ms")
    return lines


def _relative_to(
    budget: CompressionBudget,
    whole: ModelDirectory,
    pruned: ModelDirectory,
    bits_whole: float | None,
    bits: float,
    speed: float | None,
    times: TokenTimes | None,
) -> CompressionBudget:
    """Return the budget of a model before its pruning as one of the pruned model."""
    size = budget.size
    if size is not None:
        size *= tensor_bytes(whole) / tensor_bytes(pruned)
        size = min(size, 1.0)
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
    if wanted is not None and speed is not None and times is not None:
        wanted *= speed * times.wide
    return CompressionBudget(size, loss, is_relative, wanted, budget.latency)


def _wide_format(directory: ModelDirectory, head: bool, layer: str) -> str | None:
    """Return the format that keeps the dtype of a layer's file; the head stays as it is unless asked."""
    if not head and layer.rpartition(".")[2] in ("lm_head", "embed_out"):
        return None
    return "bf16" if directory.places[f"{layer}.weight"].dtype == torch.bfloat16 else "fp32"
