"""Command `windlass compress`: rounds the weights of a model and writes them packed."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from windlass.base.errors import ConfigError
from windlass.base.text import plural, print_escaped
from windlass.cli.checkpoints import format_size
from windlass.cli.training.run_folder import export_directory_of

_FEW_BITS = ("int2", "ternary", "binary")
_DEFAULT_GROUP = 128
_TIMED_TOKENS = 64


@dataclass(frozen=True)
class ModelFigures:
    """Figures of a model before or after.

    Attributes:
        nbytes: of its tensors.
        bits: bits per byte of held-out text; None: there is no text.
        speed: generated tokens a second of one request; None: not measured.
    """

    nbytes: int
    bits: float | None = None
    speed: float | None = None


def compress(
    model: Annotated[Path, typer.Argument(help="Hugging Face directory, or OUT of `windlass train`.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    weights: Annotated[
        str,
        typer.Option(help="int8, fp8, int4, int3, int2, ternary, binary, with _zp for zero points, or a full name."),
    ] = "int4",
    group: Annotated[
        int | None, typer.Option(help="Input features with one scale: 32, 64, 128; 0: a whole row. [128 below 8 bits]")
    ] = None,
    method: Annotated[
        Literal["auto", "rtn", "gptq", "awq", "hqq"],
        typer.Option(help="auto: gptq with --data, else hqq; 8 bits and formats without integers: rtn."),
    ] = "auto",
    activations: Annotated[
        Literal["float", "int8"],
        typer.Option(help="int8: fold scales that take outliers out of the inputs (SmoothQuant). Needs --data."),
    ] = "float",
    data: Annotated[
        list[str] | None, typer.Option(help="Text to calibrate and measure with: files, directories. Repeatable.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field of JSON and parquet records.")] = "text",
    sequences: Annotated[int, typer.Option(help="Calibration sequences.", min=1)] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a calibration sequence.", min=8)] = 512,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate the hidden states (QuaRot), Llama's families.")
    ] = False,
    head: Annotated[bool, typer.Option("--head", help="Pack the output head too.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure loss and speed before and after.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Round to 2 bits and fewer without training.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
) -> None:
    """Write MODEL with packed weights to OUT. The same command continues an interrupted run."""
    from windlass.compress.calibration_text import longest_sequence, read_calibration_text
    from windlass.compress.model_directory import ModelDirectory
    from windlass.compress.post_training import RoundingOptions, compress_directory

    name = format_name(weights, group)
    if name.startswith(_FEW_BITS) and not force:
        raise ConfigError(
            f"weights (--weights) is {name!r}: rounding a trained model to so few bits without training it again makes "
            "it answer badly; use int3 or int4, or --force"
        )
    source = export_directory_of(model)
    directory = ModelDirectory(source)
    text = None
    if data:
        limit = longest_sequence(directory.config) or length
        text = read_calibration_text(
            data, source, sequences=sequences, length=min(length, limit), text_field=text_field
        )
    options = RoundingOptions(
        choose_method(method, name, has_text=text is not None),  # type: ignore[arg-type]
        smooth=activations == "int8",
        rotate=rotate,
    )
    progress = _Progress()
    try:
        report, results = compress_directory(
            source,
            out,
            name,
            options,
            batches=text.batches if text is not None and options.needs_text else (),
            head=head,
            overwrite=overwrite,
            progress=progress,
            trust_remote_code=trust_remote_code,
        )
    except KeyboardInterrupt:
        progress.end()
        print_escaped(f"interrupted after {progress.done} layers; the same command continues there", to_stderr=True)
        raise
    progress.end()
    print_escaped(
        f"{out}: {plural(len(report.layers), 'layer')} as {name} by {options.method}, in {progress.seconds:.0f} s"
    )
    for reason in sorted(set(report.kept.values())):
        print_escaped(
            f"  not packed: {', '.join(layer for layer, one in report.kept.items() if one == reason)}: {reason}"
        )
    _warn_of_uneven_groups(directory, report.layers, name)
    worst = max((one for one in results if one.error is not None), key=lambda one: one.error or 0.0, default=None)
    if worst is not None:
        print_escaped(f"  largest error of a layer's outputs: {100 * (worst.error or 0):.2f} % in {worst.name}")
    print_escaped(f"  packed weights: {report.packed_before / max(report.packed_after, 1):.2f}x smaller than float32")
    held_out = None if text is None else text.held_out
    measured = {"trust_remote_code": trust_remote_code, "measure": measure}
    before = _figures(source, report.bytes_before, held_out, "auto", **measured)
    after = _figures(out, report.bytes_after, held_out, "int8" if activations == "int8" else "auto", **measured)
    print_escaped("\n".join(figure_lines(before, after)))


def format_name(weights: str, group: int | None) -> str:
    """Return the name of a weight format.

    Raises:
        ConfigError: no format has these bits in these groups.
    """
    from windlass.kernels.weight_format import list_weight_formats

    known = [name for name in list_weight_formats() if name not in ("fp32", "bf16")]
    base, zeros = (weights[:-3], "_zp") if weights.endswith("_zp") else (weights, "")
    if "_g" in weights and group is None:
        name = weights
    else:
        wide = base in ("int8", "fp8")
        size = group if group is not None else 0 if wide else _DEFAULT_GROUP
        name = base + (f"_g{size}" if size else "") + zeros
    if name not in known:
        raise ConfigError(
            f"weights (--weights) {weights!r} with group (--group) {group} is format {name!r}, which does not exist; "
            f"formats are {', '.join(known)}"
        )
    return name


def choose_method(method: str, name: str, *, has_text: bool) -> str:
    """Return the method of `auto`: the one that loses least with what is given."""
    from windlass.compress.integer_grid import is_integer_format
    from windlass.kernels.weight_format import get_weight_format

    if method != "auto":
        if method != "rtn" and not is_integer_format(get_weight_format(name)):
            raise ConfigError(f"method (--method) is {method!r}, but {name!r} has no integers to choose; use rtn")
        return method
    if name.startswith("int8") or not is_integer_format(get_weight_format(name)):
        return "rtn"
    return "gptq" if has_text else "hqq"


def figure_lines(before: ModelFigures, after: ModelFigures) -> list[str]:
    """Return a table of both models."""
    rows = [("", "before", "after", "")]
    ratio = f"{before.nbytes / max(after.nbytes, 1):.2f}x smaller"
    rows.append(("all tensors", format_size(before.nbytes), format_size(after.nbytes), ratio))
    if before.bits is not None and after.bits is not None:
        change = f"{100 * (after.bits / before.bits - 1):+.2f} %"
        rows.append(("held-out bits per byte", f"{before.bits:.4f}", f"{after.bits:.4f}", change))
    if before.speed is not None and after.speed is not None:
        rows.append(
            ("tokens/s, one request", f"{before.speed:.1f}", f"{after.speed:.1f}", f"{after.speed / before.speed:.2f}x")
        )
    return [f"  {name:24}{one:>12}{two:>12}   {three}".rstrip() for name, one, two, three in rows]


def _warn_of_uneven_groups(directory: Any, layers: Sequence[str] | dict[str, str], name: str) -> None:
    from windlass.kernels.coded_formats import CodedWeightFormat
    from windlass.kernels.weight_format import get_weight_format

    form = get_weight_format(name)
    size = form.group if isinstance(form, CodedWeightFormat) else None
    uneven = [layer for layer in layers if size and directory.places[f"{layer}.weight"].shape[1] % size]
    if uneven:
        features = directory.places[f"{uneven[0]}.weight"].shape[1]
        print_escaped(
            f"  groups of {size} do not divide the {features} input features of {plural(len(uneven), 'layer')} like "
            f"{uneven[0]}: the last group is shorter, and vLLM and transformers do not load the directory"
        )


def _figures(
    path: Path, nbytes: int, held_out: Any, activations: str, *, measure: bool, trust_remote_code: bool
) -> ModelFigures:
    """Measure a model's directory."""
    if not measure:
        return ModelFigures(nbytes)
    from windlass.compress.calibration_text import bits_per_byte
    from windlass.inference.llm import LLM
    from windlass.inference.model_loading import load_model
    from windlass.inference.sampling_params import SamplingParams

    bits = None
    if held_out is not None:
        model = load_model(path, trust_remote_code=trust_remote_code)
        _round_inputs_as_served(model, activations)
        bits = bits_per_byte(model, held_out)
        del model
        gc.collect()
    options: dict[str, Any] = {"max_sequences": 1, "skip_tokenizer_init": True, "activations": activations}
    with LLM(path, device="cpu", trust_remote_code=trust_remote_code, **options) as llm:
        prompt = [list(range(3, 11))]
        tokens = max(min(_TIMED_TOKENS, llm.max_model_len - len(prompt[0])), 1)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.generate(prompt, params)
        start = time.perf_counter()
        llm.generate(prompt, params)
        seconds = time.perf_counter() - start
    return ModelFigures(nbytes, bits, tokens / seconds)


