"""Data that a run left on disk, for its report: `windlass train --out`, or the record of `jsonl_monitor`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.errors import DataError, WindlassError
from windlass.cli.training.run_folder import CHECKPOINT_FOLDER, PLAN_FILE
from windlass.cli.training.run_metrics import read_rows
from windlass.observe.run_record import RECORD_FILE, read_record

Curve = list[tuple[float, float]]  # step and value
_SMALLEST, _LARGEST = 1e-300, 1e300  # absolute values that charts can scale without overflow or underflow

CURVES = {
    "loss": "loss",
    "held-out bits per byte": "bits per byte",
    "learning rate": "learning rate",
    "gradient norm": "norm",
    "tokens per second": "tokens/s",
    "samples per second": "samples/s",
    "seconds a step": "s",
    "memory": "MiB",
    "communication": "MiB a step",
}
"""Curves in the order of the report, with their units."""


@dataclass
class RunData:
    """Data of one run. Text comes from files and is not escaped.

    Attributes:
        name: path of the run, as the user wrote it.
        facts: facts about the run by name, in the order of the report.
        machine: facts about the machine of the run, by name.
        config: the configuration.
        curves: points (step, value) of each curve, by its name in `CURVES`.
        phases: seconds a step by phase, mean over all steps.
        checkpoints: rows of time, action, step, seconds and path.
        warnings: rows of time, level and message.
    """

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    checkpoints: list[tuple[str, ...]] = field(default_factory=list)
    warnings: list[tuple[str, ...]] = field(default_factory=list)


def read_run(path: Path) -> RunData:
    """Read a run: OUT of `windlass train`, the folder of `jsonl_monitor`, or its file.

    Raises:
        DataError: there is no run, its record is still empty, or a file is damaged. The message names the path.
    """
    run = RunData(str(path))
    record = path if path.is_file() else path / RECORD_FILE
    is_trained = (path / PLAN_FILE).is_file()
    if not record.is_file() and not is_trained:
        raise DataError(
            f"no run at {path}: give --out of `windlass train`, or the folder of the section jsonl_monitor, which has "
            f"the file {RECORD_FILE}"
        )
    if not is_trained and not any(read_record(record)):
        raise DataError(f"{record} has no line of a run yet; wait for the first one, or give another run")
    if is_trained:
        _add_plan(run, path)
    if record.is_file():
        _add_record(run, record)
    if is_trained:
        _add_training(run, path)  # last, to replace the record's loss of rank 0 by the mean of all ranks
    run.curves = {name: run.curves[name] for name in CURVES if run.curves.get(name)}
    return run


def _add_plan(run: RunData, folder: Path) -> None:
    plan = _read_object(folder / PLAN_FILE)
    config = plan.get("config")
    run.config = config if isinstance(config, dict) else {}
    for name, key in (("model", "model"), ("data", "data"), ("sequence length", "seq_len"), ("seed", "seed")):
        if key in plan:
            value = plan[key]
            run.facts[name] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    run.facts["planned steps"] = str(plan.get("steps", "?"))


def _add_training(run: RunData, folder: Path) -> None:
    metrics, result = folder / "metrics.csv", folder / "result.json"
    if metrics.is_file():
        rows = read_rows(metrics)
        columns = {
            "loss": "loss",
            "learning rate": "learning_rate",
            "gradient norm": "gradient_norm",
            "tokens per second": "tokens_per_second",
            "held-out bits per byte": "held_out_bits_per_byte",
        }
        for name, column in columns.items():
            found = _curve((row.step, getattr(row, column)) for row in rows)
            if found:
                run.curves[name] = found
        if not run.curves.get("memory"):
            memory = ((row.step, row.memory_bytes) for row in rows)
            run.curves["memory"] = [(step, nbytes / 2**20) for step, nbytes in _curve(memory)]
    if result.is_file():
        found_result = _read_object(result)
        run.facts["end"] = "finished"  # `windlass train` removes result.json at its start, and writes it last
        for name, key in (("held-out bits per byte before", "bits_before"), ("after", "bits_after")):
            number = _number(found_result.get(key))
            if number is not None:
                run.facts[name] = f"{number:.4g}"
    if not run.checkpoints and (folder / CHECKPOINT_FOLDER).is_dir():
        _add_listed_checkpoints(run, folder / CHECKPOINT_FOLDER)


def _add_listed_checkpoints(run: RunData, folder: Path) -> None:
    from windlass.checkpoint.checkpoint_listing import list_checkpoints

    try:
        listed = list_checkpoints(folder).checkpoints
    except WindlassError as error:
        run.warnings.append(("", "error", str(error)))
        return
    for one in listed:
        step = "?" if one.step is None else str(one.step)
        run.checkpoints.append((_clock(one.written), "save", step, "", str(folder / one.tag)))


def _add_record(run: RunData, path: Path) -> None:
    steps: dict[int, Mapping[str, Any]] = {}
    ended, planned, begins = False, dict(run.config), False
    for line in read_record(path):
        kind = line["kind"]
        ended = kind == "end"
        if kind == "run":
            begins = True
            _add_start(run, line)
            if isinstance(line.get("config"), dict):  # the last start of a resumed run counts
                run.config = planned or line["config"]
        elif kind == "step" and isinstance(line.get("step"), int) and _number(line["step"]) is not None:
            if begins:  # a resumed run repeats steps, and a new run starts over: the later lines replace the earlier
                steps = {number: one for number, one in steps.items() if number < line["step"]}
                begins = False
            steps[line["step"]] = line
        elif kind == "checkpoint":
            seconds = _number(line.get("seconds"))
            shown = f"{seconds:.2f}" if seconds is not None else ""
            cells = (str(line.get("action", "")), str(line.get("step", "")), shown, str(line.get("path", "")))
            run.checkpoints.append((_clock(line.get("time")), *cells))
        elif kind == "log":
            row = (_clock(line.get("time")), str(line.get("level", "")), str(line.get("message", "")))
            run.warnings.append(row)
    run.facts["end"] = (
        "ended by the script" if ended else "no end was recorded: the run continues, was stopped, or crashed"
    )
    _add_steps(run, [steps[number] for number in sorted(steps)])


def _add_start(run: RunData, line: Mapping[str, Any]) -> None:
    run.facts.setdefault("started", _clock(line.get("time")))
    for name, key in (
        ("ranks", "world_size"),
        ("mesh", "mesh"),
        ("ZeRO stage", "stage"),
        ("transport", "transport"),
        ("parameters", "parameters"),
        ("trained parameters", "trained"),
    ):
        if key in line:
            value = line[key]
            run.facts[name] = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    machine = line.get("machine")
    for key, value in machine.items() if isinstance(machine, dict) else ():
        run.machine[str(key)] = _machine_text(str(key), value)


def _machine_text(key: str, value: Any) -> str:
    if isinstance(value, dict):
        if key == "memory" and (total := _number(value.get("total_bytes"))) is not None:
            return f"{total / 2**30:.1f} GiB"
        return ", ".join(f"{name}: {item}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(str(one.get("name", one)) if isinstance(one, dict) else str(one) for one in value) or "none"
    return str(value)


def _add_steps(run: RunData, steps: list[Mapping[str, Any]]) -> None:
    def curve(value_of: Any) -> Curve:
        return _curve((line["step"], value_of(line)) for line in steps)

    def sum_bytes(line: Mapping[str, Any]) -> float | None:
        moved = line.get("bytes_moved")
        numbers = [_number(value) for value in moved.values()] if isinstance(moved, dict) else []
        return sum(number for number in numbers if number is not None) / 2**20 if numbers else None

    def memory(line: Mapping[str, Any]) -> float | None:
        number = _number(line.get("device_bytes"))
        number = _number(line.get("resident_bytes")) if number is None else number
        return None if number is None else number / 2**20

    run.curves["loss"] = curve(lambda line: line.get("loss"))
    run.curves["learning rate"] = curve(lambda line: line.get("learning_rate"))
    run.curves["gradient norm"] = curve(lambda line: line.get("gradient_norm"))
    run.curves["seconds a step"] = curve(lambda line: line.get("seconds"))
    run.curves["memory"] = curve(memory)
    run.curves["communication"] = curve(sum_bytes)
    run.curves["samples per second"] = [
        (float(line["step"]), (after - before) / seconds)
        for previous, line in zip(steps, steps[1:], strict=False)
        if (seconds := _number(line.get("seconds")))
        and (before := _number(previous.get("samples"))) is not None
        and (after := _number(line.get("samples"))) is not None
        and after > before
    ]
    totals: dict[str, float] = {}
    for line in steps:
        phases = line.get("phases")
        for name, value in phases.items() if isinstance(phases, dict) else ():
            totals[str(name)] = totals.get(str(name), 0.0) + (_number(value) or 0.0)
    run.phases = {name: total / len(steps) for name, total in totals.items()}
    run.facts["steps"] = str(len(steps))


def _curve(pairs: Iterable[tuple[Any, Any]]) -> Curve:
    return [
        (float(step), number) for step, value in pairs if (number := _number(value)) is not None and step is not None
    ]


def _number(value: Any) -> float | None:
    """Return a value from a file as a float that can be drawn; None if the value is no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if abs(number) < _SMALLEST:
        return 0.0
    return number if abs(number) <= _LARGEST else None


def _clock(value: Any) -> str:
    number = _number(value)
    try:
        return "" if number is None else datetime.fromtimestamp(number).strftime("%Y-%m-%d %H:%M:%S")
    except (OSError, OverflowError, ValueError):
        return ""


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except (OSError, JsonError) as error:
        raise DataError(f"cannot read {path}: {error}; give --out of a run of `windlass train`") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} has no JSON object; give --out of a run of `windlass train`")
    return value


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a configuration by dotted key, as JSON text."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat_config(value, f"{name}.")
        else:
            found[name] = json.dumps(value, default=str)
    return found
