"""Command `windlass simulate`: predicts the time of a training step on a cluster, without starting a rank."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.base.errors import ConfigError
from windlass.base.printable_console import PrintableConsole
from windlass.cli.simulate_report import draw_timeline, fit_line, goodput_line, kinds_table, step_tables, wait_table
from windlass.config import load_config
from windlass.plan.planned_model import SHAPES, build_from_name, build_from_shape
from windlass.simulate.cluster import Cluster
from windlass.simulate.cluster_file import load_cluster
from windlass.simulate.goodput import Goodput, expected_goodput
from windlass.simulate.hardware_parts import parse_seconds
from windlass.simulate.layer_work import CHECKPOINTING
from windlass.simulate.model_states import checkpoint_bytes, state_bytes_of_rank, states_fit
from windlass.simulate.predict_step import predict_kinds, predict_work
from windlass.simulate.step_prediction import StepPrediction
from windlass.simulate.step_workload import StepWork, describe_step
from windlass.simulate.timeline import write_trace

_DEFAULT_CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
_HOUR = 3600.0


def simulate(
    model: Annotated[
        str | None, typer.Argument(help="Directory with a config.json, or a name in the hub's cache.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Path of the ds_config.json, or base64 of it; by default bf16, a micro-batch of 1."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Size of a Llama instead of MODEL (7b, ... 1t), or hidden=4096,layers=32,...")
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="Known cluster (cpu, dgx2, dgx-a100, dgx-h100, dgx-h200), or path of a cluster file.")
    ] = "dgx-h100",
    world_size: Annotated[str, typer.Option(help="Number of ranks, or several with commas.")] = "8",
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 1024,
    checkpointing: Annotated[
        str | None,
        typer.Option(
            help="Activation checkpointing: none, full or selective. [full if activation_checkpointing.enabled is true]"
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="The model is compiled: operations are fused. [compile.enabled]")
    ] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Linear layers compute in FP8.")] = False,
    step: Annotated[
        int, typer.Option(min=1, help="Number of the step, for optimizers whose steps differ, such as OneBitAdam.")
    ] = 1,
    device_mtbf: Annotated[
        float, typer.Option(min=0, help="Hours between failures of one device; 0: the cluster file's, if it has one.")
    ] = 0.0,
    checkpoint_time: Annotated[
        str | None,
        typer.Option(help="Time for which a checkpoint blocks training (30s). [its bytes at the disks' rate]"),
    ] = None,
    restart_time: Annotated[str, typer.Option(help="Time from a failure until training continues.")] = "600s",
    as_json: Annotated[bool, typer.Option("--json", help="Print the predictions as JSON.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline to this JSON file, for Perfetto.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of the timeline to this PNG.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
) -> None:
    """Predict the time of a training step of MODEL on a cluster: MFU, waits, bytes by link. Starts no rank. Exit code
    1: the model states fit the devices with none of the numbers of ranks.
    """
    if (model is None) == (shape is None):
        raise ConfigError("the model is missing or given twice; give MODEL or --shape, not both")
    if checkpointing is not None and checkpointing not in CHECKPOINTING:
        raise ConfigError(f"--checkpointing {checkpointing!r} does not exist; write one of {', '.join(CHECKPOINTING)}")
    console = PrintableConsole(soft_wrap=False, highlight=False, markup=False)
    settings = load_config(config if config is not None else dict(_DEFAULT_CONFIG))
    settings.ensure_supported()
    built = _build(model, shape, trust_remote_code)
    worlds = _parse_worlds(world_size)
    found: list[tuple[StepPrediction, StepWork, Cluster, Goodput | None]] = []
    for world in worlds:
        place = load_cluster(cluster, world)
        if device_mtbf:
            place = replace(place, device_mtbf=device_mtbf * _HOUR)
        work = describe_step(
            built, settings, world, length, checkpointing=checkpointing, fused=compiled,
            linear_dtype="fp8" if fp8 else "", step=step,
        )  # fmt: skip
        is_drawn = world == worlds[-1] and (trace is not None or picture is not None)
        prediction = predict_work(work, place, timeline=is_drawn)
        found.append((prediction, work, place, _goodput(work, place, checkpoint_time, restart_time)))
    if as_json:
        rows = [
            {
                **one.as_json(),
                "state_bytes": state_bytes_of_rank(work, place),
                "device_memory": place.device.memory,
                "states_fit": states_fit(work, place),
                "goodput": good.as_json() if good else None,
                "kinds": [asdict(kind) for kind in predict_kinds(work, place)],
            }
            for one, work, place, good in found
        ]
        typer.echo(json.dumps(rows if len(rows) > 1 else rows[0], indent=1))
    else:
        for table in step_tables([(one, good, states_fit(work, place)) for one, work, place, good in found]):
            console.print(table)
        last, work, place, good = found[-1]
        console.print(wait_table(last))
        if kinds := predict_kinds(work, place):
            console.print(kinds_table(kinds))
        for line in (fit_line(work, place), *([goodput_line(good)] if good else []), *last.notes):
            console.print(line, soft_wrap=True)
    if trace is not None:
        write_trace(found[-1][0], trace)
    if picture is not None:
        draw_timeline(found[-1][0], picture)
    if not any(states_fit(work, place) for _, work, place, _ in found):
        raise typer.Exit(1)


def _build(model: str | None, shape: str | None, trust_remote_code: bool) -> Any:
    if shape is None:
        return build_from_name(str(model), trust_remote_code=trust_remote_code)
    if "=" in shape:
        from windlass.parallel.model_shape import parse_model_shape

        return parse_model_shape(shape)
    if shape.lower() not in SHAPES:
        raise ConfigError(
            f"--shape {shape!r} is unknown; give one of {', '.join(SHAPES)}, hidden=4096,layers=32,heads=32,"
            "vocabulary=32000, or a config.json as MODEL instead"
        )
    return build_from_shape(shape)


def _parse_worlds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 1 << 20 for part in parts):
        raise ConfigError(f"--world-size {text!r} is not a list of numbers of ranks; write e.g. 8, or 8,64,512")
    return [int(part) for part in parts]


def _goodput(work: StepWork, cluster: Cluster, checkpoint_time: str | None, restart_time: str) -> Goodput | None:
    if not cluster.device_mtbf:
        return None
    if checkpoint_time is not None:
        checkpoint = parse_seconds(checkpoint_time, "--checkpoint-time")
        if not checkpoint:
            raise ConfigError(f"--checkpoint-time {checkpoint_time!r} is not above 0; write e.g. 30s")
    elif cluster.host.disk_write:
        hosts = -(-work.grid.world // cluster.host.devices)  # hosts of the run; the cluster may have more
        checkpoint = checkpoint_bytes(work) / (hosts * cluster.host.disk_write)
    else:
        raise ConfigError(f"{cluster.name}: hosts have no disk to save to; give --checkpoint-time 30s")
    restart = parse_seconds(restart_time, "--restart-time")
    return expected_goodput(work.grid.world, cluster.device_mtbf, checkpoint, restart)
