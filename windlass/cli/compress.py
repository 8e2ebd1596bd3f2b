"""Command `windlass compress`: writes a model with packed weights, or pruned, sparse or distilled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from windlass.base.text import print_escaped
from windlass.cli.training.run_folder import export_directory_of


def compress(
    model: Annotated[Path, typer.Argument(help="Hugging Face directory, GGUF file, or OUT of `windlass train`.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    weights: Annotated[
        str | None,
        typer.Option(
            help="int8 to int1, fp8, ternary, binary, with _zp for zero points, or a full name; wide: "
            "keep the dtype. [int4; wide with --sparsity]"
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="Input features with one scale: 32, 64, 128; 0: a whole row. [128 below 8 bits]")
    ] = None,
    method: Annotated[
        Literal["auto", "rtn", "gptq", "awq", "hqq", "lkd"],
        typer.Option(
            help="auto: gptq with --data, else hqq; 8 bits and formats without integers: rtn. lkd: gptq, then codes "
            "learned block by block (ZeroQuant)."
        ),
    ] = "auto",
    lkd_steps: Annotated[int | None, typer.Option(help="Steps of each block with --method lkd. [200]", min=1)] = None,
    activations: Annotated[
        Literal["float", "int8"],
        typer.Option(help="int8: fold scales that take outliers out of the inputs (SmoothQuant). Needs --data."),
    ] = "float",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Choose a format for each layer: size=0.3 or size=4x, loss=+0.02 (bits per byte) or loss=1%, "
            "speed=2.0 (times the tokens/s), latency=2ms (a token), or several with commas. Needs --data."
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            help="Remove the least important units first, a share or a number of each in a module: heads=0.25,"
            "groups=1 (key heads), ffn=0.25,experts=2; layers=4 in the model. With grouped-query attention a number "
            "of heads is that of each key head: heads=1 of 32 with 8 key heads removes 8."
        ),
    ] = None,
    importance: Annotated[
        Literal["auto", "magnitude", "activation", "taylor"],
        typer.Option(help="Importance of units. auto: activation with --data, else magnitude."),
    ] = "auto",
    sparsity: Annotated[
        str | None,
        typer.Option(help="Set weights to 0: a share, e.g. 0.5, or 2:4; with a format in --weights they stay 0."),
    ] = None,
    sparsity_method: Annotated[
        Literal["auto", "sparsegpt", "wanda", "magnitude"],
        typer.Option(help="auto: sparsegpt with --data, else magnitude."),
    ] = "auto",
    distill: Annotated[
        Path | None,
        typer.Option(
            help="Train the model against this teacher, a directory, after pruning; with a weight format the layers "
            "round themselves meanwhile. Needs --data and --steps."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of --distill.", min=1)] = None,
    rows: Annotated[int, typer.Option(help="Sequences of a step of --distill.", min=1)] = 8,
    rate: Annotated[float, typer.Option(help="Learning rate of --distill.", min=0)] = 1e-4,
    distill_loss: Annotated[
        str | None,
        typer.Option(help="Weights of --distill: logits, task, hidden, attention, and temperature. [logits=1]"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text to calibrate, train and measure with: files, directories. Repeatable."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field of JSON and parquet records.")] = "text",
    sequences: Annotated[int, typer.Option(help="Calibration sequences.", min=1)] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a calibration sequence.", min=8)] = 512,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate hidden states (QuaRot); Llama, Mistral, Qwen2, Qwen3.")
    ] = False,
    wide_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Dtype of all tensors that stay unquantized: embeddings, norms, head. [that of the model]"),
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Pack the output head too.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure loss, memory and speed before and after.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Round to 2 bits and fewer without training.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
) -> None:
    """Compress MODEL and write it to OUT: packed weights, pruning, sparsity, distillation. The same command continues
    an interrupted run. Over ranks: windlass run --nproc 2 --module windlass compress MODEL OUT."""
    from windlass.cli.compression_settings import CompressionSettings
    from windlass.cli.compression_stages import CompressionRun

    settings = CompressionSettings(
        source=export_directory_of(model),
        out=out,
        weights=weights,
        group=group,
        method=method,
        lkd_steps=lkd_steps,
        activations=activations,
        budget=budget,
        prune=prune,
        importance=importance,
        sparsity=sparsity,
        sparsity_method=sparsity_method,
        distill=None if distill is None else export_directory_of(distill),
        distill_loss=distill_loss,
        steps=steps,
        rows=rows,
        rate=rate,
        data=tuple(data or ()),
        text_field=text_field,
        sequences=sequences,
        length=length,
        rotate=rotate,
        wide_dtype=wide_dtype,
        head=head,
        measure=measure,
        force=force,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
    )
    run = CompressionRun(settings)
    try:
        run.run()
    except KeyboardInterrupt:
        run.progress.end()
        if run.is_complete:
            print_escaped(f"interrupted while {out} was measured; {out} is complete", to_stderr=True)
        else:
            print_escaped(f"interrupted after {run.progress.text}; the same command continues there", to_stderr=True)
        raise
