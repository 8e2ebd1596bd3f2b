"""Command `windlass plan`: predicts the memory of a run, and chooses a configuration that fits, without allocating
the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from windlass.base.byte_counts import parse_bytes
from windlass.base.errors import ConfigError
from windlass.base.printable_console import PrintableConsole
from windlass.cli.plan_report import (
    choice_line,
    draw_memory,
    ladder_table,
    memory_table,
    missing_line,
    peak_line,
    refusal_lines,
)
from windlass.config import load_config
from windlass.parallel.model_checkpointing import enable_checkpointing
from windlass.plan.choose_config import Choice, choose_config
from windlass.plan.plan_run import RunShape, plan_memory
from windlass.plan.planned_layout import Target
from windlass.plan.planned_model import batch_for, build_from_name, build_from_shape, longest_sample
from windlass.plan.rank_limits import RankLimits, gpu_bytes, missing_bytes


def plan(
    model: Annotated[
        str | None, typer.Argument(help="Directory with a config.json, or a name in the hub's cache.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Path of the ds_config.json, or base64 of it; by default a micro-batch of 1.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Size of a Llama instead of MODEL: 125m, 1b, ... 1t, or hidden=1024,layers=4,heads=8,vocabulary=32000."
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample. [1024, or as many as the model has positions for]")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU of a rank, by name or memory (h200, 80GB); by default the ranks are on a CPU."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Host memory of a rank (64GB); by default unlimited.")
    ] = None,
    disk_space: Annotated[
        str | None, typer.Option("--disk-space", help="NVMe space of a rank (1T); by default unlimited.")
    ] = None,
    checkpointing: Annotated[
        bool,
        typer.Option(
            "--checkpointing",
            help="Activations are checkpointed, as with activation_checkpointing.enabled in the configuration.",
        ),
    ] = False,
    sharded_init: Annotated[
        bool, typer.Option("--sharded-init", help="The model is built by zero.Init or from_pretrained.")
    ] = False,
    activations: Annotated[
        str | None, typer.Option(help="Bytes of activations of a micro-batch, for a model that cannot be traced.")
    ] = None,
    choose: Annotated[
        bool, typer.Option("--choose", help="Find the fastest stage and tiers that fit, and print the configuration.")
    ] = False,
    nvme: Annotated[str | None, typer.Option(help="With --choose: directory on NVMe that may be used.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a stacked picture to this PNG.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
) -> None:
    """Predict the peak memory of MODEL's training: device, host and disk of a rank, by moment. Allocates no weights."""
    if (model is None) == (shape is None):
        raise ConfigError("the model is missing or given twice; give MODEL or --shape, not both")
    if nvme is not None and not choose:
        raise ConfigError(f"--nvme {nvme} has no effect without --choose; add it, or write nvme_path in --config")
    console = PrintableConsole(soft_wrap=False, highlight=False, markup=False)
    source: Any = config if config is not None else {"train_micro_batch_size_per_gpu": 1}
    settings = load_config(source)
    built = (
        build_from_shape(shape)
        if shape is not None
        else build_from_name(str(model), trust_remote_code=trust_remote_code)
    )
    if checkpointing:
        enable_checkpointing(built)
    limits = RankLimits(
        gpu_bytes(gpu) if gpu is not None else None,
        parse_bytes(host_memory, "--host-memory") if host_memory is not None else None,
        parse_bytes(disk_space, "--disk-space") if disk_space is not None else None,
    )
    target = Target("cuda", "nccl") if gpu is not None else Target("cpu", settings.comm.transport)
    given = parse_bytes(activations, "--activations") if activations is not None else None
    most = longest_sample(built)
    if length is None:
        length = min(1024, most or 1024)
    elif most is not None and length > most:
        raise ConfigError(f"--length {length}: the model has positions for {most} tokens; write at most {most}")
    run = RunShape(world_size, length, target, sharded_init, given, batch_for(built), limits)
    if choose:
        _require_limit(limits)
        choice = choose_config(built, settings.raw, run, limits, nvme_path=nvme)
        _report_choice(console, choice, limits, picture, as_json=as_json)
        return
    settings.ensure_supported()
    found = plan_memory(built, settings, run)
    missing = missing_bytes(found, limits)
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "missing": missing}, indent=1))
    else:
        console.print(memory_table(found))
        for line in (peak_line(found, limits), *found.notes, *([missing_line(missing)] if missing else [])):
            console.print(line, soft_wrap=True)
    if picture is not None:
        draw_memory(found, picture, limits)
    if missing:
        raise typer.Exit(1)


def _require_limit(limits: RankLimits) -> None:
    if limits.device is None and limits.host is None:
        raise ConfigError("--choose needs a limit: give --gpu h200, or --host-memory 64GB for CPU ranks")


def _report_choice(
    console: Console, choice: Choice, limits: RankLimits, picture: Path | None, *, as_json: bool
) -> None:
    best = choice.chosen or choice.nearest
    if as_json:
        rows = [{"name": str(t.rung), "missing": t.missing, **t.plan.as_json()} for t in choice.tried]
        refused = [{"name": str(one.rung), "problem": one.problem} for one in choice.refused]
        config = choice.chosen.config if choice.chosen is not None else None
        typer.echo(json.dumps({"chosen": config, "tried": rows, "refused": refused}, indent=1))
    else:
        console.print(ladder_table(choice))
        for line in (*refusal_lines(choice), peak_line(best.plan, limits), *best.plan.notes):
            console.print(line, soft_wrap=True)
        used_nvme = any("nvme" in (one.rung.states, one.rung.parameters) for one in choice.walked)
        console.print(choice_line(choice, may_use_nvme=used_nvme), soft_wrap=True)
    if picture is not None:
        draw_memory(best.plan, picture, limits)
    if choice.chosen is None:
        raise typer.Exit(1)
    if not as_json:
        typer.echo(json.dumps(choice.chosen.config, indent=1))
