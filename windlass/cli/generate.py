"""Command `windlass generate`: continues a text with a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from windlass.base.text import escape_unprintable


def generate(
    directory: Annotated[Path, typer.Argument(help="Hugging Face directory, or OUT of `windlass train`.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.6,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most probable tokens that together have this probability.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the sampling; the same seed gives the same text.")] = 0,
    weights_tier: Annotated[
        str,
        typer.Option(
            help="device: weights in the device's memory; disk: read ahead of each layer, for models larger than "
            "memory."
        ),
    ] = "device",
    weights_directory: Annotated[
        Path | None, typer.Option(help="Directory of the weight file. [windlass-weights in DIRECTORY]")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
) -> None:
    """Continue PROMPT with the model in DIRECTORY."""
    # Import late, so that `windlass generate --help` does not wait for torch.
    from windlass.base.compute_device import local_device
    from windlass.cli.training.run_folder import export_directory_of
    from windlass.cli.training.text_continuation import generate_continuation

    text = generate_continuation(
        export_directory_of(directory),
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        device=str(local_device()),
        trust_remote_code=trust_remote_code,
        weights_tier=weights_tier,
        weights_directory=weights_directory,
    )
    written = prompt + text
    print(escape_unprintable(written) if sys.stdout.isatty() else written)
