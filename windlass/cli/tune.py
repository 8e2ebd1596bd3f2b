"""Command `windlass tune`: searches for the fastest configuration of a training script by short runs of the script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.base.byte_counts import parse_bytes
from windlass.base.errors import ConfigError
from windlass.base.printable_console import PrintableConsole
from windlass.config.config_overrides import canonical_path
from windlass.launch.visible_devices import count_devices
from windlass.tune.autotuning_command import search_with_report
from windlass.tune.optuna_sampler import import_optuna
from windlass.tune.ray_trials import RayTrials
from windlass.tune.search_space import SearchLimits
from windlass.tune.trial_command import ProgramCommand, find_config, mapped_options, read_config
from windlass.tune.tuning_report import as_json as outcome_as_json
from windlass.tune.tuning_run import TuningRun, TuningSettings

_SEARCH_EXAMPLE = "zero_optimization.stage=1,2"
_MAP_EXAMPLE = "train_micro_batch_size_per_gpu=--per_device_train_batch_size"


def tune(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="The training script and its arguments, as for `run`."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="ds_config.json; by default the one among SCRIPT's arguments (--deepspeed_config, --config)."
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Number of ranks on this machine.")] = 1,
    search: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE,VALUE: choices of a configuration key; repeatable.")
    ] = None,
    mapped: Annotated[
        list[str] | None,
        typer.Option("--map", help="KEY=--OPTION: option of SCRIPT that stands for a configuration key; repeatable."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="MIN:MAX: range of the global batch. [the configuration's is kept]")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of a rank: of its GPU, or of its process on a CPU. [a GPU's own]"),
    ] = None,
    nvme: Annotated[str | None, typer.Option(help="Directory on NVMe that may be used.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of trials. [at most 50, in a quarter of the time of all]")
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Try every configuration.")] = False,
    sampler: Annotated[
        str, typer.Option(help="walk: by predictions, corrected by trials; optuna: Optuna's sampler, if installed.")
    ] = "walk",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster (or auto) on whose hosts trials run at the same time."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of a trial that are not timed.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a trial that are timed.")] = 5,
    trial_seconds: Annotated[float, typer.Option(min=1, help="Time limit of a trial.")] = 600,
    metric: Annotated[
        str, typer.Option(help="Quantity that selects the fastest trial: throughput, flops, latency, forward or step.")
    ] = "throughput",
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("autotuning_results"),
    picture: Annotated[Path | None, typer.Option(help="PNG of all trials. [OUT/trials.png]")] = None,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="`import deepspeed` imports windlass in SCRIPT.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.")
    ] = False,
) -> None:
    """Run SCRIPT for a few steps under many configurations, and write the fastest as OUT/ds_config_optimal.json. Keys
    at "auto" or with a list of values are searched; without any such key: stage, micro-batch, checkpointing, tiers and
    buckets. Exit code 1: no trial could be measured; 130: interrupted by Ctrl-C (143: by SIGTERM), the best so far is
    written."""
    if not program:
        raise ConfigError("nothing to tune: name a script; options of this command go before its name")
    if not Path(program[0]).is_file():
        raise ConfigError(f"no such script: {program[0]}; check the path, and put options of `tune` before it")
    if metric not in ("throughput", "latency", "flops", "forward", "step"):
        raise ConfigError(f"--metric {metric!r} is unknown; write throughput, latency, flops, forward or step")
    if sampler not in ("walk", "optuna"):
        raise ConfigError(f"--sampler {sampler!r} is unknown; write walk or optuna")
    if sampler == "optuna" and (exhaustive or ray is not None):
        other = "--exhaustive" if exhaustive else "--ray"
        raise ConfigError(f"--sampler optuna has no effect with {other}; leave one of them out")
    if exhaustive and trials is not None:
        raise ConfigError(f"--trials {trials} has no effect with --exhaustive; leave one of them out")
    if sampler == "optuna":
        import_optuna()  # without Optuna, fail before the first trial
    path = config if config is not None else find_config(program)
    low, high = _parse_range(batch)
    limits = SearchLimits(
        train_min=low,
        train_max=high,
        has_device_memory=count_devices() > 0,
        nvme_path=nvme,
        choices={
            key: _parse_choices(key, text) for key, text in _pairs(search, "--search", "KEY=VALUE", _SEARCH_EXAMPLE)
        },
    )
    settings = TuningSettings(
        out,
        limits=limits,
        memory=_parse_memory(memory),
        tuner="gridsearch" if exhaustive else "optuna" if sampler == "optuna" else "model_based",
        trials=10**9 if exhaustive else trials,
        warmup=warmup,
        steps=steps,
        trial_seconds=trial_seconds,
        metric=metric,
    )
    raw = read_config(path)
    options = mapped_options(dict(_pairs(mapped, "--map", "KEY=--OPTION", _MAP_EXAMPLE)), raw, "--map")
    launcher = [sys.executable, "-m", "windlass", "run", "--nproc", str(nproc)]
    launcher += ["--as-deepspeed"] if as_deepspeed else []
    command = ProgramCommand(tuple(launcher), tuple(program), path, options)
    console = PrintableConsole(stderr=as_json, soft_wrap=True, highlight=False, markup=False)
    hosts = RayTrials(ray, nproc, has_gpu=count_devices() > 0) if ray is not None else None
    if hosts is not None and hosts.hosts < 2:
        console.print("the Ray cluster has one host: trials run one after another")
        hosts = None
    run = TuningRun(raw, nproc, command, settings, parallel=hosts)
    outcome = search_with_report(run, console, picture)
    if as_json:
        typer.echo(json.dumps(outcome_as_json(outcome), indent=1))
    if outcome.interrupted_by is not None:
        raise typer.Exit(128 + outcome.interrupted_by)


def _pairs(given: list[str] | None, option: str, form: str, example: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for text in given or []:
        key, equals, value = text.partition("=")
        key = canonical_path(key.strip())
        if not (key and equals and value):
            raise ConfigError(f"{option} {text!r} is not {form}; write for example {example}")
        if any(key == earlier for earlier, _ in pairs):
            hint = f", and choices as {key}=VALUE,VALUE" if form == "KEY=VALUE" else ""
            raise ConfigError(f"{option} {text!r}: {key} is given twice; write it once{hint}")
        pairs.append((key, value))
    return pairs


def _parse_choices(key: str, text: str) -> tuple[Any, ...]:
    """Return the values of an option `--search KEY=VALUE,VALUE`."""
    found = tuple(map(_parse_value, text.split(",")))
    for value in found:
        if isinstance(value, (list, dict)) or value != value:
            raise ConfigError(
                f"--search {key}={text}: {value!r} is not a single value; name the keys inside of it instead"
            )
    return found


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_memory(text: str | None) -> int | None:
    found = parse_bytes(text, "--memory") if text is not None else None
    if found == 0:
        raise ConfigError("--memory 0 is not above 0; give the memory of a rank, such as 40GB")
    return found


def _parse_range(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    low, colon, high = text.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise ConfigError(f"--batch {text!r} is not a range; write MIN:MAX, such as 32:128")
    return int(low), int(high)
