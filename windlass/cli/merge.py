"""Command `windlass merge`: merges several models of one architecture into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from windlass.base.text import plural, print_escaped
from windlass.cli.training.run_folder import export_directory_of


def merge(
    models: Annotated[
        list[Path],
        typer.Argument(help="Models (Hugging Face directories, or OUT of `windlass train`); last, OUT to write."),
    ],
    method: Annotated[
        Literal["linear", "slerp", "ties", "dare"],
        typer.Option(help="linear: weighted mean. slerp: on the arc between two. ties, dare: need --base."),
    ] = "linear",
    weights: Annotated[
        str | None,
        typer.Option(help="A number for each model, with commas. slerp: 0.7,0.3 is nearer to the first. [1]"),
    ] = None,
    base: Annotated[Path | None, typer.Option(help="With ties and dare: model from which all were trained.")] = None,
    density: Annotated[
        float, typer.Option(help="Share of the elements of each model's difference from the base to keep.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="With dare: seed of the random choice of these elements.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Merge models of one architecture into OUT, the last argument. The same command continues an interrupted run."""
    from windlass.base.errors import ConfigError
    from windlass.cli.compression_figures import StageProgress
    from windlass.compress.merge_directories import merge_directories

    if len(models) < 2:
        raise ConfigError("merge takes several models, then the directory to write; give both")
    try:
        values = None if weights is None else [float(part) for part in weights.split(",")]
    except ValueError as error:
        raise ConfigError(f"weights (--weights) is {weights!r}; write numbers with commas, e.g. 0.7,0.3") from error
    progress = StageProgress()
    progress.begin("merging", "tensors")
    *sources, out = models
    try:
        count = merge_directories(
            [export_directory_of(one) for one in sources],
            out,
            method,
            weights=values,
            base=None if base is None else export_directory_of(base),
            density=density,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    except KeyboardInterrupt:
        progress.end()
        print_escaped(f"interrupted after {progress.text}; the same command continues there", to_stderr=True)
        raise
    progress.end()
    what = plural(count, "tensor")
    print_escaped(f"{out}: {what} of {plural(len(sources), 'model')} by {method}, in {progress.seconds:.0f} s")
