"""Option `--autotuning tune|run` of launchers, with DeepSpeed's section `autotuning`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from windlass.base.printable_console import PrintableConsole
from windlass.base.processes import SignalInterrupt
from windlass.config import Config, load_config
from windlass.config.config_source import ConfigSource
from windlass.launch.launch_errors import LaunchError
from windlass.launch.visible_devices import count_devices
from windlass.tune.search_space import SearchLimits
from windlass.tune.trial_command import ProgramCommand, find_config, mapped_options, read_config
from windlass.tune.tuning_report import draw_trials, summary_lines, trial_line, trials_table
from windlass.tune.tuning_run import TuningOutcome, TuningRun, TuningSettings

_FLAG = "--autotuning"
_TABLE_WIDTH = 130  # rich would assume 80 columns for a pipe


def flags_without_autotuning(flags: Sequence[str]) -> list[str]:
    """Return launcher flags without `--autotuning MODE`, in any of its spellings."""
    kept: list[str] = []
    skips = False
    for word in flags:
        if skips:
            skips = False
            continue
        name, equals, _ = word.partition("=")
        if len(name) > 3 and _FLAG.startswith(name):
            skips = not equals
            continue
        kept.append(word)
    return kept


def run_autotuning(mode: str, launcher: Sequence[str], program: Sequence[str], world_size: int) -> int:
    """Search for the best configuration of a program. The mode `run` then starts the program with that configuration.

    Args:
        launcher: Words that start the program on its ranks.
        program: The program and its arguments, which name the configuration.
        world_size: Number of ranks.

    Returns:
        The exit code: 0, or, if the search was interrupted, 128 plus the number of the signal (130 after Ctrl-C, 143
        after SIGTERM). After a complete search the mode `run` does not return: the program replaces this process.

    Raises:
        LaunchError: the section `autotuning` is off.
        ConfigError: the program's arguments name no configuration, nothing can be searched, or `arg_mappings` has an
            unknown key.
        TuningError: no trial could be measured.
    """
    path = find_config(program)
    raw = read_config(path)
    section = load_config(ConfigSource({"autotuning": raw.get("autotuning", {})}, path))
    if not section.autotuning.enabled:
        raise LaunchError(f'{_FLAG} {mode}: {path} has no "autotuning": {{"enabled": true}}; add it')
    settings = settings_of(section)
    mapped = mapped_options(section.autotuning.arg_mappings or {}, raw, "autotuning.arg_mappings")
    command = ProgramCommand(tuple(launcher), tuple(program), path, mapped)
    console = PrintableConsole(stderr=True, soft_wrap=True, highlight=False, markup=False)
    outcome = search_with_report(TuningRun(raw, world_size, command, settings), console)
    if outcome.interrupted_by is not None or outcome.config is None:
        return 128 + (outcome.interrupted_by or signal.SIGINT)
    if mode == "run":
        words = command.for_trial(settings.results / "ds_config_optimal.json", outcome.config)
        console.print(f"started with the best configuration: {settings.results / 'ds_config_optimal.json'}")
        sys.stdout.flush()
        os.execvp(words[0], words)
    return 0


def search_with_report(run: TuningRun, console: PrintableConsole, picture: Path | None = None) -> TuningOutcome:
    """Search, and print a line after each trial and a table at the end. SIGTERM ends the search as Ctrl-C does.

    Args:
        picture: Path of the plot of the trials; None: `trials.png` among the results.

    Raises:
        TuningError: see `TuningRun.run`.
    """
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(
        f"{len(run.candidates)} configurations, at most {run.state.budget} trials; results in {run.files.results}"
    )
    with _sigterm_as_interrupt():
        outcome = run.run(lambda record: console.print(trial_line(record)))
    if outcome.records:
        console.print(trials_table(outcome, run.settings.metric))
    for line in summary_lines(outcome):
        console.print(line)
    draw_trials(outcome, picture or run.files.results / "trials.png")
    if outcome.best is not None:
        console.print(
            f"best: {outcome.best.candidate.name}, {outcome.best.throughput:,.2f} samples/s; written to "
            f"{run.files.results / 'ds_config_optimal.json'}"
        )
    return outcome


def settings_of(config: Config) -> TuningSettings:
    """Return the settings of the section `autotuning`."""
    section = config.autotuning
    steps = max(1, section.end_profile_step - section.start_profile_step + 1)
    limits = SearchLimits(
        train_min=section.min_train_batch_size if section.max_train_batch_size is not None else None,
        train_max=section.max_train_batch_size,
        micro_min=section.min_train_micro_batch_size_per_gpu,
        micro_max=section.max_train_micro_batch_size_per_gpu,
        micro_count=section.num_tuning_micro_batch_sizes,
        has_device_memory=count_devices() > 0,
        fast=section.fast,
    )
    return TuningSettings(
        Path(section.results_dir),
        Path(section.exps_dir),
        limits,
        tuner=section.tuner_type,
        trials=section.tuner_num_trials,
        early_stopping=section.tuner_early_stopping or None,
        warmup=max(1, section.start_profile_step - 1),
        steps=steps,
        metric=section.metric,
        keeps_results=not section.overwrite,
    )


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SignalInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