def _round_inputs_as_served(model: Any, activations: str) -> None:
    """Round the inputs of packed layers to int8 where the inference engine does so."""
    from windlass.kernels.coded_formats import CodedWeightFormat
    from windlass.kernels.packed_linear import PackedLinear
    from windlass.kernels.reference.quantized_input import quantize_groups

    for module in model.modules():
        if isinstance(module, PackedLinear):
            form = module.format
            narrow = isinstance(form, CodedWeightFormat) and form.bits < 8
            rounds = activations == "int8" or activations == "auto" and module.rounds_inputs
            if narrow or rounds and form.name.startswith("int8"):
                module.register_forward_pre_hook(lambda layer, inputs: (quantize_groups(inputs[0]), *inputs[1:]))


class _Progress:
    """Line of the layers that are done: rewritten on a terminal, at each tenth elsewhere."""

    def __init__(self) -> None:
        self.done, self._begin, self._shown = 0, time.monotonic(), -1
        self._write: Callable[[str], Any] = sys.stderr.write
        self._is_terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def __call__(self, done: int, total: int) -> None:
        self.done = done
        tenth = 10 * done // max(total, 1)
        line = f"  {done} of {total} layers, {self.seconds:.0f} s"
        if self._is_terminal:
            self._write(f"\r{line}")
            sys.stderr.flush()
        elif tenth != self._shown:
            self._write(f"{line}\n")
        self._shown = tenth

    def end(self) -> None:
        """End the line on a terminal."""
        if self._is_terminal and self._shown >= 0:
            self._write("\n")
