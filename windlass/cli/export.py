"""Command `windlass export`: writes a checkpoint's weights as Hugging Face safetensors, or a model as GGUF, in one
process on the CPU."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from windlass.base.errors import CheckpointError
from windlass.base.text import plural, print_escaped
from windlass.cli.checkpoints import format_size
from windlass.cli.training.run_folder import checkpoint_directory_of, model_file_folders

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def export(
    ckpt: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint directory (its latest), DIR/TAG, or OUT of `windlass train`; with --format gguf also a "
            "model's directory, e.g. OUT of `windlass compress`."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write; with --format gguf the file.")],
    format: Annotated[
        Literal["safetensors", "gguf"],
        typer.Option("--format", help="gguf: a file for llama.cpp; packed layers stay packed. Needs windlass[gguf]."),
    ] = "safetensors",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Dtype of all floating-point tensors. [the dtype in which the model computed]"),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Maximum size of a file: 5GB, 500MB or 2GiB.")] = "5GB",
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept a checkpoint of trainable parameters only.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Write the full weights in CKPT to OUT, in the format that `from_pretrained` loads, or as GGUF."""
    if format == "gguf":
        _export_gguf(ckpt, out, dtype, partial, overwrite)
        return
    from windlass.base.dtypes import parse_dtype
    from windlass.checkpoint.safetensors_export import export_safetensors as write

    chosen = parse_dtype(dtype) if dtype is not None else None
    ckpt = checkpoint_directory_of(ckpt)
    found = write(
        ckpt,
        out,
        dtype=chosen,
        shard_size=parse_size(shard_size),
        allow_partial=partial,
        overwrite=overwrite,
        companion_dirs=model_file_folders(ckpt),
    )
    print_escaped(
        f"{out}: {plural(found.tensors, 'tensor')}, {format_size(found.nbytes)}, in {plural(len(found.files), 'file')}"
    )
    for alias, name in found.tied.items():
        print_escaped(f"  {alias} is {name}")
    if found.absent:
        print_escaped(f"  absent, not trained ({len(found.absent)}): {', '.join(found.absent)}")
    if found.companions:
        print_escaped(f"  copied: {', '.join(found.companions)}")
    if "config.json" not in found.companions:
        print_escaped(f"  there is no config.json beside the checkpoint; from_pretrained needs one in {out}")


def _export_gguf(source: Path, out: Path, dtype: str | None, partial: bool, overwrite: bool) -> None:
    """Write the model of a checkpoint or of a directory as a GGUF file."""
    from windlass.base.dtypes import parse_dtype
    from windlass.checkpoint.safetensors_export import export_safetensors
    from windlass.compress.gguf_file import write_gguf

    if out.is_dir() or out.exists() and not overwrite:
        kind = "is a directory" if out.is_dir() else "exists"
        raise CheckpointError(f"{out} {kind}; choose another file{'' if out.is_dir() else ', or --overwrite'}")
    if (source / "config.json").is_file() and any(source.glob("*.safetensors")):
        if dtype is not None:
            raise CheckpointError(f"--dtype {dtype} is for checkpoints; the tensors of {source} keep their dtype")
        types = write_gguf(source, out, name=source.absolute().name)
    else:
        ckpt = checkpoint_directory_of(source)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as folder:
            export_safetensors(
                ckpt,
                Path(folder) / "hf",
                dtype=None if dtype is None else parse_dtype(dtype),
                allow_partial=partial,
                companion_dirs=model_file_folders(ckpt),
            )
            types = write_gguf(Path(folder) / "hf", out, name=source.absolute().name)
    counts = Counter(line.rpartition(": ")[2] for line in types)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print_escaped(f"{out}: {plural(len(types), 'tensor')} ({kinds}), {format_size(out.stat().st_size)}")


def parse_size(text: str) -> int:
    """Parse a size in bytes: `5GB` (10^9), `2GiB` (2^30) or a number.

    Raises:
        CheckpointError: `text` is not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise CheckpointError(f"--shard-size {text!r} is not a size; write 5GB, 500MB or 2GiB")
    return int(float(found[1]) * unit)
