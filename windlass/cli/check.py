"""Command `windlass check`: prints the problems of a configuration, without a device or a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from windlass.base.bounded_input import parse_int
from windlass.base.errors import ConfigError
from windlass.base.printable_console import PrintableConsole
from windlass.base.text import one_line, plural
from windlass.config.auto_values import CLIENT_NAMES, AutoValues, Client, auto_keys_of, classify_auto_keys, guess_client
from windlass.config.config_loading import ValidationResult, validate_config
from windlass.config.config_problems import MAX_LISTED, ProblemKind, format_value
from windlass.config.config_section import ConfigSection
from windlass.config.key_status import KeyStatus
from windlass.config.key_table import TRAINING_CONFIG, find_key
from windlass.config.offload_section import idle_offload_warning
from windlass.config.optimizer_section import COMPRESSED_OPTIMIZERS, OPTIMIZER_PARAMETERS, late_start_warning
from windlass.config.root_config import Config


def check(
    config: Annotated[str, typer.Argument(help="Path of the configuration, or base64 of it.")],
    world_size: Annotated[int | None, typer.Option(help="Number of ranks. [WORLD_SIZE, else 1]")] = None,
    client: Annotated[
        Client | None,
        typer.Option(help='Program that fills in each "auto"; guessed if the file has several of them.'),
    ] = None,
) -> None:
    """Print every unknown key, wrong type, contradiction and unsupported setting in CONFIG, and the resolved values."""
    console = PrintableConsole(soft_wrap=True, highlight=False, markup=False)
    try:
        found = validate_config(config)
    except ConfigError as error:
        console.print(str(error))
        raise typer.Exit(1) from error
    world, source = _resolve_world_size(world_size)
    autos = classify_auto_keys(found.config, client or guess_client(auto_keys_of(found.config)))
    wrong = report_problems(console, found, autos)
    report_autos(console, autos, guessed=client is None)
    warnings = report_strictness(console, found, autos.client)
    warnings += report_late_start(console, found.config) + report_idle_offload(console, found.config)
    wrong += report_resolved(console, found.config, world, source, autos)
    wrong += report_disks(console, found.config)
    report_accepted(console, found)
    _print_list(console, "comments, ignored", found.config.comments)
    outcome = f"{wrong:,} to fix" if wrong else "fine"
    outcome += f" ({plural(warnings, 'warning')})" if warnings else ""
    console.print(f"\n{one_line(config, 200)}: {outcome}")
    if wrong:
        raise typer.Exit(1)


def _resolve_world_size(option: int | None) -> tuple[int, str]:
    if option is not None:
        return option, "--world-size"
    environment = os.environ.get("WORLD_SIZE", "").strip()
    if not environment:
        return 1, "assumed; give --world-size"
    number = parse_int(environment)
    if number is None:
        raise ConfigError(
            f"the environment variable WORLD_SIZE = {environment!r} is not a whole number; correct or unset it, or "
            "give --world-size"
        )
    return number, "WORLD_SIZE in the environment"


def report_problems(console: Console, found: ValidationResult, autos: AutoValues) -> int:
    """Print problems and refusals by kind. Return their number."""
    for kind in ProblemKind:
        problems = [problem for problem in found.problems if problem.kind is kind]
        _print_list(console, kind.value, problems)
    refusals = [refusal for refusal in found.config.refusals() if refusal.value != "auto"] + [*autos.refused]
    _print_list(console, "not supported", refusals)
    return len(found.problems) + len(refusals)


def report_autos(console: Console, autos: AutoValues, guessed: bool) -> None:
    """Print the values that the client fills in for each "auto", and the keys left at their default."""
    name = CLIENT_NAMES[autos.client]
    if guessed and autos.client is not Client.NONE:
        console.print(
            f'client: {name}, guessed from the keys at "auto"; choose with --client trainer, accelerate or none'
        )
    lines = [f"{key}: {value}" for key, value in autos.filled.items()]
    _print_list(console, f'at "auto", filled in by {name}', lines)
    _print_list(console, 'at "auto", left at the default', autos.defaulted)


def report_strictness(console: Console, found: ValidationResult, client: Client) -> int:
    """Print a warning if `json.load` would refuse the file. Return the number of warnings."""
    reason = found.source.not_strict_reason
    if not reason:
        return 0
    readers = CLIENT_NAMES[client] if client is not Client.NONE else "transformers, accelerate and DeepSpeed"
    fails = "reads" if client is not Client.NONE else "read"
    console.print(
        f"warning: this is not strict JSON: {reason}. windlass reads it; {readers} {fails} it with json.load, which "
        "rejects it",
        style="bold",
    )
    return 1


def report_late_start(console: Console, config: Config) -> int:
    """Print a warning if the schedule of a compressed optimizer ends before its freeze or first local step. Return the
    number of warnings."""
    if config.optimizer is None or config.scheduler is None or config.optimizer.type not in COMPRESSED_OPTIMIZERS:
        return 0
    defaults = {name: spec.default for name, spec in OPTIMIZER_PARAMETERS[config.optimizer.type].items()}
    text = late_start_warning({**defaults, **config.optimizer.params}, config.scheduler.params.get("total_num_steps"))
    if text:
        console.print(f"warning: {text}", style="bold")
    return int(bool(text))


def report_idle_offload(console: Console, config: Config) -> int:
    """Print a warning if optimizer states stay on the device although they are to be offloaded. Return the number of
    warnings."""
    text = idle_offload_warning(config.zero_optimization.offload_optimizer, config.zero_optimization.stage)
    if text:
        console.print(f"warning: {text}", style="bold")
    return int(bool(text))


def report_accepted(console: Console, found: ValidationResult) -> None:
    """Print the configured keys that are accepted without effect, each with the reason."""
    lines = [
        f"{path}: {row.reason}"
        for path in _given_keys(found.config)
        if (row := find_key(TRAINING_CONFIG, path)) and row.status is KeyStatus.ACCEPTED
    ]
    if found.config.optimizer:
        owner = found.config.optimizer.type
        for name in found.config.optimizer.params:
            row = find_key(TRAINING_CONFIG, f"optimizer.params.{name}", owner)
            if row and row.status is KeyStatus.ACCEPTED:
                lines.append(f"{row.path}: {row.reason}")
    _print_list(console, "accepted without effect", lines)


def _print_list(console: Console, title: str, items: Sequence[object]) -> None:
    if items:
        console.print(f"{title} ({len(items):,})", style="bold")
    for item in items[:MAX_LISTED]:
        console.print(f"  {item}")
    if len(items) > MAX_LISTED:
        console.print(f"  and {len(items) - MAX_LISTED:,} more")


def _given_keys(section: ConfigSection, path: str = "") -> Iterator[str]:
    """Yield the dotted path of every configured key and section, in the order of the schema."""
    for name in type(section).model_fields:
        if name in section.model_fields_set:
            inner = f"{path}.{name}".lstrip(".")
            yield inner
            value = getattr(section, name)
            if isinstance(value, ConfigSection):
                yield from _given_keys(value, inner)


def report_resolved(console: Console, config: Config, world: int, source: str, autos: AutoValues) -> int:
    """Print the values that follow from the configuration. Return the number of values that cannot be resolved."""
    rows = [("world size", f"{world} ({source})")]
    failures: list[str] = []
    if autos.fill_batch:
        rows.append(("batch", f"filled in by {CLIENT_NAMES[autos.client]}"))
    else:
        try:
            rows.append(("batch", _describe_batch(config, world, source)))
        except ConfigError as error:
            failures.append(str(error))
    try:
        rows.append(("axes", str(config.axes(world, source))))
    except ConfigError as error:
        failures += [str(error)] if str(error) not in failures else []
    for failure in failures:
        console.print(failure)
    console.print("resolved", style="bold")
    for what, value in rows + resolved_rows(config):
        console.print(f"  {what:<12}{value}")
    return len(failures)


def _describe_batch(config: Config, world: int, source: str) -> str:
    batch = config.resolve_batch(world, source)
    readers = batch.train // (batch.micro * batch.accumulation)
    return f"{batch.train} = micro {batch.micro} x accumulation {batch.accumulation} x {plural(readers, 'rank')}"


def report_disks(console: Console, config: Config) -> int:
    """Print the properties of the disks named by `nvme_path`. Return the number of disks that cannot be used."""
    zero = config.zero_optimization
    sections = [section for section in (zero.offload_optimizer, zero.offload_param) if section is not None]
    paths = [path for section in sections if section.device == "nvme" for path in section.nvme_path or ()]
    paths += config.offload.nvme_path or () if config.offload is not None else ()
    if not paths:
        return 0
    from windlass.storage import inspect_disk_path  # imported here because it imports torch

    found = [inspect_disk_path(Path(path)) for path in dict.fromkeys(paths)]
    for one in found:
        console.print(f"  {'disk':<12}{one}")
    bad = [one.problem for one in found if one.problem]
    _print_list(console, "disks that this machine cannot use", bad)
    return len(bad)


def resolved_rows(config: Config) -> list[tuple[str, str]]:
    """List the resolved values that do not depend on the number of ranks, as (name, value)."""
    zero = config.zero_optimization
    optimizer = config.optimizer.resolve() if config.optimizer else None
    rows = [
        ("stage", f"{zero.stage}"),
        ("precision", str(config.dtype_table())),
        (
            "tiers",
            "chosen at start-up for each unit"
            if config.offload is not None
            else f"parameters {_describe_tier(zero.offload_param)}, "
            f"optimizer states {_describe_tier(zero.offload_optimizer if zero.stage else None)}",
        ),
        ("buckets", f"reduce {zero.reduce_bucket_size:,}, all-gather {zero.allgather_bucket_size:,} elements"),
        ("step", f"at most {zero.sub_group_size:,} elements at once"),
        ("optimizer", f"{optimizer.name} {_format_arguments(optimizer.arguments)}" if optimizer else "the caller's"),
        (
            "schedule",
            f"{config.scheduler.type} {_format_arguments(config.scheduler.params)}" if config.scheduler else "none",
        ),
        ("clipping", f"norm {config.gradient_clipping:g}" if config.gradient_clipping else "off"),
        ("overlap", "on" if zero.overlap_comm_enabled else "off"),
        ("transport", config.comm.transport),
    ]
    if zero.stage == 3:
        prefetch = f"prefetch {zero.stage3_prefetch_bucket_size:,}, live {zero.stage3_max_live_parameters:,}"
        kept = f"persistent below {zero.stage3_param_persistence_threshold:,} elements"
        rows.insert(4, ("gathering", f"{prefetch}, {kept}"))
    return rows


def _describe_tier(section: object) -> str:
    device = getattr(section, "device", "none")
    return {"none": "device", "cpu": "host"}.get(device, device)


def _format_arguments(arguments: dict[str, object]) -> str:
    return ", ".join(f"{name}={format_value(value)}" for name, value in arguments.items())
