"""Stages of `windlass compress`: pruning, training, choice of formats, rounding, and measurements before and after."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windlass.base.atomic_file import replace_directory
from windlass.base.errors import ConfigError, WindlassError
from windlass.base.processes import SignalInterrupt
from windlass.base.text import plural, print_escaped
from windlass.cli.compression_choice import FormatChooser, budget_lines, loss_text, round_within_loss, tensor_bytes
from windlass.cli.compression_distillation import check_teacher_directory, distil_directory
from windlass.cli.compression_figures import (
    StageProgress,
    choose_method,
    figure_lines,
    measure_bits,
    measure_figures,
    warn_of_uneven_groups,
)
from windlass.cli.compression_picture import LayerSize, layer_sizes
from windlass.cli.compression_report import CompressionReport, choice_lines, prune_lines
from windlass.cli.compression_settings import LKD, WIDE, CompressionSettings
from windlass.cli.model_run import RunFigures
from windlass.comm.bootstrap import default_timeout, end_distributed, init_distributed
from windlass.comm.rank_group import RankGroup, world_group
from windlass.compress.budget_choice import BudgetChoice
from windlass.compress.calibration_text import CalibrationText, longest_sequence, read_calibration_text
from windlass.compress.compression_workspace import CompressionWorkspace
from windlass.compress.format_rounding import pack_values
from windlass.compress.gguf_model import is_gguf_file
from windlass.compress.layer_distillation import LayerDistillationOptions
from windlass.compress.layer_distillation import distil_directory as learn_directory
from windlass.compress.linear_directory import as_linear_directory
from windlass.compress.model_directory import ModelDirectory, build_empty
from windlass.compress.packed_directory import WIDE_FORMATS, PackedReport, source_state, write_packed_directory
from windlass.compress.partial_directory import check_target
from windlass.compress.post_training import LayerResult, RoundingOptions, compress_directory, fingerprint_tokens
from windlass.compress.prune_directory import prune_directory
from windlass.compress.prune_model import features_after
from windlass.compress.pruned_config import PRUNING_ENTRY
from windlass.compress.rotation import RotatedDirectory
from windlass.compress.sparse_pruning import check_pattern, parse_pattern
from windlass.compress.unpacked_gguf import write_unpacked
from windlass.data.pack_corpus import pack_corpus
from windlass.kernels.weight_format import PackedWeight, WeightFormat
from windlass.launch.supervisor import capture_signals

_EVAL_BYTES = 1 << 16
_LONGEST_STAGE = timedelta(days=1)  # time for which the other ranks wait for the first


class CompressionRun:
    """One run of `windlass compress`."""

    def __init__(self, settings: CompressionSettings) -> None:
        self._settings = settings
        self.progress = StageProgress()
        self.is_complete = False  # True once the output directory is complete; measurements may still follow
        self._bits_before: float | None = None  # bits per byte of the source model on held-out text
        self._run_before: RunFigures | None = None  # figures of a run of the source model
        self._layers: list[LayerSize] = []
        self._pruned: list[str] = []
        self._notes: list[str] = []
        self._group: RankGroup | None = None  # ranks that round together; None: this process alone
        self._others_wait = True  # the other ranks wait for a model to round, or for the end of the run

    def run(self) -> None:
        """Write the directory, and print and write the report. On several ranks, the first one does so, and the others
        share its work of rounding; they wait while it prunes and chooses formats."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            init_distributed(timeout=default_timeout(_LONGEST_STAGE))
            self._group = world_group()
            self._settings.check_ranks(self._group.size)
            limits = self._settings.limits
            if limits is not None and (limits.speed, limits.latency) != (None, None):
                _forget_ranks()  # child processes measure models
        unpacked = self._unpack_source()
        settings = self._settings
        self._directory = ModelDirectory(settings.source)
        self._directory.check_wide()
        read = [settings.source, *([] if settings.distill is None else [settings.distill])]
        texts = [spec for spec in settings.data if Path(spec).exists()]
        check_target(settings.out, [*read, *texts], overwrite=settings.overwrite)
        if settings.measure and not self._directory.is_language_model:
            raise ConfigError(
                f"{settings.source} is a {self._directory.config['architectures'][0]}, whose loss and speed as a "
                "language model cannot be measured; add --no-measure, and load the result by "
                f"windlass.from_pretrained(class, {str(settings.out)!r})"
            )
        if settings.distill is not None:
            check_teacher_directory(settings.distill, settings.source)
        self._check_layers()
        text = self._read_text()
        if self._group is not None and self._group.index:
            self._follow(text)
            return
        try:
            after, choice = self._compress(text)
        except WindlassError as error:
            if self._group is not None and self._others_wait:
                self._group.broadcast_object(str(error))
            raise
        if self._group is not None:
            self._group.broadcast_object(None)
        if settings.measure:
            self._leave_ranks()
        self._report(after, text, choice)
        if unpacked is not None:
            shutil.rmtree(unpacked)

    def _follow(self, text: CalibrationText | None) -> None:
        """Share the rounding of each model that the first rank rounds.

        Raises:
            ConfigError: the first rank refuses the run.
        """
        assert self._group is not None
        while True:
            task: Any = self._group.broadcast_object()
            if task is None:
                return
            if isinstance(task, str):
                raise ConfigError(task)
            source, choice, target = task
            self._round(source, text, choice, target)

    def _compress(self, text: CalibrationText | None) -> tuple[int, BudgetChoice | None]:
        """Run the stages, and write the directory. Return its size in bytes, and the formats chosen for a budget."""
        settings, choice = self._settings, None
        with closing(CompressionWorkspace(settings.out, self._fingerprint(text))) as work:
            source = self._prune(work, text) if settings.shares else settings.source
            if settings.distill is not None:
                source = self._distil(work, source)
            if settings.limits is not None:
                assert text is not None
                after, choice = self._round_for_budget(work, source, text)
            else:
                after = self._round(source, text, None, settings.out)
            self.is_complete = True
            work.remove()
        return after, choice

    def _leave_ranks(self) -> None:
        """Make this process one without ranks, so that it and its children measure models alone."""
        if self._group is not None:
            end_distributed()
            _forget_ranks()

    def _check_layers(self) -> None:
        """Refuse options that do not fit the model's layers, before anything is computed."""
        settings = self._settings
        if settings.rotate:
            self._matrices(settings.source)
        if settings.sparsity is None or not parse_pattern(settings.sparsity).of:
            return
        directory = as_linear_directory(self._directory, trust_remote_code=settings.trust_remote_code)
        model = build_empty(directory, trust_remote_code=settings.trust_remote_code)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        features = {
            name: count
            for name, count in features_after(model, settings.shares).items()
            if settings.head or model.get_submodule(name) is not head
        }
        check_pattern(parse_pattern(settings.sparsity), features)

    def _unpack_source(self) -> Path | None:
        """Unpack a GGUF source to a directory that the stages read instead, and return the directory; None: the source
        is not a GGUF file."""
        source, out = self._settings.source, self._settings.out.resolve()
        if not is_gguf_file(source):
            return None
        check_target(self._settings.out, [source], overwrite=self._settings.overwrite)
        state = source.stat()
        version = hashlib.sha256(f"{source.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:8]
        target = out.with_name(f".{out.name}.{version}.gguf")
        write_unpacked(source, target)
        size = tensor_bytes(ModelDirectory(target))
        print_escaped(
            f"{source} is unpacked to {size / 1e6:,.1f} MB; figures before compression are those of the unpacked model"
        )
        self._settings = replace(self._settings, source=target)
        return target

    def _read_text(self) -> CalibrationText | None:
        settings = self._settings
        if not settings.data:
            return None
        return read_calibration_text(
            settings.data,
            settings.source,
            sequences=settings.sequences,
            length=self._length(),
            eval_bytes=_EVAL_BYTES,
            text_field=settings.text_field,
        )

    def _length(self) -> int:
        """Return the number of tokens in a sequence: the requested one, or the model's maximum if that is smaller."""
        return min(self._settings.length, longest_sequence(self._directory.config) or self._settings.length)

    def _fingerprint(self, text: CalibrationText | None) -> dict[str, Any]:
        """Return all inputs of the stages before rounding. The workspace of a run with other inputs is discarded."""
        found = {**self._settings.before_rounding(), "source": source_state(self._directory)}
        if text is not None:
            found["text"] = [fingerprint_tokens(batch) for batch in text.batches]
        if self._settings.distill is not None:
            found["teacher_state"] = source_state(ModelDirectory(self._settings.distill))
        return found

    def _prune(self, work: CompressionWorkspace, text: CalibrationText | None) -> Path:
        settings = self._settings
        importance = settings.importance
        if importance == "auto":
            importance = "activation" if text is not None else "magnitude"

        def write(path: Path) -> None:
            report = prune_directory(
                settings.source,
                path,
                settings.shares,
                importance=importance,
                batches=text.batches if text is not None else (),
                trust_remote_code=settings.trust_remote_code,
            )
            parameters = (report.parameters_before, report.parameters_after)
            self._pruned = prune_lines(report.units, report.layers, parameters, report.of_each_key_head)

        found = work.directory("pruned", write)
        self._pruned = work.value("pruned", lambda: self._pruned)
        print_escaped(f"pruned by {importance}:")
        for line in self._pruned:
            print_escaped(f"  {line}")
        if PRUNING_ENTRY in ModelDirectory(found).config:
            print_escaped(
                "  transformers cannot build these numbers of heads; load the model with windlass.LLM or "
                "windlass.from_pretrained"
            )
        return found

    def _distil(self, work: CompressionWorkspace, source: Path) -> Path:
        """Train the model against the teacher, and return the directory of the trained model."""
        settings, chosen = self._settings, self._settings.distillation
        assert chosen is not None
        late: list[int] = []  # stop signals that arrive after the last training step

        def write(path: Path) -> None:
            corpus = pack_corpus(
                settings.data,
                work.kept("text"),
                tokenizer_dir=settings.source,
                text_field=settings.text_field,
                eval_bytes=_EVAL_BYTES,
            )
            self.progress.begin("distilling", "steps")
            with capture_signals(("SIGINT", "SIGTERM", "SIGHUP")) as received:
                losses = distil_directory(
                    source,
                    path,
                    corpus,
                    chosen,
                    length=self._length(),
                    checkpoints=work.kept("training"),
                    progress=self.progress,
                    signals=received.numbers,
                    trust_remote_code=settings.trust_remote_code,
                )
            self.progress.end()
            work.value("losses_of_training", lambda: losses)
            late.extend(received.numbers)

        found = work.directory("distilled", write)
        if late:
            raise SignalInterrupt(late[0])
        shutil.rmtree(work.kept("training"))
        first, last = work.value("losses_of_training", tuple)
        how = f"as {chosen.format}" if chosen.format is not None else "wide"
        note = f"distilled from {chosen.teacher}, {plural(chosen.steps, 'step')}, {how}: loss {first:.4f} -> {last:.4f}"
        print_escaped(note)
        self._notes.append(note)
        return found

    def _round_for_budget(
        self, work: CompressionWorkspace, source: Path, text: CalibrationText
    ) -> tuple[int, BudgetChoice]:
        """Write the directory with the formats chosen for the budget. Return its size in bytes, and the choice."""
        settings, limits = self._settings, self._settings.limits
        assert limits is not None
        chooser = FormatChooser(settings, work, source, text, self.progress)
        self._run_before = chooser.run_before
        if limits.loss is None:
            choice = chooser.choose()
            self._print_choice(choice)
            return self._round(source, text, choice, settings.out), choice
        before = self._bits_before = measure_bits(
            settings.source, text.held_out, trust_remote_code=settings.trust_remote_code
        )
        allowed = limits.loss * before if limits.is_relative else limits.loss

        def write(path: Path, choice: BudgetChoice) -> int:
            self._print_choice(choice)
            return self._round(source, text, choice, path)

        def measure(path: Path) -> float:
            found = measure_bits(path, text.held_out, trust_remote_code=settings.trust_remote_code) - before
            verdict = "within" if found <= allowed else "more than"
            print_escaped(f"  loss on held-out text: {found:+.4f} bits per byte, {verdict} the allowed {allowed:+.4f}")
            return found

        only_loss = (limits.size, limits.speed, limits.latency) == (None, None, None)
        found = round_within_loss(chooser, work, allowed, loss_text(limits), write, measure, uses_all=only_loss)
        choice = found.choice
        self._expect(choice)
        # `_layers` has the sizes of the choice that was rounded last, which may be another one.
        self._layers = layer_sizes(self._matrices(source), choice.formats)
        replace_directory(found.path, settings.out.resolve())
        return found.nbytes, choice

    def _matrices(self, source: Path) -> ModelDirectory:
        """Return the directory whose matrices are rounded."""
        directory = as_linear_directory(ModelDirectory(source), trust_remote_code=self._settings.trust_remote_code)
        return RotatedDirectory(directory) if self._settings.rotate else directory

    def _print_choice(self, choice: BudgetChoice) -> None:
        print_escaped("\n".join(choice_lines(choice)))
        self._expect(choice)
        print_escaped(f"  {self._notes[-1]}")

    def _expect(self, choice: BudgetChoice) -> None:
        """Add the predicted figures of a choice to the notes; replace the figures of an earlier choice."""
        expected = f"expected: {choice.nbytes:,} bytes, loss +{choice.loss:.4f} bits per byte by nearest rounding"
        if choice.seconds is not None:
            expected += f", {1e3 * choice.seconds:.3g} ms a token"
        if choice.uniform is not None:
            expected += f"; the best uniform format of no more bytes, {choice.uniform[0]}: +{choice.uniform[1]:.4f}"
        if choice.gap:
            expected += f"; at most {100 * choice.gap:.2g} % above the best choice"
        self._notes = [note for note in self._notes if not note.startswith("expected: ")]
        self._notes.append(f"{expected} ({choice.tokens} tokens)")

    def _round(self, source: Path, text: CalibrationText | None, choice: BudgetChoice | None, target: Path) -> int:
        """Round the model and write it to `target`. Return the size of its tensors in bytes."""
        settings = self._settings
        formats: str | Callable[[str], str | None]
        if choice is not None:
            names, formats = sorted(set(choice.formats.values())), choice.formats.get
        elif settings.format is not None:
            names, formats = [settings.format], settings.format
        elif settings.sparsity is not None:
            directory = ModelDirectory(source)
            names, formats = [WIDE], partial(_wide_format, directory, settings.head, settings.wide_torch_dtype)
        else:
            self._layers = layer_sizes(ModelDirectory(source), {})
            replace_directory(source, settings.out.resolve())
            print_escaped(f"{settings.out}: unquantized weights, in {self.progress.seconds:.0f} s")
            return tensor_bytes(ModelDirectory(settings.out))
        if not names:
            raise ConfigError("the model meets the budget without compression; lower the budget")
        if self._group is not None and not self._group.index:
            self._group.broadcast_object((source, choice, target))
            self._others_wait = False
        self.progress.begin("rounding", "layers")
        if settings.is_trained:
            how, report, results = self._pack_trained(source, target)
        else:
            how, report, results = self._round_by_method(source, text, names, formats, target)
        self.progress.end()
        self._others_wait = True
        if self._group is not None and self._group.index:
            return report.bytes_after
        what = names[0] if len(names) == 1 else f"{len(names)} formats"
        layers = plural(len(report.layers), "layer")
        print_escaped(f"{settings.out}: {layers} as {what} by {how}, in {self.progress.seconds:.0f} s")
        directory = self._matrices(source)
        self._print_layers(directory, report, results, names)
        self._layers = layer_sizes(directory, report.layers, ModelDirectory(target))
        return report.bytes_after

    def _pack_trained(self, source: Path, target: Path) -> tuple[str, PackedReport, list[LayerResult]]:
        settings = self._settings
        assert settings.format is not None

        def pack(layer: str, weight: torch.Tensor, form: WeightFormat) -> PackedWeight:
            return pack_values(form, weight)

        report = write_packed_directory(
            source,
            target,
            settings.format,
            pack=pack,
            method={"trained": True},
            wide_dtype=settings.wide_torch_dtype,
            experts=False,  # the training rounds linear layers only
            head=settings.head,
            overwrite=settings.overwrite,
            trust_remote_code=settings.trust_remote_code,
        )
        return "training", report, []

    def _round_by_method(
        self,
        source: Path,
        text: CalibrationText | None,
        names: list[str],
        formats: str | Callable[[str], str | None],
        target: Path,
    ) -> tuple[str, PackedReport, list[LayerResult]]:
        settings, has_text = self._settings, text is not None
        is_rounded = names != [WIDE]
        method = choose_method(settings.method, names[0], has_text=has_text) if is_rounded else "rtn"
        if method == LKD:
            assert text is not None
            return self._learn_codes(source, text, formats, target)
        if settings.limits is not None and settings.method == "auto":
            method = "gptq" if any(not name.startswith("int8") for name in names) else method
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
        report, results = compress_directory(
            source,
            target,
            formats,
            options,
            batches=text.batches if text is not None and options.needs_text else (),
            head=settings.head,
            overwrite=settings.overwrite,
            progress=self.progress if self._group is None or not self._group.index else _ignore,
            trust_remote_code=settings.trust_remote_code,
            group=self._group,
            wide_dtype=settings.wide_torch_dtype,
        )
        sparse = "" if settings.sparsity is None else f"{sparsity_method}, {settings.sparsity}"
        return f"{sparse}, then {method}" if sparse and is_rounded else sparse or method, report, results

    def _learn_codes(
        self, source: Path, text: CalibrationText, formats: str | Callable[[str], str | None], target: Path
    ) -> tuple[str, PackedReport, list[LayerResult]]:
        settings = self._settings
        report, blocks = learn_directory(
            source,
            target,
            formats,
            None,
            LayerDistillationOptions(**({} if settings.lkd_steps is None else {"steps": settings.lkd_steps})),
            batches=text.batches,
            head=settings.head,
            overwrite=settings.overwrite,
            progress=self.progress,
            trust_remote_code=settings.trust_remote_code,
            wide_dtype=settings.wide_torch_dtype,
        )
        if blocks:
            before, after = (100 * sum(values) / len(blocks) for values in (
                [block.before for block in blocks], [block.after for block in blocks]
            ))  # fmt: skip
            note = f"learned codes of {plural(len(blocks), 'block')}: mean error {before:.3g} % -> {after:.3g} %"
            self._notes.append(note)
            print_escaped(f"  {note}")
        return LKD, report, []

    def _print_layers(
        self, directory: ModelDirectory, report: PackedReport, results: list[LayerResult], names: list[str]
    ) -> None:
        for reason in sorted(set(report.kept.values())):
            layers = ", ".join(layer for layer, one in report.kept.items() if one == reason)
            print_escaped(f"  not packed: {layers}: {reason}")
        for name in names:
            if name != WIDE:
                warn_of_uneven_groups(directory, [n for n, one in report.layers.items() if one == name], name)
        worst = max((one for one in results if one.error is not None), key=lambda one: one.error or 0.0, default=None)
        if worst is not None:
            print_escaped(f"  largest error of a layer's outputs: {100 * (worst.error or 0):.2f} % in {worst.name}")
        if self._settings.sparsity is None or self._settings.format is not None:
            ratio = report.packed_before / max(report.packed_after, 1)
            print_escaped(f"  packed weights: {ratio:.2f}x smaller than float32")

    def _report(self, bytes_after: int, text: CalibrationText | None, choice: BudgetChoice | None) -> None:
        settings = self._settings
        held_out = None if text is None else text.held_out
        measured: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "measure": settings.measure}
        before = measure_figures(
            settings.source,
            tensor_bytes(self._directory),
            held_out,
            run=self._run_before,
            bits=self._bits_before,
            **measured,
        )
        after = measure_figures(settings.out, bytes_after, held_out, **measured)
        got = budget_lines(settings.limits, before, after) if settings.limits is not None else []
        self._notes += got
        lines = figure_lines(before, after)
        print_escaped("\n".join([*lines, *(f"  {line}" for line in got)]))
        report = CompressionReport(
            lines, asdict(before), asdict(after), settings.given(), self._pruned, self._layers, choice, self._notes
        )
        report.write(settings.out)


def _forget_ranks() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def _ignore(done: int, total: int) -> None:
    """Show no progress."""


def _wide_format(directory: ModelDirectory, head: bool, dtype: torch.dtype | None, layer: str) -> str | None:
    """Return the format of a dtype, or without one that of the layer's stored dtype; None for the output head unless
    `head` is set."""
    if not head and layer.rpartition(".")[2] in ("lm_head", "embed_out"):
        return None
    return WIDE_FORMATS.get(dtype or directory.places[f"{layer}.weight"].dtype, "fp32")
