"""Size, memory, loss and speed of a model before and after its compression, and the progress of a run."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.base.errors import ConfigError
from windlass.base.text import plural, print_escaped
from windlass.cli.checkpoints import format_size
from windlass.cli.model_run import RunFigures, measure_run

_DEFAULT_GROUP = 128


@dataclass(frozen=True)
class ModelFigures:
    """Figures of the model before or after compression.

    Attributes:
        nbytes: bytes of the model's tensors.
        bits: bits per byte of held-out text; None: not measured.
        speed: generated tokens a second of one request; None: not measured.
        ms_per_token: milliseconds of one generated token; None: not measured.
        memory, idle_memory: peak resident bytes of a process that loads the model and answers one request, and resident
            bytes of the same process before it loads the model; None: not measured.
    """

    nbytes: int
    bits: float | None = None
    speed: float | None = None
    ms_per_token: float | None = None
    memory: int | None = None
    idle_memory: int | None = None

    @classmethod
    def of(cls, nbytes: int, bits: float | None, run: RunFigures | None) -> ModelFigures:
        """Return the figures of a model: its size, its bits per byte, and the speed and memory of a run."""
        if run is None:
            return cls(nbytes, bits)
        return cls(nbytes, bits, 1 / run.seconds, 1e3 * run.seconds, run.memory, run.idle_memory)


def format_name(weights: str, group: int | None) -> str:
    """Return the full name of a weight format: `int4_g128`, with the default group size, for `int4` and `group` None.

    Raises:
        ConfigError: there is no format of this name and group size.
    """
    from windlass.compress.packed_directory import WIDE_FORMATS
    from windlass.kernels.weight_format import list_weight_formats

    known = [name for name in list_weight_formats() if name not in WIDE_FORMATS.values()]
    base, zeros = (weights[:-3], "_zp") if weights.endswith("_zp") else (weights, "")
    if "_g" in weights:
        named = base.rpartition("_g")[2]
        if group is not None and named != str(group):
            raise ConfigError(
                f"weights (--weights) is {weights!r}, with groups of {named}, and group (--group) is {group}; leave "
                "one of them out"
            )
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
    """Resolve the method `auto`: `rtn` for int8 and for formats without integers, else `gptq` with a text, `hqq`
    without.

    Raises:
        ConfigError: a method other than `rtn` was chosen for a format without integers.
    """
    from windlass.compress.integer_grid import is_integer_format
    from windlass.kernels.weight_format import get_weight_format

    if method != "auto":
        if method != "rtn" and not is_integer_format(get_weight_format(name)):
            raise ConfigError(f"method (--method) is {method!r}, but {name!r} is not a format of integers; use rtn")
        return method
    if name.startswith("int8") or not is_integer_format(get_weight_format(name)):
        return "rtn"
    return "gptq" if has_text else "hqq"


def figure_lines(before: ModelFigures, after: ModelFigures) -> list[str]:
    """Return the lines of a table with the figures of both models."""
    rows = [("", "before", "after", "")]
    ratio = f"{before.nbytes / max(after.nbytes, 1):.2f}x smaller"
    rows.append(("all tensors", format_size(before.nbytes), format_size(after.nbytes), ratio))
    if before.memory is not None and after.memory is not None:
        own = [one.memory - (one.idle_memory or 0) for one in (before, after) if one.memory is not None]
        rest = f"{own[0] / max(own[1], 1):.2f}x less without the process's {format_size(after.idle_memory or 0)}"
        rows.append(("peak memory, one request", format_size(before.memory), format_size(after.memory), rest))
    if before.bits is not None and after.bits is not None:
        change = f"{100 * (after.bits / before.bits - 1):+.2f} %"
        rows.append(("held-out bits per byte", f"{before.bits:.4f}", f"{after.bits:.4f}", change))
    if before.speed is not None and after.speed is not None:
        rows.append(
            ("tokens/s, one request", f"{before.speed:.1f}", f"{after.speed:.1f}", f"{after.speed / before.speed:.2f}x")
        )
    if before.ms_per_token is not None and after.ms_per_token is not None:
        ratio = f"{before.ms_per_token / after.ms_per_token:.2f}x less"
        rows.append(("ms a token", f"{before.ms_per_token:.3g}", f"{after.ms_per_token:.3g}", ratio))
    return [f"  {name:26}{one:>12}{two:>12}   {three}".rstrip() for name, one, two, three in rows]


def warn_of_uneven_groups(directory: Any, layers: Sequence[str] | dict[str, str], name: str) -> None:
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


def measure_figures(
    path: Path,
    nbytes: int,
    held_out: Any,
    *,
    measure: bool,
    trust_remote_code: bool,
    run: RunFigures | None = None,
    bits: float | None = None,
) -> ModelFigures:
    """Return the figures of the model in a directory.

    Args:
        measure: False: return only `nbytes`, `run` and `bits`.
        run, bits: figures that were measured before; None: measure them.
    """
    if measure and held_out is not None and bits is None:
        bits = measure_bits(path, held_out, trust_remote_code=trust_remote_code)
    if measure and run is None:
        run = measure_run(path, trust_remote_code=trust_remote_code)
    return ModelFigures.of(nbytes, bits, run)


def measure_bits(path: Path, held_out: Any, *, trust_remote_code: bool = False) -> float:
    """Return the bits per byte of held-out text, with layer inputs rounded as in the inference engine."""
    from windlass.compress.calibration_text import bits_per_byte
    from windlass.inference.model_loading import load_model

    model = load_model(path, trust_remote_code=trust_remote_code)
    _round_inputs_as_served(model)
    bits = bits_per_byte(model, held_out)
    del model
    gc.collect()
    return bits


def _round_inputs_as_served(model: Any) -> None:
    """Round the inputs of packed layers to int8 where the inference engine does so."""
    from windlass.kernels.coded_formats import CodedWeightFormat
    from windlass.kernels.packed_linear import PackedLinear
    from windlass.kernels.reference.quantized_input import quantize_groups

    for module in model.modules():
        if isinstance(module, PackedLinear):
            form = module.format
            narrow = isinstance(form, CodedWeightFormat) and form.bits < 8
            if narrow or module.rounds_inputs:
                module.register_forward_pre_hook(lambda layer, inputs: (quantize_groups(inputs[0]), *inputs[1:]))


class StageProgress:
    """Progress of a run's stages: bars on a terminal, a line at each tenth elsewhere."""

    def __init__(self) -> None:
        self.done, self._begin, self._shown = 0, time.monotonic(), -1
        self.stage, self.unit = "rounding", "layers"
        self._bars: Any = None
        self._task: Any = None

    @property
    def seconds(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._begin

    @property
    def text(self) -> str:
        """Number of finished units of the stage, e.g. `12 layers`."""
        return f"{self.done} {self.unit}"

    def begin(self, stage: str, unit: str) -> None:
        """Begin a stage."""
        self.end()
        self.stage, self.unit, self.done, self._shown = stage, unit, 0, -1

    def __call__(self, done: int, total: int) -> None:
        self.done = done
        if sys.stderr.isatty():
            self._draw(done, total)
            return
        tenth = 10 * done // max(total, 1)
        if tenth != self._shown:
            sys.stderr.write(f"  {done} of {total} {self.unit}, {self.seconds:.0f} s\n")
        self._shown = tenth

    def _draw(self, done: int, total: int) -> None:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bars = Progress(
                TextColumn("  {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self.unit),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bars.add_task(self.stage, total=total)
            self._bars.start()
        self._bars.update(self._task, completed=done, total=total)

    def end(self) -> None:
        """End the bars of the stage."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
